"""Independent logits, V = vI or diag(v): all labels of an input share one scalar function.

The solution for a label y is p = softmax(z_y) with z_y = z + v ⊙ (e_y - p). With the logarithm L of
the softmax's denominator,

    log p_k + v_k p_k = z_k - L  for k ≠ y,        log p_y + v_y p_y = z_y + v_y - L.        (1)

Let w_k(L) solve w + log w = z_k - L + log v_k (Lambert's function), so that g_k = w_k / v_k solves
the first equation, and let T(L) = Σ_k g_k(L) be the *mass*. It is the same for all labels. The
probabilities of label y sum to one where T(L) - g_y(L) + p_y = 1. Subtract the two equations (1) of
k = y, once for g_y and once for p_y: with r = 1 - T(L),

    p_y = r / (1 - exp(-v_y T)),      g_y = p_y - r,      z_y = L + log g_y + v_y g_y.

So for every L the label that has it as its solution is known in closed form: its logit and its
probability are points on one curve. With V = vI this curve is the same for all labels. It is
evaluated at a few nodes, each at the price of one sum over all classes, and the labels are read off
it by cubic interpolation: log p_y as a function of z_y, which is increasing with slope
1 / (1 + v p_y (1 + 1 / (v dp/dL))) and close to linear. Labels keep their order.

Where L lies. For no label at all, r = 0 and L = L₀ with T(L₀) = 1. There Σ_k g_k exp(v g_k) is
exp(lse(z) - L₀), and g is flatter than softmax(z), so lse(z) - v max softmax(z) ≤ L₀ ≤ lse(z). For
the likeliest label L ≤ lse(z) + max(0.4, log v): otherwise T ≤ exp(lse(z) - L) would be too small.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

# Nodes at which T is evaluated first, evenly spaced over the interval above, to find L₀.
FIRST_NODES = 16

# Nodes of the curve: as many as keep nodes times classes below the first number, within the others.
CELLS, LEAST_NODES, MOST_NODES = 8192, 48, 128

# Nodes gather where p is small: their distances from L₀ grow with this power.
GRADING = 3.0

# Newton steps for w. The start is 2 % off, and two steps give all digits of single precision.
LAMBERT_STEPS = {torch.float32: 2, torch.float64: 3}

# w is negligible below this exponent, but must not be 0.
LEAST_EXPONENT = -80.0

# A smaller v counts as this one; labels gain no more than it.
LEAST_VARIANCE = 1e-12

# Where 1 - T is at most this many units of rounding, a node says nothing about its label.
UNCERTAIN = 64

# Numbers in a block of inputs: its tensors should stay in the processor's cache.
BLOCK = 2**17

# Newton steps of `solve_diagonal` at most; they approach the solution from one side.
DIAGONAL_STEPS = 100


class _Curve(NamedTuple):
    """The labels that have their solutions at nodes L, in ascending order, (B, n)."""

    logit: Tensor  # z; -inf where T ≥ 1, left of L₀
    log_prob: Tensor
    slope: Tensor  # d log p / dz
    limit: Tensor  # (B, 1) of log p - z for unlikely labels: v - L₀


def solve_isotropic(logits: Tensor, var: Tensor, nodes: int | None = None) -> Tensor:
    """Return log p_θ̂_y(y|x) (B, K) of all labels for logits z (B, K) and V = vI with v (B,).

    An input's answer does not depend on the other inputs, and the number of operations depends on
    shapes alone. In single precision, answers are accurate to about 1e-5 for v up to 20 and to 3e-3
    for any v. The error falls with the fourth power of the number of nodes.
    """
    z = logits - logits.amax(-1, keepdim=True)
    v = var.unsqueeze(-1).clamp(min=LEAST_VARIANCE)
    n = nodes or max(LEAST_NODES, min(MOST_NODES, CELLS // z.shape[1]))
    size = max(1, BLOCK // (n * z.shape[1]))
    if torch.compiler.is_exporting() or len(z) <= size:  # exporting, the batch must stay unread
        return _read(_curve(z, v, n), z)
    parts = zip(z.split(size), v.split(size), strict=True)
    return torch.cat([_read(_curve(own, its, n), own) for own, its in parts])


def solve_diagonal(logits: Tensor, var: Tensor) -> Tensor:
    """Return log p_θ̂_y(y|x) (B, K) for V = diag(v) with v (B, K), at a cost of K² an input.

    T(L) - g_y(L) + p_y(L) - 1 is convex and falls with L. Newton's steps from any point lead to
    its left side and stay there. In double precision, answers have 1e-9 or all digits.
    """
    z = logits - logits.amax(-1, keepdim=True)
    v = var.clamp(min=LEAST_VARIANCE)
    L = (z.logsumexp(-1, keepdim=True) - v.amax(-1, keepdim=True)).expand_as(z)
    for _ in range(DIAGONAL_STEPS):
        mass, decline = _mass(z, v, L)
        own, other = (lambert(z + v.log() + shift - L) for shift in (v, 0))
        excess = mass + (own - other) / v - 1
        step = excess / (decline + (own / (1 + own) - other / (1 + other)) / v)
        L = L + step
        if bool((step.abs() <= 4 * torch.finfo(z.dtype).eps * (1 + L.abs())).all()):
            break
    return (z + v - L) - lambert(z + v.log() + v - L)


def lambert(x: Tensor) -> Tensor:
    """Solve w + log w = x by Newton steps (Iacono & Boyd 2017)."""
    x = x.clamp(min=LEAST_EXPONENT)
    start = functional.softplus(x)
    w = start * (1 - start.log1p() / (2 + start))
    for _ in range(LAMBERT_STEPS[x.dtype]):
        w = w * (1 + x - w.log()) / (1 + w)
    return w


def _mass(z: Tensor, v: Tensor, L: Tensor) -> tuple[Tensor, Tensor]:
    """Return T and -dT/dL (B, n) at L (B, n), for v (B, 1) or (B, K)."""
    w = lambert((z + v.log()).unsqueeze(1) - L.unsqueeze(2))
    share, change = w, w / (1 + w)
    if v.shape[1] > 1:
        v = v.unsqueeze(1)
        return (share / v).sum(-1), (change / v).sum(-1)
    return share.sum(-1) / v, change.sum(-1) / v


def _curve(z: Tensor, v: Tensor, nodes: int) -> _Curve:
    """Evaluate the curve of inputs with logits z (B, K), at most 0, and v (B, 1)."""
    top = z.logsumexp(-1, keepdim=True)
    low, high = top - v * (-top).exp(), top + v.log().clamp(min=0.4)
    origin = _origin(z, v, low, high)
    grading = torch.linspace(0, 1, nodes, dtype=z.dtype, device=z.device) ** GRADING
    L = origin + (high - origin) * grading
    mass, decline = _mass(z, v, L)
    origin = origin - _newton(mass[:, :1], decline[:, :1], v)  # the first node
    least = UNCERTAIN * torch.finfo(z.dtype).eps
    rest, most = (1 - mass).clamp(min=least), -torch.expm1(-v * mass)
    prob = rest / most
    growth = decline * (1 + v * (prob - rest)) / most  # dp/dL
    log_prob = prob.log()
    logit = (log_prob - v * (1 - prob) + L).where(rest > least, -torch.inf)
    return _Curve(logit, log_prob, 1 / (1 + v * prob + prob / growth), v - origin)


def _origin(z: Tensor, v: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Return L₀ (B, 1), where T = 1, nearly.

    It is the root of ψ = log T + v (T - 1), which is linear in L for a single class: inverse
    interpolation of ψ between two nodes, and a Newton step.
    """
    grid = torch.linspace(0, 1, FIRST_NODES, dtype=z.dtype, device=z.device)
    L, spacing = low + (high - low) * grid, (high - low) / (FIRST_NODES - 1)
    mass, decline = _mass(z, v, L)
    left = ((mass >= 1).sum(-1, keepdim=True) - 1).clamp(0, FIRST_NODES - 2)
    both = torch.cat([left, left + 1], dim=1)
    value, slope = (each.gather(1, both) for each in _psi(mass, decline, v))
    width = value[:, 1:] - value[:, :1]
    steep = (width / slope).minimum(3 * spacing)  # of a monotone cubic
    L = _hermite(-value[:, :1] / width, L.gather(1, left), spacing, steep[:, :1], steep[:, 1:])
    return L - _newton(*_mass(z, v, L), v)


def _psi(mass: Tensor, decline: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return log T + v (T - 1) and its derivative by L."""
    return mass.log() + v * (mass - 1), -decline * (1 / mass + v)


def _newton(mass: Tensor, decline: Tensor, v: Tensor) -> Tensor:
    """Return Newton's step towards L₀, to be subtracted."""
    value, slope = _psi(mass, decline, v)
    return value / slope


def _read(curve: _Curve, z: Tensor) -> Tensor:
    """Return log p (B, K) of the labels with logits z (B, K)."""
    above = _nodes_below(z, curve.logit)
    last = curve.logit.shape[1] - 1
    left, right = (above - 1).clamp(min=0), above.clamp(max=last)
    z0, l0, m0 = (values.gather(1, left) for values in curve[:3])
    z1, l1, m1 = (values.gather(1, right) for values in curve[:3])
    width, rise = z1 - z0, l1 - l0
    steepest = 3 * rise  # of a monotone cubic
    t = (z - z0) / width.clamp(min=torch.finfo(z.dtype).tiny)
    inside = _hermite(t, l0, rise, (width * m0).minimum(steepest), (width * m1).minimum(steepest))
    # Left of all nodes log p - z differs from its limit in proportion to p.
    offset = (l1 - z1 - curve.limit) * (z - z1).clamp(max=0.0).exp()
    below = z + curve.limit + offset.where(z1.isfinite(), 0.0)
    beyond = (l0 + m0 * (z - z0)).clamp(max=0.0)
    known = (above > 0) & z0.isfinite()
    return below.where(~known, beyond.where(above > last, inside))


def _nodes_below(z: Tensor, nodes: Tensor) -> Tensor:
    """Count the nodes (B, n), in ascending order, that are less than z (B, K)."""
    if torch.compiler.is_exporting():  # ONNX has no binary search
        return (z.unsqueeze(2) > nodes.unsqueeze(1)).sum(-1)
    return torch.searchsorted(nodes, z)


def _hermite(t: Tensor, start: Tensor, rise: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Return a cubic on [0, 1] at t, given its start, its rise, and its slopes at both ends."""
    bend, twist = 3 * rise - 2 * left - right, left + right - 2 * rise
    return start + t * (left + t * (bend + t * twist))
