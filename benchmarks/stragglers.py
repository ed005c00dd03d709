"""Simulate a cluster that scores many parts, with stragglers, lost workers and Ray's retries.

python -m benchmarks.stragglers

A task is a list of parts. Its time is its number of rows times the time per row, times a random
factor: log-normal with a coefficient of variation of 0.2, and ten times as long for one task in
500, a straggler. A worker is lost at random, at a rate per hour of its work. Its task is queued
again from its beginning, without the parts that are complete, and a new worker takes `restart`
seconds to load the model. This is what `acnml.ray.Cluster` does: parts that were written stay.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from dataclasses import dataclass
from statistics import mean
from typing import final

RUNS = 5


@final
@dataclass(frozen=True)
class Setting:
    """A cluster and its work."""

    rows: int
    workers: int
    rows_per_part: int
    parts_per_task: int
    seconds_per_row: float = 1e-4
    losses_per_hour: float = 0.0  # of one worker
    restart: float = 20.0
    straggling: float = 0.002  # share of tasks
    slowness: float = 10.0  # of a straggler


def simulate(setting: Setting, seed: int) -> tuple[float, float]:
    """Return the time of the run, and the time if all workers were busy and nothing went wrong."""
    rng = random.Random(seed)
    tasks = math.ceil(setting.rows / (setting.rows_per_part * setting.parts_per_task))
    queue = deque([setting.parts_per_task] * tasks)
    free = [(setting.restart, worker) for worker in range(setting.workers)]
    heapq.heapify(free)
    spread = math.sqrt(math.log(1 + 0.2**2))
    end = 0.0
    while queue:
        now, worker = heapq.heappop(free)
        parts = queue.popleft()
        part = setting.rows_per_part * setting.seconds_per_row
        part *= rng.lognormvariate(-(spread**2) / 2, spread)
        if rng.random() < setting.straggling:
            part *= setting.slowness
        rate = setting.losses_per_hour / 3600
        lost_after = rng.expovariate(rate) if rate else math.inf
        if lost_after < parts * part:
            queue.append(parts - int(lost_after / part))
            heapq.heappush(free, (now + lost_after + setting.restart, worker))
            end = max(end, now + lost_after)
        else:
            heapq.heappush(free, (now + parts * part, worker))
            end = max(end, now + parts * part)
    return end, setting.rows * setting.seconds_per_row / setting.workers


def overhead(setting: Setting) -> float:
    """Return the mean time of a run, relative to the ideal time."""
    runs = [simulate(setting, seed) for seed in range(RUNS)]
    return mean(end / ideal for end, ideal in runs)


def main() -> None:
    """Print a table of overheads."""
    billion, part = 10**9, 16_384
    print("Time over the ideal time, 1e9 rows at 0.1 ms on 100 workers; mean of 5 runs.\n")
    print("| rows per task | no losses | 0.1 losses per worker and hour | 1 loss | 10 losses |")
    print("|---:|---:|---:|---:|---:|")
    for parts in (1, 8, 64, 512):
        cells = [
            overhead(Setting(billion, 100, part, parts, losses_per_hour=losses))
            for losses in (0.0, 0.1, 1.0, 10.0)
        ]
        print(f"| {parts * part:,} | " + " | ".join(f"{cell:.3f}" for cell in cells) + " |")
    print("\nThe same without complete parts that stay (a lost task begins again):\n")
    print("| rows per task | no losses | 0.1 | 1 | 10 |\n|---:|---:|---:|---:|---:|")
    for parts in (8, 64, 512):
        cells = [
            overhead(Setting(billion, 100, part * parts, 1, losses_per_hour=losses))
            for losses in (0.0, 0.1, 1.0, 10.0)
        ]
        print(f"| {parts * part:,} | " + " | ".join(f"{cell:.3f}" for cell in cells) + " |")


if __name__ == "__main__":
    main()
