"""CIFAR-10-C: the test images of CIFAR-10 under a corruption, official or made here.

The official files are in `CIFAR-10-C` of the data folder: `<corruption>.npy`, five times the 10,000
test images, one severity after the other, and `labels.npy`. Where that folder is missing, the
images are made from the clean ones and kept in a cache.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray

from studies.corruptions.base import SEVERITIES, Bytes, Corruption
from studies.corruptions.catalogue import CORRUPTIONS
from studies.data import Labelled, cifar10
from studies.data.catalogue import CIFAR10_C
from studies.data.folder import DataError, data_folder, remedy
from studies.files import write_file

TEST_IMAGES = 10_000
# Raise it when the code makes other images from the same parameters: caches then expire.
VERSION = 1


@final
@dataclass(frozen=True, eq=False)
class Cifar10C:
    """Some of the test images, under any corruption and severity.

    Attributes:
        clean: these images without corruption.
        numbers: their places among the 10,000 test images.
        cache: folder for images that are made here.
    """

    clean: Labelled
    numbers: Sequence[int]
    cache: Path

    @staticmethod
    def of_test_set(numbers: Sequence[int], cache: Path) -> Cifar10C:
        """Return these images of the test set."""
        index = torch.as_tensor(list(numbers), dtype=torch.long)
        if len(index) == 0 or index.min() < 0 or index.max() >= TEST_IMAGES:
            raise ValueError(f"numbers must be some of 0 to {TEST_IMAGES - 1}")
        test = cifar10.load("test")
        chosen = Labelled(test.inputs[index], test.labels[index])
        return Cifar10C(chosen, tuple(index.tolist()), cache)

    @property
    def official(self) -> bool:
        """Whether the images are from the official files."""
        return official_folder().is_dir()

    def load(self, name: str, severity: int) -> Labelled:
        """Return the images under a corruption; severity 0 is none."""
        corruption = _known(name)
        if severity == 0:
            return self.clean
        if severity not in SEVERITIES:
            raise ValueError(f"severity must be 0 to 5, got {severity}")
        made = self._read_official if self.official else self._generated
        images = torch.from_numpy(made(corruption, severity)).movedim(-1, 1).contiguous()
        return Labelled(images, self.clean.labels)

    def require_available(self, names: Iterable[str]) -> None:
        """Refuse early what could not be loaded later, by trying the first image of each."""
        first = Cifar10C(Labelled(*(t[:1] for t in self.clean)), self.numbers[:1], self.cache)
        image = first.clean.inputs.movedim(1, -1).numpy()
        for corruption in map(_known, names):
            if self.official:
                first._read_official(corruption, SEVERITIES[0])
            else:
                corruption(image, SEVERITIES[0], first.numbers)

    def _read_official(self, corruption: Corruption, severity: int) -> Bytes:
        rows = (severity - 1) * TEST_IMAGES + np.array(self.numbers)
        shape = (len(SEVERITIES) * TEST_IMAGES,)
        labels = _open(official_folder() / "labels.npy", shape)[rows]
        if not np.array_equal(labels, self.clean.labels.numpy()):
            raise DataError(f"{official_folder()} has other labels than CIFAR-10's test images")
        path = official_folder() / f"{corruption.name}.npy"
        return np.ascontiguousarray(_open(path, (*shape, 32, 32, 3))[rows])

    def _generated(self, corruption: Corruption, severity: int) -> Bytes:
        """Make the images, or read them from the cache."""
        clean = np.ascontiguousarray(self.clean.inputs.movedim(1, -1).numpy())
        key = _key(clean, self.numbers, corruption, severity)
        path = self.cache / f"{corruption.name}-{severity}-{key}.npy"
        if path.is_file():
            return np.array(_open(path, clean.shape))
        images = corruption(clean, severity, self.numbers)
        file = BytesIO()
        np.save(file, images)
        self.cache.mkdir(parents=True, exist_ok=True)
        write_file(path, file.getvalue())
        return images


def official_folder() -> Path:
    """Return the folder of the official files."""
    return data_folder() / CIFAR10_C.folder


def _known(name: str) -> Corruption:
    if name not in CORRUPTIONS:
        raise ValueError(f"there is no corruption {name!r}; choose of {', '.join(CORRUPTIONS)}")
    return CORRUPTIONS[name]


def _key(clean: Bytes, numbers: Sequence[int], corruption: Corruption, severity: int) -> str:
    """Return a digest of everything that the corrupted images depend on."""
    parameter = corruption.parameters[severity - 1]
    digest = hashlib.sha256(f"{VERSION} {np.__version__} {parameter!r} {numbers!r}".encode())
    digest.update(clean.tobytes())
    return digest.hexdigest()[:16]


def _open(path: Path, shape: tuple[int, ...]) -> NDArray[Any]:
    """Map an array of bytes into memory, and refuse wrong types and shapes."""
    if not path.is_file():
        raise DataError(
            f"{path} is missing: {remedy(CIFAR10_C)}; or remove {path.parent} altogether, to "
            "have its images made from CIFAR-10"
        )
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise DataError(f"{path} is corrupt, remove or replace it: {error}") from error
    if array.dtype != np.uint8 or array.shape != shape:
        raise DataError(
            f"{path} holds {array.dtype} of shape {array.shape}, expected bytes of {shape}"
        )
    return array
