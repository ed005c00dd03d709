"""Curvatures of every structure against the exact Gauss-Newton matrix and an independent code."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from functools import partial, reduce
from operator import add

import pytest
import torch
from torch import nn

import acnml
from acnml import Classifier, fit_laplace
from acnml._util.params import unflatten
from acnml.fit import (
    DiagonalCurvature,
    EmpiricalFisher,
    ExactFisher,
    MonteCarloFisher,
    fit_curvature,
)
from cases import CONV, MLP, MODELS, Case, affine_layers, normal
from dense import covariance, vector
from fits import (
    CASES,
    ONE_POSITION,
    STRUCTURES,
    assert_identical,
    dense,
    gauss_newton,
    labelled,
    tensors,
)

TIGHT = {"rtol": 1e-10, "atol": 1e-12}

by_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
by_structure = pytest.mark.parametrize("structure", STRUCTURES)


def fitted(case: Case, structure: str, *sizes: int, **options):
    return fit_curvature(case.model(), labelled(case, *sizes), structure=structure, **options)


# Against the exact matrix ------------------------------------------------------------------------


@by_case
@pytest.mark.parametrize("sizes", [(2, 2, 2, 1), (7,)], ids=str)
def test_the_diagonal_is_the_exact_one(case, sizes):
    curvature = fitted(case, "diag", *sizes)
    expected = gauss_newton(case.model(), case.x(7), curvature.mean).diagonal()
    torch.testing.assert_close(vector(curvature.diagonal), expected, **TIGHT)


def basis(curvature: DiagonalCurvature) -> torch.Tensor:
    """U for all layers and groups: the columns are orthogonal."""
    mean, columns = curvature.mean, []
    for unit in torch.eye(len(curvature.eigenvalues())).double():
        outer = dense(replace(curvature, diagonal=unflatten(unit, mean)))
        columns.append(outer[:, outer.diagonal().argmax()] / outer.diagonal().amax().sqrt())
    return torch.stack(columns, dim=1)


class Shared(nn.Module):
    """One layer that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.body(torch.tanh(self.body(x)))))


SHARED = Case("a layer that is passed twice", Shared, lambda n: normal(n, 4))


@pytest.mark.parametrize("case", [*CASES, SHARED], ids=lambda case: case.name)
def test_eigenvalues_are_the_exact_diagonal_in_the_eigenbasis_of_kfac(case):
    """For convolutions and sequences too, where a gradient is a sum over positions."""
    curvature = fitted(case, "ekfac", 3, 4)
    U, H = basis(curvature), gauss_newton(case.model(), case.x(7), curvature.mean)
    torch.testing.assert_close(U.T @ U, torch.eye(len(U)).double(), rtol=0, atol=1e-9)
    expected = (U.T @ H @ U).diagonal()
    torch.testing.assert_close(curvature.eigenvalues(), expected, rtol=1e-8, atol=1e-10)
    if case is SHARED:
        diagonal = fitted(case, "diag", 3, 4).diagonal
        torch.testing.assert_close(vector(diagonal), H.diagonal(), **TIGHT)


@by_case
def test_the_full_curvature_is_the_whole_gauss_newton_matrix(case):
    names = [name for layer in affine_layers(case.model()) for name in layer.names]
    curvature = fitted(case, "full", 3, 4, layers=names)
    expected = gauss_newton(case.model(), case.x(7), curvature.mean)
    torch.testing.assert_close(curvature.hessian, expected, **TIGHT)


@pytest.mark.parametrize("case", MODELS, ids=lambda case: case.name)
def test_the_full_curvature_is_the_hessian_of_the_loss(case):
    """The softmax loss is convex in a last layer, and its Hessian needs no approximation."""
    classifier, data = Classifier(case.model()).tempered(1.3), labelled(case, 5, 7)
    curvature = fit_curvature(classifier, data, structure="full")
    mean = curvature.mean

    def loss(flat):
        pieces = flat.split([t.numel() for t in mean.values()])
        named = {n: p.view(t.shape) for (n, t), p in zip(mean.items(), pieces, strict=True)}
        return sum(
            nn.functional.cross_entropy(classifier.logits(x, named), y, reduction="sum")
            for x, y in data
        )

    hessian = torch.autograd.functional.hessian(loss, vector(mean))
    torch.testing.assert_close(curvature.hessian, hessian, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("structure", ["kron", "ekfac"])
@pytest.mark.parametrize("fisher", ["type-2", "empirical"])
@pytest.mark.parametrize("case", MODELS[:4], ids=lambda case: case.name)
def test_equals_an_independent_implementation(case, fisher, structure):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        curvlinops = pytest.importorskip("curvlinops", reason="pip install -r tests/oracles.txt")
    model, data = case.model().eval(), labelled(case, 6)
    layers = [layer for layer in affine_layers(model) if layer.groups == 1]  # it has no groups
    names = [name for layer in layers for name in layer.names]
    chosen = ExactFisher() if fisher == "type-2" else EmpiricalFisher()
    ours = fit_curvature(model, data, structure=structure, layers=names, fisher=chosen)
    kinds = {"kron": curvlinops.KFACLinearOperator, "ekfac": curvlinops.EKFACLinearOperator}
    operator = kinds[structure](
        model,
        nn.CrossEntropyLoss(reduction="sum"),
        [p for n, p in model.named_parameters() if n in names],
        data,
        fisher_type=fisher,
        separate_weight_and_bias=False,
        check_deterministic=False,
    )
    theirs = operator @ torch.eye(operator.shape[0], dtype=torch.float64)
    torch.testing.assert_close(dense(ours), theirs, rtol=1e-7, atol=1e-8)


def confident(dtype: torch.dtype) -> tuple[Classifier, torch.Tensor]:
    """A network and inputs of which it is sure: 1 - p is about 4e-7."""
    model = nn.Linear(4, 3).to(dtype)
    with torch.no_grad():
        model.weight.copy_(16 * torch.eye(3, 4))
        model.bias.zero_()
    x = torch.eye(4)[torch.arange(60) % 3] + 0.05 * normal(60, 4).float()
    return Classifier(model), x.to(dtype)


@by_structure
@pytest.mark.parametrize("fisher", [ExactFisher(), EmpiricalFisher()], ids=["exact", "empirical"])
def test_confident_networks_lose_no_digits_in_single_precision(structure, fisher):
    labels = torch.arange(60) % 3
    single, double = (
        fit_curvature(classifier, [(x, labels)], structure=structure, fisher=fisher)
        for classifier, x in map(confident, (torch.float32, torch.float64))
    )
    traces = [each.eigenvalues().sum().item() for each in (single, double)]
    assert 0 < traces[1] < 1e-3
    assert traces[0] == pytest.approx(traces[1], rel=1e-5, abs=0)


# Priors, sums, files -----------------------------------------------------------------------------


@by_structure
@by_case
def test_a_posterior_adds_the_prior(case, structure):
    if case is ONE_POSITION[2] and structure == "full":
        pytest.skip("it has no Linear layer")
    curvature, tau = fitted(case, structure, 6), 0.3
    H, theta = dense(curvature), vector(curvature.mean)
    eye = torch.eye(len(H)).double()
    precision = torch.linalg.inv(covariance(curvature.posterior(tau)))
    torch.testing.assert_close(precision, H + tau * eye, rtol=1e-8, atol=1e-8)
    log_det = torch.logdet(precision) - len(H) * math.log(tau)
    expected = -0.5 * (tau * theta @ theta + log_det).item()
    assert curvature.log_evidence(tau) == pytest.approx(expected, abs=1e-7)
    values = curvature.eigenvalues().sort().values
    torch.testing.assert_close(values, torch.linalg.eigvalsh(H), rtol=1e-8, atol=1e-8)
    assert curvature.mean_eigenvalue() == pytest.approx(values.mean().item(), rel=1e-8)
    posterior = fit_laplace(
        case.model(), labelled(case, 6), structure=structure, prior_precision=tau
    )
    assert_identical(posterior, curvature.posterior(tau))


def test_kfac_can_be_damped_by_factors():
    curvature = fitted(MLP, "kron", 6)
    block, (_, A, G) = curvature.damped(0.7).blocks[0], curvature.factors[0].normalised
    a, g = (m + math.sqrt(0.7) * torch.eye(len(m)).double() for m in (A, G))
    v = normal(len(G), len(A))
    torch.testing.assert_close(g @ block.cov_mv(v) @ a, v, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("structure", ["diag", "kron", "full"])
@pytest.mark.parametrize("fisher", [ExactFisher(), EmpiricalFisher()], ids=["exact", "empirical"])
@by_case
def test_curvatures_of_parts_add_up(case, structure, fisher, tmp_path):
    """Also those from files. The parts are unequal, so that wrong weights show."""
    if case is ONE_POSITION[2] and structure == "full":
        pytest.skip("it has no Linear layer")
    classifier, data = Classifier(case.model()).tempered(1.7), labelled(case, 1, 4, 7)
    options = {"structure": structure, "fisher": fisher}
    whole = fit_curvature(classifier, data, **options)
    parts = [fit_curvature(classifier, [part], **options) for part in data]
    for total in (reduce(add, parts), parts[2] + (parts[1] + parts[0])):
        for a, b in zip(tensors(total), tensors(whole), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    loaded = []
    for index, part in enumerate(parts):
        acnml.save(part, tmp_path / f"{index}.safetensors")
        loaded.append(acnml.load(tmp_path / f"{index}.safetensors"))
    assert_identical(reduce(add, loaded), reduce(add, parts))
    assert_identical(loaded[2].posterior(0.3), parts[2].posterior(0.3))


def test_curvatures_of_ekfac_do_not_add_up():
    parts = [fitted(MLP, "ekfac", n) for n in (3, 4)]
    with pytest.raises(ValueError, match="have different bases and do not add up"):
        parts[0] + parts[1]


# Fisher matrices ---------------------------------------------------------------------------------


def test_monte_carlo_fisher_is_unbiased():
    """The mean of 40,000 draws is within six standard errors of the Hessian."""
    probs, n = normal(1, 3).softmax(-1), 40_000
    generator = torch.Generator().manual_seed(0)
    drawn = torch.cat(list(MonteCarloFisher(samples=n).vectors(probs, None, generator)))
    outers = n * drawn.unsqueeze(-1) * drawn.unsqueeze(-2)
    hessian = torch.diag(probs[0]) - probs[0].outer(probs[0])
    assert ((outers.mean(0) - hessian).abs() < 6 * outers.std(0) / math.sqrt(n)).all()


def test_empirical_fisher_is_the_sum_of_squared_gradients():
    case = MODELS[3]
    curvature = fitted(case, "diag", 2, 3, fisher=EmpiricalFisher())
    model, ((x, y),) = case.model(), labelled(case, 5)
    expected = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
    for i in range(len(y)):
        loss = nn.functional.cross_entropy(model(x[i : i + 1]), y[i : i + 1])
        grads = torch.autograd.grad(loss, list(model.parameters()))
        for name, grad in zip(expected, grads, strict=True):
            expected[name] += grad**2
    torch.testing.assert_close(curvature.diagonal, expected, **TIGHT)


# What a fit covers, and what it leaves alone -----------------------------------------------------

AFFINE = ["stem.weight", "stem.bias", "grouped.weight", "grouped.bias", "head.weight", "head.bias"]
NORM = ["norm.weight", "norm.bias"]


@pytest.mark.parametrize(
    ("structure", "layers", "names"),
    [
        ("diag", None, [*AFFINE[:2], *NORM, *AFFINE[2:]]),
        ("kron", None, AFFINE),
        ("ekfac", None, AFFINE),
        ("full", None, AFFINE[4:]),
        *((structure, "last", AFFINE[4:]) for structure in STRUCTURES),
        ("kron", "stem", AFFINE[:2]),
        ("kron", lambda model: model.stem, AFFINE[:2]),
        ("kron", lambda model: model.stem.weight, AFFINE[:1]),
        ("kron", lambda model: iter([model.head, "stem.weight"]), ["stem.weight", *AFFINE[4:]]),
        (
            "diag",
            lambda model: ["head.weight", model.norm],
            ["norm.weight", "norm.bias", AFFINE[4]],
        ),
    ],
)
def test_covers_what_is_asked_for(structure, layers, names):
    model = CONV.model()
    chosen = layers(model) if callable(layers) else layers
    found = fit_laplace(model, labelled(CONV, 4), structure=structure, layers=chosen)
    assert list(found.mean) == names


def test_leaves_the_model_alone_and_survives_in_place_activations():
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(inplace=True), nn.Linear(5, 3)).double().train()
    plain = nn.Sequential(model[0], nn.ReLU(), model[2])
    data = [(normal(6, 4), torch.zeros(6, dtype=int))]
    before = [p.clone() for p in model.parameters()]
    in_place, expected = (fit_curvature(m, data, structure="diag") for m in (model, plain))
    torch.testing.assert_close(in_place.diagonal, expected.diagonal)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert model.training
    assert all(p.grad is None for p in model.parameters())
    assert not model[0]._forward_hooks


# Errors ------------------------------------------------------------------------------------------


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
