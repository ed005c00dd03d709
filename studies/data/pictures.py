"""Pictures in folders: Tiny-ImageNet, one picture of every ImageNet class, and Caltech-101.

They are files that stay where they are: `Pictures` names some of them with their classes, and reads
those that are asked for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from studies.data.folder import DataError, data_folder
from studies.data.labelled import shuffled

TINY_IMAGENET = "tiny-imagenet-200"
IMAGENET_SAMPLES = "imagenet-sample-images"
CALTECH101 = "101_ObjectCategories"
SOURCES = {
    TINY_IMAGENET: "http://cs231n.stanford.edu/tiny-imagenet-200.zip",
    IMAGENET_SAMPLES: "https://github.com/EliSchwartz/imagenet-sample-images",
    CALTECH101: "https://data.caltech.edu/records/mzrjq-6wc02",
}
BACKGROUND = "BACKGROUND_Google"  # the folder of Caltech-101 that is no class


@final
@dataclass(frozen=True)
class Pictures:
    """Some pictures with their classes.

    Attributes:
        paths: of the files.
        classes: of the pictures.
        side: to which the shorter side is scaled, before the middle square is cut out.
    """

    paths: tuple[Path, ...]
    classes: tuple[int, ...]
    side: int

    @property
    def labels(self) -> Tensor:
        """The classes (N,)."""
        return torch.tensor(self.classes)

    def take(self, rows: Sequence[int]) -> Pictures:
        """Return the pictures with these numbers."""
        return Pictures(
            tuple(self.paths[row] for row in rows),
            tuple(self.classes[row] for row in rows),
            self.side,
        )

    @cached_property
    def checksum(self) -> str:
        """The SHA-256 of all files, in this order, and of the side."""
        digest = hashlib.sha256(str(self.side).encode())
        for path in self.paths:
            digest.update(path.read_bytes())
        return digest.hexdigest()

    def read(self, rows: slice) -> NDArray[np.uint8]:
        """Return pictures as bytes (n, side, side, 3)."""
        return np.stack([_square(path, self.side) for path in self.paths[rows]])


def _square(path: Path, side: int) -> NDArray[np.uint8]:
    """Return the middle of a picture."""
    with Image.open(path) as image:
        rgb = image.convert("RGB")
    scale = side / min(rgb.size)
    width, height = (max(side, round(length * scale)) for length in rgb.size)
    if rgb.size != (width, height):
        rgb = rgb.resize((width, height), Image.Resampling.BICUBIC)
    left, top = (width - side) // 2, (height - side) // 2
    return np.asarray(rgb.crop((left, top, left + side, top + side)))


def tiny_imagenet(split: str, side: int = 64) -> Pictures:
    """Return all pictures of "train" or "val", with classes in the order of their names."""
    names = tiny_names()
    if split == "train":
        found = [
            (path, k)
            for k, name in enumerate(names)
            for path in sorted((_folder(TINY_IMAGENET) / "train" / name / "images").glob("*.JPEG"))
        ]
    else:
        lines = (_folder(TINY_IMAGENET) / "val" / "val_annotations.txt").read_text().splitlines()
        rows = [line.split("\t")[:2] for line in lines]
        images, order = (
            _folder(TINY_IMAGENET) / "val" / "images",
            {n: k for k, n in enumerate(names)},
        )
        found = [(images / file, order[name]) for file, name in rows]
    return _pictures(found, side)


def tiny_names() -> list[str]:
    """Return the WordNet numbers of Tiny-ImageNet's classes."""
    return sorted(path.name for path in (_folder(TINY_IMAGENET) / "train").iterdir())


def imagenet_samples(side: int) -> Pictures:
    """Return one picture of each of the 1,000 classes, in the usual order of ImageNet."""
    paths = sorted(_folder(IMAGENET_SAMPLES).glob("n*.JPEG"))
    return _pictures([(path, k) for k, path in enumerate(paths)], side)


def imagenet_names() -> list[str]:
    """Return the WordNet numbers of ImageNet's classes, in the usual order."""
    return sorted(path.name.split("_")[0] for path in _folder(IMAGENET_SAMPLES).glob("n*.JPEG"))


def caltech101(side: int) -> tuple[Pictures, Pictures]:
    """Return the pictures of all classes, and those of none."""
    folder = _folder(CALTECH101)
    names = sorted(path.name for path in folder.iterdir() if path.name != BACKGROUND)
    found = [(p, k) for k, name in enumerate(names) for p in sorted((folder / name).glob("*.jpg"))]
    others = [(path, -1) for path in sorted((folder / BACKGROUND).glob("*.jpg"))]
    return _pictures(found, side), _pictures(others, side)


def by_class(pictures: Pictures, counts: Sequence[int], seed: int) -> list[Pictures]:
    """Return disjoint parts with so many pictures of every class, at random, as far as they go."""
    parts = [list[int]() for _ in counts]
    taken = dict.fromkeys(pictures.classes, 0)
    ends = np.cumsum(counts)
    for row in shuffled(len(pictures.paths), seed).tolist():
        own = pictures.classes[row]
        part = int(np.searchsorted(ends, taken[own], side="right"))
        if part < len(parts):
            parts[part].append(row)
        taken[own] += 1
    return [pictures.take(rows) for rows in parts]


def _pictures(found: Sequence[tuple[Path, int]], side: int) -> Pictures:
    return Pictures(tuple(p for p, _ in found), tuple(k for _, k in found), side)


def _folder(name: str) -> Path:
    folder = data_folder() / name
    if not folder.is_dir():
        raise DataError(f"{folder} is missing: unpack {SOURCES[name]} there")
    return folder
