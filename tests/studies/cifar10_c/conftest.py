"""The tiny study and its one whole run: tests read it, and change only copies of it."""

from __future__ import annotations

import pytest
from safetensors.torch import save_file

from stores import Whole
from studies.cifar10_c import recipes, settings
from studies.cifar10_c.settings import Cifar10CStudy
from studies.cifar10_c.study import build
from studies.data import cifar10
from studies.engine import predict
from studies.models import MODELS

from .tiny import DESCRIPTIONS, PIECES, RECIPES, SPLITS, given_weights


@pytest.fixture(autouse=True, scope="package")
def tiny_world(tmp_path_factory):
    """A tiny network in the place of all others, and few images in that of CIFAR-10."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "weights").mkdir()
    save_file(given_weights(), folder / "weights" / "tiny.safetensors")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACNML_DATA", str(folder))
        patch.setattr(cifar10, "load", lambda split: SPLITS[split])
        patch.setattr(predict, "ENDS", (3, 9))  # a few stages for the images of a shift
        patch.setattr(recipes, "MODELS", {**MODELS, **DESCRIPTIONS})
        patch.setattr(settings, "RECIPES", {**recipes.RECIPES, **RECIPES})
        yield folder


@pytest.fixture(scope="package")
def tiny(tiny_world):
    return Cifar10CStudy("tiny", **PIECES)


@pytest.fixture(scope="package")
def finished(tiny, tmp_path_factory):
    return Whole.run(build(tiny), tmp_path_factory.mktemp("finished"))
