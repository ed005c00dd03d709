"""The conformance suite for posteriors, for every model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import acnml
from acnml import Diagonal, Kronecker, LowRank
from acnml._algebra.dual import Affine, Dual, Outers
from acnml._util.params import Params, flatten
from acnml.posteriors import EigenBlock, Posterior, full
from cases import MODELS, POSTERIORS, affine_layers, layer_inputs, normal
from dense import covariance, vector

CASES = [
    pytest.param(case, build, id=f"{case.name}-{name}")
    for case in MODELS
    for name, build in POSTERIORS.items()
]
each_posterior = pytest.mark.parametrize(("case", "build"), CASES)


def points(posterior: Posterior, *batch: int, seed: int = 3) -> Params:
    return {n: normal(*batch, *t.shape, seed=seed) for n, t in posterior.mean.items()}


def gaussian(posterior: Posterior) -> torch.distributions.MultivariateNormal:
    return torch.distributions.MultivariateNormal(vector(posterior.mean), covariance(posterior))


@each_posterior
def test_cov_mv_is_the_dense_product(case, build):
    posterior = build(case.model())
    v = points(posterior, 2, 3)
    expected = flatten(v, posterior.mean) @ covariance(posterior)
    actual = flatten(posterior.cov_mv(v), posterior.mean)
    torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-11)


@each_posterior
def test_log_prob_is_the_dense_density(case, build):
    posterior = build(case.model())
    theta = points(posterior, 4)
    expected = gaussian(posterior).log_prob(flatten(theta, posterior.mean))
    torch.testing.assert_close(posterior.log_prob(theta), expected, rtol=1e-9, atol=1e-9)
    one = {name: tensor[0] for name, tensor in theta.items()}
    torch.testing.assert_close(posterior.log_prob(one), expected[0], rtol=1e-9, atol=1e-9)


@each_posterior
def test_sample_moments(case, build):
    """Mean and covariance of 20,000 draws within six standard errors, entry by entry."""
    posterior, n = build(case.model()), 20_000
    draws = flatten(posterior.sample(n, torch.Generator().manual_seed(0)), posterior.mean)
    cov = covariance(posterior)
    offset = draws - vector(posterior.mean)
    mean_error = cov.diagonal().div(n).sqrt()
    cov_error = ((cov.diagonal().outer(cov.diagonal()) + cov**2) / n).sqrt()
    assert (offset.mean(0).abs() < 6 * mean_error).all()
    assert ((offset.T @ offset / n - cov).abs() < 6 * cov_error).all()


@each_posterior
def test_sample_is_seeded_and_leaves_the_global_state(case, build):
    posterior = build(case.model())
    before = torch.get_rng_state()
    first, again = (posterior.sample(2, torch.Generator().manual_seed(7)) for _ in range(2))
    assert all(torch.equal(first[name], again[name]) for name in posterior.mean)
    assert torch.equal(before, torch.get_rng_state())


def test_samples_that_are_drawn_one_by_one_decompose_a_dense_matrix_once(monkeypatch):
    model, calls, decompose = MODELS[1].model(), [], torch.linalg.eigh
    posterior, fresh = (POSTERIORS["full"](model) for _ in range(2))
    monkeypatch.setattr(torch.linalg, "eigh", lambda m: calls.append(m) or decompose(m))
    with torch.inference_mode():
        posterior.sample(1, torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(7)
    again = [posterior.sample(1, generator) for _ in range(5)]
    assert len(calls) == 1
    # The numbers are those of a posterior that has not been sampled from before.
    first = fresh.sample(1, torch.Generator().manual_seed(7))
    assert all(torch.equal(again[0][n], first[n]) for n in posterior.mean)
    assert not any(tensor.is_inference() for draw in again for tensor in draw.values())
    # Other posteriors made from it have a root of their own.
    wide = posterior.scaled(4.0).sample(1, torch.Generator().manual_seed(7))
    for n, mean in posterior.mean.items():
        torch.testing.assert_close(wide[n] - mean, 2 * (first[n] - mean), rtol=1e-9, atol=1e-9)


@each_posterior
def test_scaled_scales_the_covariance_only(case, build):
    posterior = build(case.model())
    scaled = posterior.scaled(2.5)
    assert type(scaled) is type(posterior)
    torch.testing.assert_close(
        covariance(scaled), 2.5 * covariance(posterior), rtol=1e-12, atol=1e-14
    )
    torch.testing.assert_close(vector(scaled.mean), vector(posterior.mean), rtol=0, atol=0)


@each_posterior
@pytest.mark.parametrize("alpha", [0.0, -1.0, float("nan"), float("inf")])
def test_scaled_refuses_what_is_not_positive(case, build, alpha):
    with pytest.raises(ValueError, match="alpha must be a positive"):
        build(case.model()).scaled(alpha)


def duals(posterior: Posterior, model: nn.Module) -> tuple[Dual, Dual]:
    """Return v with every factorable layer factored, and with every other one."""
    layers = [
        layer
        for layer in affine_layers(model)
        if layer.groups == 1 and set(layer.names) <= set(posterior.mean)
    ]
    return _dual(posterior, layers), _dual(posterior, layers[::2])


def _dual(posterior: Posterior, layers: list[Affine]) -> Dual:
    """Five inputs, three labels, four terms; the layer inputs are shared by the labels."""
    outers = {}
    for layer in layers:
        out_size, in_size = layer.join(posterior.mean, posterior.mean).shape
        inputs = layer_inputs(layer, 5, 1, 4, in_size, seed=5)
        outers[layer] = Outers(normal(5, 3, 4, out_size, seed=4), inputs)
    factored = {name for layer in layers for name in layer.names}
    dense = {
        n: normal(5, 3, *t.shape, seed=6) for n, t in posterior.mean.items() if n not in factored
    }
    return Dual(dense, outers)


@each_posterior
@pytest.mark.parametrize("which", [0, 1])
def test_displacement_is_cov_mv_of_the_materialised_sum(case, build, which):
    model = case.model()
    posterior = build(model)
    dual = duals(posterior, model)[which]
    actual, expected = posterior.displacement(dual), Posterior.displacement(posterior, dual)
    assert set(actual.dense) == set(dual.dense)
    for name in dual.dense:
        torch.testing.assert_close(actual.dense[name], expected.dense[name], rtol=1e-11, atol=1e-11)
    for layer, outers in dual.outers.items():
        in_size = outers.inputs.shape[-1]
        inputs = layer_inputs(layer, 5, 1, 6, in_size, seed=7)  # six positions
        shown = actual.actions[layer](inputs)
        assert shown.shape == (5, 3, 6, outers.deltas.shape[-1])
        torch.testing.assert_close(shown, expected.actions[layer](inputs), rtol=1e-11, atol=1e-11)


@each_posterior
def test_storage_round_trip(case, build, tmp_path):
    posterior = build(case.model())
    acnml.save(posterior, tmp_path / "posterior.safetensors")
    loaded = acnml.load(tmp_path / "posterior.safetensors")
    assert type(loaded) is type(posterior)
    assert list(loaded.mean) == list(posterior.mean)
    assert torch.equal(covariance(loaded), covariance(posterior))
    assert torch.equal(vector(loaded.mean), vector(posterior.mean))


@each_posterior
def test_moves_to_another_dtype(case, build):
    moved = build(case.model()).to("cpu", torch.float32)
    v = {name: tensor.float() for name, tensor in points(moved).items()}
    assert all(t.dtype == torch.float32 for t in (moved.cov_mv(v) | moved.mean).values())


MEAN = {"w": torch.zeros(2, 3)}
EYE = torch.eye(2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Diagonal({}, {}), "mean is empty"),
        (lambda: Diagonal(MEAN, {}), r"missing \['w'\]"),
        (lambda: Diagonal(MEAN, {"w": torch.ones(2, 3), "b": EYE}), r"unexpected \['b'\]"),
        (lambda: Diagonal(MEAN, {"w": torch.ones(3, 2)}), r"'w' has shape \(3, 2\)"),
        (lambda: Diagonal(MEAN, {"w": -torch.ones(2, 3)}), "'w' must not be negative"),
        (lambda: Diagonal(MEAN, {"w": torch.full((2, 3), torch.nan)}), "'w' has NaN"),
        (lambda: Diagonal({"w": torch.full((2,), torch.inf)}, {"w": EYE[0]}), "NaN or infinite"),
        (
            lambda: LowRank(MEAN, {"w": torch.ones(2, 3)}, {"w": torch.ones(2, 3)}),
            r"expected \(2, 2, 3\)",
        ),
        (lambda: LowRank(MEAN, {"w": torch.ones(2, 3)}, {"w": torch.ones(0, 2, 3)}), "no direct"),
        (lambda: Kronecker(MEAN, ()), r"missing \['w'\]"),
        (
            lambda: Kronecker(MEAN, (EigenBlock(Affine("w"), EYE, EYE, EYE),)),
            r"have shape \(2, 3\)",
        ),
        (lambda: EigenBlock(Affine("w"), torch.ones(2, 3), EYE, EYE), r"expected \(2, 3\)"),
        (lambda: EigenBlock(Affine("w"), EYE, EYE, -EYE), "not negative"),
        (lambda: EigenBlock(Affine("w"), EYE, EYE, torch.ones(2, 3)), r"expected \(2, 2\)"),
        (lambda: EigenBlock.damped(Affine("w"), EYE, EYE, 0.0), "prior_precision must be a pos"),
        (lambda: EigenBlock.from_factors(Affine("w"), EYE, EYE, -1.0), "prior_precision must be"),
    ],
)
def test_refuses_what_is_not_a_covariance(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_density_needs_positive_variances():
    posterior = Diagonal(MEAN, {"w": torch.zeros(2, 3)})
    assert torch.equal(posterior.sample(1, torch.Generator())["w"][0], MEAN["w"])
    with pytest.raises(ValueError, match="some of 'w' are zero"):
        posterior.log_prob(MEAN)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", POSTERIORS)
def test_kernels_of_a_layer_have_a_faster_form(name, bias, monkeypatch):
    monkeypatch.setattr(full, "AT_ONCE", 1)  # a full covariance is multiplied with few inputs
    model = nn.Linear(2, 3, bias=bias).double()
    posterior, (layer,) = POSTERIORS[name](model), affine_layers(model)
    a = layer_inputs(layer, 8, 2 + bias, seed=5)  # more inputs than the layer has columns
    expected = Posterior.output_kernel(posterior, layer, a)
    found = posterior.output_kernel(layer, a)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
