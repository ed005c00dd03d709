"""How much memory a computation may take."""

from __future__ import annotations

import os

import torch

SHARE = 0.25  # of what is free
MOST = 2**30  # more than this at once makes nothing faster


def budget(device: torch.device, given: int | None) -> int:
    """Return the given number of bytes, or by default a share of what is free on the device."""
    if given is not None:
        return given
    return min(int(SHARE * free_bytes(device)), MOST)


def free_bytes(device: torch.device) -> int:
    """Return the memory that is free, on a CUDA device or in the machine."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # not every system tells
        return MOST
