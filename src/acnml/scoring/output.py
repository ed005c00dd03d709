"""The folder with the results: parts that are complete or absent, and a manifest.

    scored/part-00000000.parquet   the answers for the rows of a part, in their order
    scored/_rejects/part-….parquet rows of the part without an answer, with the reason; if any
    scored/_manifest.json          settings, hashes of the files, and counts

A part is written after its rejects, and both atomically. So a part that exists is complete. Readers
of Parquet folders leave out names that begin with an underscore.
"""

from __future__ import annotations

import inspect
import json
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from acnml._util import files
from acnml.scoring import locks
from acnml.scoring.columns import Array
from acnml.scoring.models import ScoringError
from acnml.scoring.scorer import Scored
from acnml.scoring.sources import Block

MANIFEST, REJECTS = "_manifest.json", "_rejects"
FORMAT = 2  # format 1 does not say which code the parts were made with
COUNTS, PART = b"acnml.counts", b"acnml.part"  # keys of a part's counts and number in its metadata

# Columns of every part, before those that are carried over and the answers.
KEYS = ("file", "row")
ANSWERS = ("label", "confidence", "regret", "solved", "abstain", "log_probs")

# Answers are written as a row group when they have this many bytes.
GROUP_BYTES = 32 * 2**20


@final
@dataclass(frozen=True)
class Summary:
    """How many rows were scored and rejected, and why.

    Args:
        rows: of the input.
        scored: rows with an answer.
        rejected: rows without an answer, by the reason.
        unsolved: scored rows for which the solver did not reach an optimum.
        abstained: scored rows that the predictor should not answer.
        parts: of the output.
        found: parts that were complete before this run.

    >>> from acnml.scoring import Summary
    >>> nan = {"NaN": 1}
    >>> Summary(rows=9, scored=8, rejected=nan, unsolved=0, abstained=2, parts=1).n_rejected
    1
    """

    rows: int
    scored: int
    rejected: dict[str, int]
    unsolved: int
    abstained: int
    parts: int
    found: int = field(default=0, compare=False)

    @property
    def n_rejected(self) -> int:
        """The number of rows without an answer."""
        return sum(self.rejected.values())


@final
@dataclass(frozen=True)
class Folder:
    """The folder of a job."""

    path: Path

    @contextmanager
    def begun(self, identity: dict[str, Any]) -> Iterator[None]:
        """Make the folder, or check that it is one of the same job, and hold it during a run."""
        self.path.mkdir(parents=True, exist_ok=True)
        with ExitStack() as run:
            with locks.one_at_a_time(self.path):
                self._begin(identity)
                run.enter_context(locks.in_use(self.path / REJECTS))
            yield

    def _begin(self, identity: dict[str, Any]) -> None:
        is_new = not (self.path / MANIFEST).exists()
        if is_new and not all(map(_is_of_beginning, self.path.iterdir())):
            raise ScoringError(
                f"{self.path} is not empty, and not a folder of `acnml predict`: choose another"
            )
        (self.path / REJECTS).mkdir(exist_ok=True)
        is_taken_over = not is_new and self._is_of_another_job(identity)
        for folder in (self.path, self.path / REJECTS):
            files.remove_abandoned(folder)
        if is_new or is_taken_over:
            self._write_manifest({**identity, "status": "running"})

    def part(self, index: int) -> Path:
        """Return the path of a part."""
        return self.path / f"part-{index:08d}.parquet"

    def rejects(self, index: int) -> Path:
        """Return the path of the rejects of a part."""
        return self.path / REJECTS / self.part(index).name

    def counts(self, index: int, rows: int) -> dict[str, Any]:
        """Return the counts of a part, and check that the part has its own rows, all of them."""
        path = self.part(index)
        again = "remove it, and run the same command again"
        try:
            metadata = pq.read_metadata(path).metadata or {}
        except (pa.ArrowException, OSError) as error:
            raise ScoringError(f"{path} is damaged ({error}): {again}") from error
        counts = json.loads(metadata.get(COUNTS, b"{}"))
        if (
            metadata.get(PART) != _number(index)
            or counts["scored"] + sum(counts["rejected"].values()) != rows
        ):
            raise ScoringError(f"{path} does not have the rows of its part: {again}")
        return dict(counts)

    def finish(self, identity: dict[str, Any], parts: Sequence[Mapping[str, Any]]) -> Summary:
        """Write the counts of all parts into the manifest, and return their sums."""
        total, rejected = Counter[str](), Counter[str]()
        for counts in parts:
            rejected.update(counts["rejected"])
            total.update({name: n for name, n in counts.items() if name != "rejected"})
        reasons, rows = dict(sorted(rejected.items())), total["scored"] + rejected.total()
        summary = Summary(
            rows, total["scored"], reasons, total["unsolved"], total["abstained"], len(parts)
        )
        counts = {k: v for k, v in vars(summary).items() if k != "found"}
        self._write_manifest({**identity, "status": "complete", "counts": counts})
        return summary

    def _is_of_another_job(self, identity: dict[str, Any]) -> bool:
        """Compare the manifest; raise an error if it is of another job that has results or runs."""
        path = self.path / MANIFEST
        try:
            before = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise ScoringError(f"{path} cannot be read ({error}): choose another folder") from error
        different = _differences(before, identity)
        # In this order, because a run that ends in between may have written a part.
        is_unused = locks.is_unused(self.path / REJECTS)
        if different and self._has_results():
            raise ScoringError(
                f"{self.path} has results of another job: {different}. Choose another output "
                "folder, or run with the same settings and files"
            )
        if different and not is_unused:
            raise ScoringError(
                f"{self.path} is of another job, which may be running: {different}. Choose another "
                "output folder, or remove this one if nothing uses it; it has no results yet"
            )
        return bool(different)

    def _has_results(self) -> bool:
        found = (folder.glob("part-*") for folder in (self.path, self.path / REJECTS))
        return any(any(parts) for parts in found)

    def _write_manifest(self, content: dict[str, Any]) -> None:
        text = json.dumps(content, indent=1, sort_keys=True) + "\n"
        files.write_file(self.path / MANIFEST, text.encode())


@final
class PartWriter:
    """Collects the answers for a part and writes them, in row groups of bounded size.

    Args:
        folder: of the job.
        index: of the part.
        rows: of the part.
        carried: types of the columns that are carried over.
        answers: types of the answers.
    """

    def __init__(
        self, folder: Folder, index: int, rows: int, carried: pa.Schema, answers: pa.Schema
    ) -> None:
        keys = pa.schema([("file", pa.string()), ("row", pa.int64())])
        self._folder, self._index, self._missing = folder, index, rows
        self._schema = pa.schema([*keys, *carried, *answers])
        self._reject_schema = pa.schema([*keys, *carried, pa.field("reason", pa.string())])
        self._rejects: list[pa.Table] = []
        self._counts = Counter[str](scored=0, unsolved=0, abstained=0)
        self._reasons = Counter[str]()
        self._steps = self._written()
        next(self._steps)

    def add(self, block: Block, scored: Scored) -> bool:
        """Add the next rows; return whether they were the last, and the part is in its place."""
        # A generator that has failed ends in the same way as one that has finished.
        if inspect.getgeneratorstate(self._steps) == inspect.GEN_CLOSED:
            raise RuntimeError(f"part {self._index} is complete or abandoned, and takes no rows")
        try:
            self._steps.send((block, scored))
        except StopIteration:
            return True
        return False

    def abandon(self) -> None:
        """Remove what is written of the part, unless it is complete."""
        self._steps.close()

    def _written(self) -> Generator[None, tuple[Block, Scored], None]:
        """Write the blocks that are sent, until the part is complete.

        Closing this generator earlier raises an exception inside of `drafted`, so a part that is
        abandoned never gets to its place.
        """
        group = list[pa.Table]()
        with files.drafted(self._folder.part(self._index)) as file:
            with pq.ParquetWriter(file, self._schema, compression="zstd") as writer:
                while self._missing:
                    block, scored = yield
                    self._missing -= len(block.rows)
                    group.append(self._answers(block, scored))
                    self._reject(block, scored)
                    if sum(table.nbytes for table in group) > GROUP_BYTES:
                        writer.write_table(pa.concat_tables(group))
                        group = []
                writer.write_table(pa.concat_tables(group or [self._schema.empty_table()]))
                counts = {**self._counts, "rejected": self._reasons}
                writer.add_key_value_metadata(
                    {COUNTS: json.dumps(counts, sort_keys=True), PART: _number(self._index)}
                )
            # Before the part itself is in its place, so that a part never lacks its rejects.
            if self._rejects:
                self._write_rejects()

    def _write_rejects(self) -> None:
        with files.drafted(self._folder.rejects(self._index)) as file:
            pq.write_table(pa.concat_tables(self._rejects), file, compression="zstd")

    def _answers(self, block: Block, scored: Scored) -> pa.Table:
        kept = block.kept[scored.kept]
        table = _keys(block, kept)
        self._counts["scored"] += len(kept)
        for name in self._schema.names[table.num_columns :]:
            kind = self._schema.field(name).type
            column = scored.columns.get(name)
            table = table.append_column(name, _arrow(column, kind))
        if len(kept):
            self._counts["unsolved"] += int((~scored.columns.get("solved", _TRUE)).sum())
            self._counts["abstained"] += int(scored.columns.get("abstain", ~_TRUE).sum())
        return table.cast(self._schema)

    def _reject(self, block: Block, scored: Scored) -> None:
        reasons = block.reasons | {
            int(block.kept[row]): reason for row, reason in scored.reasons.items()
        }
        if not reasons:
            return
        rows = np.array(sorted(reasons))
        texts = [reasons[row] for row in rows.tolist()]
        self._reasons.update(texts)
        table = _keys(block, rows).append_column("reason", pa.array(texts, pa.string()))
        self._rejects.append(table.cast(self._reject_schema))


_TRUE = np.ones((), dtype=bool)


def _differences(before: dict[str, Any], identity: dict[str, Any]) -> str:
    """Say in which settings and files a manifest differs from a job, if in any."""
    if before.get("format") != FORMAT:
        return (
            f"another version of acnml began it (format {before.get('format')} instead of "
            f"{FORMAT}), so nothing says that the code is the same"
        )
    old, new = ({**each, **each.get("settings", {})} for each in (before, identity))
    plain = json.loads(json.dumps(new))
    names = [name for name in new if name != "settings" and old.get(name) != plain[name]]
    words = {"model_code": "code of the model", "transform_code": "code of the transform"}
    return f"it had other {', '.join(words.get(name, name) for name in names)}" if names else ""


def _number(index: int) -> bytes:
    return str(index).encode()


def answer_fields(columns: dict[str, Array]) -> pa.Schema:
    """Return the types of answers such as these."""
    kinds = {name: pa.from_numpy_dtype(array.dtype) for name, array in columns.items()}
    if "log_probs" in columns:
        kinds["log_probs"] = pa.list_(kinds["log_probs"], columns["log_probs"].shape[1])
    return pa.schema([(name, kinds[name]) for name in ANSWERS if name in kinds])


def arrow_columns(
    fields: pa.Schema, columns: dict[str, Array], rows: Array, size: int
) -> dict[str, pa.Array]:
    """Return answers for some rows of `size` rows, with null for the other rows."""
    place = np.full(size, -1)
    place[rows] = np.arange(len(rows))
    index = pa.array(place, mask=place < 0)
    return {field.name: _arrow(columns.get(field.name), field.type).take(index) for field in fields}


def _keys(block: Block, rows: Array) -> pa.Table:
    """Return where rows are from, and the columns that are carried over."""
    carried = dict(zip(block.carried.column_names, block.carried.columns, strict=True))
    table = pa.table({"file": block.files, "row": block.rows, **carried})
    return table if len(rows) == len(table) else table.take(pa.array(rows))


def _arrow(values: Array | None, kind: pa.DataType) -> pa.Array:
    if values is None:
        return pa.array([], kind)
    if values.ndim == 1:
        return pa.array(values)
    flat = pa.array(np.ascontiguousarray(values).reshape(-1))
    return pa.FixedSizeListArray.from_arrays(flat, values.shape[1])


def _is_of_beginning(file: Path) -> bool:
    """Whether a run that ended before it wrote a manifest may have left this."""
    if file.name == REJECTS:
        return file.is_dir() and not any(file.iterdir())
    return file.name.startswith(".") and file.suffix == ".tmp"
