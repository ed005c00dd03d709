"""Idx files written by their specification, and a data set like MNIST."""

from __future__ import annotations

import gzip
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np

from described import described
from studies.data.catalogue import MNIST, DataSet


def encode(values: np.ndarray) -> bytes:
    """An idx file, written by its specification."""
    header = struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape)
    return header + values.astype(np.uint8).tobytes()


def put(folder: Path, path: str, content: bytes) -> None:
    (folder / path).parent.mkdir(parents=True, exist_ok=True)
    (folder / path).write_bytes(content)


def tiny_mnist(folder: Path) -> tuple[DataSet, list[np.ndarray]]:
    """Files like MNIST's, and what is in them: one of them unzipped, the others zipped."""
    generator = np.random.default_rng(0)
    values = [generator.integers(0, 256, shape) for shape in [(6, 28, 28), (6,), (4, 28, 28), (4,)]]
    downloads = []
    for download, array in zip(MNIST.downloads, values, strict=True):
        content = gzip.compress(encode(array))
        plain = described(download.file.path.removesuffix(".gz"), encode(array))
        downloads.append(replace(download, file=described(download.file.path, content, plain)))
        put(folder, download.file.path, content)
    put(folder, downloads[1].file.alternatives[0].path, encode(values[1]))
    (folder / downloads[1].file.path).unlink()
    return replace(MNIST, downloads=tuple(downloads)), values
