"""The precision in which modules compute."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def without_autocast(like: Tensor) -> AbstractContextManager[object]:
    """Leave autocast inside, on the device of a tensor.

    Autocast computes matrix products in half precision, which has too few digits for a solver.
    Where it is off, nothing is entered, so that exported graphs are as before.
    """
    kind = like.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()
