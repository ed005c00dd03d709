"""Timing that is robust on a noisy machine: interleaved runs, and the fastest of several rounds."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping


def fastest(methods: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return the fastest time of every method in seconds; each round runs all methods in turn."""
    best = dict.fromkeys(methods, float("inf"))
    for _ in range(rounds):
        for name, run in methods.items():
            start = time.perf_counter()
            run()
            best[name] = min(best[name], time.perf_counter() - start)
    return best
