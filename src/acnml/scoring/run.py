"""Run a job: cut the input into parts, let an engine score those that are missing, and count."""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from itertools import chain, groupby
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar, final

import pyarrow as pa

import acnml
from acnml.scoring.job import Job
from acnml.scoring.models import ScoringError, file_of, load_predictor
from acnml.scoring.output import ANSWERS, FORMAT, KEYS, Folder, PartWriter, Summary, answer_fields
from acnml.scoring.scorer import Scored, Scorer
from acnml.scoring.sources import SHOWN, Block, Source, open_source

T = TypeVar("T")
S = TypeVar("S")

# Blocks that are scored and not yet written, at most: a disk takes some time to store a part.
BEHIND = 4


class Part(NamedTuple):
    """Rows `start` to `stop` of a file of the input, which become one file of the output."""

    number: int
    file: int
    start: int
    stop: int

    @property
    def rows(self) -> int:
        """How many rows it has."""
        return self.stop - self.start


# Parts that follow each other and are best read by the same process.
Unit: TypeAlias = tuple[Part, ...]

# Scores all units of a job, and yields numbers of rows as they are done.
Engine: TypeAlias = Callable[[Job, Sequence[Unit]], Iterator[int]]


def locally(job: Job, units: Sequence[Unit]) -> Iterator[int]:
    """Score in this process: the engine of `score` unless another is given.

    >>> from acnml.scoring import Job, locally
    >>> job = Job("network.py:build", "calibrated.safetensors", "data.parquet", "scored")
    >>> list(locally(job, []))  # no units: nothing to do
    []
    """
    if not units:
        return
    with closing(Worker(job)) as worker:
        yield from worker.run(chain.from_iterable(units))


def score(
    job: Job,
    engine: Engine = locally,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Summary:
    """Score all rows of a job that are not scored yet, and return the counts of all rows.

    Args:
        job: what to score, and how.
        engine: who computes; by default this process. `acnml.ray.Cluster` is another engine.
        progress: is called with the number of rows that are done and the number of all rows.

    >>> import pathlib, tempfile
    >>> import acnml, numpy, torch
    >>> from acnml.scoring import Job, score
    >>> map_ = acnml.Map(acnml.Classifier(torch.nn.Identity()))  # its inputs are logits
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     model, x, out = (str(pathlib.Path(folder) / name) for name in ("map", "x.npy", "out"))
    ...     acnml.save(map_, model)
    ...     numpy.save(x, numpy.zeros((100, 3), "float32"))
    ...     summary = score(Job("torch.nn:Identity", model, x, out))
    >>> summary.scored
    100
    """
    source, folder = open_source(job.input, job.reading, job.output), Folder(Path(job.output))
    _require_free_names(source)
    identity = _identity(job, source)
    with folder.begun(identity):
        return _score_missing(job, source, folder, identity, engine, progress)


def _score_missing(
    job: Job,
    source: Source,
    folder: Folder,
    identity: dict[str, Any],
    engine: Engine,
    progress: Callable[[int, int], None],
) -> Summary:
    parts = list(parts_of(source, job.part_rows))
    missing = [part for part in parts if not folder.part(part.number).exists()]
    # Those that are there are checked first, so that a damaged one is named at once.
    counts = {part: folder.counts(part.number, part.rows) for part in set(parts) - set(missing)}
    total = sum(part.rows for part in parts)
    done = total - sum(part.rows for part in missing)
    progress(done, total)
    for rows in engine(job, units_of(source, missing)) if missing else ():
        done += rows
        progress(done, total)
    counts |= {part: folder.counts(part.number, part.rows) for part in missing}
    summary = folder.finish(identity, [counts[part] for part in parts])
    return dataclasses.replace(summary, found=len(parts) - len(missing))


def _identity(job: Job, source: Source) -> dict[str, Any]:
    """Return all that must be the same when a run goes on."""
    transform = job.reading.transform
    return {
        "format": FORMAT,
        "acnml": acnml.__version__,
        "settings": job.settings(),
        "input": source.fingerprint(),
        "predictor": _sha256(Path(job.predictor)),
        "weights": None if job.weights is None else _sha256(Path(job.weights)),
        "model_code": _code_sha256(job.model, "model"),
        "transform_code": None if transform is None else _code_sha256(transform, "--transform"),
    }


def _code_sha256(function: str, what: str) -> str | None:
    """Return the hash of the file that a function is in; None if its module has no file."""
    path = file_of(function, what)
    return None if path is None else _sha256(path)


def parts_of(source: Source, rows: int) -> Iterator[Part]:
    """Cut the files of an input into parts of so many rows; the last of a file may have fewer."""
    number = 0
    for file, length in enumerate(source.lengths):
        for start in range(0, length, rows):
            yield Part(number, file, start, min(start + rows, length))
            number += 1


def units_of(source: Source, parts: Iterable[Part]) -> list[Unit]:
    """Join parts of one stretch of a file, because reading cannot begin inside of it."""
    stretches = groupby(parts, lambda part: (part.file, source.stretch(part.file, part.start)))
    return [tuple(unit) for _, unit in stretches]


@final
class Worker:
    """Scores parts of a job: it loads the predictor once, and reads and writes while it computes.

    An engine creates one in every process, as `acnml.ray.Cluster` does in its actors.

    Args:
        job: the job. Its folder must exist.

    >>> from acnml.scoring import Job, Worker
    >>> def engine(job, units):  # for `score(job, engine)`
    ...     worker = Worker(job)
    ...     for unit in units:
    ...         yield from worker.run(unit)
    """

    def __init__(self, job: Job) -> None:
        self._job, self._folder = job, Folder(Path(job.output))
        self._source = open_source(job.input, job.reading, job.output)
        self._scorer = Scorer(load_predictor(job), job.answers)
        self._fields = answer_fields(self._first_answers().columns)

    def run(self, parts: Iterable[Part]) -> Iterator[int]:
        """Score parts and write them, unless they are there already; yield numbers of rows.

        One thread reads the next block, and another writes what is scored, while this one computes.
        """
        missing = list[Part]()
        for part in parts:
            if self._folder.part(part.number).exists():  # of a worker that was lost after writing
                yield part.rows
            else:
                missing.append(part)
        writing = _Writing(self._folder, self._source.carried, self._fields)
        # The threads have ended when an unfinished part is abandoned.
        with closing(writing), ThreadPoolExecutor(1) as reader, ThreadPoolExecutor(1) as writer:
            scored = self._scored(ahead(self._blocks(missing), reader))
            yield from filter(None, behind(scored, writing.add, writer))

    def close(self) -> None:
        """Close the input."""
        self._source.close()

    def _blocks(self, parts: Iterable[Part]) -> Iterator[tuple[Part, Block]]:
        for part in parts:
            size = self._job.batch_rows
            for block in self._source.blocks(part.file, part.start, part.stop, size):
                yield part, block

    def _scored(self, blocks: Iterable[tuple[Part, Block]]) -> Iterator[tuple[Part, Block, Scored]]:
        for part, block in blocks:
            scored = self._scorer(block.inputs)
            yield part, dataclasses.replace(block, inputs={}), scored  # inputs need not wait

    def _first_answers(self) -> Scored:
        """Score rows until one has an answer, to see the types of all answers.

        A model that does not fit the inputs fails here, before anything is written.
        """
        reasons = Counter[str]()
        for file, length in enumerate(self._source.lengths):
            for block in self._source.blocks(file, 0, length, SHOWN):
                scored = self._scorer(block.inputs)
                if len(scored.kept):
                    return scored
                reasons.update([*block.reasons.values(), *scored.reasons.values()])
        counted = "; ".join(f"{count:,} rows: {reason}" for reason, count in reasons.most_common(5))
        raise ScoringError(
            f"none of the {reasons.total():,} rows has an answer: check `columns` (--columns), "
            f"`shape` (--shape) and the model ({counted})"
        )


@final
class _Writing:
    """Writes parts one after the other, from blocks in the order of their rows.

    Blocks wait in a queue, so some of them still arrive after one has failed. They are refused:
    with a block missing, later blocks could fill a part to the right number of wrong rows.
    """

    def __init__(self, folder: Folder, carried: pa.Schema, answers: pa.Schema) -> None:
        self._folder, self._carried, self._answers = folder, carried, answers
        self._open: tuple[Part, PartWriter] | None = None
        self._has_failed = False

    def add(self, item: tuple[Part, Block, Scored]) -> int:
        """Add a block to its part; return the number of rows of the part if it is complete."""
        part, block, scored = item
        if self._has_failed:
            raise RuntimeError(
                f"part {part.number} is not written, because an earlier block failed"
            )
        try:
            is_complete = self._writer(part).add(block, scored)
        except BaseException:
            self._has_failed = True
            raise
        if not is_complete:
            return 0
        self._open = None
        return part.rows

    def close(self) -> None:
        """Abandon a part that is not complete."""
        if self._open is not None:
            self._open[1].abandon()

    def _writer(self, part: Part) -> PartWriter:
        """Return the writer of a part, which is the open one if there is one."""
        if self._open is None:
            writer = PartWriter(self._folder, part.number, part.rows, self._carried, self._answers)
            self._open = part, writer
        current, writer = self._open
        if current != part:
            raise ScoringError(
                f"the input does not have all rows of part {current.number}: check that its files "
                "do not change, and run the same command again"
            )
        return writer


def ahead(items: Iterator[T], reader: ThreadPoolExecutor) -> Iterator[T]:
    """Iterate one item ahead, in the thread of an executor."""
    end = object()
    following = reader.submit(next, items, end)
    while True:
        item = following.result()
        if item is end:
            return
        following = reader.submit(next, items, end)
        yield item  # type: ignore[misc]


def behind(
    items: Iterable[T], use: Callable[[T], S], writer: ThreadPoolExecutor, most: int = BEHIND
) -> Iterator[S]:
    """Use items in the thread of an executor, at most so many behind, and yield the results.

    If `use` fails, its error is raised, and items that still wait are not used. If `items` fails,
    those that wait are used.
    """
    waiting = deque[Future[S]]()
    for item in items:
        waiting.append(writer.submit(use, item))
        while waiting and (len(waiting) > most or waiting[0].done()):
            yield _first_result(waiting)
    while waiting:
        yield _first_result(waiting)


def _first_result(waiting: deque[Future[S]]) -> S:
    """Take the result of the first of some futures; cancel the others if it failed."""
    try:
        return waiting.popleft().result()
    except BaseException:
        for future in reversed(waiting):  # so that none is used without those before it
            future.cancel()
        raise


def _require_free_names(source: Source) -> None:
    taken = sorted({*KEYS, *ANSWERS} & set(source.carried.names))
    if taken:
        raise ScoringError(
            f"column {taken[0]!r} cannot be carried over, because the output has a column of this "
            "name: rename it"
        )


def _sha256(path: Path) -> str:
    if not path.is_file():
        raise ScoringError(f"there is no file {path}: check the path")
    total = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(2**20):
            total.update(piece)
    return total.hexdigest()
