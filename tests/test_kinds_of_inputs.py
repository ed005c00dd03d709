"""Inputs, settings and models of unusual kinds: accepted, or refused with a sentence of advice."""

from __future__ import annotations

import operator
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import acnml
from acnml import Acnml, Classifier, Map
from cases import CONV, MLP, diagonal

X, Y = MLP.x(60), torch.arange(60) % 3
DATA = [(X, Y)]


# A missing batch dimension -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "x"),
    [
        (MLP.model(), X[0]),
        (nn.Linear(4, 4).double(), X[0]),  # the logits seem to have one row per entry
        (CONV.model(), CONV.x(3)[0]),
        (nn.Sequential(nn.Flatten(), nn.Linear(50, 3)).double(), CONV.x(3)[0]),
    ],
)
def test_one_input_without_a_batch_dimension_is_explained(model, x):
    classifier = Classifier(model)
    for predict in (Map(classifier), Acnml(classifier, diagonal(model), alpha=0.1)):
        for _ in range(2):  # on first sight and later
            with pytest.raises(ValueError, match=r"batch dimension is missing: .* pass x\[None\]"):
                predict(x)
            assert predict(x[None]).shape[0] == 1


# NumPy numbers -----------------------------------------------------------------------------------

TWO = np.int64(2)
ALL_LAYERS = MLP.model()


def test_numpy_integers_are_integers():
    classifier = Classifier(ALL_LAYERS)
    acnml.fit_swag(classifier, DATA, epochs=TWO, rank=TWO, seed=TWO, learning_rate=0.5)
    acnml.fit_laplace(classifier, DATA, fisher=acnml.fit.MonteCarloFisher(TWO, TWO))
    posterior = diagonal(ALL_LAYERS)
    acnml.Bma(classifier, posterior, samples=TWO, seed=TWO)(X)
    solver = acnml.Gradient(TWO, 0.3, np.int64(10**7))
    Acnml(classifier, posterior, solver, alpha=np.float32(0.1), on_unsolved="ignore")(X)


# Posteriors --------------------------------------------------------------------------------------


def test_posteriors_are_converted_as_tensors_are():
    posterior = diagonal(MLP.model())
    for single in (
        posterior.to(dtype=torch.float32),
        posterior.to(torch.float32),
        posterior.to("cpu", torch.float32),
        posterior.to(device="cpu", dtype=torch.float32),
    ):
        assert {t.dtype for t in (*single.mean.values(), *single.var.values())} == {torch.float32}
    assert posterior.to("cpu").dtype == torch.float64


# Pickling ----------------------------------------------------------------------------------------


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = MLP.model()

    def forward(self, x):
        return {"logits": self.net(x)}


def test_a_classifier_with_a_function_of_the_standard_library_can_be_pickled():
    predict = Map(Classifier(Wrapped(), operator.itemgetter("logits")).tempered(2.0))
    expected = predict(X)
    again = pickle.loads(pickle.dumps(predict))
    assert torch.equal(again(X), expected)


# Names of modules --------------------------------------------------------------------------------

PACKAGE = Path(acnml.__file__).parent


def test_torch_can_be_imported_inside_every_folder_of_the_package():
    folders = [str(p.parent) for p in PACKAGE.rglob("__init__.py")]
    code = f"import sys; sys.path[:0] = {folders}; import random, torch; random.random()"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
