"""Closed-form curvatures of a last layer, compared with the general fit and dense algebra."""

from __future__ import annotations

import math
from typing import final

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import acnml
from acnml import Classifier, EmpiricalFisher, ExactFisher, MonteCarloFisher
from acnml._util.params import flatten
from acnml.fit import laplace
from cases import MODELS, affine_layers, normal
from dense import vector
from test_calibrate import joined, problem

CASES = [case for case in MODELS if not isinstance(case.x(1), (tuple, dict))]
FISHERS = [ExactFisher(), MonteCarloFisher(3, seed=1), EmpiricalFisher()]


def data(case, n=12):
    labels = torch.randint(3, (n,), generator=torch.Generator().manual_seed(0))
    x = case.x(n)
    return [(x[:5], labels[:5]), (x[5:], labels[5:])]


def names(model):
    return list(affine_layers(model)[-1].names)


@pytest.fixture
def general(monkeypatch):
    """Disable the closed form of the last layer in fits."""

    def use():
        monkeypatch.setattr(laplace, "only_linear", lambda *_: None)

    return use


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("fisher", FISHERS, ids=lambda fisher: type(fisher).__name__)
def test_factors_and_diagonal_are_those_of_the_general_way(case, fisher, general):
    model = case.model()
    classifier, loader = Classifier(model).tempered(1.7), data(case)
    fast = acnml.kronecker_curvature(classifier, loader, names(model), fisher)
    diagonal = acnml.diagonal_curvature(classifier, loader, names(model), fisher)
    general()
    slow = acnml.kronecker_curvature(classifier, loader, names(model), fisher)
    for a, b in zip(fast.factors[0][1:], slow.factors[0][1:], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)
    expected = acnml.diagonal_curvature(classifier, loader, names(model), fisher)
    for name in names(model):
        torch.testing.assert_close(
            diagonal.diagonal[name], expected.diagonal[name], rtol=1e-11, atol=1e-12
        )


def confident(dtype: torch.dtype) -> tuple[Classifier, torch.Tensor]:
    """A network and inputs of which it is sure: 1 - p is about 4e-7."""
    model = nn.Linear(4, 3).to(dtype)
    with torch.no_grad():
        model.weight.copy_(16 * torch.eye(3, 4))
        model.bias.zero_()
    x = torch.eye(4)[torch.arange(60) % 3] + 0.05 * normal(60, 4).float()
    return Classifier(model), x.to(dtype)


CURVATURES = [
    acnml.diagonal_curvature,
    acnml.kronecker_curvature,
    acnml.ekfac_curvature,
    acnml.full_curvature,
]


@pytest.mark.parametrize("fit", CURVATURES, ids=lambda fit: fit.__name__)
@pytest.mark.parametrize("fisher", [ExactFisher(), EmpiricalFisher()], ids=["exact", "empirical"])
@pytest.mark.parametrize("way", ["closed form", "backward passes"])
def test_confident_networks_lose_no_digits_in_single_precision(fit, fisher, way, general):
    if way == "backward passes":
        if fit is acnml.full_curvature:
            pytest.skip("it has only the closed form")
        general()
    labels = torch.arange(60) % 3
    single, double = (
        fit(classifier, [(x, labels)], fisher=fisher)
        for classifier, x in map(confident, (torch.float32, torch.float64))
    )
    assert 0 < double.trace() < 1e-3
    assert single.trace() == pytest.approx(double.trace(), rel=1e-5, abs=0)


def test_the_summed_fisher_is_positive_however_confident_the_network_is():
    logits = torch.diag(torch.tensor([30.0, 60.0, 90.0])).double()
    G = ExactFisher().summed(logits.softmax(-1), None, torch.Generator())
    beside = torch.tensor([[0, 1, 1], [1, 0, 0], [1, 0, 0]]).double() * math.exp(-30)
    exact = torch.diag(beside.sum(1)) - beside  # the other two inputs add less than 1e-25
    torch.testing.assert_close(G, exact, rtol=1e-9, atol=1e-25)
    assert torch.linalg.eigvalsh(G)[0] > -1e-14 * G.max()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_full_curvature_is_the_hessian_of_the_loss(case):
    """The softmax loss is convex in a last layer, and its Hessian needs no approximation."""
    model = case.model()
    classifier, loader = Classifier(model).tempered(1.3), data(case)
    curvature = acnml.full_curvature(classifier, loader)
    mean = curvature.mean

    def loss(flat):
        pieces = flat.split([t.numel() for t in mean.values()])
        named = {n: p.view(t.shape) for (n, t), p in zip(mean.items(), pieces, strict=True)}
        return sum(
            nn.functional.cross_entropy(classifier.logits(x, named), y, reduction="sum")
            for x, y in loader
        )

    hessian = torch.autograd.functional.hessian(loss, vector(mean))
    torch.testing.assert_close(curvature.hessian, hessian, rtol=1e-9, atol=1e-10)
    posterior = curvature.posterior(0.5)
    eye = torch.eye(len(hessian), dtype=hessian.dtype)
    torch.testing.assert_close(posterior.cov @ (hessian + 0.5 * eye), eye, rtol=1e-8, atol=1e-8)
    expected = torch.linalg.eigvalsh(hessian).clamp(min=0)
    torch.testing.assert_close(curvature.eigenvalues(), expected, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("fisher", FISHERS, ids=lambda fisher: type(fisher).__name__)
def test_full_curvature_is_the_sum_over_the_vectors_of_the_fisher(fisher):
    """Σ (s ⊗ a)(s ⊗ a)ᵀ / T², for the vectors s of the estimator and features a."""
    model = nn.Linear(5, 4, bias=False).double()
    x, labels = normal(30, 5), torch.arange(30) % 4
    classifier = Classifier(model).tempered(1.3)
    found = acnml.full_curvature(classifier, [(x, labels)], fisher=fisher)
    probs = classifier.log_probs(x).detach().exp()
    generator = torch.Generator().manual_seed(getattr(fisher, "seed", 0))
    expected = torch.zeros(20, 20).double()
    for s in fisher.cotangents(probs, labels, generator):
        grads = torch.einsum("bc,bi->bci", s, x).flatten(1) / 1.3
        expected += grads.T @ grads
    torch.testing.assert_close(found.hessian, expected, rtol=1e-11, atol=1e-12)


@final
class Largest(TorchDispatchMode):
    """Notes the size of the largest tensor that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.size = max(self.size, leaf.numel())
        return result


def test_full_curvature_weighs_inputs_for_one_class_at_a_time():
    """No tensor has a number for every pair of classes, input and feature."""
    classes, size, batch = 10, 3, 200
    classifier = Classifier(nn.Linear(size - 1, classes))
    acnml.full_curvature(classifier, [normal(batch, size - 1).float()])  # the model is checked
    with Largest() as largest:
        acnml.full_curvature(classifier, [normal(batch, size - 1).float()])
    assert largest.size <= batch * classes * max(classes, size)


def test_full_is_refused_for_other_layers():
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    loader = [(normal(6, 4), torch.zeros(6).long())]
    with pytest.raises(ValueError, match="batch 0: the logits are not the outputs of '0' alone"):
        acnml.full_curvature(Classifier(model), loader, [model[0]])
    with pytest.raises(ValueError, match="full_curvature covers a last Linear layer alone"):
        acnml.full_curvature(
            Classifier(nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 3))),
            loader,
            ["0.weight", "0.bias"],
        )


def test_a_thousand_classes_take_one_forward_pass_a_batch():
    """There are no backward passes and no loop over classes: the layer is called once."""
    model, calls = nn.Linear(8, 1000), []
    model.register_forward_hook(lambda *_: calls.append(1))
    classifier = Classifier(model)
    x = torch.randn(32, 8, generator=torch.Generator().manual_seed(0))
    acnml.kronecker_curvature(classifier, [x, x])  # the first batches are also checked
    before = len(calls)
    curvature = acnml.kronecker_curvature(classifier, [x] * 10)
    assert len(calls) - before <= 10 + 3
    probs = classifier.log_probs(x).detach().exp()
    expected = torch.diag(probs.sum(0)) - probs.T @ probs
    found = curvature.factors[0].gradients * (320**0.5) / 10
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_full_survives_storage(tmp_path):
    model = MODELS[0].model()
    curvature = acnml.full_curvature(Classifier(model), data(MODELS[0]))
    acnml.save(curvature, tmp_path / "curvature.safetensors")
    loaded = acnml.load(tmp_path / "curvature.safetensors")
    assert torch.equal(loaded.hessian, curvature.hessian)
    assert torch.equal(flatten(loaded.mean, loaded.mean), flatten(curvature.mean, curvature.mean))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_traces_are_sums_of_eigenvalues(case):
    model = case.model()
    classifier, loader = Classifier(model), data(case)
    curvatures = [
        acnml.full_curvature(classifier, loader),
        acnml.diagonal_curvature(classifier, loader),
        acnml.kronecker_curvature(classifier, loader),  # all layers, grouped ones too
        acnml.ekfac_curvature(classifier, loader),
    ]
    for curvature in curvatures:
        values = curvature.eigenvalues().double()
        assert curvature.trace() == pytest.approx(values.sum().item(), rel=1e-8)
        assert curvature.mean_eigenvalue() == pytest.approx(values.mean().item(), rel=1e-8)


def test_calibration_does_not_depend_on_the_scale_of_features():
    """Features times c and weights divided by c are the same network, with the same answers."""
    model, train, validation, test = problem()
    x, _ = joined(test)
    results = []
    for scale in (1.0, 100.0):
        head = nn.Linear(16, 3, bias=False).double()
        with torch.no_grad():
            head.weight.copy_(model.head.weight / scale)
        network = nn.Sequential(model.body, nn.Tanh(), Scale(scale), head)
        results.append(acnml.calibrate(network, train, validation, price=0.03).probs(x))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=1e-3)


class Scale(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return self.factor * x
