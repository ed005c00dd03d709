"""Stored files, changed by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

from acnml import storage
from acnml.storage import disk


def contents(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The header and the tensors of a file."""
    with safetensors.safe_open(path, "pt") as file:
        header = json.loads(file.metadata()[storage.HEADER])
    return header, safetensors.torch.load(path.read_bytes())


def write_sealed(path: Path, header: Any, tensors: dict[str, Tensor]) -> None:
    """Write any header with a checksum that fits, as no damage would."""
    text = json.dumps(header)
    metadata = {storage.HEADER: text, storage.CHECKSUM: disk._checksum(text, tensors)}
    path.write_bytes(safetensors.torch.save(tensors, metadata))


def rewrite(path: Path, change: Callable[[Any], object]) -> None:
    """Change the header of a stored file, and its checksum with it."""
    header, tensors = contents(path)
    change(header)
    write_sealed(path, header, tensors)
