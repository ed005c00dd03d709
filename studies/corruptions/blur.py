"""Blur: defocus, frosted glass, motion, zoom, and plain Gaussian."""

from __future__ import annotations

from functools import cache

import numpy as np
from scipy import ndimage

from studies.corruptions.base import Corruption, Generators, Images, draw, to_bytes
from studies.corruptions.filters import (
    Floats,
    gaussian_blur,
    motion_blur,
    zoom_matrix,
)


def _gaussian(images: Images, std: float, _: Generators) -> Images:
    return gaussian_blur(images, std)


def _defocus(images: Images, radius_and_std: tuple[float, float], _: Generators) -> Images:
    """Spread every point over a disk whose rim is softened."""
    kernel = disk(*radius_and_std)[None, :, :, None]
    return ndimage.correlate(images, kernel, mode="mirror")


def disk(radius: float, softening: float) -> Floats:
    """Return a disk that sums to one, blurred by a Gaussian of 3 × 3 pixels.

    OpenCV's `GaussianBlur` with a kernel size of 3: the Gaussian is cut off after one pixel.
    """
    reach = int(np.ceil(radius)) + 1
    square = np.arange(-reach, reach + 1) ** 2
    inside = (square[:, None] + square <= radius**2).astype(float)
    side = np.exp(-1 / (2 * softening**2))
    taps = np.array([side, 1.0, side]) / (1 + 2 * side)
    return ndimage.convolve(inside / inside.sum(), np.outer(taps, taps), mode="constant")


def _glass(images: Images, parameter: tuple[float, int], generators: Generators) -> Images:
    """Blur, let pixels take over a neighbour's colour, and blur again.

    The original's text says that pixels are swapped; but its code assigns views of one array to
    each other, by which the first is overwritten before it is read. So the official images hold
    copies: a pixel takes its own colour, or that of its upper, left or upper left neighbour.
    """
    std, repeats = parameter
    blurred = to_bytes(gaussian_blur(images, std)) / 255
    inner = np.arange(2, images.shape[1])
    shape = (repeats, 2, len(inner), len(inner))
    steps = draw(generators, lambda g: g.integers(-1, 1, size=shape))  # each -1 or 0
    number = np.arange(len(images))[:, None, None]
    for repeat in range(repeats):
        down, right = steps[:, repeat, 0], steps[:, repeat, 1]
        taken = blurred[number, inner[:, None] + down, inner + right]
        blurred[:, 2:, 2:] = taken
    return gaussian_blur(blurred, std)


def _motion(images: Images, parameter: tuple[int, float], generators: Generators) -> Images:
    degrees = draw(generators, lambda g: g.uniform(-45, 45))
    return motion_blur(images, *parameter, degrees)


def _zoom(images: Images, largest: float, _: Generators) -> Images:
    """Average the image and ever closer views of it."""
    size, height, width, channels = images.shape
    matrix = _zoom_blur_matrix(height, largest)
    blurred = np.tensordot(images.reshape(size, height * width, channels), matrix, (1, 1))
    return np.moveaxis(blurred, -1, 1).reshape(images.shape)


@cache
def _zoom_blur_matrix(side: int, largest: float) -> Floats:
    """Return what zoom blur does to all pixels of a channel: (side², side²).

    The blur is linear, and one product with this matrix beats dozens of zooms.
    """
    # Not linspace: with the original's arange, rounding decides whether the last one is included.
    factors = np.arange(1, largest, 0.01)
    total = np.eye(side**2)
    for view in (zoom_matrix(side, factor) for factor in factors):
        total += np.kron(view, view)
    return total / (len(factors) + 1)


BLUR = (
    Corruption(
        "defocus_blur", _defocus, ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1))
    ),
    Corruption("glass_blur", _glass, ((0.05, 1), (0.25, 1), (0.4, 1), (0.25, 2), (0.4, 2))),
    Corruption("motion_blur", _motion, ((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5))),
    Corruption("zoom_blur", _zoom, (1.06, 1.11, 1.16, 1.21, 1.26)),
)
GAUSSIAN_BLUR = Corruption("gaussian_blur", _gaussian, (0.4, 0.6, 0.7, 0.8, 1))
