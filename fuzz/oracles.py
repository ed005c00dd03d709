"""Dense mathematics in double precision, to compare answers with."""

from __future__ import annotations

import copy
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import functional_call

from acnml._util import batches
from acnml._util.params import Params, flatten, unflatten
from acnml.posteriors import Posterior
from fuzz.networks import Network


def in_double(net: Network) -> tuple[torch.nn.Module, Any]:
    """Return a copy of a network and its inputs in double precision."""
    wide = batches.map_inputs(net.inputs, lambda t: t.double() if t.is_floating_point() else t)
    return copy.deepcopy(net.model).double(), wide


def logits_of(model: torch.nn.Module, params: Params, one: Any) -> Tensor:
    """Return the logits (K,) of one input at other parameters."""
    args, kwargs = batches.as_arguments(one)
    return functional_call(model, params, args, kwargs)[0]


def linearised(model: torch.nn.Module, mean: Params, one: Any) -> tuple[Tensor, Tensor]:
    """Return logits (K,) and their Jacobian (K, P) at the mean."""
    jacobian = torch.func.jacrev(lambda params: logits_of(model, params, one))(mean)
    return logits_of(model, mean, one).detach(), flatten(jacobian, mean).detach()


def covariance_times(scaled: Posterior, jacobian: Tensor) -> Tensor:
    """Return Σ Jᵀ (P, K)."""
    moved = scaled.cov_mv(unflatten(jacobian, scaled.mean))
    return flatten(moved, scaled.mean).mT


def is_linear(model: torch.nn.Module, scaled: Posterior, one: Any, label: int) -> bool:
    """Return whether the logits are linear in the covered parameters along a random direction."""
    generator = torch.Generator().manual_seed(label)
    step = {
        n: torch.randn(t.shape, generator=generator, dtype=t.dtype) for n, t in scaled.mean.items()
    }
    at = [
        logits_of(model, {n: t + k * step[n] for n, t in scaled.mean.items()}, one)
        for k in (0, 1, 2)
    ]
    bend = (at[2] - 2 * at[1] + at[0]).abs().max()
    return bool(bend <= 1e-9 * (1 + at[2].abs().max()))


class Iterated(NamedTuple):
    """Where the paper's iteration ends, for one row."""

    log_lik: float  # log p_θ(y|x)
    residual: float
    largest: float  # residual of all steps, by which rounding may be amplified


def iterated(
    model: torch.nn.Module, scaled: Posterior, one: Any, label: int, steps: int, size: float
) -> Iterated:
    """Take the paper's steps for one row."""

    def log_lik(params: Params) -> Tensor:
        return logits_of(model, params, one).log_softmax(-1)[label]

    gradient = torch.func.grad_and_value(log_lik)
    v = {n: torch.zeros_like(t) for n, t in scaled.mean.items()}
    theta, largest = dict(scaled.mean), 0.0
    grad, value = gradient(theta)
    rest = grad
    for _ in range(steps):
        v = {n: v[n] + size * rest[n] for n in v}
        moved = scaled.cov_mv(v)
        theta = {n: scaled.mean[n] + moved[n] for n in v}
        grad, value = gradient(theta)
        rest = {n: grad[n] - v[n] for n in v}
        largest = max(largest, _norm(scaled, rest))
    final = _norm(scaled, rest)
    return Iterated(float(value), final, max(largest, final))


def _norm(scaled: Posterior, vector: Params) -> float:
    moved = scaled.cov_mv(vector)
    squared = float(sum((moved[n] * vector[n]).sum() for n in vector))
    return math.sqrt(max(squared, 0.0)) if math.isfinite(squared) else math.inf


def influence(logits: Tensor, kernel: Tensor) -> Tensor:
    """Return (e_y - p)ᵀV(e_y - p) of every label (K,)."""
    errors = torch.eye(len(logits), dtype=logits.dtype) - logits.softmax(-1)
    return ((errors @ kernel) * errors).sum(-1)


def convex(logits: Tensor, kernel: Tensor, label: int) -> float:
    """Return log p at the solution of z_y = z + V(e_y - softmax z_y), by Newton with halving.

    With z = z₀ + V u the problem is to maximise log p_y(z₀ + V u) - ½ uᵀVu.
    """
    u = torch.zeros_like(logits)

    def objective(u: Tensor) -> Tensor:
        return (logits + kernel @ u).log_softmax(-1)[label] - u @ kernel @ u / 2

    eye = torch.eye(len(logits), dtype=logits.dtype)
    for _ in range(200):
        p = (logits + kernel @ u).softmax(-1)
        slope = eye[label] - p - u
        step = torch.linalg.solve(eye + (torch.diag(p) - torch.outer(p, p)) @ kernel, slope)
        size = 1.0
        while size > 1e-10 and not objective(u + size * step) >= objective(u):
            size /= 2
        u = u + size * step
        if float(slope @ kernel @ slope) < 1e-24:
            break
    return float((logits + kernel @ u).log_softmax(-1)[label])
