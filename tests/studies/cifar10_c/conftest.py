"""The tiny study's data and its one whole run: tests read it, and change only copies of it."""

from __future__ import annotations

import pytest
from safetensors.torch import save_file
from studies.cifar10_c.data import load_data
from studies.cifar10_c.results import collect
from studies.cifar10_c.run import run
from studies.cifar10_c.study import Cifar10CStudy
from studies.cifar10_c.training import settings, task
from studies.study import tranches
from studies.study.artefacts import Finished, Making

from stores import store_in
from studies.cifar10_c import workshop
from studies.data import cifar10
from studies.models import MODELS

from .tiny import DESCRIPTIONS, PIECES, RECIPES, SPLITS, given_weights


@pytest.fixture(autouse=True, scope="package")
def tiny_world(tmp_path_factory):
    """A tiny network in the place of all others, and few images in that of CIFAR-10."""
    patch, folder = pytest.MonkeyPatch(), tmp_path_factory.mktemp("data")
    (folder / "weights").mkdir()
    save_file(given_weights(), folder / "weights" / "tiny.safetensors")
    patch.setenv("ACNML_DATA", str(folder))
    patch.setattr(cifar10, "load", lambda split: SPLITS[split])
    patch.setattr(tranches, "ENDS", (3, 9))  # a few stages for the images of a shift
    for module in (task, workshop):
        patch.setattr(module, "MODELS", {**MODELS, **DESCRIPTIONS})
    for name, recipe in RECIPES.items():
        patch.setitem(settings.RECIPES, name, recipe)
    yield folder
    patch.undo()


@pytest.fixture(scope="package")
def tiny(tiny_world):
    return Cifar10CStudy("tiny", **PIECES)


@pytest.fixture(scope="package")
def data(tiny, tmp_path_factory):
    return load_data(tiny, tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="package")
def finished(tmp_path_factory, tiny, data):
    """A whole run, its folder and results."""
    out = tmp_path_factory.mktemp("finished")
    run(tiny, data, Making(store_in(out, tiny)))
    return out, collect(tiny, data, Finished(store_in(out, tiny)))
