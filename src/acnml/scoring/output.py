"""The folder with the results: parts that are complete or absent, and a manifest.

    scored/part-00000000.parquet     the answers for the rows of a part, in their order
    scored/_rejects/part-….parquet   rows of the part without an answer, with the reason; if any
    scored/_sums/part-….sha256       hashes of the two: cd scored && sha256sum -c _sums/*
    scored/_manifest.json            settings, hashes of the files, and counts

Every file is written atomically, and a part after its rejects and its hashes. So a part that exists
is complete, and damage is noticed. Readers of Parquet folders leave out names that begin with an
underscore.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from acnml._util import files
from acnml.scoring.files import Files
from acnml.scoring.job import COLUMNS, REJECT, ScoringError
from acnml.scoring.sources import Part

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

MANIFEST, REJECTS, SUMS = "_manifest.json", "_rejects", "_sums"
FORMAT = 3

COUNTS = b"acnml.counts"  # the key of a part's counts in its metadata
AGAIN = "check that nothing changes the files, and run the same command again"


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
        files: of the input.
        skipped: files whose names, or whose folders' names, begin with a dot or an underscore.
        found: parts that were complete before this run.

    >>> Summary(rows=9, scored=8, rejected={"": 1}, unsolved=0, abstained=2, parts=1).n_rejected
    1
    """

    rows: int
    scored: int
    rejected: dict[str, int]
    unsolved: int
    abstained: int
    parts: int
    files: int = 0
    skipped: int = 0
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
        """Make the folder, or check that it is one of the same job, and hold it during a run.

        A folder without results is not tied to its job.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        with _held(self.path):
            before = self._manifest()
            # A run that ended before it wrote a manifest may have left a draft of it.
            if not before and {*self.path.iterdir()} - {*self.path.glob(".*.tmp")}:
                raise ScoringError(
                    f"{self.path} is not empty, and not a folder of `acnml predict`: choose another"
                )
            different = _differences(before, identity)
            results = [*self.path.glob("part-*"), *self.path.glob(f"{REJECTS}/part-*")]
            if different and results:
                raise ScoringError(
                    f"{self.path} has results of another job: it had other {different}. Choose "
                    "another output folder, or run with the same settings and files"
                )
            if different:
                self.write_manifest(identity)
            for folder in (self.path, self.path / REJECTS, self.path / SUMS):
                folder.mkdir(exist_ok=True)
                files.remove_drafts(folder)
            yield

    def has(self, part: Part) -> bool:
        """Whether a part is there."""
        return (self.path / part.name).exists()

    def write(self, part: Part, table: pa.Table) -> None:
        """Write a part: its rejects, the hashes of both, and then its answers."""
        if len(table) != part.rows:
            raise ScoringError(f"the input does not have all rows of part {part.number}: {AGAIN}")
        answers = table.filter(pc.is_null(table[REJECT])).drop_columns([REJECT])
        rejects = table.filter(pc.is_valid(table[REJECT])).drop_columns(
            [name for name in COLUMNS if name in table.column_names]
        )
        counts = json.dumps(_counts(answers, rejects), sort_keys=True)
        contents = {part.name: _parquet(answers.replace_schema_metadata({COUNTS: counts}))}
        if len(rejects):
            contents[f"{REJECTS}/{part.name}"] = _parquet(rejects)
        sums = _lines({name: hashlib.sha256(c).hexdigest() for name, c in contents.items()})
        contents[f"{SUMS}/{part.name}.sha256"] = sums
        for name in sorted(contents):  # names with an underscore come first
            files.write_file(self.path / name, contents[name])

    def counts(self, part: Part) -> dict[str, Any]:
        """Return the counts of a part, and check that the part is undamaged and has its rows."""
        path, sums = self.path / part.name, self.path / SUMS / f"{part.name}.sha256"
        if not path.exists():
            raise ScoringError(f"{path} is missing: run the same command again, without --verify")
        names = [part.name, f"{REJECTS}/{part.name}"]
        found = _lines({n: sha256(self.path / n) for n in names if (self.path / n).exists()})
        if not sums.exists() or sums.read_bytes() != found:
            raise ScoringError(
                f"{path} or its rejects are damaged, because their hashes differ from those in "
                f"{sums}: remove {path.name}, and run the same command again"
            )
        counts = json.loads(pq.read_schema(path).metadata[COUNTS])
        if counts["scored"] + sum(counts["rejected"].values()) != part.rows:
            raise ScoringError(f"{path} does not have the rows of its part: {AGAIN}")
        return dict(counts)

    def require_complete(self, identity: dict[str, Any], summary: Summary) -> None:
        """Raise an error unless the folder is that of a complete run of a job with these counts."""
        path, expected = self.path / MANIFEST, _manifest_of(identity, summary)
        if not path.exists() or path.read_bytes() != _text(expected):
            different = _differences(self._manifest(), expected) or "bytes"
            raise ScoringError(f"{path} has other {different}: {AGAIN}")
        if len([*self.path.glob("*.parquet")]) != summary.parts:
            raise ScoringError(f"{self.path} has more Parquet files than its parts: remove them")

    def require_input(self, fingerprint: str) -> None:
        """Raise an error if the input is another one than when the run began."""
        if self._manifest().get("input") != fingerprint:
            raise ScoringError(f"the input changed after the run had begun: {AGAIN}")

    def _manifest(self) -> dict[str, Any]:
        path = self.path / MANIFEST
        try:
            return dict(json.loads(path.read_text())) if path.exists() else {}
        except (OSError, ValueError) as error:
            raise ScoringError(f"{path} cannot be read ({error}): choose another folder") from error

    def write_manifest(self, identity: dict[str, Any], summary: Summary | None = None) -> None:
        """Write the manifest of a run that has begun, or that is complete with these counts."""
        files.write_file(self.path / MANIFEST, _text(_manifest_of(identity, summary)))


def summary_of(counts: Sequence[dict[str, Any]], inputs: Files) -> Summary:
    """Return the sums of the counts of parts."""
    total = {n: sum(one[n] for one in counts) for n in ("scored", "unsolved", "abstained")}
    reasons = sorted(sum((Counter(one["rejected"]) for one in counts), Counter[str]()).items())
    rows, seen = total["scored"] + sum(count for _, count in reasons), len(inputs.paths)
    return Summary(
        rows,
        rejected=dict(reasons),
        parts=len(counts),
        files=seen,
        skipped=inputs.skipped,
        **total,
    )


def sha256(path: str | Path | None) -> str | None:
    """Return the hash of a file; None for None."""
    return None if path is None else hashlib.sha256(Path(path).read_bytes()).hexdigest()


def _counts(answers: pa.Table, rejects: pa.Table) -> dict[str, Any]:
    """Count the rows of a part."""
    true = {n: sum(answers[n].to_pylist()) for n in {"solved", "abstain"} & {*answers.column_names}}
    return {
        "scored": len(answers),
        "unsolved": len(answers) - true.get("solved", len(answers)),
        "abstained": true.get("abstain", 0),
        "rejected": Counter(rejects[REJECT].to_pylist()),
    }


def _lines(sums: Mapping[str, str | None]) -> bytes:
    """Return hashes as `sha256sum` writes them."""
    return "".join(f"{total}  {name}\n" for name, total in sums.items()).encode()


def _parquet(table: pa.Table) -> bytes:
    content = io.BytesIO()
    pq.write_table(table, content, compression="zstd")
    return content.getvalue()


def _manifest_of(identity: dict[str, Any], summary: Summary | None) -> dict[str, Any]:
    """Return the manifest of a run that has begun, or that is complete with these counts."""
    if summary is None:
        return {**identity, "status": "running"}
    counts = {name: value for name, value in vars(summary).items() if name != "found"}
    return {**identity, "status": "complete", "counts": counts}


def _text(manifest: dict[str, Any]) -> bytes:
    return (json.dumps(manifest, indent=1, sort_keys=True) + "\n").encode()


def _differences(before: dict[str, Any], identity: dict[str, Any]) -> str:
    """Name the settings and files in which a manifest differs from a job."""
    old, new = ({**each, **each.get("settings", {})} for each in (before, identity))
    plain = json.loads(json.dumps(new))
    names = [name for name in new if name != "settings" and old.get(name) != plain[name]]
    words = {"model_code": "code of the model", "transform_code": "code of the transform"}
    return ", ".join(words.get(name, name) for name in names)


@contextmanager
def _held(folder: Path) -> Iterator[None]:
    """Let no other run use a folder. The system releases it when the process ends, however it ends.

    Windows and some network disks have no locks on folders. There, nothing is held.
    """
    with ExitStack() as stack:
        if fcntl is not None:
            file = os.open(folder, os.O_RDONLY)
            stack.callback(os.close, file)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ScoringError(f"another run uses {folder}: wait, or choose another") from error
            except OSError:  # a disk without locks
                pass
        yield
