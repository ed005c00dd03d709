"""EK-FAC against the exact curvature in its eigenbasis, and against KFAC."""

from __future__ import annotations

import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import acnml
from acnml import (
    Classifier,
    EmpiricalFisher,
    ExactFisher,
    FactorBlock,
    Kronecker,
    MonteCarloFisher,
    ekfac_curvature,
    kronecker_curvature,
)
from acnml.fit import laplace
from acnml.fit.curvature import EigenFactors, EkfacCurvature
from acnml.posteriors import EigenBlock
from cases import MODELS, affine_layers, normal
from dense import covariance
from test_calibrate import joined, problem
from test_laplace import ALL, Shared, diagonal_blocks, gauss_newton, labelled
from test_last_layer_fits import CASES, FISHERS, data, names


def dense(curvature) -> torch.Tensor:
    """H with its blocks, in the order of the flattened mean."""
    if isinstance(curvature, EkfacCurvature):
        blocks = (
            EigenBlock(f.layer, f.input_basis, f.output_basis, f.values) for f in curvature.factors
        )
    else:
        blocks = (FactorBlock(layer, A, G) for layer, A, G in curvature.factors)
    return covariance(Kronecker(curvature.mean, tuple(blocks)))


def basis(curvature: EkfacCurvature) -> torch.Tensor:
    """U for all layers and groups: the columns are orthogonal."""
    ones = [torch.ones_like(f.values) for f in curvature.factors]
    total = len(curvature.eigenvalues())
    columns = torch.zeros(total, total, dtype=torch.float64)
    for index in range(total):
        values = torch.zeros(total, dtype=torch.float64)
        values[index] = 1
        parts = values.split([one.numel() for one in ones])
        factors = tuple(
            EigenFactors(f.layer, f.input_basis, f.output_basis, part.view_as(one))
            for f, part, one in zip(curvature.factors, parts, ones, strict=True)
        )
        outer = dense(EkfacCurvature(curvature.mean, factors))
        columns[:, index] = outer[:, outer.diagonal().argmax()] / outer.diagonal().amax().sqrt()
    return columns


@pytest.mark.parametrize("case", ALL, ids=lambda case: case.name)
@pytest.mark.parametrize("batch", [3, 7])
def test_eigenvalues_are_the_exact_diagonal_in_the_eigenbasis(case, batch):
    """For convolutions and sequences too, where a gradient is a sum over positions."""
    model = case.model()
    curvature = ekfac_curvature(Classifier(model), labelled(case, 7, batch))
    U, H = basis(curvature), gauss_newton(model, case.x(7), list(curvature.mean))
    torch.testing.assert_close(U.T @ U, torch.eye(len(U)).double(), rtol=0, atol=1e-10)
    expected = (U.T @ H @ U).diagonal()
    torch.testing.assert_close(curvature.eigenvalues(), expected, rtol=1e-9, atol=1e-11)


def test_a_layer_that_is_passed_twice_counts_both():
    model = Shared().double()
    curvature = ekfac_curvature(Classifier(model), [(normal(3, 4), torch.zeros(3, dtype=int))])
    U, H = basis(curvature), gauss_newton(model, normal(3, 4), list(curvature.mean))
    expected = (U.T @ H @ U).diagonal()
    torch.testing.assert_close(curvature.eigenvalues(), expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("case", ALL, ids=lambda case: case.name)
def test_the_trace_is_the_exact_one(case):
    """KFAC's is not, unless inputs and gradients are independent."""
    model = case.model()
    curvature = ekfac_curvature(Classifier(model), labelled(case, 7, 4))
    exact = gauss_newton(model, case.x(7), list(curvature.mean)).trace().item()
    assert curvature.trace() == pytest.approx(exact, rel=1e-9)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 6), st.sampled_from(ALL))
def test_never_farther_from_the_curvature_than_kfac(seed, n, case):
    """In the Frobenius norm of every layer's block; equal only if KFAC is exact."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = case.build().double()
    loader = labelled(case, n, n)
    kfac, ekfac = (fit(Classifier(model), loader) for fit in (kronecker_curvature, ekfac_curvature))
    H = diagonal_blocks(gauss_newton(model, case.x(n), list(kfac.mean)), kfac)
    ours, theirs = ((dense(c) - H).norm().item() for c in (ekfac, kfac))
    assert ours <= theirs * (1 + 1e-9) + 1e-12
    if n > 1:
        assert ours < theirs


@pytest.mark.parametrize("case", ALL[:2], ids=lambda case: case.name)
def test_exact_where_kfac_is(case):
    """All inputs are equal."""
    model, x = case.model(), case.x(1)
    curvature = ekfac_curvature(Classifier(model), [torch.cat([x] * 3)])
    factors = kronecker_curvature(Classifier(model), [torch.cat([x] * 3)])
    exact = diagonal_blocks(3 * gauss_newton(model, x, list(curvature.mean)), factors)
    torch.testing.assert_close(dense(curvature), exact, rtol=1e-9, atol=1e-11)


def test_exact_for_two_classes_and_orthogonal_inputs_where_kfac_is_not():
    """Σ h_n vvᵀ ⊗ a_n a_nᵀ with v = (1, -1) is diagonal in a basis of the inputs, for any h_n."""
    model = nn.Linear(3, 2, bias=False).double()
    x = torch.diag(torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64))
    exact = gauss_newton(model, x, ["weight"])
    curvature = ekfac_curvature(Classifier(model), [x])
    torch.testing.assert_close(dense(curvature), exact, rtol=1e-10, atol=1e-12)
    assert (dense(kronecker_curvature(Classifier(model), [x])) - exact).abs().max() > 0.01


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("fisher", FISHERS, ids=lambda fisher: type(fisher).__name__)
def test_the_closed_form_of_a_last_layer_is_the_general_way(case, fisher, monkeypatch):
    model = case.model()
    classifier, loader = Classifier(model).tempered(1.7), data(case)
    fast = ekfac_curvature(classifier, loader, names(model), fisher)
    monkeypatch.setattr(laplace, "only_linear", lambda *_: None)
    slow = ekfac_curvature(classifier, loader, names(model), fisher)
    torch.testing.assert_close(dense(fast), dense(slow), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("fisher", ["type-2", "empirical"])
@pytest.mark.parametrize("case", MODELS[:4], ids=lambda case: case.name)
def test_equals_an_independent_implementation(case, fisher):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        curvlinops = pytest.importorskip("curvlinops", reason="pip install -r tests/oracles.txt")
    model, loader = case.model().eval(), labelled(case, 6, 6)
    layers = [layer for layer in affine_layers(model) if layer.groups == 1]  # it has no groups
    own = [name for layer in layers for name in layer.names]
    chosen = ExactFisher() if fisher == "type-2" else EmpiricalFisher()
    ours = ekfac_curvature(Classifier(model), loader, own, chosen)
    operator = curvlinops.EKFACLinearOperator(
        model,
        nn.CrossEntropyLoss(reduction="sum"),
        [p for n, p in model.named_parameters() if n in own],
        loader,
        fisher_type=fisher,
        separate_weight_and_bias=False,
        check_deterministic=False,
    )
    theirs = operator @ torch.eye(operator.shape[0], dtype=torch.float64)
    torch.testing.assert_close(dense(ours), theirs, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("fisher", FISHERS, ids=lambda fisher: type(fisher).__name__)
def test_squares_in_a_basis_are_those_of_the_vectors(fisher):
    """Confident predictions too, for which the closed form subtracts nearly equal numbers."""
    logits = 12 * normal(6, 4)
    U = torch.linalg.qr(normal(4, 4, seed=1))[0]
    labels = torch.arange(6) % 4

    def generator():
        return torch.Generator().manual_seed(3)

    vectors = fisher.cotangents(logits.softmax(-1), labels, generator())
    expected = torch.stack([(s @ U) ** 2 for s in vectors]).sum(0)
    found = fisher.squares_in(U, logits.softmax(-1), labels, generator())
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-14)
    single = fisher.squares_in(U.float(), logits.float().softmax(-1), labels, generator())
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), expected, rtol=1e-3, atol=1e-7)


def test_monte_carlo_draws_the_same_labels_in_both_passes():
    """So for one example of a last layer, the eigenvalues are those of its factors."""
    model = MODELS[0].model()
    loader = [(normal(1, 4), torch.zeros(1, dtype=int))]
    for fisher in (MonteCarloFisher(2, seed=4), EmpiricalFisher(), ExactFisher()):
        kfac = kronecker_curvature(Classifier(model), loader, fisher=fisher)
        ekfac = ekfac_curvature(Classifier(model), loader, fisher=fisher)
        torch.testing.assert_close(dense(ekfac), dense(kfac), rtol=1e-9, atol=1e-12)


def test_the_posterior_adds_the_prior():
    case = MODELS[2]
    classifier, loader = Classifier(case.model()), labelled(case, 6, 3)
    posterior = acnml.fit_ekfac_laplace(classifier, loader, prior_precision=0.7)
    expected = dense(ekfac_curvature(classifier, loader))
    precision = torch.linalg.inv(covariance(posterior))
    eye = torch.eye(len(expected)).double()
    torch.testing.assert_close(precision, expected + 0.7 * eye, rtol=1e-8, atol=1e-8)


def test_an_iterator_that_is_used_up_is_an_error():
    case = MODELS[1]
    with pytest.raises(ValueError, match="pass a loader that can be iterated again"):
        ekfac_curvature(Classifier(case.model()), iter(labelled(case, 4, 2)))


def test_refuses_parts_that_do_not_fit():
    (layer,) = affine_layers(MODELS[0].model())
    mean = {"weight": normal(3, 4), "bias": normal(3)}
    wrong = EigenFactors(layer, torch.eye(4), torch.eye(3), torch.ones(3, 4))
    with pytest.raises(ValueError, match=r"matrix of shape \(3, 4\), but .* \(3, 5\)"):
        EkfacCurvature(mean, (wrong,))


def test_calibrate_takes_it():
    model, train, validation, test = problem()
    x, labels = joined(test)
    plain, refitted = (
        acnml.calibrate(model, train, validation, curvature=fit)
        for fit in (kronecker_curvature, ekfac_curvature)
    )
    assert refitted.typicality is not None
    nlls = [acnml.metrics.nll(c.probs(x).log(), labels) for c in (plain, refitted)]
    assert abs(nlls[0] - nlls[1]) < 0.05
    assert not torch.equal(plain.probs(x), refitted.probs(x))
