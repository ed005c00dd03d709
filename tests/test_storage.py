"""Invalid files, and values that cannot be stored."""

from __future__ import annotations

import numpy as np
import pytest
import safetensors.torch
import torch

import acnml
from acnml import Acnml, Classifier, Diagonal, Gradient, Map
from acnml.storage import StorageError
from cases import MODELS, POSTERIORS, diagonal
from stored import rewrite


@pytest.fixture
def stored(tmp_path):
    path = tmp_path / "posterior.safetensors"
    acnml.save(POSTERIORS["diagonal"](MODELS[1].model()), path)
    return path


def test_foreign(tmp_path):
    path = tmp_path / "weights.safetensors"
    safetensors.torch.save_file({"weight": torch.ones(2)}, path)
    with pytest.raises(StorageError, match=r"not one that acnml.save wrote"):
        acnml.load(path)


def test_newer(stored):
    rewrite(stored, lambda header: header.update(format_version=99))
    with pytest.raises(StorageError, match=r"has format 99, .* reads format 3: save it again, or"):
        acnml.load(stored)


def test_predictor_needs_the_classifier(stored, tmp_path):
    classifier = Classifier(MODELS[1].model())
    path = tmp_path / "map.safetensors"
    acnml.save(Map(classifier), path)
    with pytest.raises(StorageError, match=r"holds a Map\. .* use load\(path, model\)"):
        acnml.load(path)
    with pytest.raises(
        StorageError, match=r"a Diagonal\. Of its 0 .* 1 were given: use load\(path\)"
    ):
        acnml.load(stored, classifier)


def test_another_class_of_the_same_name_is_refused(tmp_path):
    known = POSTERIORS["diagonal"](MODELS[1].model())
    stranger = type("Diagonal", (Diagonal,), {})(known.mean, known.var)
    with pytest.raises(TypeError, match="cannot store a value of type Diagonal"):
        acnml.save(stranger, tmp_path / "posterior.safetensors")


def test_numpy_numbers_are_stored(tmp_path):
    model, path = MODELS[1].model(), tmp_path / "predictor.safetensors"
    alpha, steps = np.float32(0.5), np.int64(3)
    acnml.save(Acnml(Classifier(model), diagonal(model), Gradient(steps, 0.5), alpha), path)
    loaded = acnml.load(path, Classifier(model))
    assert (loaded.alpha, loaded.solver) == (0.5, Gradient(3, 0.5))
