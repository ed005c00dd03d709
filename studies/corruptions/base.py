"""A corruption of images, with a parameter for each of five severities.

Everything random is drawn image by image from a generator that the corruption's name, the severity
and the image's number seed. So an image is corrupted in one way only, alone or among others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, final

import numpy as np
from numpy.typing import NDArray

SEVERITIES = (1, 2, 3, 4, 5)
BLOCK = 250  # images corrupted at once, to bound memory

Bytes: TypeAlias = NDArray[np.uint8]  # (N, H, W, 3), RGB
Images: TypeAlias = NDArray[np.float64]  # (N, H, W, 3), RGB in [0, 1]
Generators: TypeAlias = Sequence[np.random.Generator]  # one per image


@final
@dataclass(frozen=True)
class Corruption:
    """A corruption of images, as in CIFAR-10-C (Hendrycks & Dietterich 2019).

    Attributes:
        name: as in the names of the official files.
        apply: (images, parameter, generators) -> images; what leaves [0, 1] is clipped after it.
        parameters: for severities 1 to 5.
    """

    name: str
    apply: Callable[[Images, Any, Generators], Images]
    parameters: tuple[Any, Any, Any, Any, Any]

    def __call__(self, images: Bytes, severity: int, numbers: Sequence[int]) -> Bytes:
        """Corrupt images (N, H, W, 3) that have these numbers in the test set.

        Severity 0 leaves them as they are.
        """
        _require_images(images, numbers)
        if severity not in (0, *SEVERITIES):
            raise ValueError(f"severity must be 0 to 5, got {severity}")
        if severity == 0:
            return images.copy()
        blocks = (slice(start, start + BLOCK) for start in range(0, len(images), BLOCK))
        parts = [self._corrupt(images[block], severity, numbers[block]) for block in blocks]
        return np.concatenate([images[:0], *parts])

    def _corrupt(self, images: Bytes, severity: int, numbers: Sequence[int]) -> Bytes:
        generators = [
            np.random.default_rng([*self.name.encode(), severity, int(number)])
            for number in numbers
        ]
        result = self.apply(images / 255, self.parameters[severity - 1], generators)
        return to_bytes(result)


def to_bytes(images: NDArray[np.floating[Any]]) -> Bytes:
    """Clip to [0, 1] and round down to bytes, as the official files were.

    What rounding errors have brought just below a byte counts as that byte: it must not matter how
    many images were computed at once.
    """
    return (np.clip(images, 0, 1) * 255 + 1e-6).astype(np.uint8)


def draw(generators: Generators, one: Callable[[np.random.Generator], Any]) -> NDArray[Any]:
    """Draw something of one shape from every generator and stack it."""
    return np.stack([one(generator) for generator in generators])


def _require_images(images: Bytes, numbers: Sequence[int]) -> None:
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] != 3:
        raise ValueError(
            f"images must be bytes of shape (N, H, W, 3), got {images.dtype} of {images.shape}"
        )
    if len(numbers) != len(images):
        raise ValueError(f"there are {len(images)} images and {len(numbers)} numbers for them")
