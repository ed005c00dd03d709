"""Files on remote file systems, named by URIs that Arrow reads, such as s3://bucket/folder.

Credentials are those that Arrow finds: environment variables, configuration files, or options in
the URI itself.
"""

from __future__ import annotations

from glob import has_magic
from pathlib import PurePosixPath

import pyarrow as pa
from pyarrow import fs

from acnml.scoring.models import ScoringError


def remote_files(uri: str) -> tuple[fs.FileSystem, PurePosixPath, list[PurePosixPath]]:
    """Return the file system of a URI, the folder that names are relative to, and all files."""
    if has_magic(uri.partition("?")[0]):
        raise ScoringError(f"{uri} is a pattern, which only local paths may be: name a folder")
    try:
        system, path = fs.FileSystem.from_uri(uri)
        found = system.get_file_info(path)
        if found.type == fs.FileType.File:
            return system, PurePosixPath(path).parent, [PurePosixPath(path)]
        if found.type != fs.FileType.Directory:
            raise ScoringError(f"there is no file or folder {uri}: check --input")
        below = system.get_file_info(fs.FileSelector(path, recursive=True))
    except (OSError, pa.ArrowException) as error:
        first = str(error).partition("\n")[0]
        raise ScoringError(
            f"{uri} cannot be read: {first}. Check the URI and the credentials, or copy the files "
            "to a local folder"
        ) from error
    files = [PurePosixPath(info.path) for info in below if info.type == fs.FileType.File]
    return system, PurePosixPath(path), files
