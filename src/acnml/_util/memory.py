"""Limits on the memory of a computation."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path

import torch

from acnml._util import checks

SHARE = 0.25  # fraction of the free memory to use by default
MOST = 2**30  # default maximum in bytes: larger chunks are not faster

MEMINFO = Path("/proc/meminfo")  # where Linux shows the memory of the machine
CONTAINER = Path("/sys/fs/cgroup")  # and where the limit of the container, if there is one


def require_memory(memory: int | None) -> None:
    """Raise an error unless `memory` is None or a positive number of bytes."""
    if memory is not None:
        checks.require_integer(memory, "memory", least=1)


@cache
def default_budget(device: torch.device, most: int = MOST) -> int:
    """Return a fraction of the device's free memory, looked up once, in bytes."""
    return min(int(SHARE * free_bytes(device)), most)


def free_bytes(device: torch.device) -> float:
    """Return the free memory in bytes: that of a CUDA device, or else the main memory.

    Memory that holds cached files is free. In a container, free is what its limit leaves.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return max(0, min(_available(), _left_in_container()))


def _available() -> float:
    """Return the main memory that a new process could use."""
    try:
        fields = dict(line.split()[:2] for line in MEMINFO.read_text().splitlines())
        return int(fields["MemAvailable:"]) * 1024
    except (OSError, ValueError, LookupError):  # not on Linux
        return MOST


def _left_in_container() -> float:
    """Return what the limit of the container leaves."""
    try:
        most, used = (
            int((CONTAINER / f"memory.{name}").read_text()) for name in ("max", "current")
        )
        numbers = dict(
            line.split() for line in (CONTAINER / "memory.stat").read_text().splitlines()
        )
        return most - used + int(numbers["inactive_file"])
    except (OSError, ValueError, LookupError):  # no container, or "max", which is no limit
        return math.inf
