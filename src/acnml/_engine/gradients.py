"""Per-example gradients, assembled from the layer inputs and output gradients of a tape.

That they are the model's own gradients is not taken for granted: see `trust.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

from acnml._engine.layers import Site, input_vectors, output_positions, scaling_gradients
from acnml._engine.recorder import Passage
from acnml._util.params import Params, add


def joined_inputs(site: Site, passages: Sequence[Passage]) -> Tensor:
    """Return an affine site's input vectors of all passages: (B, [groups,] positions, in [+ 1])."""
    return torch.cat([input_vectors(site, one.received) for one in passages], dim=-2)


def joined_deltas(site: Site, deltas: Sequence[Tensor]) -> Tensor:
    """Return the gradients at an affine site's outputs: (B, [groups,] positions, out)."""
    return torch.cat([output_positions(site.module, delta) for delta in deltas], dim=-2)


def summed_scaling_gradients(
    site: Site, passages: Sequence[Passage], deltas: Sequence[Tensor]
) -> Params:
    """Return every example's gradients of a scaling site, summed over passages: (B, *shape)."""
    pairs = zip(passages, deltas, strict=True)
    parts = (scaling_gradients(site, one.received[:, None], d[:, None]) for one, d in pairs)
    return {name: grad.squeeze(1) for name, grad in reduce(add, parts).items()}
