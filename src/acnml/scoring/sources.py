"""Where rows come from: what all kinds of input have in common.

A source has files with a number of rows each. Rows are read block by block, in the order of the
files, so memory does not depend on the size of the input.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from glob import escape, glob, has_magic
from pathlib import Path, PurePath
from typing import TypeVar, final

import pyarrow as pa
from pyarrow import fs

from acnml.scoring.columns import Array
from acnml.scoring.job import Reading, is_uri
from acnml.scoring.models import ScoringError

P = TypeVar("P", bound=PurePath)

PARQUET = (".parquet", ".pq")

# Rows at the beginning of the input that show the shapes of inputs.
SHOWN = 256


@final
@dataclass(frozen=True, eq=False)
class Block:
    """Consecutive rows of one file of the input, n of them.

    Args:
        files: the name of the file of every row (n,).
        rows: the index of every row in its file (n,).
        carried: the columns to copy to the output (n rows each).
        inputs: arrays (m, ...) by name, for the rows that could be read.
        kept: which of the n rows these are (m,).
        reasons: why the others could not be read, by their index among the n rows.
    """

    files: pa.Array
    rows: Array
    carried: pa.Table
    inputs: dict[str, Array]
    kept: Array
    reasons: dict[int, str]


class Source(ABC):
    """The rows of an input."""

    lengths: tuple[int, ...]  # rows of every file
    carried: pa.Schema  # of the columns that are carried over

    @abstractmethod
    def identity(self) -> list[tuple[str, int, int]]:
        """Return name, size and time of change of every file."""

    @abstractmethod
    def blocks(self, file: int, start: int, stop: int, size: int) -> Iterator[Block]:
        """Yield rows `start` to `stop` of a file, in blocks of `size` rows and a shorter last one.

        Reading on where the last call stopped is fast. A source is used by one thread at a time.
        """

    @abstractmethod
    def stretch(self, file: int, row: int) -> int:
        """Return the last row up to `row` at which reading can begin without what is before it."""

    @abstractmethod
    def close(self) -> None:
        """Close the file that is being read, if any."""

    @final
    def fingerprint(self) -> str:
        """Return a hash of names, sizes and times of change of all files."""
        return hashlib.sha256(json.dumps(self.identity()).encode()).hexdigest()


def open_source(path: str, reading: Reading, output: str | None = None) -> Source:
    """Return the source for a file, a folder, a pattern or a URI, without files of the output."""
    from acnml.scoring.arrays import ArraySource
    from acnml.scoring.images import SUFFIXES as IMAGES
    from acnml.scoring.images import ImageSource
    from acnml.scoring.parquet import ParquetSource

    if is_uri(path):
        _refuse_image_settings(reading)
        return _open_remote(path, reading, output)
    root, found = files_of(path, output)
    suffixes = {file.suffix.lower() for file in found}
    if suffixes & set(PARQUET):
        _refuse_image_settings(reading)
        files = _only(found, PARQUET, path)
        return ParquetSource(fs.LocalFileSystem(), root, files, reading)
    for suffix in (".npy", ".npz"):
        if suffix in suffixes:
            _refuse_image_settings(reading)
            return ArraySource(root, _only(found, (suffix,), path), reading)
    if suffixes & set(IMAGES):
        return ImageSource(root, [file for file in found if file.suffix.lower() in IMAGES], reading)
    raise ScoringError(
        f"{path} has none of .parquet, .npy, .npz and images ({', '.join(IMAGES)}): check --input"
    )


def _refuse_image_settings(reading: Reading) -> None:
    plain = Reading()
    for name in ("transform", "image_size", "image_mode"):
        if getattr(reading, name) != getattr(plain, name):
            raise ScoringError(
                f"`{name}` (--{name.replace('_', '-')}) is for folders of images: leave it out, "
                "and convert rows beforehand"
            )


def _open_remote(uri: str, reading: Reading, output: str | None) -> Source:
    """Return the source for Parquet files that Arrow reads from another file system."""
    from acnml.scoring.parquet import ParquetSource
    from acnml.scoring.remote import remote_files

    system, root, found = remote_files(uri)
    if isinstance(system, fs.LocalFileSystem):
        found = _outside(root, found, output)
    visible = _visible(root, found)
    parquet = [file for file in visible if file.suffix.lower() in PARQUET]
    if not parquet:
        raise ScoringError(
            f"{uri} has no Parquet files, and nothing else is read from a URI: convert the files "
            "to Parquet, or copy them to a local folder"
        )
    return ParquetSource(system, root, _only(visible, PARQUET, uri), reading)


def files_of(path: str, output: str | None = None) -> tuple[Path, list[Path]]:
    """Return the folder that names are relative to, and all files in the order of their names.

    Files and folders whose names begin with a dot or an underscore are left out, as usual, and so
    is an output folder inside of the input. A path that exists is not a pattern, even if it has the
    characters of one.
    """
    if Path(path).is_dir():
        root = Path(path)
        found = list(root.rglob("*"))
    elif Path(path).is_file():
        root, found = Path(path).parent, [Path(path)]
    elif has_magic(path):
        found = [Path(name) for name in glob(path, recursive=True)]  # noqa: PTH207
        root = Path(path.split("*")[0].split("?")[0].split("[")[0] + "x").parent
    else:
        raise ScoringError(f"there is no file or folder {path}: check --input")
    files = _visible(root, _outside(root, [file for file in found if file.is_file()], output))
    if not files:
        raise ScoringError(f"{path} has no files: check --input")
    return root, files


def _outside(root: P, files: list[P], output: str | None) -> list[P]:
    """Return the files that are not below an output folder inside of the root.

    A run that goes on would take its own parts for inputs. If the root itself is in the output
    folder, nothing is left out: that folder has other files, so the run is refused.
    """
    if output is None:
        return files
    folder = Path(output).resolve()
    if Path(root).resolve().is_relative_to(folder):
        return files
    # Folders are resolved, and not files, because there may be millions of these.
    outside = {
        parent: not Path(parent).resolve().is_relative_to(folder)
        for parent in {file.parent for file in files}
    }
    return [file for file in files if outside[file.parent]]


def _visible(root: P, files: list[P]) -> list[P]:
    """Return the files that are not hidden, in the order of their names."""
    named = [(file.relative_to(root), file) for file in files]
    hidden = (".", "_")
    visible = [pair for pair in named if not any(p.startswith(hidden) for p in pair[0].parts)]
    return [file for _, file in sorted(visible, key=lambda pair: pair[0].as_posix())]


def _only(files: Sequence[P], suffixes: tuple[str, ...], path: str) -> list[P]:
    """Return all files, or raise an error if some are of another kind that would be left out."""
    others = [file for file in files if file.suffix.lower() not in suffixes]
    if others:
        folder = escape(path) if Path(path).exists() else path
        example = f"for example --input '{Path(folder) / f'*{suffixes[0]}'}'"
        remedy = "move the others away" if is_uri(path) else f"name the ones to score, {example}"
        raise ScoringError(
            f"{path} has {suffixes[0]} files and others, such as {others[0].name}: {remedy}"
        )
    return list(files)


def identity_of(root: Path, files: list[Path]) -> list[tuple[str, int, int]]:
    """Return the name, size and time of change of files."""
    found = [(file.relative_to(root).as_posix(), file.stat()) for file in files]
    return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in found]
