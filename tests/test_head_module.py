"""The fixed-step module: equal to the solver, compiled, exported, and in onnxruntime."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
import torch
from torch import nn

from acnml.head.ascent import softplus
from acnml.head.module import (
    EigenKernel,
    FullKernel,
    HeadModule,
    KernelModule,
    KroneckerKernel,
    VarianceKernel,
)
from acnml.head.solve import Precision, solve_head
from cases import normal, spd
from heads import covariance as class_covariance

FEATURES, BATCH = 6, 5
KINDS = ["kronecker", "eigen", "diagonal", "full"]
each_kind = pytest.mark.parametrize("kind", KINDS)
requires_onnx = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("onnx", "onnxscript", "onnxruntime")),
    reason="needs onnx, onnxscript and onnxruntime",
)


def kernel(kind: str, classes: int, bias: bool = True) -> KernelModule:
    size = FEATURES + bias
    inputs = torch.linalg.inv(spd(size, seed=1)).contiguous() / size
    outputs = class_covariance(classes, 0.5)
    var = normal(classes, size, seed=2).exp() / size
    if kind == "kronecker":
        return KroneckerKernel(inputs, outputs)
    if kind == "eigen":
        return EigenKernel(torch.linalg.eigh(inputs)[1], torch.linalg.eigh(outputs)[1], var)
    if kind == "diagonal":
        return VarianceKernel(var)
    full = torch.kron(outputs, inputs) + torch.diag(var.flatten())
    return FullKernel(full.reshape(classes, size, classes, size))


def data(classes: int, batch: int = BATCH):
    return normal(batch, FEATURES, seed=5), 3 * normal(batch, classes, seed=6)


@each_kind
@pytest.mark.parametrize("bias", [False, True])
def test_kernels_are_covariances_of_the_logits(kind, bias):
    module, (a, _) = kernel(kind, 4, bias), data(4)
    inputs = torch.cat([a, torch.ones_like(a[:, :1])], 1) if bias else a
    if kind == "kronecker":
        cov = torch.kron(module.output_cov, module.input_cov)
    elif kind == "eigen":
        basis = torch.kron(module.output_basis, module.input_basis)
        cov = basis @ torch.diag(module.var.flatten()) @ basis.T
    elif kind == "diagonal":
        cov = torch.diag(module.var.flatten())
    else:
        cov = module.cov.reshape(inputs.shape[1] * 4, -1)
    jacobians = [torch.kron(torch.eye(4).double(), one[None]) for one in inputs]
    expected = torch.stack([j @ cov @ j.T for j in jacobians])
    torch.testing.assert_close(module(a).dense(), expected, rtol=1e-10, atol=1e-10)


@each_kind
@pytest.mark.parametrize("classes", [2, 10, 30])
@pytest.mark.parametrize("alpha", [0.01, 1.0, 10.0])
def test_it_agrees_with_the_solver(kind, classes, alpha):
    (a, z), V = data(classes), kernel(kind, classes)
    exact = solve_head(z, V(a).scaled(alpha), Precision(negligible=0.0)).log_lik
    module = HeadModule(V, alpha, steps=20)
    log_probs, regret = module(a, z)
    assert module.residual(a, z).max() <= 1e-6
    torch.testing.assert_close(log_probs, exact.log_softmax(-1), rtol=0, atol=1e-6)
    torch.testing.assert_close(regret, exact.logsumexp(-1), rtol=0, atol=1e-6)


@each_kind
@pytest.mark.parametrize("alpha", [0.01, 1.0])
def test_the_default_in_single_precision(kind, alpha):
    (a, z), V = data(10), kernel(kind, 10)
    exact = solve_head(z, V(a).scaled(alpha)).log_lik.softmax(-1)
    log_probs, _ = HeadModule(V, alpha).float()(a.float(), z.float())
    assert (log_probs.double().exp() - exact).abs().max() <= 1e-4


@each_kind
def test_more_steps_leave_less(kind):
    (a, z), V = data(10), kernel(kind, 10)
    residuals = [HeadModule(V, 3.0, steps=n).residual(a, z).max() for n in (0, 3, 12)]
    assert residuals[0] > 1e-3 or kind == "diagonal"  # which one settling step solves
    assert residuals[1] <= max(residuals[0], 1e-12)
    assert residuals[2] <= max(1e-3 * residuals[1], 1e-12)


@pytest.mark.parametrize("kind", ["kronecker", "eigen"])
@pytest.mark.parametrize("negligible", [1e-3, 1e-2])
def test_some_of_many_labels_are_enough_where_they_are_for_the_solver(kind, negligible):
    (a, z), V = data(100, batch=12), kernel(kind, 100)
    scale = torch.logspace(-4, 1, 12).double()
    problem = V(a).scaled(scale)
    needed = (solve_head(z, problem, Precision(negligible=negligible)).omitted == 0).sum(-1)
    exact = solve_head(z, problem, Precision(negligible=0.0)).log_lik
    module = HeadModule(V, steps=20, labels=30, negligible=negligible)
    assert module.residual(a, z, scale).shape == (12, 30)
    log_probs, regret = module(a, z, scale)
    enough = needed <= 30
    assert 3 <= enough.sum() <= 9
    assert torch.equal(~log_probs.isnan(), enough[:, None].expand_as(log_probs))
    assert torch.equal(~regret.isnan(), enough)
    off = (log_probs.exp() - exact.softmax(-1))[enough].abs()
    assert off.max() <= negligible
    lost = (exact.logsumexp(-1).exp() - regret.exp())[enough]
    assert lost.max() <= negligible
    assert lost.min() >= -1e-6
    every = HeadModule(V, steps=20, labels=100)(a, z, scale)[0]
    assert (every.exp() - exact.softmax(-1)).abs().max() <= 1e-6


def test_extremes_stay_within_bounds_or_are_nan():
    """What the fixed number of steps leaves unsolved is NaN, not the sure answer of the mean."""
    z, a = torch.tensor([[1e4, 0.0, -1e4], [0.0, 0.0, 0.0]]), torch.ones(2, 2)
    for scale in (0.0, 1e-12, 1e8):
        module = HeadModule(VarianceKernel(torch.full((3, 2), scale)))
        log_probs, regret = module(a, z)
        solved = (module.residual(a, z) <= 0.1).all(-1)
        assert solved[1]
        assert solved[0] == (scale < 1)
        assert log_probs[solved].isfinite().all()
        assert log_probs[~solved].isnan().all()
        assert regret[~solved].isnan().all()
        assert (regret[solved] >= 0).all()
        assert (regret[solved] <= np.log(3) + 1e-5).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_softplus_is_exact_up_to_rounding(dtype):
    x = torch.linspace(-10, 100, 3001, dtype=dtype)
    rounding = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(
        softplus(x), torch.logaddexp(x, torch.zeros_like(x)), rtol=rounding, atol=0
    )
    # Far to the left it is exp(x), so that no runtime rounds it to 0.
    x = torch.linspace(-80, -10.01, 300, dtype=dtype)
    assert torch.equal(softplus(x), x.exp())


@pytest.mark.parametrize("wrong", [{"alpha": -1.0}, {"steps": -1}, {"settling": -1}, {"labels": 0}])
def test_settings_are_checked(wrong):
    with pytest.raises(ValueError, match=r"must be ≥ 0"):
        HeadModule(VarianceKernel(torch.ones(3, 2)), **wrong)


def test_buffers_move_with_it():
    module = HeadModule(kernel("eigen", 4)).to("meta")
    assert {buffer.device.type for buffer in module.buffers()} == {"meta"}
    assert not list(module.parameters())


@each_kind
def test_it_compiles_without_graph_breaks(kind):
    (a, z), module = data(4), HeadModule(kernel(kind, 4), steps=2)
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    for actual, expected in zip(compiled(a, z), module(a, z), strict=True):
        torch.testing.assert_close(actual, expected)


@each_kind
def test_it_exports_for_any_batch_size(kind):
    (a, z), module = data(4), HeadModule(kernel(kind, 4), steps=2)
    batch = torch.export.Dim("batch")
    program = torch.export.export(module, (a, z), dynamic_shapes=({0: batch}, {0: batch}))
    for size in (2, BATCH, 11):
        a, z = data(4, size)
        for actual, expected in zip(program.module()(a, z), module(a, z), strict=True):
            torch.testing.assert_close(actual, expected)


@requires_onnx
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "classes", "labels", "dtype"),
    [
        ("eigen", 10, None, torch.float32),
        ("full", 10, None, torch.float32),
        ("eigen", 100, 8, torch.float32),
        ("kronecker", 10, None, torch.float64),
        ("full", 10, None, torch.float64),
        ("eigen", 100, 8, torch.float64),
    ],
)
def test_onnxruntime_agrees(kind, classes, labels, dtype, tmp_path):
    import onnxruntime

    alpha = 1.0 if labels is None else 1e-4  # so that eight labels are enough for some inputs
    module = HeadModule(kernel(kind, classes), alpha, labels=labels, steps=3).to(dtype)
    a, z = (t.to(dtype) for t in data(classes))
    batch = torch.export.Dim("batch")
    shapes = ({0: batch}, {0: batch})
    program = torch.onnx.export(module, (a, z), dynamo=True, dynamic_shapes=shapes, verbose=False)
    assert program is not None
    program.save(tmp_path / "head.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "head.onnx")
    names = [one.name for one in session.get_inputs()]
    tolerance = 1e-5 if dtype == torch.float32 else 1e-10
    for size in (1, BATCH, 9):
        a, z = (t.to(dtype) for t in data(classes, size))
        found = session.run(None, dict(zip(names, (a.numpy(), z.numpy()), strict=True)))
        for actual, expected in zip(found, module(a, z), strict=True):
            np.testing.assert_allclose(actual, expected.numpy(), atol=tolerance)
    assert expected.isfinite().any()


def test_network_and_head_in_one_module():
    """Together with a trunk: features and logits come from one pass."""

    class Calibrated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk, self.last = nn.Linear(3, FEATURES), nn.Linear(FEATURES, 4)
            self.head = HeadModule(kernel("kronecker", 4))

        def forward(self, x):
            features = torch.tanh(self.trunk(x))
            return self.head(features, self.last(features))

    log_probs, regret = Calibrated().double()(normal(7, 3))
    torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones(7).double())
    assert regret.shape == (7,)
