"""Knobs: the one thing that can be turned in a method, and the values that are tried."""

from __future__ import annotations

from typing import Protocol

TEMPERATURE, ALPHA, TAU, SCALE = "temperature", "alpha", "prior precision", "covariance scale"
GRIDS = ("temperatures", "alphas", "prior_precisions", "covariance_scales")


class Grids(Protocol):
    """The values that are tried."""

    @property
    def temperatures(self) -> tuple[float, ...]:
        """Of TEMPERATURE."""
        ...

    @property
    def alphas(self) -> tuple[float, ...]:
        """Of ALPHA."""
        ...

    @property
    def prior_precisions(self) -> tuple[float, ...]:
        """Of TAU."""
        ...

    @property
    def covariance_scales(self) -> tuple[float, ...]:
        """Of SCALE."""
        ...


def sweep_values(knob: str, grids: Grids) -> tuple[float, ...]:
    """Return the values of a knob, the most cautious first: a prior is cautious when it is wide."""
    values = {
        TEMPERATURE: grids.temperatures,
        ALPHA: grids.alphas,
        SCALE: grids.covariance_scales,
        TAU: grids.prior_precisions,
    }[knob]
    return tuple(sorted(values, reverse=knob != TAU))
