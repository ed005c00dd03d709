"""The idx files that MNIST and its relatives come in, zipped or not."""

from __future__ import annotations

import gzip
import zlib

import numpy as np
import torch
from torch import Tensor

from acnml.experiments.data.catalogue import DataFile, DataSet
from acnml.experiments.data.folder import read
from acnml.experiments.data.labelled import Labelled

ZIPPED = b"\x1f\x8b"  # what every gzip file begins with
UNSIGNED_BYTES = b"\x00\x00\x08"  # what every idx file of unsigned bytes begins with


def load_labelled(data_set: DataSet, images: DataFile, labels: DataFile) -> Labelled:
    """Return images (N, 1, H, W) in [0, 1] and their labels (N,) from two files, checked."""
    pixels, numbers = (decode(read(data_set, file), file.path) for file in (images, labels))
    if pixels.dim() != 3 or numbers.shape != pixels.shape[:1]:
        shapes = f"{tuple(pixels.shape)} and {tuple(numbers.shape)}"
        raise ValueError(f"{images.path} and {labels.path} hold {shapes}, no images and labels")
    return Labelled(pixels[:, None].float() / 255, numbers.long())


def decode(content: bytes, name: str) -> Tensor:
    """Return the unsigned bytes of an idx file as a tensor of the shape that its header tells.

    The format: two bytes 0, one byte 8 (unsigned bytes), one byte with the number of dimensions;
    each dimension in four bytes, the highest first; the values, the last dimension fastest. The
    name is for errors.
    """
    raw = _unzipped(content, name) if content.startswith(ZIPPED) else content
    if not raw.startswith(UNSIGNED_BYTES) or len(raw) < 4 or len(raw) < 4 + 4 * raw[3]:
        raise ValueError(f"{name} is not an idx file of unsigned bytes")
    shape = tuple(np.frombuffer(raw, ">u4", count=raw[3], offset=4).tolist())
    values = np.frombuffer(raw, np.uint8, offset=4 + 4 * len(shape))
    if values.size != np.prod(shape, dtype=int):
        raise ValueError(f"{name} holds {values.size} values, its header promises {shape}")
    return torch.from_numpy(values.reshape(shape).copy())


def _unzipped(content: bytes, name: str) -> bytes:
    try:
        return gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{name} cannot be unzipped: {error}") from error
