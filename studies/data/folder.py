"""The data folder: what of the catalogue lies in it, and whether it is what it should be.

Checksums are checked whenever a file is read, on the very bytes that are then used: nothing is
read twice, no stamp says that a file was whole last week, and a folder that cannot be written to
is as good as any. Hashing costs a fraction of unzipping. The one exception is CIFAR-10-C,
whose official arrays have no published checksum and are mapped into memory:
`corruptions/cifar10_c.py` checks their type and shape.
"""

from __future__ import annotations

import hashlib
import io
import os
from enum import Enum
from pathlib import Path
from typing import BinaryIO, NamedTuple, final

from studies.data.catalogue import DataFile, DataSet, Download

BLOCK = 2**20  # bytes read at a time


@final
class DataError(Exception):
    """A data file is missing, corrupt or out of reach; the message says what to do."""


@final
class State(Enum):
    """How much of a data set there is."""

    PRESENT = "present"
    INCOMPLETE = "incomplete"
    CORRUPT = "corrupt"
    ABSENT = "absent"


class Condition(NamedTuple):
    """What there is of a data set."""

    state: State
    folder: str  # where it lies, or would, below the data folder
    size: int  # bytes on the disk
    flaws: tuple[str, ...]  # what is wrong with it, a sentence per file


def data_folder() -> Path:
    """Return the data folder: `ACNML_DATA`, or `data` in the working directory."""
    return Path(os.environ.get("ACNML_DATA") or "data")


def locate(file: DataFile) -> tuple[Path, DataFile] | None:
    """Return where a file lies, and in which of its forms; None if nowhere."""
    for form in (file, *file.alternatives):
        path = data_folder() / form.path
        if path.is_file():
            return path, form
    return None


def part_of(file: DataFile) -> Path:
    """Return where the part of a file lies that has been downloaded so far."""
    return data_folder() / f"{file.path}.part"


def read(data_set: DataSet, file: DataFile) -> bytes:
    """Return the content of a file as it lies there, zipped or not, checked."""
    found = locate(file)
    if found is None:
        raise DataError(f"{data_folder() / file.path} is missing: {remedy(data_set)}")
    path, form = found
    content = path.read_bytes()
    wrong = flaw(io.BytesIO(content), form)
    if wrong:
        raise DataError(f"{path} is corrupt, {wrong}: {remedy(data_set)}")
    return content


def remedy(data_set: DataSet) -> str:
    """Say how to get a data set."""
    size = data_set.download_size / 1e6
    return f"`python -m studies data download {data_set.name}` gets it ({size:,.1f} MB)"


def flaw(stream: BinaryIO, file: DataFile) -> str | None:
    """Say what is wrong with a file's content; None if nothing is."""
    size = stream.seek(0, os.SEEK_END)
    stream.seek(0)
    if size != file.size:
        return f"it has {size} bytes, expected {file.size}"
    if file.checksum is None:
        return None
    algorithm, _, expected = file.checksum.partition(":")
    digest = hashlib.new(algorithm, usedforsecurity=False)
    while block := stream.read(BLOCK):
        digest.update(block)
    got = digest.hexdigest()
    return None if got == expected else f"its {algorithm} is {got}, expected {expected}"


class Finding(NamedTuple):
    """What there is of a file, and a sentence if that is not all."""

    state: State
    sentence: str | None


def examine(file: DataFile) -> Finding:
    """Look at a file, its checksum included."""
    found = locate(file)
    if found is None:
        return Finding(State.ABSENT, f"{file.path} is missing")
    path, form = found
    with path.open("rb") as stream:
        wrong = flaw(stream, form)
    if wrong:
        return Finding(State.CORRUPT, f"{form.path} is corrupt, {wrong}")
    return Finding(State.PRESENT, None)


def inspect(data_set: DataSet) -> Condition:
    """Look at every file of a data set, and at what has been begun to be downloaded."""
    found = [place for file in data_set.files if (place := locate(file))]
    begun = [_begun(download) for download in data_set.downloads if part_of(download.file).exists()]
    findings = [examine(file) for file in data_set.files]
    sentences = [finding.sentence for finding in findings if finding.sentence]
    return Condition(
        state=_overall({finding.state for finding in findings}, bool(found or begun)),
        folder=found[0][1].folder if found else data_set.folder,
        size=sum(path.stat().st_size for path, _ in found),
        flaws=(*begun, *(sentences if found else ())) if sentences else (),
    )


def _begun(download: Download) -> str:
    done = part_of(download.file).stat().st_size
    return f"{download.file.path} is downloaded to {done:,} of {download.file.size:,} bytes"


def _overall(states: set[State], there: bool) -> State:
    if State.CORRUPT in states:
        return State.CORRUPT
    if State.ABSENT in states:
        return State.INCOMPLETE if there else State.ABSENT
    return State.PRESENT
