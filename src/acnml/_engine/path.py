"""The way of the rows from the mean: v and Σv after some gradient steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import NamedTuple

from torch import Tensor

from acnml._algebra.actions import Displacement
from acnml._algebra.dual import Dual
from acnml.posteriors import Posterior


class Tangent(NamedTuple):
    """The gradients of all K logits at the mean, with Σ applied to them once and for all."""

    jacobian: Dual  # (B, K, ...)
    moved: Displacement  # ΣJᵀ

    @staticmethod
    def of(posterior: Posterior, jacobian: Dual) -> Tangent:
        """Apply Σ."""
        return Tangent(jacobian, posterior.displacement(jacobian))


class Path(NamedTuple):
    """v = Σ_s c_s g_s for gradients g_s, and Σv, to which Σ was applied gradient by gradient."""

    steps: tuple[tuple[float, Callable[[], Dual]], ...]  # written out only if v is asked for
    moved: Displacement  # Σv

    @staticmethod
    def along(tangent: Tangent, weights: Tensor) -> Path:
        """Begin with v = Jᵀw for weights (B, L, K) of the logits."""
        step = (1.0, lambda: tangent.jacobian.combined(weights))
        return Path((step,), tangent.moved.combined(weights))

    def stepped(self, posterior: Posterior, gradient: Dual, step_size: float) -> Path:
        """Return the path to (1 - ε)v + ε · gradient."""
        kept = 1 - step_size
        steps = *((weight * kept, one) for weight, one in self.steps), (step_size, lambda: gradient)
        return Path(steps, self.moved.blended(posterior.displacement(gradient), kept, step_size))

    def v(self) -> Dual:
        """Return v."""
        (weight, first), *others = self.steps
        start = first().blended(first(), weight, 0)
        return reduce(lambda v, step: v.blended(step[1](), 1, step[0]), others, start)
