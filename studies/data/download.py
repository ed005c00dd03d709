"""Downloading data sets: mirrors, interrupted transfers, checksums and archives."""

from __future__ import annotations

import io
import os
import re
import tarfile
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import NamedTuple, Protocol, final
from urllib.error import HTTPError

from studies.data.catalogue import DataFile, DataSet, Download
from studies.data.folder import (
    BLOCK,
    DataError,
    State,
    data_folder,
    examine,
    flaw,
    part_of,
)
from studies.files import write_file, writing
from studies.store.parts import locked

PATIENCE = 30  # seconds without a byte after which a connection is given up


class Progress(Protocol):
    """Receives the progress of downloads and extraction."""

    def begin(self, what: str, size: int, done: int) -> None:
        """Begin work on this many bytes, of which some may be done."""

    def reached(self, size: int) -> None:
        """Report the number of finished bytes."""

    def wait(self) -> None:
        """Report that another process is downloading to the same folder."""


def fetch(data_set: DataSet, progress: Progress) -> None:
    """Download missing or corrupt files of a data set; complete files stay."""
    if not _wanting(data_set):
        return
    with writing(data_folder()):
        data_folder().mkdir(parents=True, exist_ok=True)
    with locked(data_folder() / ".download.lock", progress.wait, on_missing=lambda: None):
        for download in _wanting(data_set):  # another process may have got them meanwhile
            _deliver(download, progress)


def _wanting(data_set: DataSet) -> list[Download]:
    return [
        download
        for download in data_set.downloads
        if not all(_is_whole(file) for file in download.delivers)
    ]


def _is_whole(file: DataFile) -> bool:
    return examine(file).state is State.PRESENT


def _deliver(download: Download, progress: Progress) -> None:
    place = data_folder() / download.file.path
    if not _is_whole(download.file):  # an archive may have been left by a run that was killed
        with writing(place.parent):
            place.parent.mkdir(parents=True, exist_ok=True)
        progress.begin(place.name, download.file.size, _size(part_of(download.file)))
        _download(download, progress)
    if download.contents:
        progress.begin(f"Unpacking {place.name}", sum(file.size for file in download.contents), 0)
        unpack(place, download.contents, progress.reached)
        place.unlink()


def _download(download: Download, progress: Progress) -> None:
    """Try the mirrors in order."""
    file, failures = download.file, []
    for address in download.mirrors:
        try:
            _from_mirror(address, file, progress)
        except _MirrorError as error:
            failures.append(f"\n  {address}: {error}")
        else:
            with writing(data_folder() / file.path):
                part_of(file).replace(data_folder() / file.path)
            return
    kept = "\nWhat has arrived is kept: the same command goes on from there."
    raise DataError(
        f"{data_folder() / file.path} could not be downloaded:{''.join(failures)}"
        f"{kept if _size(part_of(file)) else ''}"
    )


@final
class _MirrorError(Exception):
    """A mirror failed; the message says how."""


def _from_mirror(address: str, file: DataFile, progress: Progress) -> None:
    """Complete the part and check it; a wrong one is removed.

    What was there before may have been begun wrongly: then the mirror gets a second chance, from
    the first byte.
    """
    part = part_of(file)
    resumed = _size(part) > 0
    _complete(part, address, file, progress)
    with part.open("rb") as stream:
        wrong = flaw(stream, file)
    if wrong:
        part.unlink()
        if not resumed:
            raise _MirrorError(f"the file is not the right one, {wrong}")
        _from_mirror(address, file, progress)


def _complete(part: Path, address: str, file: DataFile, progress: Progress) -> None:
    """Resume until the part is complete, while every connection makes progress."""
    while (before := _size(part)) < file.size:
        failure = f"the connection ended after {before} of {file.size} bytes"
        try:
            _transfer(part, address, file.size, progress)
        except _MirrorError as error:
            failure = str(error)
        if _size(part) <= before:
            raise _MirrorError(failure)


def _transfer(part: Path, address: str, size: int, progress: Progress) -> None:
    """Download the rest; from a server that cannot resume, the whole file."""
    have = _size(part)
    with _request(address, have) as response:
        offer = _offer(response)
        if offer.start not in (0, have) or offer.size not in (None, size):
            raise _MirrorError(f"offers {offer.size} bytes from {offer.start}, expected {size}")
        with writing(part), part.open("ab" if offer.start else "wb") as file:
            for block in _blocks(response):
                file.write(block)
                progress.reached(file.tell())
                if file.tell() > size:
                    raise _MirrorError(f"sends more than the expected {size} bytes")
            file.flush()
            os.fsync(file.fileno())


class _Offer(NamedTuple):
    """The first byte that a server will send, and the size of the file."""

    start: int
    size: int | None  # None if it does not say


def _offer(response: HTTPResponse) -> _Offer:
    if response.status == 206:
        content_range = re.match(r"bytes (\d+)-\d+/(\d+)", response.headers["Content-Range"] or "")
        if content_range is None:
            raise _MirrorError("sends a part of the file without saying which")
        return _Offer(*map(int, content_range.groups()))
    length = response.headers["Content-Length"]
    return _Offer(0, int(length) if length else None)


@contextmanager
def _request(address: str, start: int) -> Iterator[HTTPResponse]:
    """Request a file from a byte on."""
    headers = {"User-Agent": "acnml", **({"Range": f"bytes={start}-"} if start else {})}
    request = urllib.request.Request(address, headers=headers)
    with _network_errors():
        response = urllib.request.urlopen(request, timeout=PATIENCE)
    with response:
        yield response


def _blocks(response: HTTPResponse) -> Iterator[bytes]:
    with _network_errors():
        while block := response.read1(BLOCK):
            yield block


@contextmanager
def _network_errors() -> Iterator[None]:
    """Turn all network errors into one kind.

    Only around the network: a disk that is full is not the mirror's fault.
    """
    try:
        yield
    except HTTPError as error:
        error.close()
        raise _MirrorError(f"HTTP {error.code}, {error.reason}") from error
    except (OSError, HTTPException) as error:
        raise _MirrorError(str(getattr(error, "reason", error)) or repr(error)) from error


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def unpack(archive: Path, files: Iterable[DataFile], reached: Callable[[int], None]) -> None:
    """Extract these files from an archive to their places in the data folder.

    Only they are written, and only to the places in the catalogue, so that parent directories,
    links and devices in an archive have no effect. `reached` gets the number of finished bytes.
    """
    wanted, done = {file.path: file for file in files}, 0
    with tarfile.open(archive) as tar:
        for member in tar:
            if member.isfile() and member.name in wanted and (stream := tar.extractfile(member)):
                file = wanted.pop(member.name)
                _put(file, stream.read(), archive)
                done += file.size
                reached(done)
    if wanted:
        raise DataError(f"{archive} lacks {', '.join(wanted)}")


def _put(file: DataFile, content: bytes, archive: Path) -> None:
    wrong = flaw(io.BytesIO(content), file)
    if wrong:
        raise DataError(f"{file.path} in {archive} is not the right one, {wrong}")
    place = data_folder() / file.path
    with writing(place.parent):
        place.parent.mkdir(parents=True, exist_ok=True)
    write_file(place, content)
