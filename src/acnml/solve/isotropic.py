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
it by interpolation: log p_y as a function of z_y, which is increasing and close to linear. Its
first two derivatives at the nodes follow from those of T, so the interpolation has fifth order.

The number of operations depends on shapes alone, and there is no branch on values: the same code
runs eagerly, compiled, and exported.

Where L lies. For no label at all, r = 0 and L = L₀ with T(L₀) = 1. There Σ_k g_k exp(v g_k) is
exp(lse(z) - L₀), and g is flatter than softmax(z), so lse(z) - v max softmax(z) ≤ L₀ ≤ lse(z). For
the likeliest label L ≤ lse(z) + max(0.4, log v): otherwise T ≤ exp(lse(z) - L) would be too small.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from acnml._algebra.kernels import lambert

# Nodes at which T is evaluated first, evenly spaced over the interval above, to find L₀.
FIRST_NODES = 16

# Nodes of the curve: as many as keep nodes times classes below the first number, within the others.
CELLS, LEAST_NODES, MOST_NODES = 4096, 48, 96

# Nodes gather where p is small: their distances from L₀ grow with this power.
GRADING = 3.0

# A smaller v counts as this one; labels gain no more than it.
LEAST_VARIANCE = 1e-12

# Where 1 - T is at most this many units of rounding, a node says nothing about its label.
UNCERTAIN = 64

# Numbers in a block of inputs, and in a part of it whose tensors should stay in the processor's
# cache.
BLOCK, PART = 2**19, 2**15

# Newton steps of `solve_diagonal` at most; they approach the solution from one side.
DIAGONAL_STEPS = 100

# Newton steps that bring answers of the curve to double precision.
POLISH = 8


class _Curve(NamedTuple):
    """The labels that have their solutions at nodes L, in ascending order, (B, n)."""

    logit: Tensor  # z; -inf where T ≥ 1, left of L₀
    values: Tensor  # (B, n, 4): z, log p, d log p / dz, d² log p / dz²
    limit: Tensor  # (B, 1) of log p - z for unlikely labels: v - L₀


class _Mass(NamedTuple):
    """T(L) and its derivatives (B, n)."""

    value: Tensor
    decline: Tensor  # -dT/dL
    bend: Tensor  # d²T/dL²


def solve_isotropic(logits: Tensor, var: Tensor) -> Tensor:
    """Return log p_θ̂_y(y|x) (B, K) of all labels for logits z (B, K) and V = vI with v (B,).

    An input's answer does not depend on the other inputs, and the number of operations depends on
    shapes alone. Answers are accurate to about 1e-5 for v up to 20 and to 4e-3 for any v.
    """
    z = logits - logits.amax(-1, keepdim=True)
    v = var.unsqueeze(-1).clamp(min=LEAST_VARIANCE)
    n = max(LEAST_NODES, min(MOST_NODES, CELLS // z.shape[1]))
    size = max(1, BLOCK // (n * z.shape[1]))
    if torch.compiler.is_compiling() or len(z) <= size:
        return _read(_curve(z, v, n), z)
    parts = zip(z.split(size), v.split(size), strict=True)
    return torch.cat([_read(_curve(own, its, n), own) for own, its in parts])


def solve_exactly(logits: Tensor, var: Tensor, labels: Tensor | None = None) -> Tensor:
    """Return what `solve_isotropic` approximates, to 1e-9 in double precision, at a cost of K².

    Args:
        logits: z (B, K), in double precision.
        var: v (B,).
        labels: indices (n,) of the labels to solve for; by default all, as (B, K).
    """
    start = solve_isotropic(logits, var)
    z = logits - logits.amax(-1, keepdim=True)
    v = var.unsqueeze(-1).clamp(min=LEAST_VARIANCE)
    chosen = torch.arange(z.shape[1]) if labels is None else labels
    own, found = z[:, chosen], start[:, chosen]
    L = own + v * (1 - found.exp()) - found
    for _ in range(POLISH):
        L = L + _step_of_labels(z, v, own, v, L)
    return (own + v - L) - lambert(own + v.log() + v - L)


def solve_diagonal(logits: Tensor, var: Tensor) -> Tensor:
    """Return log p_θ̂_y(y|x) (B, K) for V = diag(v) with v (B, K), at a cost of K² an input.

    T(L) - g_y(L) + p_y(L) - 1 is convex and falls with L. Newton's steps from any point lead to
    its left side and stay there. In double precision, answers have 1e-9 or all digits.
    """
    z = logits - logits.amax(-1, keepdim=True)
    v = var.clamp(min=LEAST_VARIANCE)
    L = (z.logsumexp(-1, keepdim=True) - v.amax(-1, keepdim=True)).expand_as(z)
    for _ in range(DIAGONAL_STEPS):
        step = _step_of_labels(z, v, z, v, L)
        L = L + step
        if bool((step.abs() <= 4 * torch.finfo(z.dtype).eps * (1 + L.abs())).all()):
            break
    return (z + v - L) - lambert(z + v.log() + v - L)


def _step_of_labels(z: Tensor, v: Tensor, own_z: Tensor, own_v: Tensor, L: Tensor) -> Tensor:
    """Return Newton's step (B, n) of labels with logits (B, n), each with an L of its own."""
    mass, decline, _ = _mass(z, v, L)
    own, other = (lambert(own_z + own_v.log() + shift - L) for shift in (own_v, 0))
    excess = mass + (own - other) / own_v - 1
    return excess / (decline + (own / (1 + own) - other / (1 + other)) / own_v)


def _mass(z: Tensor, v: Tensor, L: Tensor) -> _Mass:
    """Return T and its derivatives (B, n) at L (B, n), for v (B, 1) or (B, K)."""
    size = L.shape[1] if torch.compiler.is_compiling() else max(1, PART // z.numel())
    if L.shape[1] <= size:
        return _mass_at(z, v, L)
    parts = [_mass_at(z, v, part) for part in L.split(size, dim=1)]
    return _Mass(*(torch.cat(own, dim=1) for own in zip(*parts, strict=True)))


def _mass_at(z: Tensor, v: Tensor, L: Tensor) -> _Mass:
    w = lambert((z + v.log()).unsqueeze(1) - L.unsqueeze(2))
    left = (w + 1).reciprocal_()
    change = w * left
    bend = left.square_().mul_(change)
    if v.shape[1] > 1:
        w, change, bend = (part / v.unsqueeze(1) for part in (w, change, bend))
        return _Mass(w.sum(-1), change.sum(-1), bend.sum(-1))
    return _Mass(w.sum(-1) / v, change.sum(-1) / v, bend.sum(-1) / v)


def _curve(z: Tensor, v: Tensor, nodes: int) -> _Curve:
    """Evaluate the curve of inputs with logits z (B, K), at most 0, and v (B, 1)."""
    top = z.logsumexp(-1, keepdim=True)
    low, high = top - v * (-top).exp(), top + v.log().clamp(min=0.4)
    origin = _origin(z, v, low, high)
    grading = torch.linspace(0, 1, nodes, dtype=z.dtype, device=z.device) ** GRADING
    L = origin + (high - origin) * grading
    mass = _mass(z, v, L)
    origin = origin - _newton(mass.value[:, :1], mass.decline[:, :1], v)  # the first node
    least = UNCERTAIN * torch.finfo(z.dtype).eps
    rest, most = (1 - mass.value).clamp(min=least), -torch.expm1(-v * mass.value)
    prob = rest / most
    # Derivatives by L: of p = rest / most, and with log p those of z.
    pull = 1 + v * (prob - rest)
    first = mass.decline * pull / most
    second = (
        v * mass.decline * (2 * first - mass.decline - most * first) - mass.bend * pull
    ) / most
    log_prob = prob.log()
    whole = first * (1 + v * prob) + prob  # p dz/dL
    slope = first / whole
    bend = (1 - slope) * (prob * second - first.square()) - slope * v * second * prob.square()
    logit = (log_prob - v * (1 - prob) + L).where(rest > least, -torch.inf)
    values = torch.stack([logit, log_prob, slope, bend / whole.square()], dim=-1)
    return _Curve(logit, values, v - origin)


def _origin(z: Tensor, v: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Return L₀ (B, 1), where T = 1, nearly.

    It is the root of ψ = log T + v (T - 1), which is linear in L for a single class: inverse
    interpolation of ψ between two nodes, and a Newton step between them.
    """
    grid = torch.linspace(0, 1, FIRST_NODES, dtype=z.dtype, device=z.device)
    L, spacing = low + (high - low) * grid, (high - low) / (FIRST_NODES - 1)
    mass, decline, _ = _mass(z, v, L)
    left = ((mass >= 1).sum(-1, keepdim=True) - 1).clamp(0, FIRST_NODES - 2)
    both = torch.cat([left, left + 1], dim=1)
    value, slope = (each.gather(1, both) for each in _psi(mass, decline, v))
    width = value[:, 1:] - value[:, :1]
    steep = (width / slope).minimum(3 * spacing)  # of a monotone cubic
    start = L.gather(1, left)
    guess = _hermite(-value[:, :1] / width, start, spacing, steep[:, :1], steep[:, 1:])
    mass, decline, _ = _mass(z, v, guess)
    return (guess - _newton(mass, decline, v)).maximum(start).minimum(start + spacing)


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
    z0, l0, m0, c0 = _at(curve.values, left)
    z1, l1, m1, c1 = _at(curve.values, right)
    width = z1 - z0
    t = (z - z0) / width.clamp(min=torch.finfo(z.dtype).tiny)
    half = width.square() / 2
    inside = l0 + _quintic(t, l1 - l0, width * m0, width * m1, half * c0, half * c1)
    # Left of all nodes, log p - z - limit is a function of s = exp(z - z1): 0 at s = 0, and known
    # with its slope at s = 1.
    s, gap = (z - z1).clamp(max=0.0).exp(), l1 - z1 - curve.limit
    offset = s * (gap + (m1 - 1 - gap) * (s - 1))
    below = z + curve.limit + offset.where(z1.isfinite(), 0.0)
    beyond = (l0 + m0 * (z - z0)).clamp(max=0.0)
    known = (above > 0) & z0.isfinite()
    return below.where(~known, beyond.where(above > last, inside))


def _at(values: Tensor, index: Tensor) -> tuple[Tensor, ...]:
    """Return the values (B, n, 4) of nodes by index (B, K), as four tensors (B, K)."""
    return values.gather(1, index.unsqueeze(2).expand(-1, -1, values.shape[2])).unbind(2)


def _nodes_below(z: Tensor, nodes: Tensor) -> Tensor:
    """Count the nodes (B, n), in ascending order, that are less than z (B, K)."""
    if torch.compiler.is_exporting():  # ONNX has no binary search
        return (z.unsqueeze(2) > nodes.unsqueeze(1)).sum(-1)
    return torch.searchsorted(nodes, z)


def _hermite(t: Tensor, start: Tensor, rise: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Return a cubic on [0, 1] at t, given its start, its rise, and its slopes at both ends."""
    bend, twist = 3 * rise - 2 * left - right, left + right - 2 * rise
    return start + t * (left + t * (bend + t * twist))


def _quintic(
    t: Tensor, rise: Tensor, left: Tensor, right: Tensor, left_bend: Tensor, right_bend: Tensor
) -> Tensor:
    """Return a polynomial on [0, 1] at t that begins with 0 and ends with its rise.

    Its slopes at both ends are given, and half its second derivatives there.
    """
    a, b = rise - left - left_bend, right - left - 2 * left_bend
    c = right_bend - left_bend
    bends = (10 * a - 4 * b + c, -15 * a + 7 * b - 2 * c, 6 * a - 3 * b + c)
    return t * (left + t * (left_bend + t * (bends[0] + t * (bends[1] + t * bends[2]))))
