"""One thread for many small operations.

An operation on a few thousand numbers gains nothing from several threads. On a busy machine it
waits for them: a thousand such operations took a hundred times as long.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


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
