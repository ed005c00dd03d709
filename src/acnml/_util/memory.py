"""Limits on the memory of a computation."""

from __future__ import annotations

import os

import torch

SHARE = 0.25  # fraction of the free memory to use by default
MOST = 2**30  # default maximum in bytes: larger chunks are not faster


def budget(device: torch.device, given: int | None) -> int:
    """Return the given number of bytes, or by default a fraction of the device's free memory."""
    if given is not None:
        return given
    return min(int(SHARE * free_bytes(device)), MOST)


def free_bytes(device: torch.device) -> int:
    """Return the free memory in bytes: that of a CUDA device, or else the main memory."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # not available on every system
        return MOST
