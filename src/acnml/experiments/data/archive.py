"""Taking files out of tar archives."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable, Iterable
from pathlib import Path

from acnml.experiments.data.catalogue import DataFile
from acnml.experiments.data.folder import DataError, data_folder, flaw
from acnml.experiments.files import write_file, writing


def unpack(archive: Path, files: Iterable[DataFile], reached: Callable[[int], None]) -> None:
    """Take these files out of an archive, to their places in the data folder.

    Only they are written, and only to where the catalogue says: names that climb out of the
    folder, links and devices in an archive can do nothing. `reached` hears how many bytes are out.
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
