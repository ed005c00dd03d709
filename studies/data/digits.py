"""Handwritten digits and letters: MNIST, notMNIST, and scikit-learn's digits in their place."""

from __future__ import annotations

import gzip
import zlib
from dataclasses import dataclass
from typing import Literal, final

import numpy as np
import torch
from scipy import ndimage
from sklearn import datasets
from torch import Tensor

from studies.data import Labelled, split
from studies.data.catalogue import MNIST, NOTMNIST, DataFile, DataSet
from studies.data.folder import data_folder, locate, read, remedy

ZIPPED = b"\x1f\x8b"  # first bytes of every gzip file
UNSIGNED_BYTES = b"\x00\x00\x08"  # first bytes of every idx file of unsigned bytes

SIZE, SIDE = 1797, 8  # images in scikit-learn's collection, and their pixels in each direction
TEST_DIGITS = 400  # of them, in the place of MNIST's
CLASSES = 10


def load_labelled(data_set: DataSet, images: DataFile, labels: DataFile) -> Labelled:
    """Return images (N, 1, H, W) in [0, 1] and their labels (N,) from two files, verified."""
    pixels, numbers = (decode(read(data_set, file), file.path) for file in (images, labels))
    if pixels.dim() != 3 or numbers.shape != pixels.shape[:1]:
        shapes = f"{tuple(pixels.shape)} and {tuple(numbers.shape)}"
        raise ValueError(f"{images.path} and {labels.path} hold {shapes}, no images and labels")
    return Labelled(pixels[:, None].float() / 255, numbers.long())


def decode(content: bytes, name: str) -> Tensor:
    """Return the unsigned bytes of an idx file as a tensor of the shape in its header.

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


def load_mnist(part: Literal["train", "test"]) -> Labelled:
    """Return the 60,000 images to train on or the 10,000 to test, (N, 1, 28, 28) in [0, 1]."""
    images, labels = {"train": MNIST.files[:2], "test": MNIST.files[2:]}[part]
    return load_labelled(MNIST, images, labels)


def has_letters() -> bool:
    """Whether all files of notMNIST are present; checksums are verified when they are read."""
    return all(locate(file) for file in NOTMNIST.files)


def load_letters() -> Labelled:
    """Return notMNIST: 1,000 images of each of the letters A to J, labelled 0 to 9."""
    images, labels = NOTMNIST.files
    return load_labelled(NOTMNIST, images, labels)


def rotate(images: Tensor, degrees: float | Tensor) -> Tensor:
    """Rotate images (..., H, W) counter-clockwise, with linear interpolation.

    Pixels that leave the frame are lost, and new ones are background, 0. Multiples of 90° only
    move pixels. `degrees` is one angle for all images, or a tensor with one angle for each along
    the first dimension.
    """
    if not isinstance(degrees, Tensor):
        return _rotated(images, degrees)
    if degrees.shape != images.shape[:1]:
        raise ValueError(f"{len(images)} images need one angle each, not {tuple(degrees.shape)}")
    rotated = torch.empty_like(images)
    for i, angle in enumerate(degrees.tolist()):
        rotated[i] = _rotated(images[i], angle)
    return rotated


def _rotated(images: Tensor, degrees: float) -> Tensor:
    rotated = ndimage.rotate(
        images.numpy(), degrees, axes=(-1, -2), reshape=False, order=1, mode="grid-constant"
    )
    return torch.from_numpy(rotated)


def random_angles(count: int, seed: int) -> Tensor:
    """Return independent angles, uniform over the full circle, [0°, 360°); the same for a seed."""
    generator = torch.Generator().manual_seed(seed)
    return 360 * torch.rand(count, generator=generator, dtype=torch.float64)


@final
@dataclass(frozen=True, eq=False)
class HandwrittenDigits:
    """Digits to train on and to test with, their name, and a sentence that says what they are."""

    name: str
    note: str
    train: Labelled
    test: Labelled


def handwritten_digits() -> HandwrittenDigits:
    """Return MNIST, or scikit-learn's 8x8 digits if the data folder has no file of MNIST.

    If some files of MNIST are there and others are missing or corrupt, that is an error. Nothing
    is downloaded.
    """
    if not any(locate(file) for file in MNIST.files):
        return _scikit_learn()
    train, test = load_mnist("train"), load_mnist("test")
    note = f"MNIST: {len(train.labels):,} digits to train on, {len(test.labels):,} to test."
    return HandwrittenDigits("MNIST", note, train, test)


def _scikit_learn() -> HandwrittenDigits:
    train, test = split(all_digits(), (SIZE - TEST_DIGITS, TEST_DIGITS), seed=0)
    note = (
        f"There is no MNIST in the folder {data_folder()}, {remedy(MNIST)}: "
        f"using scikit-learn's {SIDE}x{SIDE} digits, {len(train.labels):,} to train on and "
        f"{len(test.labels):,} to test, a smaller and easier problem."
    )
    return HandwrittenDigits("scikit-learn digits", note, train, test)


def all_digits() -> Labelled:
    """Return scikit-learn's whole collection, in its own order."""
    pixels, labels = datasets.load_digits(return_X_y=True)
    images = (pixels / pixels.max()).astype(np.float32).reshape(SIZE, 1, SIDE, SIDE)
    return Labelled(torch.from_numpy(images), torch.from_numpy(labels.astype(np.int64)))
