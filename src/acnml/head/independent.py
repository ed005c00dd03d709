"""Independent logits: all labels of an input share one function of one number.

With V = diag(d) the solution for a label y has p = softmax(z) and z = z₀ + d ⊙ (e_y - p). So, with
the logarithm L of the softmax's denominator,

    log p_k + d_k p_k = z₀_k - L  for k ≠ y,        log p_y + d_y p_y = z₀_y + d_y - L.

Let g_k(L) solve the first equation: g_k = W(d_k exp(z₀_k - L)) / d_k with Lambert's W. The second
one is g_y(L - d_y). L is right where the probabilities sum to one,

    T(L) - g_y(L) + g_y(L - d_y) = 1,        T = Σ_k g_k,

which is convex and decreasing in L: Newton's steps from the left never pass the root. T is the
same for all labels. It is tabulated with two derivatives and interpolated by quintics, so that the
cost per label does not depend on the number of classes.

Accuracy. With w = dg, g' = -g/(1+w), g'' = g/(1+w)³, g''' = g(2w-1)/(1+w)⁵ and
g⁽⁶⁾ = g(120w⁴ - 444w³ + 328w² - 52w + 1)/(1+w)¹¹: neither |g'''| nor |g⁽⁶⁾| is above g''. Between
nodes h apart, a quintic is therefore off by h⁶/46080 · exp(h/2) · max T'' at most, with T'' taken
at the two nodes.
And if probabilities p found in this way sum to 1 + ε, then p / (1 + ε) is the softmax at the point
u = e_y - p: the residual is |ε| / (1 + ε) · √(Σ_k d_k p_k²).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

# Quadratic convergence: from a start that is 2 % off these give all digits of double precision.
LAMBERT_STEPS = 3

# Newton steps for the left end of the table. They approach it from the left and never pass it.
LEFT_STEPS = 6

# Newton steps for a label at most; eight are usually enough.
STEPS = 40

# Nodes of a table at most. A problem that needs more has a residual above the tolerance.
MOST_NODES = 400

# A quintic that matches value, slope and curvature at two nodes is off by h⁶/46080 · max |f⁽⁶⁾|.
QUINTIC = 46080


class _Share(NamedTuple):
    """The solution of log g + d g = a, elementwise."""

    log: Tensor  # log g
    weight: Tensor  # w = d g

    @property
    def value(self) -> Tensor:
        return self.log.exp()


class _Table(NamedTuple):
    """T as quintics between equidistant nodes, with bounds on their errors."""

    left: Tensor  # (B, 1)
    right: Tensor  # (B, 1) no solution lies right of it; nodes may
    spacing: Tensor  # (B, 1)
    pieces: Tensor  # (B, n - 1, 6) coefficients of quintics on [0, 1]
    error: Tensor  # (B, n - 1) largest error of a piece
    spread: Tensor  # (B, n - 1) largest Σ d g² in a piece


class _Sum(NamedTuple):
    """A label's probabilities at some L, summed."""

    excess: Tensor  # ε, as interpolated
    slope: Tensor  # dε/dL
    own: _Share  # of the label itself


class IndependentSolution(NamedTuple):
    """All labels of a block of inputs."""

    log_lik: Tensor  # (B, K)
    residual: Tensor  # (B, K), an upper bound


def solve_independent(logits: Tensor, var: Tensor, tolerance: float) -> IndependentSolution:
    """Solve for all labels of inputs with logits z₀ and variances d, both (B, K).

    An input's answer does not depend on the other inputs.
    """
    logits = logits - logits.amax(-1, keepdim=True)
    most = (1 + var.amax(-1, keepdim=True)).sqrt()  # bounds √(Σ d p²)
    error = tolerance / (4 * most)
    table = _table(logits, var, error)
    L = table.left.expand_as(logits)
    total = _sum(table, logits, var, L)
    for _ in range(STEPS):
        unsolved = ~(total.excess.abs() <= error)
        if not bool(unsolved.any()):
            break
        step = torch.where(unsolved, total.excess / total.slope, 0.0)
        L = (L - step).clamp(table.left, table.right)
        total = _sum(table, logits, var, L)
    return _solution(table, var, L, total)


def _solution(table: _Table, var: Tensor, L: Tensor, total: _Sum) -> IndependentSolution:
    piece, _ = _locate(table, L)
    wrong = total.excess.abs() + table.error.gather(1, piece)
    spread = table.spread.gather(1, piece) + total.own.weight * total.own.value
    residual = wrong / (1 - wrong).clamp(min=0) * spread.sqrt()
    return IndependentSolution(total.own.log - total.excess.log1p(), residual)


def _share(a: Tensor, log_var: Tensor) -> _Share:
    """Solve log g + d g = a by Newton steps for w + log w = a + log d (Iacono & Boyd 2017)."""
    x = (a + log_var).clamp(min=-600)  # w is negligible there, but must not be 0
    v = functional.softplus(x)
    w = v * (1 - v.log1p() / (2 + v))
    for _ in range(LAMBERT_STEPS):
        w = w * (1 + x - w.log()) / (1 + w)
    return _Share(a - w, w)


def _table(logits: Tensor, var: Tensor, error: Tensor) -> _Table:
    """Tabulate T where solutions may lie, so finely that pieces are no more than `error` off."""
    left = _left_end(logits, var)
    # There T ≤ ½ and g_y(L - d_y) ≤ ½, whatever the label.
    middle = (logits + var / 2).amax(-1, keepdim=True)
    right = torch.maximum(logits.logsumexp(-1, keepdim=True), middle) + math.log(2)
    finest = (QUINTIC * error / 2).pow(1 / 6).clamp(max=1.0)
    pieces = ((right - left) / finest).ceil().clamp(1, MOST_NODES - 1)
    spacing = (right - left) / pieces
    # Inputs that need fewer nodes than others have some right of their last one.
    n_nodes = int(pieces.max()) + 1
    nodes = left + spacing * torch.arange(n_nodes, dtype=left.dtype, device=left.device)
    share = _share(logits.unsqueeze(1) - nodes.unsqueeze(2), var.log().unsqueeze(1))
    g, w = share.value, share.weight
    values, slopes = g.sum(-1), -(g / (1 + w)).sum(-1)
    curvatures, spread = (g / (1 + w) ** 3).sum(-1), (g * w).sum(-1)
    steepest = torch.maximum(curvatures[:, 1:], curvatures[:, :-1])
    errors = spacing**6 * (spacing / 2).exp() / QUINTIC * steepest
    quintics = _quintics(values, slopes * spacing, curvatures * spacing**2)
    return _Table(left, right, spacing, quintics, errors, spread[:, :-1])


def _left_end(logits: Tensor, var: Tensor) -> Tensor:
    """Return an L where T(L) ≥ 1, nearly with equality: no label's solution lies left of it."""
    far = logits.logsumexp(-1, keepdim=True) - var.amax(-1, keepdim=True)
    L = torch.maximum(far, (logits - var).amax(-1, keepdim=True))
    for _ in range(LEFT_STEPS):
        share = _share(logits - L, var.log())
        g = share.value
        excess = g.sum(-1, keepdim=True) - 1
        L = L + excess.clamp(min=0) / (g / (1 + share.weight)).sum(-1, keepdim=True)
    return L


def _quintics(f: Tensor, df: Tensor, ddf: Tensor) -> Tensor:
    """Return the coefficients, from the constant up, that match values and derivatives at nodes."""
    rise, d0, d1 = f[:, 1:] - f[:, :-1], df[:, :-1], df[:, 1:]
    c0, c1 = ddf[:, :-1] / 2, ddf[:, 1:] / 2
    cubic = 10 * rise - 6 * d0 - 4 * d1 - 3 * c0 + c1
    quartic = -15 * rise + 8 * d0 + 7 * d1 + 3 * c0 - 2 * c1
    quintic = 6 * rise - 3 * d0 - 3 * d1 - c0 + c1
    return torch.stack([f[:, :-1], d0, c0, cubic, quartic, quintic], dim=-1)


def _sum(table: _Table, logits: Tensor, var: Tensor, L: Tensor) -> _Sum:
    """Sum every label's probabilities at its own L (B, K)."""
    piece, t = _locate(table, L)
    coefficients = table.pieces.gather(1, piece.unsqueeze(-1).expand(-1, -1, 6)).unbind(-1)
    value, slope = torch.zeros_like(t), torch.zeros_like(t)
    for c in reversed(coefficients):
        value, slope = value * t + c, slope * t + value
    log_var = var.log()
    others, own = _share(logits - L, log_var), _share(logits + var - L, log_var)
    g, p = others.value, own.value
    excess = value - g + p - 1
    return _Sum(excess, slope / table.spacing + g / (1 + others.weight) - p / (1 + own.weight), own)


def _locate(table: _Table, L: Tensor) -> tuple[Tensor, Tensor]:
    """Return in which piece every L is, and where in it."""
    t = (L - table.left) / table.spacing
    piece = t.nan_to_num().floor().clamp(0, table.pieces.shape[1] - 1)
    return piece.long(), t - piece
