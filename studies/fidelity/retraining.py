"""CNML by retraining to convergence, on the training data and one labelled query.

For every row, a query x with a label y, minimise

    f(θ) = -Σ_n log p_θ(y_n|x_n) - log p_θ(y|x) + ½ τ ‖θ‖²

from the trained weights θ̂. The curvature H of the training objective at θ̂ is known (it is the
generalised Gauss-Newton matrix), so f is minimised in the coordinates φ with θ = θ̂ + Lφ and
LLᵀ = H⁻¹, where it is nearly a paraboloid of revolution but for the query. L-BFGS then needs some
ten steps. All rows of a block run together; each has its own step sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, jacrev, vmap

from acnml._util.params import Params, flatten, unflatten

# Pairs of steps and changes of the gradient that L-BFGS remembers.
MEMORY = 12

# A step must lower the objective by this share of what its slope promises.
SHARE_OF_SLOPE = 1e-4
HALVINGS = 12

# (points of some rows (R, P), which rows (R,)) -> values (R,) and gradients (R, P).
Objective: TypeAlias = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class Minimum(NamedTuple):
    """Where rows end."""

    point: Tensor  # (R, P)
    slope: Tensor  # (R,) the norm of the gradient


class Retrained(NamedTuple):
    """CNML of some queries."""

    log_lik: Tensor  # (B, K)
    residual: Tensor  # (B, K) √(gᵀH⁻¹g) of the gradient g that is left


def parameters(network: nn.Module) -> Params:
    """Return all parameters."""
    return {name: tensor.detach() for name, tensor in network.named_parameters()}


def gauss_newton(network: nn.Module, x: Tensor) -> Tensor:
    """Return Σ_n Jᵀ(diag(p) - ppᵀ)J over all parameters (P, P), the curvature of the loss."""
    theta = parameters(network)

    def logits(params: Params, one: Tensor) -> Tensor:
        out: Tensor = functional_call(network, params, one.unsqueeze(0))
        return out[0]

    total = None
    for part in x.split(100):
        named = vmap(jacrev(logits), in_dims=(None, 0))(theta, part)
        jacobian = torch.cat([named[name].flatten(2) for name in theta], dim=2)  # (n, K, P)
        p = network(part).detach().softmax(-1).unsqueeze(-1)
        centred = p.sqrt() * (jacobian - (p * jacobian).sum(1, keepdim=True))
        rows = centred.flatten(0, 1)
        total = rows.T @ rows if total is None else total + rows.T @ rows
    assert total is not None
    return total


def objective(
    network: nn.Module, x: Tensor, labels: Tensor, precision: float
) -> Callable[[Params, Tensor, Tensor], Tensor]:
    """Return f as a function of the parameters, a query and its label."""

    def value(params: Params, query: Tensor, label: Tensor) -> Tensor:
        inputs = torch.cat([x, query.unsqueeze(0)])
        targets = torch.cat([labels, label.unsqueeze(0)])
        logits = functional_call(network, params, inputs)
        loss = nn.functional.cross_entropy(logits, targets, reduction="sum")
        return loss + precision / 2 * torch.stack([(t**2).sum() for t in params.values()]).sum()

    return value


def train(network: nn.Module, x: Tensor, labels: Tensor, precision: float, steps: int) -> None:
    """Train to a minimum of the training objective, by L-BFGS on all data at once."""
    own = list(network.parameters())
    optimizer = torch.optim.LBFGS(
        own, max_iter=steps, tolerance_grad=1e-9, tolerance_change=0, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(network(x), labels, reduction="sum")
        loss = loss + precision / 2 * torch.stack([(p**2).sum() for p in own]).sum()
        loss.backward()
        return loss

    optimizer.step(closure)


def root_of_inverse(curvature: Tensor) -> Tensor:
    """Return L with LLᵀ = H⁻¹."""
    factor = torch.linalg.cholesky(curvature)
    eye = torch.eye(len(curvature), dtype=curvature.dtype)
    return torch.linalg.solve_triangular(factor.T, eye, upper=True)


def retrained(
    network: nn.Module,
    x: Tensor,
    labels: Tensor,
    queries: Tensor,
    precision: float,
    root: Tensor,
    steps: int,
) -> Retrained:
    """Retrain for every label of every query.

    Args:
        network: with weights θ̂ that minimise the training objective.
        x: the training data.
        labels: their labels.
        queries: (B, ...).
        precision: τ.
        root: L with LLᵀ = H⁻¹.
        steps: of L-BFGS, at most.
    """
    theta = parameters(network)
    classes = network(queries[:1]).shape[1]
    rows = queries.repeat_interleave(classes, dim=0)
    targets = torch.arange(classes).repeat(len(queries))
    mean = flatten(theta, theta)
    gradients = vmap(grad_and_value(objective(network, x, labels, precision)))

    def evaluate(phi: Tensor, which: Tensor) -> tuple[Tensor, Tensor]:
        at = unflatten(mean + phi @ root.T, theta)
        grads, values = gradients(at, rows[which], targets[which])
        return values, flatten(grads, theta) @ root

    found = minimise(evaluate, torch.zeros(len(rows), len(mean), dtype=mean.dtype), steps)

    def log_lik(params: Params, query: Tensor, label: Tensor) -> Tensor:
        logits = functional_call(network, params, query.unsqueeze(0))
        return -nn.functional.cross_entropy(logits, label.unsqueeze(0))

    ends = unflatten(mean + found.point @ root.T, theta)
    values = vmap(log_lik)(ends, rows, targets)
    return Retrained(values.view(-1, classes), found.slope.view(-1, classes))


@torch.no_grad()
def minimise(evaluate: Objective, start: Tensor, steps: int, tolerance: float = 1e-5) -> Minimum:
    """Minimise all rows (R, P) by L-BFGS, each with its own step sizes.

    Rows that are done are not evaluated again. A row that no step lowers any further, which
    rounding may prevent, stays where it is.
    """
    found = Minimum(start.clone(), start.new_full((len(start),), torch.inf))
    left, point = torch.arange(len(start)), start
    value, slope = evaluate(point, left)
    history: list[tuple[Tensor, Tensor]] = []
    lowered = torch.ones_like(value, dtype=torch.bool)
    for _ in range(steps):
        found.point[left], found.slope[left] = point, slope.norm(dim=1)
        going = lowered & (found.slope[left] > tolerance)
        if not bool(going.any()):
            break
        left, point, value, slope = (tensor[going] for tensor in (left, point, value, slope))
        history = [(step[going], change[going]) for step, change in history]
        direction = -_times_inverse(history, slope)
        uphill = (direction * slope).sum(1, keepdim=True) >= 0
        direction = torch.where(uphill, -slope, direction)
        new = _search(evaluate, left, point, direction, value, slope)
        lowered = new.size > 0
        history = [*history, (new.point - point, new.slope - slope)][-MEMORY:]
        point, value, slope = new.point, new.value, new.slope
    return found


class _Searched(NamedTuple):
    """The end of a line search; rows for which it failed have a size of 0 and did not move."""

    size: Tensor  # (R,)
    point: Tensor
    value: Tensor
    slope: Tensor


def _search(
    evaluate: Objective, rows: Tensor, point: Tensor, along: Tensor, value: Tensor, slope: Tensor
) -> _Searched:
    """Halve the step of every row until its value falls by a share of what the slope promises."""
    end = _Searched(torch.zeros_like(value), point.clone(), value.clone(), slope.clone())
    promised = (along * slope).sum(1)
    rounding = 1e-13 * (1 + value.abs())  # close to the minimum, values differ by no more
    waiting, size = torch.arange(len(rows)), 1.0
    for _ in range(HALVINGS):
        tried = point[waiting] + size * along[waiting]
        new_value, new_slope = evaluate(tried, rows[waiting])
        limit = value + SHARE_OF_SLOPE * size * promised + rounding
        lower = new_value <= limit[waiting]
        which = waiting[lower]
        end.size[which], end.point[which] = size, tried[lower]
        end.value[which], end.slope[which] = new_value[lower], new_slope[lower]
        waiting, size = waiting[~lower], size / 2
        if not len(waiting):
            break
    return end


def _times_inverse(history: list[tuple[Tensor, Tensor]], slope: Tensor) -> Tensor:
    """Apply the approximate inverse Hessian of L-BFGS, which is the identity at first."""
    result, known = slope, []
    for step, change in reversed(history):
        product = (step * change).sum(1)
        usable = product > 1e-12 * (change**2).sum(1)
        weight = torch.where(usable, 1 / torch.where(usable, product, 1.0), 0.0)
        share = weight * (step * result).sum(1)
        result = result - share[:, None] * change
        known.append((step, change, weight, share))
    for step, change, weight, share in reversed(known):
        back = weight * (change * result).sum(1)
        result = result + (share - back)[:, None] * step
    return result
