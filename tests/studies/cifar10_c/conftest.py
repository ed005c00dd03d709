"""The tiny study, its data and its one whole run: tests read it, and change only copies of it."""

from __future__ import annotations

import pytest
from safetensors.torch import save_file

from stores import store_in
from studies.cifar10_c import recipes, settings
from studies.cifar10_c.settings import Cifar10CStudy
from studies.cifar10_c.study import build
from studies.data import cifar10
from studies.engine import predict
from studies.engine.results import collect
from studies.engine.run import run
from studies.engine.workshop import Finished, Making
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
    patch.setattr(predict, "ENDS", (3, 9))  # a few stages for the images of a shift
    patch.setattr(recipes, "MODELS", {**MODELS, **DESCRIPTIONS})
    patch.setattr(settings, "RECIPES", {**recipes.RECIPES, **RECIPES})
    yield folder
    patch.undo()


@pytest.fixture(scope="package")
def tiny(tiny_world):
    return Cifar10CStudy("tiny", **PIECES)


@pytest.fixture(scope="package")
def study(tiny):
    return build(tiny)


@pytest.fixture(scope="package")
def data(study, tmp_path_factory):
    return study.load(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="package")
def finished(tmp_path_factory, study, tiny, data):
    """A whole run, its folder and results."""
    out = tmp_path_factory.mktemp("finished")
    run(study, data, Making(store_in(out, tiny)))
    return out, collect(study, data, Finished(store_in(out, tiny)))
