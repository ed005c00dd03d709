"""Corruptions of images that are larger than CIFAR's.

`TINY` has corruptions of Tiny-ImageNet-C (Hendrycks & Dietterich 2019), with its parameters for 64
× 64 pixels: those of which the code for CIFAR-10-C needs no other change. `PHOTOGRAPHS` takes from
photographs what a classifier may rely on: colour, surfaces, detail.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
from scipy import ndimage

from studies.corruptions.base import Corruption, Generators, Images
from studies.corruptions.catalogue import CORRUPTIONS
from studies.corruptions.filters import gaussian_blur
from studies.corruptions.weather import LUMA

_TINY: Mapping[str, tuple[Any, Any, Any, Any, Any]] = {
    "gaussian_noise": (0.04, 0.08, 0.12, 0.15, 0.18),
    "shot_noise": (250, 100, 50, 30, 15),
    "impulse_noise": (0.01, 0.02, 0.05, 0.08, 0.14),
    "defocus_blur": ((0.5, 0.6), (1, 0.1), (1.5, 0.1), (2.5, 0.01), (3, 0.1)),
    "motion_blur": ((10, 1), (10, 1.5), (10, 2), (10, 2.5), (12, 3)),
    "brightness": (0.1, 0.2, 0.3, 0.4, 0.5),
    "contrast": (0.4, 0.3, 0.2, 0.1, 0.05),
    "pixelate": (0.9, 0.8, 0.7, 0.6, 0.5),
    "jpeg_compression": (65, 58, 50, 40, 25),
}
TINY: Mapping[str, Corruption] = MappingProxyType(
    {name: replace(CORRUPTIONS[name], parameters=its) for name, its in _TINY.items()}
)


def _grey(images: Images, kept: float, _: Generators) -> Images:
    """Keep a share of the colour."""
    grey = (images @ LUMA)[..., None]
    return grey + kept * (images - grey)


def _edges(images: Images, shown: float, _: Generators) -> Images:
    """Blend into a drawing: dark lines on white, where brightness changes fast."""
    grey = gaussian_blur((images @ LUMA)[..., None], 1.0)
    slopes = [ndimage.sobel(grey, axis=axis, mode="nearest") for axis in (1, 2)]
    strength = np.hypot(*slopes)
    most = np.quantile(strength, 0.98, axis=(1, 2), keepdims=True).clip(min=1e-6)
    drawing = 1 - np.clip(strength / most, 0, 1)
    return (1 - shown) * images + shown * drawing


PHOTOGRAPHS: Mapping[str, Corruption] = MappingProxyType(
    {
        corruption.name: corruption
        for corruption in (
            Corruption("grey", _grey, (0.8, 0.6, 0.4, 0.2, 0.0)),
            Corruption("edges", _edges, (0.2, 0.4, 0.6, 0.8, 1.0)),
            replace(CORRUPTIONS["pixelate"], parameters=(0.5, 0.35, 0.25, 0.15, 0.1)),
            replace(CORRUPTIONS["jpeg_compression"], parameters=(25, 18, 15, 10, 7)),
        )
    }
)
