"""State of torch that belongs to the whole process, set for a while and restored.

Random numbers: the library draws its own from its own `torch.Generator`s. `seeded` is for those
layers of torch, such as dropout, that always draw from the global state.

Threads: an operation on a few thousand numbers gains nothing from several threads. On a busy
machine it waits for them: a thousand such operations took a hundred times as long.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import RLock

import torch

# Work of fewer products takes one thread some 10 ms. Its operations are then so short that,
# on a busy machine, several threads mostly wait for each other.
SMALL = 2**28

# The random state belongs to the whole process, so only one thread at a time may seed it.
_LOCK = RLock()


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the global random state inside the context; restore it afterwards, also on an error.

    This covers the CPU and every device of the accelerator. Threads that use `seeded` wait for each
    other, and other threads must not draw from the state in the meantime.
    """
    # torch 2.6 raises where later versions return None.
    has_accelerator = torch.accelerator.is_available()
    accelerator = torch.accelerator.current_accelerator() if has_accelerator else None
    kind = "cuda" if accelerator is None else accelerator.type
    # All devices explicitly: without a list, torch warns if there are several.
    devices = range(torch.accelerator.device_count())
    with _LOCK, torch.random.fork_rng(devices, device_type=kind):
        torch.manual_seed(seed)
        yield


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch use one thread inside; also a decorator.

    torch keeps the number for each thread of the program, so threads that are inside at once do not
    disturb each other. A thread that uses torch for the first time takes the number that was set
    last: it may take 1, if another one is inside. A number that is set inside is kept.
    """
    before = torch.get_num_threads()
    if before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        if torch.get_num_threads() == 1:
            torch.set_num_threads(before)


def threads_for(products: float) -> AbstractContextManager[None]:
    """Use one thread for work of so many products if that is little, or as many as before."""
    return one_thread() if products < SMALL else nullcontext()
