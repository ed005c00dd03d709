"""The displacement of a posterior that has no faster form: write v out, multiply by Σ."""

from __future__ import annotations

from acnml.actions import Displacement, MatrixAction
from acnml.dual import Dual
from acnml.posteriors.base import Posterior


def materialised_displacement(posterior: Posterior, dual: Dual) -> Displacement:
    """Return Σv through `cov_mv`: right for every posterior, one matrix per row and layer."""
    moved = posterior.cov_mv(dual.materialised(posterior.mean))
    return Displacement(
        {name: moved[name] for name in dual.dense},
        {layer: MatrixAction(layer.join(moved, posterior.mean)) for layer in dual.outers},
    )
