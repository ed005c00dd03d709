"""Invalid arguments of Laplace fits, and their error messages."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

import acnml
from acnml import Classifier
from acnml.fit import EmpiricalFisher
from cases import CONV, normal


class Unsupported(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.embed, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.scale * self.embed(x).transpose(0, 1).contiguous().transpose(0, 1))


X, Y = normal(4, 4).float(), torch.tensor([0, 1, 2, 0])


HEAD = ["head.weight"]
WRONG = [
    ([], HEAD, "the loader gave no batch"),
    ([(X, Y), (X, Y.float())], HEAD, "batch 1: labels must be a tensor of"),
    ([(X, Y[:3])], HEAD, r"batch 0: labels have shape \(3,\)"),
    ([(X, Y + 1)], HEAD, "batch 0: label 3 is outside the model"),
    ([(X * torch.nan, Y)], HEAD, "batch 0: input x is NaN"),
    ([(X, Y)], ["scale"], r"layer '' \(Unsupported\) with parameters \['scale'\]"),
    ([(X, Y)], ["head.bias"], "bias of layer 'head' .* without its weight"),
    ([(X, Y)], ["haed.weight"], "no parameter or buffer 'haed.weight'; did you mean"),
    ([(X, Y)], [nn.Linear(4, 3)], "has no parameters of the given Linear"),
]


@pytest.mark.parametrize(("data", "layers", "message"), WRONG)
@pytest.mark.parametrize("structure", ["diag", "kron"])
def test_refuses_bad_data_and_layers(structure, data, layers, message):
    with pytest.raises((ValueError, TypeError), match=message):
        acnml.fit_laplace(Unsupported(), data, structure=structure, layers=layers)


def test_says_what_it_covers_and_which_structures_there_are():
    data, chosen = [(CONV.x(2), Y[:2])], ["norm.weight"]
    for structure in ("kron", "full"):
        message = rf'layer .norm. \(BatchNorm2d\).*"{structure}" covers Linear and Conv2d layers: '
        with pytest.raises(ValueError, match=message):
            acnml.fit_laplace(CONV.model(), data, structure=structure, layers=chosen)
    with pytest.raises(ValueError, match=r"structure must be one of .*, got 'kfac'"):
        acnml.fit_laplace(CONV.model(), data, structure="kfac")


def reparametrised() -> nn.Module:
    norm = nn.utils.parametrizations.weight_norm
    return nn.Sequential(norm(nn.Linear(4, 5)), nn.ReLU(), norm(nn.Linear(5, 3)))


def one_dimensional() -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (4, 1)), nn.Conv1d(4, 3, 1), nn.Flatten())


@pytest.mark.parametrize("build", [reparametrised, one_dimensional])
def test_kfac_says_what_it_covers_where_a_model_has_none_of_it(build):
    classifier, data = Classifier(build()), [(X, Y)]
    message = "Sequential has no Linear or Conv2d layer whose weight .* use acnml.fit_swag"
    with pytest.raises(ValueError, match=message):
        acnml.fit_laplace(classifier, data)
    # The way out is one.
    posterior = acnml.fit_swag(classifier, data, epochs=2, learning_rate=0.5).low_rank()
    assert acnml.Bma(classifier, posterior)(X).shape == (4, 3)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(3, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(torch.tanh(self.body(x + self.embed.weight.mean(0))))


def test_kfac_leaves_tied_layers_out_unless_told():
    model = Tied()
    covered = acnml.fit_laplace(Classifier(model), [(X, Y)]).mean
    assert list(covered) == ["body.weight", "body.bias"]
    with pytest.raises(ValueError, match=r"are the same parameter; .*leave it out"):
        acnml.fit_laplace(Classifier(model), [(X, Y)], layers=[model.head])


class Untracked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head, self.unused = nn.Linear(4, 5), nn.Linear(5, 3), nn.Linear(2, 2)

    def forward(self, x):
        with torch.no_grad():
            hidden = torch.tanh(self.trunk(x))
        return self.head(hidden)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["trunk", "head"], r"batch 0: layer 'trunk' runs under torch.no_grad\(\)"),
        (["trunk"], r"batch 0: layer 'trunk' runs under torch.no_grad\(\)"),
        (["unused"], "batch 0: the model's logits use none of `layers`"),
    ],
)
@pytest.mark.parametrize(
    "fit",
    [partial(acnml.fit_laplace, structure="diag"), acnml.fit_laplace, acnml.fit_bayes_by_backprop],
)
def test_refuses_layers_that_no_gradient_reaches(fit, names, message):
    with pytest.raises(ValueError, match=message):
        fit(Untracked(), [(X, Y)], layers=names)


def test_empirical_fisher_needs_labels():
    with pytest.raises(ValueError, match="EmpiricalFisher needs labels"):
        acnml.fit_laplace(Classifier(nn.Linear(4, 3)), [X], fisher=EmpiricalFisher())


@pytest.mark.parametrize(
    ("scale", "tau"), [(1.0, 3e-3), (10.0, 0.3), (100.0, 30.0), (1.0, 1e-3), (10.0, 1e-3)]
)
def test_full_curvatures_in_single_precision_are_accurate_or_refused(scale, tau):
    """The shared variance 1/τ of all logits must not drown the variances of differences."""
    model, x = nn.Linear(6, 2).double(), scale * normal(300, 6)
    with torch.no_grad():
        model.weight.copy_(torch.eye(2, 6) / scale)
        model.bias.zero_()
    exact = acnml.fit_laplace(model, x, structure="full", prior_precision=tau)
    expected = acnml.Acnml(Classifier(model), exact).regret(5 * x[:20])
    single = Classifier(model.float())
    if tau < 2e-3 * scale**2:
        with pytest.raises(ValueError, match=r"above .*, or convert the model to double"):
            acnml.fit_laplace(single, x.float(), prior_precision=tau, structure="full")
    else:
        posterior = acnml.fit_laplace(single, x.float(), prior_precision=tau, structure="full")
        found = acnml.Acnml(single, posterior).regret(5 * x[:20].float())
        torch.testing.assert_close(found.double(), expected, rtol=0.02, atol=1e-3)
