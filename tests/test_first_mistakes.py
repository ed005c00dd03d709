"""First mistakes, whose messages say what to pass instead, and unusual kinds that are accepted."""

from __future__ import annotations

import operator
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import acnml
from acnml import Acnml, Classifier, Map, Swag, Tempered, tuning
from acnml.fit import Refit
from cases import CONV, MLP, diagonal
from predicting import dropping

X, Y = MLP.x(6), torch.arange(6) % 3
DATA = [(X, Y)]


@pytest.mark.parametrize(
    "use",
    [
        Map,
        lambda model: Acnml(model, diagonal(model)),
        lambda model: acnml.Bma(model, diagonal(model)),
        lambda model: acnml.Glm(model, diagonal(model)),
        lambda _: acnml.McDropout(dropping(MLP, 0.5)),
        lambda model: acnml.predictors.NaiveCnml(model, DATA),
    ],
)
def test_a_model_must_be_wrapped(use):
    with pytest.raises(TypeError, match=r"expected a Classifier, got \w+; wrap the model: acnml\."):
        use(MLP.model())


@pytest.mark.parametrize(
    "use",
    [
        lambda given: Tempered(given, 2.0),
        lambda given: acnml.Ensemble((given,)),
        lambda given: tuning.temperature_by_nll(given, DATA),
    ],
)
@pytest.mark.parametrize("wrap", [lambda model: model, Classifier])
def test_a_model_is_not_a_predictor(use, wrap):
    with pytest.raises(TypeError, match=r"a predictor such as Map\(Classifier\(model\)\), got a"):
        use(wrap(MLP.model()))


def covered(model: nn.Module, layers) -> list[list[str]]:
    """The parameters that each way of selecting them covers."""
    swag = Swag(layers=layers())
    for _ in range(2):  # an iterator must serve twice
        swag.update(model)
    naive = acnml.predictors.NaiveCnml(Classifier(model), DATA, Refit(1), layers())
    kfac = acnml.fit_laplace(model, DATA, layers=layers())
    return [list(swag.mean), list(naive.layers), list(kfac.mean)]


def test_layers_may_be_chosen_as_for_an_optimiser():
    model = MLP.model()
    assert covered(model, model[2].parameters) == [["2.weight", "2.bias"]] * 3
    assert covered(model, lambda: [model[2].weight]) == [["2.weight"]] * 3
    assert covered(model, lambda: "last") == [["2.weight", "2.bias"]] * 3


def test_a_dataset_is_not_a_loader():
    data = torch.utils.data.TensorDataset(X, Y)
    with pytest.raises(TypeError, match=r"TensorDataset yields single examples: pass DataLoader\("):
        acnml.fit_laplace(Classifier(MLP.model()), data)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (Y.double(), r"got torch.float64: pass class indices, for example labels.long\(\)"),
        (Y.tolist(), "got list: pass class indices"),
    ],
)
def test_labels_of_another_kind_are_explained(labels, message):
    with pytest.raises(TypeError, match=f"batch 0: labels must be a tensor of integers, {message}"):
        acnml.fit_laplace(MLP.model(), [(X, labels)])


def test_a_loader_that_yields_more_than_pairs_is_explained():
    with pytest.raises(ValueError, match=r"batch 0: .* in a tuple .* but the last are inputs"):
        acnml.fit_laplace(Classifier(MLP.model()), [(X, Y, torch.arange(6))])


@pytest.mark.parametrize("value", [Classifier(MLP.model()), {"a": X}])
def test_only_what_can_be_loaded_is_saved(value, tmp_path):
    with pytest.raises(
        TypeError, match="only posteriors, curvatures, Swag, predictors, calibrated networks"
    ):
        acnml.save(value, tmp_path / "file.safetensors")
    assert list(tmp_path.iterdir()) == []


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


def test_numpy_integers_are_integers():
    model = MLP.model()
    classifier, posterior = Classifier(model), diagonal(model)
    acnml.fit_swag(classifier, DATA, epochs=TWO, rank=TWO, seed=TWO, learning_rate=0.5)
    acnml.fit_laplace(classifier, DATA, fisher=acnml.fit.MonteCarloFisher(TWO, TWO))
    acnml.Bma(classifier, posterior, samples=TWO, seed=TWO)(X)
    solver = acnml.Gradient(TWO, 0.3, np.int64(10**7))
    Acnml(classifier, posterior, solver, alpha=np.float32(0.1), on_unsolved="ignore")(X)


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


def test_no_module_is_named_like_one_of_the_standard_library():
    """A program in a folder of the package would import it instead."""
    paths = Path(acnml.__file__).parent.rglob("*")
    assert not {path.stem for path in paths} & set(sys.stdlib_module_names)
