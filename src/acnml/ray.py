"""Score and fit on a Ray cluster. This module needs the extra `ray`.

- `Cluster` is an engine for `acnml.scoring.score`: `acnml predict --engine ray`.
- `score` adds answers to a Ray Dataset.
- `fit` fits parts of the data in parallel tasks, and adds up the results pairwise.

What a lost worker was computing is computed again by another one. The results do not depend on it:
a part of the output is written atomically, and a Dataset has the blocks of one attempt only.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, final

import torch

from acnml._util.messages import needed_by
from acnml.predictors import Predictor

with needed_by("acnml.ray", "acnml[ray]"):
    import pyarrow as pa
    import ray
    import ray.data
    from ray.util import ActorPool

    from acnml.scoring import Answers, Job, Reading, ScoringError
    from acnml.scoring.columns import SHOWN, InputColumns, require_columns, require_free_names
    from acnml.scoring.job import COLUMNS, REJECT
    from acnml.scoring.run import Worker
    from acnml.scoring.scorer import Scorer, beside
    from acnml.scoring.sources import Unit

T = TypeVar("T")


@final
@dataclass(frozen=True)
class Cluster:
    """An engine that scores parts of a job by a pool of Ray actors.

    Every actor loads the predictor once, and reserves a CPU for each of the job's threads, and a
    GPU with the device "cuda". All files must be at the same paths on all machines. A task is a
    stretch of the input that is best read at once, such as a row group of a Parquet file.

    Args:
        address: of a running cluster; by default Ray's usual choice, see `ray.init`. A cluster that
            this process is connected to is used as it is.
        actors: how many; by default as many as there are CPUs and GPUs for.

    >>> from acnml.ray import Cluster
    >>> engine = Cluster(actors=4)  # for `acnml.scoring.score(job, engine)`
    """

    address: str | None = None
    actors: int | None = None

    def __call__(self, job: Job, units: Sequence[Unit]) -> Iterator[int]:
        """Score all units; yield numbers of rows as they are done."""
        _connect(self.address)
        gpus = int(job.device.startswith("cuda"))
        there = ray.cluster_resources()
        most = min(there.get("CPU", 1) // job.threads, there.get("GPU", 0) if gpus else math.inf)
        actors = self.actors or max(1, int(most))
        own = {"num_cpus": job.threads, "num_gpus": gpus}
        again = {"max_restarts": -1, "max_task_retries": -1}  # whenever a worker is lost
        actor = ray.remote(**own, **again)(_Scoring)
        count = min(actors, len(units))
        pool = ActorPool([actor.remote(job, str(Path.cwd())) for _ in range(count)])
        try:
            yield from pool.map_unordered(lambda actor, unit: actor.run.remote(unit), units)
        except ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None)  # Ray adds lines to its message
            lines = str(cause or error).strip().splitlines() or [type(error).__name__]
            raise ScoringError(f"an actor of Ray failed: {lines[0 if cause else -1]}") from error


def _connect(address: str | None = None) -> None:
    """Connect to a cluster, or start one on this machine; without a dashboard and usage reports."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if not ray.is_initialized():
        local = {} if address else {"include_dashboard": False}
        ray.init(address=address, log_to_driver=False, **local)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.raise_original_map_exception = True


@final
class _Scoring:
    """Scores the units of a job in an actor."""

    def __init__(self, job: Job, folder: str) -> None:
        torch.set_num_threads(job.threads)
        with suppress(OSError):  # on another machine, where paths must be absolute then
            os.chdir(folder)
        self._worker = Worker(job)

    def run(self, unit: Unit) -> int:
        """Score the parts of a unit and return their number of rows."""
        return sum(self._worker.run([unit]))


def score(
    dataset: ray.data.Dataset,
    factory: Callable[[], Predictor],
    *,
    reading: Reading | None = None,
    answers: Answers | None = None,
    batch_rows: int = 1024,
    actors: int = 2,
    threads: int = 1,
) -> ray.data.Dataset:
    """Add answers to the rows of a Ray Dataset, lazily, as all its transformations are.

    The result has the columns of the dataset (or those of `reading.carry`), those that `acnml
    predict` writes, and `reject`. A row without an answer has nulls, and the reason in `reject`,
    which is null for all others. This call reads the first 256 rows to see the shape of an input;
    rows of another shape are rejected. A dataset without rows stays as it is.

    Args:
        dataset: the rows.
        factory: returns the predictor; it is called once in every actor. It must be importable on
            the workers, or be a function that Ray can send.
        reading: how rows become inputs; settings of images are not used.
        answers: what is asked for.
        batch_rows: rows that are scored together.
        actors: how many actors share the work. Leave CPUs of the cluster free for what comes before
            in the dataset, such as reading files: if none is free, the job never starts.
        threads: of torch in every actor, which are the CPUs that it reserves.

    >>> import ray
    >>> from acnml.ray import score
    >>> factory = lambda: acnml.Map(acnml.Classifier(torch.nn.Identity()))  # its inputs are logits
    >>> dataset = ray.data.from_items([{"x": [0.0, 2.0]}, {"x": [1.0, 0.0]}])  # doctest: +SKIP
    >>> scored = score(dataset, factory, actors=1)  # doctest: +SKIP
    >>> sorted(row["label"] for row in scored.iter_rows())  # doctest: +SKIP
    [0, 1]
    """
    reading, answers = reading or Reading(), answers or Answers()
    first = dataset.limit(SHOWN).iter_batches(batch_size=SHOWN, batch_format="pyarrow")
    shown = next(iter(first), None)
    if shown is None:  # there are no rows to add answers to
        return dataset
    inputs, scorer = _inputs(shown, reading), lambda: Scorer(factory(), answers)
    return dataset.map_batches(
        _Adding,
        fn_constructor_args=(scorer, reading.carry, inputs, threads),
        batch_size=batch_rows,
        batch_format="pyarrow",
        compute=ray.data.ActorPoolStrategy(size=actors),
        num_cpus=threads,
    )


def _inputs(first: pa.Table, reading: Reading) -> InputColumns:
    """Return what the first rows show, or raise an error if answers cannot be added to them."""
    require_columns(reading.carry, first.column_names, "the dataset")
    require_free_names(reading.carry or first.column_names, [*COLUMNS, REJECT])
    return InputColumns.found(reading, first)


@final
class _Adding:
    """Adds answers to tables in an actor."""

    def __init__(
        self, scorer: Callable[[], Scorer], carry: Sequence[str], inputs: InputColumns, threads: int
    ) -> None:
        torch.set_num_threads(threads)
        self._scorer, self._carry, self._inputs = scorer(), [*carry], inputs

    def __call__(self, table: pa.Table) -> pa.Table:
        kept = table.select(self._carry) if self._carry else table
        return beside(kept, self._scorer(self._inputs.read(table)))


def fit(
    shards: Sequence[T],
    fit_one: Callable[[T], Any],
    *,
    threads: int = 1,
    address: str | None = None,
) -> Any:
    """Fit every shard of the data in a task of its own, and add up the results pairwise.

    What is fitted must add up, as curvatures do. The order of additions depends only on the
    number of shards, so the result is the same in every run.

    Args:
        shards: descriptions of parts of the data that do not overlap, for example paths of files.
        fit_one: returns, for example, `fit_curvature(classifier, loader_of(shard))`.
        threads: of torch in every task, which are the CPUs that it reserves.
        address: of a running cluster, see `Cluster`.

    >>> from acnml.ray import fit
    >>> def fit_one(seed):
    ...     x = torch.randn(100, 4, generator=torch.Generator().manual_seed(seed))
    ...     return acnml.fit.fit_curvature(classifier, x)
    >>> fit([0, 1, 2], fit_one).posterior(1.0)  # doctest: +SKIP
    Kronecker(15 parameters: weight … bias)
    """
    if len(shards) == 0:  # an array has no truth value
        raise ValueError("there are no shards: pass at least one part of the data")
    _connect(address)
    task = ray.remote(num_cpus=threads, max_retries=-1)  # again whenever a worker is lost

    def fitted(shard: T) -> Any:
        torch.set_num_threads(threads)
        return fit_one(shard)

    run, add = task(fitted), task(lambda first, second: first + second)
    sums = [run.remote(shard) for shard in shards]
    while len(sums) > 1:
        pairs = [add.remote(*pair) for pair in zip(sums[::2], sums[1::2], strict=False)]
        sums = [*pairs, *sums[2 * len(pairs) :]]
    return ray.get(sums[0])
