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
probability are points on one curve. With V = vI this curve is the same for all labels, and they are
read off it by interpolation.

Only T costs a sum over all classes. It is evaluated at a few nodes L, with two derivatives. Between
them L is interpolated as a function of

    ψ = log T + v (T - 1),

which falls with L, and is linear in L for a single class. The points of the curve lie at values of
ψ of our choice, from 0, where T = 1, downwards: ψ gives T by Lambert's function, interpolation
gives L, and their derivatives follow. So the curve has many points at no cost in classes. Labels
are then read off it: log p_y as a function of z_y, which is increasing and close to linear. Both
interpolations use two derivatives at each end, and so have fifth order.

The number of operations depends on shapes alone, and there is no branch on values: the same code
runs eagerly, compiled, and exported.

Where L lies. For no label at all, r = 0 and L = L₀ with T(L₀) = 1. There Σ_k g_k exp(v g_k) is
exp(lse(z) - L₀), and g is flatter than softmax(z), so lse(z) - v max softmax(z) ≤ L₀ ≤ lse(z). For
the likeliest label L ≤ lse(z) + max(0.4, log v): otherwise T ≤ exp(lse(z) - L) would be too small.
The bend of T where a class begins to matter has a width of a few units of L. If the interval is
much longer than that, most of these bends are near its upper end, and so are most nodes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from acnml.solve.lambert import lambert

# Nodes at which T is evaluated: as many as keep nodes times classes below the first number, within
# the others.
CELLS, LEAST_NODES, MOST_NODES = 4096, 32, 48

# Nodes are evenly spaced in an interval up to this length, and in a longer one up to this distance
# from its upper end, nearly.
EVEN = 32.0

# Points of the curve. They gather where p is small: their ψ grow with this power.
POINTS, GRADING = 160, 1.5

# Slopes and bends of an interpolation are at most these multiples of its rise. They are, except
# where nodes are too far apart for the bends of T.
STEEPEST, MOST_BENT = 2.0, 0.5

# A smaller v counts as this one; labels gain no more than it.
LEAST_VARIANCE = 1e-12

# Where 1 - T is at most this many units of rounding, a node says nothing about its label.
UNCERTAIN = 64

# Numbers in a block of inputs, and in a part of it whose tensors should stay in the processor's
# cache.
BLOCK, PART = 2**19, 2**15


class _Nodes(NamedTuple):
    """Values of ψ, in descending order, and L as a function of them, (B, n)."""

    psi: Tensor
    values: Tensor  # (B, n, 3): L, dL/dψ, d²L/dψ²


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
    shapes alone. Answers are accurate to 1e-5 for v up to 20, and to a few thousandths for any v.
    """
    z = logits - logits.amax(-1, keepdim=True)
    v = var.unsqueeze(-1).clamp(min=LEAST_VARIANCE)
    n = max(LEAST_NODES, min(MOST_NODES, CELLS // z.shape[1]))
    size = max(1, BLOCK // (n * max(POINTS // n, z.shape[1])))
    if torch.compiler.is_compiling() or len(z) <= size:
        return _read(_curve(_nodes(z, v, n), v), z)
    parts = zip(z.split(size), v.split(size), strict=True)
    return torch.cat([_read(_curve(_nodes(own, its, n), its), own) for own, its in parts])


def _mass(z: Tensor, v: Tensor, L: Tensor) -> _Mass:
    """Return T and its derivatives (B, n) at L (B, n), for z (B, K) and v (B, 1)."""
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
    return _Mass(w.sum(-1) / v, change.sum(-1) / v, bend.sum(-1) / v)


def _nodes(z: Tensor, v: Tensor, count: int) -> _Nodes:
    """Evaluate ψ of inputs with logits z (B, K), at most 0, and v (B, 1) where L can lie."""
    top = z.logsumexp(-1, keepdim=True)
    high = top + v.log().clamp(min=0.4)
    length = high - (top - v * (-top).exp())
    stretch = (length / EVEN).log1p()
    grid = torch.linspace(1, 0, count, dtype=z.dtype, device=z.device)
    L = high - length * torch.expm1(stretch * grid) / torch.expm1(stretch)
    mass, decline, bend = _mass(z, v, L)
    pull = 1 / mass + v
    slope = -1 / (decline * pull)
    curvature = bend * pull - (decline / mass).square()
    psi = mass.log() + v * (mass - 1)
    return _Nodes(psi, torch.stack([L, slope, -curvature * slope**3], dim=-1))


def _curve(nodes: _Nodes, v: Tensor) -> _Curve:
    """Return the curve of inputs whose ψ was evaluated at nodes, for v (B, 1)."""
    grid = torch.linspace(0, 1, POINTS, dtype=v.dtype, device=v.device) ** GRADING
    psi = nodes.psi[:, -1:] * grid
    L, slope, curvature = _between(nodes, psi)
    mass = lambert(psi + v + v.log()) / v
    pull = 1 / mass + v
    decline = -1 / (slope * pull)
    bend = ((decline / mass).square() - curvature / slope**3) / pull
    least = UNCERTAIN * torch.finfo(v.dtype).eps
    rest, most = (1 - mass).clamp(min=least), -torch.expm1(-v * mass)
    prob = rest / most
    # Derivatives by L: of p = rest / most, and with log p those of z.
    pull = 1 + v * (prob - rest)
    first = decline * pull / most
    second = (v * decline * (2 * first - decline - most * first) - bend * pull) / most
    log_prob = prob.log()
    whole = first * (1 + v * prob) + prob  # p dz/dL
    slope = first / whole
    bend = (1 - slope) * (prob * second - first.square()) - slope * v * second * prob.square()
    logit = (log_prob - v * (1 - prob) + L).where(rest > least, -torch.inf)
    values = torch.stack([logit, log_prob, slope, bend / whole.square()], dim=-1)
    return _Curve(logit, values, v - L[:, :1])


def _between(nodes: _Nodes, psi: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return L and its two derivatives by ψ (B, n), for ψ (B, n) between nodes."""
    above = _nodes_below(-psi, -nodes.psi).clamp(1, nodes.psi.shape[1] - 1)
    start, width = nodes.psi.gather(1, above - 1), nodes.psi.diff(dim=1).gather(1, above - 1)
    L, *ends = _at(nodes.values, above - 1)
    its_L, *its_ends = _at(nodes.values, above)
    rise, half = its_L - L, width.square() / 2
    left, right = (width * each[0] for each in (ends, its_ends))
    left_bend, right_bend = (half * each[1] for each in (ends, its_ends))
    steepest, most_bent = STEEPEST * rise, MOST_BENT * rise
    a = _quintic(
        rise,
        left.minimum(steepest),
        right.minimum(steepest),
        left_bend.minimum(most_bent).maximum(-most_bent),
        right_bend.minimum(most_bent).maximum(-most_bent),
    )
    t = (psi - start) / width
    slope = _polynomial(t, [(i + 1) * each for i, each in enumerate(a)])
    bend = _polynomial(t, [(i + 1) * i * each for i, each in enumerate(a)][1:])
    return L + t * _polynomial(t, a), slope / width, bend / width.square()


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
    a = _quintic(l1 - l0, width * m0, width * m1, half * c0, half * c1)
    inside = l0 + t * _polynomial(t, a)
    # Left of all nodes, log p - z - limit is a function of s = exp(z - z1): 0 at s = 0, and known
    # with its slope at s = 1.
    s, gap = (z - z1).clamp(max=0.0).exp(), l1 - z1 - curve.limit
    offset = s * (gap + (m1 - 1 - gap) * (s - 1))
    below = z + curve.limit + offset.where(z1.isfinite(), 0.0)
    beyond = (l0 + m0 * (z - z0)).clamp(max=0.0)
    known = (above > 0) & z0.isfinite()
    return below.where(~known, beyond.where(above > last, inside))


def _at(values: Tensor, index: Tensor) -> tuple[Tensor, ...]:
    """Return the values (B, n, k) of nodes by index (B, m), as k tensors (B, m)."""
    return values.gather(1, index.unsqueeze(2).expand(-1, -1, values.shape[2])).unbind(2)


def _nodes_below(z: Tensor, nodes: Tensor) -> Tensor:
    """Count the nodes (B, n), in ascending order, that are less than z (B, K)."""
    if torch.compiler.is_exporting():  # ONNX has no binary search
        return (z.unsqueeze(2) > nodes.unsqueeze(1)).sum(-1)
    return torch.searchsorted(nodes, z)


def _quintic(
    rise: Tensor, left: Tensor, right: Tensor, left_bend: Tensor, right_bend: Tensor
) -> list[Tensor]:
    """Return a such that a₀t + a₁t² + … + a₄t⁵ ends with its rise at t = 1.

    Its slopes at both ends are given, and half its second derivatives there.
    """
    a, b = rise - left - left_bend, right - left - 2 * left_bend
    c = right_bend - left_bend
    return [left, left_bend, 10 * a - 4 * b + c, -15 * a + 7 * b - 2 * c, 6 * a - 3 * b + c]


def _polynomial(t: Tensor, coefficients: list[Tensor]) -> Tensor:
    """Return the polynomial a₀ + a₁t + a₂t² + …, by its coefficients."""
    value = coefficients[-1]
    for each in reversed(coefficients[:-1]):
        value = torch.addcmul(each, value, t)
    return value
