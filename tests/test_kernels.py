"""Covariances of a layer's outputs, against dense matrices, and a head with many classes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import acnml
from acnml import Classifier, Linearised
from acnml.posteriors import full
from cases import POSTERIORS, affine_layers, layer_inputs, normal, seeded
from dense import covariance

BATCH = 4


def close(actual, expected, tolerance=1e-10):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", [n for n in POSTERIORS if n != "last_layer"])
def test_output_kernel_is_the_covariance_of_a_layers_outputs(name):
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3, bias=False)).double()
    posterior = POSTERIORS[name](model)
    sizes = {n: t.numel() for n, t in posterior.mean.items()}
    Σ, names = covariance(posterior), list(posterior.mean)
    for layer in affine_layers(model):
        matrix = layer.join(posterior.mean, posterior.mean)
        a = layer_inputs(layer, BATCH, matrix.shape[1], seed=5)
        start = sum(sizes[n] for n in names[: names.index(layer.weight)])
        size = matrix.numel()
        # Rows of d(output)/d(parameters): the inputs, once for each output, weights before biases.
        jacobian = torch.stack([_output_jacobian(layer, matrix.shape, one) for one in a])
        block = Σ[start : start + size, start : start + size]
        expected = jacobian @ block @ jacobian.mT
        close(posterior.output_kernel(layer, a), expected)


@pytest.mark.parametrize("name", POSTERIORS)
def test_output_kernel_without_a_faster_form(name):
    model = nn.Linear(4, 3).double()
    posterior, (layer,) = POSTERIORS[name](model), affine_layers(model)
    a = layer_inputs(layer, BATCH, 5, seed=5)
    found = acnml.posteriors.Posterior.output_kernel(posterior, layer, a)
    close(found, posterior.output_kernel(layer, a))


def test_a_full_covariance_is_multiplied_with_few_inputs_at_a_time(monkeypatch):
    monkeypatch.setattr(full, "AT_ONCE", 1)
    model = nn.Linear(2, 3).double()
    posterior, (layer,) = POSTERIORS["full"](model), affine_layers(model)
    a = layer_inputs(layer, 8, 3, seed=5)  # more inputs than the layer has columns
    matrices = [posterior.output_kernel(layer, one) for one in a.split(1)]
    close(posterior.output_kernel(layer, a), torch.cat(matrices))


def _output_jacobian(layer, shape, a):
    out_size, in_size = shape
    weights = in_size if layer.bias is None else in_size - 1
    rows = torch.zeros(out_size, out_size * in_size).double()
    for o in range(out_size):
        rows[o, o * weights : (o + 1) * weights] = a[:weights]
        if layer.bias is not None:
            rows[o, out_size * weights + o] = 1
    return rows


@pytest.mark.parametrize("name", ["diagonal", "kronecker_eigen", "low_rank"])
def test_many_classes_through_the_predictor(name):
    """A head with many classes and a temperature, against the paper's iteration to convergence."""
    model = seeded(lambda: nn.Linear(5, 70))
    classifier, x = Classifier(model).tempered(0.5), normal(3, 5)
    posterior = POSTERIORS[name](model).scaled(0.05)
    exact = Linearised(tolerance=1e-10)(classifier, posterior, x)
    literal = acnml.solve.Reference(steps=300, step_size=0.2)(classifier, posterior, x)
    close(exact.log_lik, literal.log_lik, 1e-8)
