"""Run a job: cut the input into parts, let an engine score those that are missing, and count."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain, groupby
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, final

import pyarrow as pa
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import nn

import acnml
from acnml._util.messages import track
from acnml.classifier import Classifier
from acnml.predictors import Predictor
from acnml.scoring.columns import require_free_names
from acnml.scoring.functions import file_of, load_function
from acnml.scoring.inputs import open_source
from acnml.scoring.job import COLUMNS, REJECT, Job, ScoringError
from acnml.scoring.output import FORMAT, Folder, Summary, sha256, summary_of
from acnml.scoring.scorer import Scorer, beside
from acnml.scoring.sources import Part, Source, Unit
from acnml.storage import load

T = TypeVar("T")

# Scores all units of a job, and yields the number of rows of every part that is done.
Engine: TypeAlias = Callable[[Job, Sequence[Unit]], Iterator[int]]


def locally(job: Job, units: Sequence[Unit]) -> Iterator[int]:
    """Score in this process: the engine of `score` unless another is given."""
    before = torch.get_num_threads()
    torch.set_num_threads(job.threads)
    try:
        yield from Worker(job).run(units)
    finally:
        torch.set_num_threads(before)


def score(job: Job, engine: Engine = locally, progress: bool | None = None) -> Summary:
    """Score all rows of a job that are not scored yet, and return the counts of all rows.

    Args:
        job: what to score, and how.
        engine: who computes; by default this process. `acnml.ray.Cluster` is another engine.
        progress: whether to show a bar over the parts; None shows it in a terminal, and logs lines
            elsewhere.

    >>> import tempfile
    >>> from acnml.scoring import Job, score
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     model, x, out = f"{folder}/map", f"{folder}/x.npy", f"{folder}/out"
    ...     acnml.save(acnml.Map(acnml.Classifier(torch.nn.Identity())), model)
    ...     np.save(x, np.zeros((100, 3), "float32"))  # logits, as the network returns them
    ...     score(Job("torch.nn:Identity", model, x, out)).scored
    100
    """
    source, folder, identity = _opened(job)
    require_free_names(source.carried, ["file", "row", *COLUMNS, REJECT])
    with folder.begun(identity):
        parts = [*source.parts(job.part_rows)]
        missing = [part for part in parts if not folder.has(part)]
        # Those that are there are checked first, so that a damaged one is named at once.
        counts = {part: folder.counts(part) for part in set(parts) - set(missing)}
        if missing:
            done = engine(job, source.units(missing))
            for _ in track(done, "parts", progress, total=len(missing)):
                pass
        counts |= {part: folder.counts(part) for part in missing}
        summary = summary_of([counts[part] for part in parts], source.files)
        folder.write_manifest(identity, summary)
    return dataclasses.replace(summary, found=len(parts) - len(missing))


def verify(job: Job) -> Summary:
    """Check that a job is complete and none of its results is damaged; compute and write nothing.

    >>> verify(Job("network.py:build", "calibrated.safetensors", "x.parquet", "scored")).scored
    ... # doctest: +SKIP
    1000
    """
    source, folder, identity = _opened(job)
    counts = [folder.counts(part) for part in source.parts(job.part_rows)]
    summary = summary_of(counts, source.files)
    folder.require_complete(identity, summary)
    return dataclasses.replace(summary, found=len(counts))


def _opened(job: Job) -> tuple[Source, Folder, dict[str, Any]]:
    """Return the input and the output of a job, and all that must be the same when it goes on."""
    source = open_source(job.input, job.reading, job.output)
    transform = job.reading.transform
    identity = {
        "format": FORMAT,
        "acnml": acnml.__version__,
        "settings": job.settings(),
        "input": source.files.fingerprint(),
        "predictor": sha256(job.predictor),
        "weights": sha256(job.weights),
        "model_code": sha256(file_of(job.model, "--model")),
        "transform_code": sha256(transform and file_of(transform, "--transform")),
    }
    return source, Folder(Path(job.output)), identity


def load_predictor(job: Job) -> Predictor:
    """Return the predictor of a job on its device."""
    built = load_function(job.model, "--model")()
    model = built.model if isinstance(built, Classifier) else built
    if not isinstance(model, nn.Module):
        kind = type(built).__name__
        raise ScoringError(f"{job.model} must return an nn.Module or a Classifier, got a {kind}")
    try:
        if job.weights is not None:
            safetensors.torch.load_model(model, job.weights)
        model.to(job.device)
    except (SafetensorError, RuntimeError, AssertionError) as error:
        raise ScoringError(f"check --weights and --device: {error}") from error
    return load(job.predictor, built if isinstance(built, Classifier) else Classifier(model))


@final
class Worker:
    """Scores parts of a job whose folder is there; an engine creates one in every process."""

    def __init__(self, job: Job) -> None:
        self._job, self._folder = job, Folder(Path(job.output))
        self._source = open_source(job.input, job.reading, job.output)
        self._folder.require_input(self._source.files.fingerprint())
        self._scorer = Scorer(load_predictor(job), job.answers)

    def run(self, units: Iterable[Unit]) -> Iterator[int]:
        """Score parts and write them, unless they are there already; yield numbers of rows.

        One thread reads the next block, and another writes the last part, while this one computes.
        A part is written when all its rows are scored, so one that fails leaves nothing.
        """
        parts = [part for unit in units for part in unit]
        there = {part for part in parts if self._folder.has(part)}  # of a worker that was lost
        yield from (part.rows for part in there)
        missing = self._source.units(part for part in parts if part not in there)
        written: Future[int] | None = None
        with ThreadPoolExecutor(1) as reader, ThreadPoolExecutor(1) as writer:
            read = (self._source.blocks(unit, self._job.batch_rows) for unit in missing)
            blocks = ahead(chain.from_iterable(read), reader)
            for part, own in groupby(blocks, lambda pair: pair[0]):
                tables = [beside(block.keys, self._scorer(block.read)) for _, block in own]
                if written is not None:
                    yield written.result()
                written = writer.submit(self._write, part, tables)
            if written is not None:
                yield written.result()

    def _write(self, part: Part, tables: Sequence[pa.Table]) -> int:
        self._folder.write(part, pa.concat_tables(tables))
        return part.rows


def ahead(items: Iterator[T], reader: ThreadPoolExecutor) -> Iterator[T]:
    """Iterate one item ahead, in the thread of an executor."""
    end = object()
    following = reader.submit(next, items, end)
    while (item := following.result()) is not end:
        following = reader.submit(next, items, end)
        yield item  # type: ignore[misc]
