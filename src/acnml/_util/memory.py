"""Limits on the memory of a computation."""

from __future__ import annotations

import numbers
import os
from functools import cache
from pathlib import Path, PurePosixPath

import torch

SHARE = 0.25  # fraction of the free memory to use by default
MOST = 2**30  # default maximum in bytes: larger chunks are not faster

MEMINFO = Path("/proc/meminfo")  # where Linux shows the memory of the machine
CGROUPS = Path("/sys/fs/cgroup")  # where Linux shows the limits of containers
OWN_CGROUPS = Path("/proc/self/cgroup")  # which of them this process is in


def require_memory(memory: int | None) -> None:
    """Raise an error unless `memory` is None or a positive number of bytes."""
    if memory is None:
        return
    if isinstance(memory, bool) or not isinstance(memory, numbers.Integral):
        kind = type(memory).__name__
        raise TypeError(f"memory must be a whole number of bytes, such as 2**30, got a {kind}")
    if memory < 1:
        raise ValueError(f"memory must be at least 1 byte, got {memory}")


def budget(device: torch.device, given: int | None, most: int = MOST) -> int:
    """Return the given number of bytes, or by default a fraction of the device's free memory."""
    if given is not None:
        return int(given)
    return min(int(SHARE * free_bytes(device)), most)


@cache
def default_budget(device: torch.device, most: int = MOST) -> int:
    """Return what `budget` gives by default, looked up once: the files of a container are many."""
    return budget(device, None, most)


def free_bytes(device: torch.device) -> int:
    """Return the free memory in bytes: that of a CUDA device, or else the main memory.

    Memory that holds cached files is free. In a container, free is what its limit leaves.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return max(0, min([_available(), *_left_in_cgroups()]))


def _available() -> int:
    """Return the main memory that a new process could use."""
    try:
        lines = MEMINFO.read_text().splitlines()
        fields = next(line.split() for line in lines if line.startswith("MemAvailable:"))
        return int(fields[1]) * 1024
    except (OSError, ValueError, IndexError, StopIteration):  # not on Linux
        pass
    try:
        # Without the cached files, which are often most of the memory.
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # not available on every system
        return MOST


def _left_in_cgroups() -> list[int]:
    """Return what the limits of this process's control group and of those around it leave.

    Inside a container the group's path often does not exist: the root is then the container's own.
    """
    try:
        lines = OWN_CGROUPS.read_text().splitlines()
    except (OSError, ValueError):  # not on Linux
        return []
    left = []
    for line in lines:
        if line.startswith("0::"):
            path = PurePosixPath(line.removeprefix("0::").lstrip("/"))
            left += [_left(CGROUPS / part) for part in (path, *path.parents)]
    return [free for free in left if free is not None]


def _left(group: Path) -> int | None:
    """Return what the limit of a group leaves, with cached files; None if there is no limit."""
    try:
        most, used = (int((group / f"memory.{what}").read_text()) for what in ("max", "current"))
    except (OSError, ValueError):  # no such group, or "max", which is no limit
        return None
    try:
        numbers = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        cached = int(numbers.get("inactive_file", 0))
    except (OSError, ValueError):
        cached = 0
    return max(0, most - used + cached)
