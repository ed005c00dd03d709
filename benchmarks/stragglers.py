"""Simulate a cluster that scores many parts, with stragglers, lost workers and Ray's retries.

python -m benchmarks.stragglers     writes docs/results/measurements/stragglers.csv

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

from benchmarks.recording import MEASUREMENTS, record

BILLION, PART, WORKERS = 10**9, 16_384, 100
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
    """Simulate tasks of different sizes; with parts that stay, and with tasks that begin again."""
    rows = []
    for parts_stay, sizes in {"yes": (1, 8, 64, 512), "no": (8, 64, 512)}.items():
        for parts in sizes:
            split = (PART, parts) if parts_stay == "yes" else (PART * parts, 1)
            for losses in (0.0, 0.1, 1.0, 10.0):
                setting = Setting(BILLION, WORKERS, *split, losses_per_hour=losses)
                case = {"parts_stay": parts_stay, "rows_per_task": PART * parts, "losses": losses}
                rows.append({**case, "overhead": overhead(setting)})
                print(rows[-1], flush=True)
    record(MEASUREMENTS / "stragglers.csv", rows)


if __name__ == "__main__":
    main()
