"""Classifier: outputs, views and copies of arbitrary modules."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from acnml import Classifier
from acnml._util.batches import split_labels
from cases import MODELS, normal


def test_runs_in_eval_mode_whatever_the_users_mode():
    model = nn.Sequential(
        nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Dropout(0.9), nn.Linear(5, 3)
    ).double()
    x = normal(6, 4)
    expected = model.eval()(x)
    assert torch.equal(Classifier(model.train()).logits(x), expected)


class Named(nn.Module):
    """Returns an object with its outputs under a name."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.linear, self.name = nn.Linear(4, 3), name

    def forward(self, x):
        return SimpleNamespace(**{self.name: self.linear(x)})


def test_picks_the_logits_out_of_the_models_output():
    x, model = torch.ones(2, 4), Named("scores")
    logits = Classifier(model, get_logits=lambda output: output.scores).logits(x)
    assert torch.equal(logits, model.linear(x))
    with pytest.raises(TypeError, match="returned SimpleNamespace, not a tensor of logits; pass"):
        Classifier(model).logits(x)


def test_an_output_with_logits_is_understood():
    x, model = torch.ones(2, 4), Named("logits")
    assert torch.equal(Classifier(model).logits(x), model.linear(x))
    negated = Classifier(model, get_logits=lambda output: -output.logits)
    assert torch.equal(negated.logits(x), -model.linear(x))


@pytest.mark.parametrize("names", [["labels"], ["label"], ["label", "labels"]])
def test_labels_in_a_mapping_are_no_inputs(names):
    batch = {"input": torch.ones(2, 4)} | {name: torch.tensor([0, len(name)]) for name in names}
    assert list(Classifier(nn.Linear(4, 3)).prepare(batch)) == ["input"]
    inputs, labels = split_labels(batch)
    assert list(inputs) == ["input"]
    assert torch.equal(labels, batch[names[-1]])


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Linear(4, 1), r"K ≥ 2 logits: .*return \[0, z\]"),
        (nn.Sequential(nn.Linear(4, 1), nn.Flatten(0)), r"K ≥ 2 logits: .*return \[0, z\]"),
        (nn.Flatten(0), r"logits must have shape \(2, K\)"),
        (nn.Unflatten(1, (2, 2)), r"logits must have shape \(2, K\), got \(2, 2, 2\)"),
    ],
)
def test_refuses_outputs_that_are_not_logits(model, message):
    with pytest.raises(ValueError, match=message):
        Classifier(model).logits(torch.ones(2, 4))


def test_refuses_what_is_not_a_module():
    with pytest.raises(TypeError, match=r"wraps an nn\.Module, got function"):
        Classifier(lambda x: x)


def test_refuses_a_module_that_cannot_be_copied():
    model = nn.Linear(4, 3)
    model.lock = threading.Lock()
    with pytest.raises(TypeError, match="Linear cannot be copied"):
        Classifier(model)


def test_is_a_view_that_follows_training():
    model = nn.Linear(4, 3)
    classifier, x = Classifier(model), torch.ones(2, 4)
    with torch.no_grad():
        model.weight += 1
    assert torch.equal(classifier.logits(x), model(x))
    model.double()
    assert torch.equal(classifier.logits(x.double()), model(x.double()))


def test_at_replaces_parameters_and_buffers_in_the_view_only():
    case = MODELS[2]
    model = case.model().eval()
    tensors = {"norm.running_mean": torch.ones(4).double(), "head.bias": torch.zeros(3).double()}
    moved = Classifier(model).at(tensors)
    expected = torch.func.functional_call(model, tensors, case.x())
    assert torch.equal(moved.logits(case.x()), expected)
    assert torch.equal(moved.parameters["head.bias"], torch.zeros(3).double())
    assert torch.equal(Classifier(model).logits(case.x()), model(case.x()))


def test_tied_weights_move_together():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(3, 3, bias=False)
            self.second = nn.Linear(3, 3, bias=False)
            self.second.weight = self.first.weight

        def forward(self, x):
            return self.second(self.first(x))

    classifier, x = Classifier(Tied()), torch.ones(1, 3)
    assert list(classifier.parameters) == ["first.weight"]
    doubled = {"first.weight": 2 * torch.eye(3)}
    assert torch.equal(classifier.logits(x, doubled), 4 * x)


def test_copies_of_the_module_are_independent():
    case = MODELS[2]
    model = case.model().train()
    classifier = Classifier(model)
    copied = classifier.at({"head.bias": torch.zeros(3).double()}).copy_module()
    with torch.no_grad():
        copied.stem.weight.zero_()
    assert torch.equal(copied.head.bias, torch.zeros(3).double())
    assert model.stem.weight.abs().sum() > 0
    assert isinstance(copied.stem.weight, nn.Parameter)
    assert not copied.training
    assert model.training


@pytest.mark.parametrize(
    "use",
    [
        lambda classifier, tensors: classifier.at(tensors),
        lambda classifier, tensors: classifier.logits(MODELS[2].x(), tensors),
    ],
)
def test_names_that_the_model_lacks_are_refused(use):
    with pytest.raises(ValueError, match=r"no parameter or buffer 'head\.bais'; did you mean"):
        use(Classifier(MODELS[2].model()), {"head.bais": torch.zeros(3)})


def test_old_style_weight_norm_can_be_wrapped():
    model = nn.Linear(4, 3)
    model.plain = model.weight * 2  # not a leaf: deepcopy alone would refuse it
    assert Classifier(model).logits(torch.ones(1, 4)).shape == (1, 3)
