"""One thread for many small operations.

An operation on a few thousand numbers gains nothing from several threads. On a busy machine it
waits for them: a thousand such operations took a hundred times as long.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_lock = threading.Lock()
_inside = 0
_before = 1


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch use one thread inside, in the whole process; the last to leave restores it."""
    global _inside, _before
    with _lock:
        if _inside == 0:
            _before = torch.get_num_threads()
            if _before > 1:
                torch.set_num_threads(1)
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if _inside == 0 and _before > 1:
                torch.set_num_threads(_before)
