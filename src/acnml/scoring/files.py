"""The files of an input: none is left out unnoticed, and none changes while it is read.

A walk visits everything below a folder, also through links. Every file is part of the input, is
skipped because its name begins with a dot or an underscore (and is counted), or ends the run with
an error: a link to nothing, a folder that may not be listed, a pipe.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from glob import has_magic
from itertools import takewhile
from pathlib import Path, PurePath, PurePosixPath
from typing import TypeAlias, final

import pyarrow as pa
from pyarrow import fs

from acnml.scoring.job import ScoringError, is_uri

HIDDEN = (".", "_")
EVERYTHING = ("**",)

# Size, time of change in ns, and inode. Remote files have no inode, and some have no time.
Stamp: TypeAlias = tuple[int, int, int]


@final
@dataclass(frozen=True)
class Files:
    """The files of an input, in the order of their names.

    Args:
        system: that they are on.
        root: the folder that their names are relative to.
        paths: of the files.
        stamps: of the files, when they were found.
        skipped: how many files and folders were skipped because of their names.
    """

    system: fs.FileSystem
    root: PurePath
    paths: tuple[PurePath, ...]
    stamps: tuple[Stamp | None, ...]
    skipped: int

    def name(self, index: int) -> str:
        """Return the name of a file in the output."""
        return self.paths[index].relative_to(self.root).as_posix()

    def fingerprint(self) -> str:
        """Return a hash of names, sizes and times of change of all files."""
        known = [(self.name(i), *(stamp or ())[:2]) for i, stamp in enumerate(self.stamps)]
        return hashlib.sha256(json.dumps(known).encode()).hexdigest()

    def require_unchanged(self, indices: Sequence[int]) -> None:
        """Raise an error if files are not those any more that were found."""
        now = _stamps(self.system, [self.paths[index] for index in indices])
        for index, stamp in zip(indices, now, strict=True):
            if stamp != self.stamps[index]:
                raise ScoringError(
                    f"{self.paths[index]} was changed, replaced or removed during the run: put it "
                    "back, or score the new file into another output folder"
                )


def find_files(path: str, output: str | None = None) -> Files:
    """Return the files that a path, a pattern or a URI names, except those below the output.

    A path that exists is not a pattern, even if it has the characters of one.
    """
    system, root, pattern = _place(path)
    walk = _Walk(None if output is None else Path(output))
    if not pattern:
        found: Iterable[PurePath] = [root]
        root = root.parent
    elif isinstance(system, fs.LocalFileSystem):
        found = set(walk.files(Path(root), pattern))
    else:
        found = walk.remote_files(system, root)
    paths = sorted(found, key=lambda file: file.relative_to(root).as_posix())
    if not paths:
        raise ScoringError(f"{path} has no files: check --input")
    return Files(system, root, tuple(paths), _stamps(system, paths), len(walk.skipped))


def _place(path: str) -> tuple[fs.FileSystem, PurePath, tuple[str, ...]]:
    """Return a file system, a file or folder on it, and a pattern of files below a folder."""
    missing = ScoringError(f"there is no file or folder {path}: check --input")
    if is_uri(path):
        if has_magic(path.partition("?")[0]):
            raise ScoringError(f"{path} is a pattern, which only local paths may be: name a folder")
        try:
            system, name = fs.FileSystem.from_uri(path)
            kind = system.get_file_info(name).type
        except (OSError, pa.ArrowException) as error:
            text = f"{path} cannot be read: check the URI and the credentials"
            raise ScoringError(f"{text} ({str(error).splitlines()[0]})") from error
        if kind == fs.FileType.NotFound:
            raise missing
        root = Path(name) if isinstance(system, fs.LocalFileSystem) else PurePosixPath(name)
        return system, root, () if kind == fs.FileType.File else EVERYTHING
    if Path(path).exists():
        return fs.LocalFileSystem(), Path(path), EVERYTHING if Path(path).is_dir() else ()
    parts = Path(path).parts
    fixed = [*takewhile(lambda part: not has_magic(part), parts)]
    if len(fixed) == len(parts) or not Path(*fixed).is_dir():
        raise missing
    return fs.LocalFileSystem(), Path(*fixed), parts[len(fixed) :]


@final
class _Walk:
    """Visits folders, and notes what it skips."""

    def __init__(self, output: Path | None) -> None:
        self.skipped: set[PurePath] = set()
        self._output = _inode(output) if output is not None and output.exists() else None

    def files(
        self, folder: Path, pattern: tuple[str, ...], above: tuple[tuple[int, int], ...] = ()
    ) -> Iterator[Path]:
        """Yield the files below a folder that a pattern names, part by part; ** is any folders.

        A folder that the last part names is taken whole.
        """
        head, rest = pattern[0], pattern[1:]
        if head == "**" and rest:
            yield from self.files(folder, rest, above)
        try:
            inode = _inode(folder)
            with os.scandir(folder) as entries:
                found = [(entry.name, entry.is_dir(), entry.is_file()) for entry in entries]
        except OSError as error:
            raise ScoringError(
                f"{error.filename or folder} cannot be read ({error.strerror}), so its files would "
                "be left out: make it readable, or name the files by a pattern"
            ) from error
        if inode in above:
            raise ScoringError(f"{folder} is a link to a folder that it is in: remove it")
        for name, is_folder, is_file in found:
            path = folder / name
            is_meant = (head == "**" or fnmatchcase(name, head)) and (is_folder or not rest)
            if not is_meant or (is_folder and _inode(path) == self._output):
                continue
            if name.startswith(HIDDEN) and not head.startswith(name[0]):
                self.skipped.add(path)
            elif is_folder:
                deeper = pattern if head == "**" else rest or EVERYTHING
                yield from self.files(path, deeper, (*above, inode))
            elif is_file:
                yield path
            else:
                raise ScoringError(
                    f"{path} is a link to nothing, or not a file: remove it, or name the files to "
                    "score by a pattern"
                )

    def remote_files(self, system: fs.FileSystem, root: PurePath) -> Iterator[PurePath]:
        """Yield all files below a folder of another file system."""
        for info in system.get_file_info(fs.FileSelector(str(root), recursive=True)):
            path = PurePosixPath(info.path)
            if info.type == fs.FileType.File:
                if any(part.startswith(HIDDEN) for part in path.relative_to(root).parts):
                    self.skipped.add(path)
                else:
                    yield path


def _inode(path: Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_dev, stat.st_ino


def _stamps(system: fs.FileSystem, paths: Sequence[PurePath]) -> tuple[Stamp | None, ...]:
    """Return the stamps of files, None for a file that is gone."""
    if isinstance(system, fs.LocalFileSystem):
        return tuple(_local_stamp(Path(path)) for path in paths)
    infos = system.get_file_info([str(path) for path in paths])
    return tuple((info.size or 0, info.mtime_ns or 0, 0) for info in infos)


def _local_stamp(path: Path) -> Stamp | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_size, stat.st_mtime_ns, stat.st_ino
