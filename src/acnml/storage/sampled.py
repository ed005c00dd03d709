"""Fingerprints in files of format 1: a projection of a sample of a tensor's entries.

They notice other weights, but not a few more steps of training. Newer files contain hashes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from acnml._util import checks
from acnml._util.params import Params

PRINTED = 10_000  # approximate number of a tensor's entries that its fingerprint uses
ROUNDING = 0.02  # tolerance for fingerprints: above half-precision rounding, below training


def require_alike(tensors: Params, fingerprints: Mapping[str, Sequence[float]]) -> None:
    """Raise an error if weights differ by more than the rounding of half precision."""
    checks.require_known(fingerprints, list(tensors))
    for name, expected in fingerprints.items():
        differences = [abs(a - b) for a, b in zip(_of(tensors[name]), expected, strict=True)]
        if not max(differences) <= ROUNDING * expected[1]:
            raise ValueError(
                f"{name!r} of the given network differs from when the file was saved; load the "
                "weights that the network had then"
            )


def _of(tensor: Tensor) -> list[float]:
    """Project some entries of a tensor onto a fixed vector; return the projection and their norm.

    For different weights the projection differs by about the norm. For the same weights after
    rounding it differs by much less.
    """
    flat = tensor.detach().flatten()
    some = flat[:: 1 + len(flat) // PRINTED].to("cpu", torch.float64)
    fixed = torch.cos(torch.arange(len(some), dtype=torch.float64, device="cpu"))
    return [float(some @ fixed), float(some.norm())]
