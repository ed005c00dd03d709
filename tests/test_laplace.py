"""Curvature against the exact generalised Gauss-Newton matrix and an independent KFAC."""

from __future__ import annotations

import inspect
import math
import warnings

import pytest
import torch
from torch import nn
from torch.func import functional_call, jacrev

import acnml
from acnml import (
    Classifier,
    EmpiricalFisher,
    ExactFisher,
    FactorBlock,
    Kronecker,
    MonteCarloFisher,
    diagonal_curvature,
    ekfac_curvature,
    kronecker_curvature,
)
from acnml._util.batches import as_arguments, size, take
from acnml.fit import KroneckerCurvature
from cases import MODELS, Case, affine_layers, normal
from dense import covariance, vector


def one_position() -> nn.Module:
    """Convolutions that see their whole input at once, one of them grouped."""
    return nn.Sequential(
        nn.Conv2d(2, 4, 4, groups=2), nn.Tanh(), nn.Conv2d(4, 3, 1, bias=False), nn.Flatten()
    )


ONE_POSITION = [MODELS[0], MODELS[1], Case("conv", one_position, lambda n: normal(n, 2, 4, 4))]
ALL = [*MODELS, *ONE_POSITION[2:]]


def labelled(case: Case, n: int, batch: int) -> list:
    """n examples in batches, with labels 0, 1, 2 in turn."""
    x, y = case.x(n), torch.arange(n) % 3
    return [(take(x, slice(i, i + batch)), y[i : i + batch]) for i in range(0, n, batch)]


def gauss_newton(model: nn.Module, x, names: list[str]) -> torch.Tensor:
    """Σ_n Jᵀ (diag p - ppᵀ) J over the flattened named parameters."""
    params = {n: p.detach() for n, p in model.eval().named_parameters() if n in names}
    total = 0
    for i in range(size(x)):
        args, kwargs = as_arguments(take(x, slice(i, i + 1)))

        def logits(named, args=args, kwargs=kwargs):
            return functional_call(model, named, args, kwargs)[0]

        J = torch.cat([j.flatten(1) for j in jacrev(logits)(params).values()], dim=1)
        p = logits(params).softmax(-1)
        total = total + J.T @ (torch.diag(p) - p.outer(p)) @ J
    return total


def dense(curvature: KroneckerCurvature) -> torch.Tensor:
    """A ⊗ G for all layers, in the order of the flattened mean."""
    blocks = tuple(FactorBlock(layer, A, G) for layer, A, G in curvature.factors)
    return covariance(Kronecker(curvature.mean, blocks))


def diagonal_blocks(matrix: torch.Tensor, curvature: KroneckerCurvature) -> torch.Tensor:
    """Set entries between parameters of different layers or groups to zero."""
    blocks = tuple(
        FactorBlock(layer, torch.ones_like(A), torch.ones_like(G))
        for layer, A, G in curvature.factors
    )
    return matrix * covariance(Kronecker(curvature.mean, blocks))


@pytest.mark.parametrize("case", ALL, ids=lambda case: case.name)
@pytest.mark.parametrize("batch", [2, 7])
def test_diagonal_is_the_exact_one(case, batch):
    model = case.model()
    curvature = diagonal_curvature(Classifier(model), labelled(case, 7, batch))
    expected = gauss_newton(model, case.x(7), list(curvature.mean)).diagonal()
    torch.testing.assert_close(vector(curvature.diagonal), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("case", ONE_POSITION, ids=lambda case: case.name)
@pytest.mark.parametrize("copies", [1, 5])
def test_kfac_is_exact_for_one_datum(case, copies):
    """If all inputs are equal, the expectation of the product is the product of expectations."""
    model, x = case.model(), case.x(1)
    data = [(torch.cat([x] * copies), torch.zeros(copies, dtype=int))]
    curvature = kronecker_curvature(Classifier(model), data)
    exact = diagonal_blocks(copies * gauss_newton(model, x, list(curvature.mean)), curvature)
    torch.testing.assert_close(dense(curvature), exact, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("case", ALL, ids=lambda case: case.name)
def test_kfac_does_not_depend_on_the_batches(case):
    classifier = Classifier(case.model())
    one, other = (kronecker_curvature(classifier, labelled(case, 12, batch)) for batch in (5, 12))
    torch.testing.assert_close(dense(one), dense(other), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("fisher", ["type-2", "empirical"])
@pytest.mark.parametrize("case", MODELS[:4], ids=lambda case: case.name)
def test_kfac_equals_an_independent_implementation(case, fisher):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        curvlinops = pytest.importorskip("curvlinops", reason="pip install -r tests/oracles.txt")
    model, data = case.model().eval(), labelled(case, 6, 6)
    layers = [layer for layer in affine_layers(model) if layer.groups == 1]  # it has no groups
    names = [name for layer in layers for name in layer.names]
    ours = kronecker_curvature(
        Classifier(model), data, names, ExactFisher() if fisher == "type-2" else EmpiricalFisher()
    )
    operator = curvlinops.KFACLinearOperator(
        model,
        nn.CrossEntropyLoss(reduction="sum"),
        [p for n, p in model.named_parameters() if n in names],
        data,
        fisher_type=fisher,
        separate_weight_and_bias=False,
        check_deterministic=False,
    )
    theirs = operator @ torch.eye(operator.shape[0], dtype=torch.float64)
    torch.testing.assert_close(dense(ours), theirs, rtol=1e-9, atol=1e-10)


def test_fisher_vectors_sum_to_the_hessian():
    probs = normal(4, 3).softmax(-1)
    hessian = torch.diag_embed(probs) - probs.unsqueeze(-1) * probs.unsqueeze(-2)
    vectors = torch.stack(list(ExactFisher().cotangents(probs, None, torch.Generator())))
    outer = torch.einsum("sbi,sbj->bij", vectors, vectors)
    torch.testing.assert_close(outer, hessian, rtol=1e-12, atol=1e-12)


def test_monte_carlo_fisher_is_unbiased():
    """The mean of 40,000 draws is within six standard errors of the Hessian."""
    probs, n = normal(1, 3).softmax(-1), 40_000
    fisher = MonteCarloFisher(samples=n)
    drawn = torch.cat(list(fisher.cotangents(probs, None, torch.Generator().manual_seed(0))))
    outers = n * drawn.unsqueeze(-1) * drawn.unsqueeze(-2)
    hessian = torch.diag(probs[0]) - probs[0].outer(probs[0])
    assert ((outers.mean(0) - hessian).abs() < 6 * outers.std(0) / math.sqrt(n)).all()


def test_monte_carlo_fisher_is_seeded():
    case = MODELS[1]
    classifier, data = Classifier(case.model()), labelled(case, 6, 3)
    fits = [
        vector(acnml.fit_diagonal_laplace(classifier, data, fisher=MonteCarloFisher(2, seed)).var)
        for seed in (1, 1, 2)
    ]
    assert torch.equal(fits[0], fits[1])
    assert not torch.equal(fits[0], fits[2])


def test_empirical_fisher_is_the_sum_of_squared_gradients():
    case = MODELS[3]
    model, data = case.model(), labelled(case, 5, 2)
    curvature = diagonal_curvature(Classifier(model), data, fisher=EmpiricalFisher())
    expected = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
    for x, y in data:
        for i in range(len(y)):
            loss = nn.functional.cross_entropy(model(x[i : i + 1]), y[i : i + 1])
            grads = torch.autograd.grad(loss, list(model.parameters()))
            for name, grad in zip(expected, grads, strict=True):
                expected[name] += grad**2
    torch.testing.assert_close(curvature.diagonal, expected, rtol=1e-10, atol=1e-12)


def test_posteriors_add_the_prior():
    case = MODELS[1]
    classifier, data = Classifier(case.model()), labelled(case, 6, 3)
    kron = kronecker_curvature(classifier, data)
    precision = torch.linalg.inv(
        covariance(acnml.fit_laplace(classifier, data, prior_precision=0.7))
    )
    eye = torch.eye(len(precision)).double()
    torch.testing.assert_close(precision, dense(kron) + 0.7 * eye, rtol=1e-8, atol=1e-8)
    damped = kron.posterior(0.7, FactorBlock.damped).blocks[0]
    G = kron.factors[0].gradients
    identity = damped.output_cov @ (G + math.sqrt(0.7) * torch.eye(len(G)).double())
    torch.testing.assert_close(identity, torch.eye(len(G)).double(), rtol=1e-10, atol=1e-10)
    diagonal = diagonal_curvature(classifier, data)
    var = acnml.fit_diagonal_laplace(classifier, data, prior_precision=0.7).var
    torch.testing.assert_close(1 / vector(var), vector(diagonal.diagonal) + 0.7, rtol=1e-12, atol=0)


@pytest.mark.parametrize("estimate", [diagonal_curvature, kronecker_curvature, ekfac_curvature])
def test_log_evidence_is_the_laplace_integral(estimate):
    """log ∫ exp(-½ dᵀHd) N(θ; 0, I/τ) dθ-style terms, from dense determinants."""
    case, tau = MODELS[2], 0.3
    curvature = estimate(Classifier(case.model()), labelled(case, 6, 3))
    H = torch.linalg.inv(covariance(curvature.posterior(tau)))
    theta = vector(curvature.mean)
    expected = -0.5 * (tau * theta @ theta - len(theta) * math.log(tau) + torch.logdet(H))
    assert abs(curvature.log_evidence(tau) - expected.item()) < 1e-8


def test_covers_what_is_asked_for():
    case = MODELS[2]
    model = case.model()
    classifier, data = Classifier(model), labelled(case, 4, 2)
    assert list(acnml.fit_laplace(classifier, data).mean) == [
        *("stem.weight", "stem.bias", "grouped.weight", "grouped.bias", "head.weight", "head.bias")
    ]
    last = acnml.fit_laplace(classifier, data, parameters=[acnml.last_linear(model)])
    assert list(last.mean) == ["head.weight", "head.bias"]
    mixed = acnml.fit_diagonal_laplace(classifier, data, parameters=["head.weight", model.norm])
    assert list(mixed.mean) == ["norm.weight", "norm.bias", "head.weight"]
    weight_only = kronecker_curvature(classifier, data, ["head.weight"])
    both = kronecker_curvature(classifier, data, ["head.weight", "head.bias"])
    torch.testing.assert_close(weight_only.factors[0].inputs, both.factors[0].inputs[:-1, :-1])


def test_sees_the_tensors_that_the_classifier_sees():
    case = MODELS[2]
    model, data = case.model(), labelled(case, 4, 2)
    moved = {"norm.running_mean": torch.ones(4).double(), "head.bias": normal(3)}
    viewed = diagonal_curvature(Classifier(model).at(moved), data)
    model.load_state_dict(moved, strict=False)
    torch.testing.assert_close(
        viewed.diagonal, diagonal_curvature(Classifier(model), data).diagonal
    )


def test_leaves_the_model_alone_and_survives_in_place_activations():
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(inplace=True), nn.Linear(5, 3)).double().train()
    plain = nn.Sequential(model[0], nn.ReLU(), model[2])
    data = [(normal(6, 4), torch.zeros(6, dtype=int))]
    before = [p.clone() for p in model.parameters()]
    in_place = diagonal_curvature(Classifier(model), data)
    torch.testing.assert_close(
        in_place.diagonal, diagonal_curvature(Classifier(plain), data).diagonal
    )
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert model.training
    assert all(p.grad is None for p in model.parameters())
    assert not model[0]._forward_hooks


class Shared(nn.Module):
    """One layer that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.body(torch.tanh(self.body(x)))))


def test_a_layer_that_is_passed_twice_counts_both():
    model = Shared().double()
    curvature = diagonal_curvature(Classifier(model), [(normal(3, 4), torch.zeros(3, dtype=int))])
    exact = gauss_newton(model, normal(3, 4), list(curvature.mean)).diagonal()
    torch.testing.assert_close(vector(curvature.diagonal), exact, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("form", [lambda x, y: [x, y], lambda x, y: {"input": x, "labels": y}])
def test_batches_may_be_lists_or_mappings(form):
    classifier, x, y = Classifier(nn.Linear(4, 3)), normal(4, 4), torch.tensor([0, 1, 2, 0])
    expected = acnml.fit_diagonal_laplace(classifier, [(x, y)]).var
    torch.testing.assert_close(acnml.fit_diagonal_laplace(classifier, [form(x, y)]).var, expected)


def test_the_old_name_still_works():
    with pytest.warns(DeprecationWarning, match="is now called acnml.fit_diagonal_laplace"):
        assert acnml.fit_laplace_diagonal is acnml.fit_diagonal_laplace
    with pytest.raises(AttributeError, match="module 'acnml' has no attribute 'fit_everything'"):
        acnml.fit_everything  # noqa: B018


FITS = [getattr(acnml, name) for name in acnml.__all__ if name.startswith(("fit_", "collect_"))]


@pytest.mark.parametrize("fit", FITS, ids=lambda fit: fit.__name__)
def test_settings_of_fits_are_given_by_name(fit):
    """After the classifier and its data, so that no number is taken for another one."""
    settings = [
        parameter
        for parameter in inspect.signature(fit).parameters.values()
        if parameter.name != "classifier" and not parameter.name.endswith("loader")
    ]
    assert settings
    assert all(parameter.kind is parameter.KEYWORD_ONLY for parameter in settings)
