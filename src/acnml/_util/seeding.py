"""The one place that touches torch's global random state, and puts it back.

Everything random in the library draws from its own `torch.Generator`. Some of torch's layers, such
as dropout, cannot: they draw from the global one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the global random state inside, and restore what it was after, also on an error.

    Covers the CPU and every device of the accelerator, where there is one. The state belongs to the
    whole process: other threads must not draw from it meanwhile.

    >>> with seeded(0):
    ...     first = torch.rand(3)
    >>> with seeded(0):
    ...     again = torch.rand(3)
    >>> torch.equal(first, again)
    True
    """
    accelerator = torch.accelerator.current_accelerator()
    kind = "cuda" if accelerator is None else accelerator.type
    # All devices by name, because torch warns of "every device" when it is left to it.
    devices = range(torch.accelerator.device_count())
    with torch.random.fork_rng(devices, device_type=kind):
        torch.manual_seed(seed)
        yield
