"""The files of an input: none is left out unnoticed, and none changes while it is read.

Every file below a folder, also through links, is part of the input, is skipped because its name
begins with a dot or an underscore (and is counted), or ends the run with an error: a link to
nothing, a folder that may not be listed, a pipe. That is also so for patterns, which `Path.glob`
would not do: it skips linked folders and those that may not be listed.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from glob import has_magic
from itertools import takewhile
from pathlib import Path, PurePath, PurePosixPath
from typing import TypeAlias, final

import pyarrow as pa
from pyarrow import fs

from acnml.scoring.job import ScoringError, is_uri

# Size and time of change in ns; some remote files have no time.
Stamp: TypeAlias = tuple[int, int]


@final
@dataclass(frozen=True)
class Files:
    """The files of an input, in the order of their names.

    Args:
        system: that they are on.
        root: the folder that their names are relative to.
        paths: of the files.
        stamps: of the files, when they were found.
        skipped: how many files were skipped because of their names.
    """

    system: fs.FileSystem
    root: PurePath
    paths: Sequence[PurePath]
    stamps: Sequence[Stamp | None]
    skipped: int

    @property
    def is_local(self) -> bool:
        """Whether they are on a disk of this machine."""
        return isinstance(self.system, fs.LocalFileSystem)

    def name(self, index: int) -> str:
        """Return the name of a file in the output."""
        return self.paths[index].relative_to(self.root).as_posix()

    def fingerprint(self) -> str:
        """Return a hash of names, sizes and times of change of all files."""
        known = [(self.name(i), *(stamp or ())) for i, stamp in enumerate(self.stamps)]
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
    """Return the files that a path, a pattern or a URI names, except those below the output."""
    system, name = _place(path)
    is_local = isinstance(system, fs.LocalFileSystem)
    root, found = _local_files(Path(name)) if is_local else _remote_files(system, name)
    own = Path(output).resolve() if output and is_local else None

    @cache
    def is_output(folder: PurePath) -> bool:
        return own is not None and Path(folder).resolve().is_relative_to(own)

    seen = [path for path in {*found} if is_output(root) or not is_output(path.parent)]
    # What is named itself is meant, whatever its name.
    paths = [p for p in seen if p == type(p)(name) or not _is_hidden(p.relative_to(root))]
    paths.sort(key=lambda file: file.relative_to(root).as_posix())
    if not paths:
        raise ScoringError(f"there are no files of {path}: check --input")
    stamps = _stamps(system, paths)
    if None in stamps:
        raise ScoringError(
            f"{paths[stamps.index(None)]} is a link to nothing, or not a file: remove it, or name "
            "the files to score by a pattern"
        )
    return Files(system, root, paths, stamps, len(seen) - len(paths))


def _is_hidden(path: PurePath) -> bool:
    return any(part.startswith((".", "_")) for part in path.parts)


def _stamps(system: fs.FileSystem, paths: Sequence[PurePath]) -> list[Stamp | None]:
    """Return the stamps of files; None for what is not a file."""
    infos = system.get_file_info([str(path) for path in paths])
    return [(info.size or 0, info.mtime_ns or 0) if info.is_file else None for info in infos]


def _place(path: str) -> tuple[fs.FileSystem, str]:
    """Return a file system and a path on it."""
    if not is_uri(path):
        return fs.LocalFileSystem(), path
    try:
        system, name = fs.FileSystem.from_uri(path)
        system.get_file_info(name)
    except (OSError, pa.ArrowException) as error:
        text = f"{path} cannot be read: check the URI and the credentials"
        raise ScoringError(f"{text} ({str(error).splitlines()[0]})") from error
    return system, name


def _local_files(path: Path) -> tuple[Path, list[Path]]:
    """Return the folder that names are relative to, and the files that a path or pattern names.

    A path that exists is not a pattern, even if it has the characters of one.
    """
    if path.is_dir():
        return path, _below(path)
    if path.exists():
        return path.parent, [path]
    root = Path(*takewhile(lambda part: not has_magic(part), path.parts))
    if root == path:
        return root, []
    matches = _matches(root, path.relative_to(root).parts)
    return root, [file for m in matches for file in (_below(m) if m.is_dir() else [m])]


def _matches(root: Path, pattern: Sequence[str]) -> list[Path]:
    """Return the files and folders below a folder that a pattern names, part by part."""
    found = [root]
    for part in pattern:
        walks = [_walk(folder) for folder in found if folder.is_dir()]
        if part == "**":
            found = [here for walk in walks for here, _, _ in walk]
        else:
            listed = [(here, folders + files) for here, folders, files in map(next, walks)]
            found = [here / name for here, names in listed for name in fnmatch.filter(names, part)]
    return found


def _below(folder: Path) -> list[Path]:
    """Return all files in a folder and the folders below it."""
    return [here / name for here, _, files in _walk(folder) for name in files]


def _walk(folder: Path) -> Iterator[tuple[Path, list[str], list[str]]]:
    """Yield a folder and all below it, with the names of the folders and the files in them."""

    def refuse(error: OSError) -> None:
        raise ScoringError(
            f"{error.filename} cannot be read ({error.strerror}), so its files would be left out: "
            "make it readable, or name the files by a pattern"
        ) from error

    for place, folders, files in os.walk(folder, onerror=refuse, followlinks=True):
        here = Path(place)
        if here.is_symlink() and here.resolve() in map(Path.resolve, here.parents):
            raise ScoringError(f"{here} is a link to a folder that it is in: remove it")
        yield here, folders, files


def _remote_files(system: fs.FileSystem, name: str) -> tuple[PurePath, list[PurePath]]:
    """Return the same for another file system, which has no patterns."""
    root = PurePosixPath(name)
    if system.get_file_info(name).is_file:
        return root.parent, [root]
    infos = system.get_file_info(fs.FileSelector(name, allow_not_found=True, recursive=True))
    return root, [PurePosixPath(info.path) for info in infos if info.is_file]
