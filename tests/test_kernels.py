"""Kernels of every structure against their dense matrices, and heads with many classes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import acnml
from acnml import Classifier, Linearised
from acnml._algebra import kernels
from acnml._algebra.kernels import (
    DenseKernel,
    DiagonalKernel,
    Kernel,
    SpectralKernel,
)
from acnml.posteriors import full
from cases import POSTERIORS, affine_layers, layer_inputs, normal, spd
from dense import covariance

BATCH = 4


def kernel(kind: str, classes: int, width: float = 1.0) -> Kernel:
    positive = width * normal(BATCH, classes, seed=3).exp()
    basis = torch.linalg.eigh(spd(classes, seed=4))[1]
    return {
        "dense": DenseKernel(width * spd(BATCH, classes, seed=1)),
        "diagonal": DiagonalKernel(positive),
        "spectral": SpectralKernel(basis, positive),
    }[kind]


KINDS = ["dense", "diagonal", "spectral"]
each_kind = pytest.mark.parametrize("kind", KINDS)


def close(actual, expected, tolerance=1e-10):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@each_kind
@pytest.mark.parametrize("small", [0, 64])
def test_a_kernel_is_its_dense_matrix(kind, small, monkeypatch):
    monkeypatch.setattr(kernels, "SMALL", small)
    V, u = kernel(kind, 5), normal(BATCH, 3, 5, seed=7)
    dense = V.dense()
    close(dense, dense.mT)
    close(V.mv(u), torch.einsum("bij,blj->bli", dense, u))
    close(V.diagonal(), dense.diagonal(dim1=1, dim2=2))
    close(V.scaled(0.3).dense(), 0.3 * dense)
    close(V.take(slice(1, 3)).dense(), dense[1:3])
    factors = torch.tensor([0.5, 2.0, 0.0, 1.0]).double()
    close(V.scaled(factors).dense(), factors[:, None, None] * dense)
    inputs, classes = torch.tensor([0, 0, 2, 3, 3, 3]), torch.tensor([4, 1, 0, 2, 2, 3])
    close(V.columns(inputs, classes), dense[inputs, classes])
    vectors = normal(6, 5, seed=8)
    close(V.mv_rows(vectors, inputs), torch.einsum("nij,nj->ni", dense[inputs], vectors))
    assert torch.equal(V.double().dense(), dense)
    parts = [V.take(slice(0, 1)), V.take(slice(1, 4))]
    close(Kernel.joined(parts).dense(), dense)


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
        close(posterior.output_kernel(layer, a).dense(), expected)


@pytest.mark.parametrize("name", POSTERIORS)
def test_output_kernel_without_a_faster_form(name):
    model = nn.Linear(4, 3).double()
    posterior, (layer,) = POSTERIORS[name](model), affine_layers(model)
    a = layer_inputs(layer, BATCH, 5, seed=5)
    found = acnml.posteriors.Posterior.output_kernel(posterior, layer, a)
    close(found.dense(), posterior.output_kernel(layer, a).dense())


def test_a_full_covariance_is_multiplied_with_few_inputs_at_a_time(monkeypatch):
    monkeypatch.setattr(full, "AT_ONCE", 1)
    model = nn.Linear(2, 3).double()
    posterior, (layer,) = POSTERIORS["full"](model), affine_layers(model)
    a = layer_inputs(layer, 8, 3, seed=5)  # more inputs than the layer has columns
    matrices = [posterior.output_kernel(layer, one).dense() for one in a.split(1)]
    close(posterior.output_kernel(layer, a).dense(), torch.cat(matrices))


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
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 70)).double()
    classifier, x = Classifier(model).tempered(0.5), normal(3, 5)
    posterior = POSTERIORS[name](model).scaled(0.05)
    exact = Linearised(negligible=0, tolerance=1e-10)(classifier, posterior, x)
    literal = acnml.solve.Reference(steps=300, step_size=0.2)(classifier, posterior, x)
    close(exact.log_lik, literal.log_lik, 1e-8)
    pruned = Linearised(negligible=0.05, tolerance=1e-10)(classifier, posterior, x)
    gain = exact.log_lik.exp() - pruned.log_lik.exp()
    assert (gain <= pruned.omitted + 1e-9).all()
    assert (gain >= -1e-9).all()
