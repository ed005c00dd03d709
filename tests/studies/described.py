"""Files for tests of data sets, described as the catalogue describes them."""

from __future__ import annotations

import hashlib

from studies.data.catalogue import DataFile


def described(path: str, content: bytes, *alternatives: DataFile) -> DataFile:
    return DataFile(path, len(content), f"md5:{hashlib.md5(content).hexdigest()}", alternatives)
