"""CIFAR-10 from its standard files, in the folder that `ACNML_DATA` names.

Three kinds of files are read: the binary version, the python version, and lossless WebP mosaics of
100 × 100 images with a file of labels for each. All are converted to the records of the binary
version and must have its published SHA-1: the result is CIFAR-10, bit for bit.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Mapping
from io import BytesIO
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.nn import functional

from studies.data import Labelled
from studies.data.catalogue import CIFAR10
from studies.data.folder import DataError, data_folder, flaw, remedy

CLASSES = (
    *("airplane", "automobile", "bird", "cat", "deer"),
    *("dog", "frog", "horse", "ship", "truck"),
)
SIDE = 32
PIXELS = 3 * SIDE * SIDE  # of an image: the red ones by rows, then the green and the blue ones

# Images of a file, each a label and its pixels: (N, 1 + 3072).
Records: TypeAlias = NDArray[np.uint8]

SPLITS = {"train": tuple(f"data_batch_{i}" for i in range(1, 6)), "test": ("test_batch",)}
FILES = {Path(file.path).stem: file for file in CIFAR10.files}  # of the binary version


def available() -> bool:
    """Whether all files are present, of any kind."""
    return all(_find(name) for names in SPLITS.values() for name in names)


def load(split: str) -> Labelled:
    """Return the 50,000 images of "train" or the 10,000 of "test"."""
    if split not in SPLITS:
        raise ValueError(f"split must be 'train' or 'test', got {split!r}")
    records = torch.from_numpy(np.concatenate([_load_file(name) for name in SPLITS[split]]))
    images = records[:, 1:].reshape(-1, 3, SIDE, SIDE)
    return Labelled(images, records[:, 0].long())


def to_unit(images: Tensor) -> Tensor:
    """Convert bytes to floats in [0, 1], the input of a model's `normalise`."""
    return images.float() / 255


def read_binary(path: Path) -> Records:
    """Read a file of the binary version."""
    return np.frombuffer(path.read_bytes(), np.uint8).reshape(-1, 1 + PIXELS)


def read_python(path: Path) -> Records:
    """Read a file of the python version.

    Such a file is a pickle. It is never unpickled, which could run anything: its operations are
    listed, and labels and pixels picked from their arguments.
    """
    labels: list[int] = []
    section = pixels = ""
    for operation, argument, _ in pickletools.genops(path.read_bytes()):
        if isinstance(argument, str):
            section = argument
            pixels = max(pixels, argument, key=len)  # by far the longest string
        elif section == "labels" and operation.name == "BININT1" and argument is not None:
            labels.append(argument)
    rows = np.frombuffer(pixels.encode("latin-1"), np.uint8).reshape(-1, PIXELS)
    return np.column_stack([np.array(labels, np.uint8), rows])


def read_mosaic(path: Path) -> Records:
    """Read a WebP mosaic and its file of labels."""
    with Image.open(path) as image:
        mosaic = np.asarray(image.convert("RGB"))
    tiles = mosaic.reshape(100, SIDE, 100, SIDE, 3).transpose(0, 2, 4, 1, 3)
    labels = np.frombuffer(path.with_suffix(".labels.u8").read_bytes(), np.uint8)
    return np.column_stack([labels, tiles.reshape(-1, PIXELS)])


# Where the kinds of files are below the data folder, and how they are read, the best first.
SOURCES: Mapping[str, Callable[[Path], Records]] = {
    "cifar-10-batches-bin/{}.bin": read_binary,
    "cifar-10-batches-py/{}": read_python,
    "cifar10/{}.webp": read_mosaic,
}


def load_cifar100(split: str) -> Labelled:
    """Return images of CIFAR-100 from mosaics like those of CIFAR-10: "train" or "test".

    There are no published checksums of single images.
    """
    path = data_folder() / "cifar100" / f"{split}.webp"
    if not path.is_file():
        raise DataError(f"{path} is missing: a mosaic of 100 × 100 images, with {split}.labels.u8")
    records = torch.from_numpy(read_mosaic(path))
    return Labelled(records[:, 1:].reshape(-1, 3, SIDE, SIDE), records[:, 0].long())


def _find(name: str) -> tuple[Path, Callable[[Path], Records]] | None:
    """Return the file that holds a batch, and how to read it."""
    for pattern, reader in SOURCES.items():
        path = data_folder() / pattern.format(name)
        if path.is_file():
            return path, reader
    return None


def _load_file(name: str) -> Records:
    found = _find(name)
    if found is None:
        places = ", ".join(pattern.format(name) for pattern in SOURCES)
        raise DataError(f"none of {places} is in {data_folder()}: {remedy(CIFAR10)}")
    path, reader = found
    try:
        records = reader(path)
    except (ValueError, OSError) as error:
        raise DataError(f"{path} is corrupt, {error}: {remedy(CIFAR10)}") from error
    wrong = flaw(BytesIO(records.tobytes()), FILES[name])
    if wrong:
        raise DataError(f"{path} is corrupt, as records {wrong}: {remedy(CIFAR10)}")
    return records


def crop_and_flip(images: Tensor, generator: torch.Generator, padding: int = 4) -> Tensor:
    """Augment images (B, C, H, W) as is usual for CIFAR-10, every image independently."""
    return random_flip(random_crop(images, padding, generator), generator)


def random_crop(images: Tensor, padding: int, generator: torch.Generator) -> Tensor:
    """Shift every image by up to `padding` pixels in both directions, filling with zeros."""
    if padding < 0:
        raise ValueError(f"padding must not be negative, got {padding}")
    size, _, height, width = images.shape
    top, left = _draw((2, size, 1), 2 * padding + 1, images, generator)
    rows = top + torch.arange(height, device=images.device)  # (B, H)
    columns = left + torch.arange(width, device=images.device)  # (B, W)
    padded = functional.pad(images, (padding,) * 4)
    number = torch.arange(size, device=images.device)[:, None, None]
    channels_last = padded[number, :, rows[:, :, None], columns[:, None, :]]
    return channels_last.movedim(-1, 1)


def random_flip(images: Tensor, generator: torch.Generator) -> Tensor:
    """Mirror each image left to right with probability one half."""
    flipped = _draw((len(images), 1, 1, 1), 2, images, generator).bool()
    return torch.where(flipped, images.flip(-1), images)


def _draw(shape: tuple[int, ...], below: int, images: Tensor, generator: torch.Generator) -> Tensor:
    """Draw integers from 0 to `below` - 1 on the generator's device, for use with the images."""
    drawn = torch.randint(below, shape, generator=generator, device=generator.device)
    return drawn.to(images.device)
