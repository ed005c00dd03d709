"""The way of the rows from the mean: v and Σv after some gradient steps."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from acnml.dual import Action, Affine, Displacement, Dual
from acnml.params import Params, add, scale
from acnml.posteriors import Posterior


class Path(NamedTuple):
    """v = Σ_s c_s g_s for gradients g_s, with Σ applied to each of them once and for all."""

    steps: tuple[tuple[float, Dual], ...]
    dense: Params  # Σv, where it is written out
    actions: Mapping[Affine, tuple[tuple[float, Action], ...]]  # Σg_s, where it is not

    @staticmethod
    def start(posterior: Posterior, dual: Dual, weight: float = 1.0) -> Path:
        """Begin with v = weight · dual."""
        moved = posterior.displacement(dual)
        actions = {layer: ((weight, action),) for layer, action in moved.actions.items()}
        return Path(((weight, dual),), scale(moved.dense, weight), actions)

    def stepped(self, posterior: Posterior, gradient: Dual, step_size: float) -> Path:
        """Return the path to (1 - ε)v + ε · gradient."""
        kept, new = 1 - step_size, Path.start(posterior, gradient, step_size)
        return Path(
            _faded(self.steps, kept) + new.steps,
            add(scale(self.dense, kept), new.dense),
            {k: _faded(terms, kept) + new.actions[k] for k, terms in self.actions.items()},
        )

    def v(self) -> Dual:
        """Return v."""
        return reduce(Dual.plus, (dual.scaled(weight) for weight, dual in self.steps))

    def displacement(self) -> Displacement:
        """Return Σv."""
        return Displacement(self.dense, {k: _sum(terms) for k, terms in self.actions.items()})


T = TypeVar("T")


def _faded(terms: tuple[tuple[float, T], ...], factor: float) -> tuple[tuple[float, T], ...]:
    return tuple((weight * factor, term) for weight, term in terms)


def _sum(terms: tuple[tuple[float, Action], ...]) -> Action:
    def action(inputs: Tensor) -> Tensor:
        (weight, first), *others = terms
        total = first(inputs) * weight
        for weight, one in others:
            total = torch.add(total, one(inputs), alpha=weight)
        return total

    return action
