"""MNIST and its relatives from the standard idx files, in the folder that `ACNML_DATA` names."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

FILES = {
    "train": ("train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"),
    "test": ("t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz"),
}


def data_folder() -> Path:
    """Return the data folder: `ACNML_DATA`, or `data` in the working directory."""
    return Path(os.environ.get("ACNML_DATA", "data"))


def available() -> bool:
    """Whether all files of MNIST are there."""
    folder = data_folder() / "mnist"
    return all((folder / name).is_file() for names in FILES.values() for name in names)


def load(split: str) -> tuple[Tensor, Tensor]:
    """Return the images (N, 784) in [0, 1] and the labels (N,) of "train" or "test"."""
    images, labels = (read_idx(data_folder() / "mnist" / name) for name in FILES[split])
    return images.flatten(1).float() / 255, labels.long()


def read_idx(path: Path) -> Tensor:
    """Read a gzipped idx file of unsigned bytes."""
    with gzip.open(path) as file:
        content = file.read()
    if content[:3] != b"\x00\x00\x08":
        raise ValueError(f"{path} is not an idx file of unsigned bytes")
    dims = content[3]
    shape = np.frombuffer(content, ">u4", count=dims, offset=4).astype(int)
    values = np.frombuffer(content, np.uint8, offset=4 + 4 * dims)
    if values.size != shape.prod():
        raise ValueError(f"{path} holds {values.size} values, its header promises {tuple(shape)}")
    return torch.from_numpy(values.reshape(shape).copy())
