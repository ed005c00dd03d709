"""The one place that touches torch's global random state, and puts it back.

Everything random in the library draws from its own `torch.Generator`. Some of torch's layers, such
as dropout, cannot: they draw from the global one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock

import torch

# The random state belongs to the whole process, so only one thread at a time may seed it.
_LOCK = RLock()


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the global random state inside, and restore what it was after, also on an error.

    Covers the CPU and every device of the accelerator, if there is one. The state belongs to the
    whole process: threads that use `seeded` wait for each other, and others must not draw from it
    meanwhile.

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
    with _LOCK, torch.random.fork_rng(devices, device_type=kind):
        torch.manual_seed(seed)
        yield
