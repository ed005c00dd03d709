"""Filters that several corruptions share: Gaussian and motion blur, and zooming in."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from studies.corruptions.base import Images

Floats = NDArray[np.float64]


def gaussian_blur(images: Images, std: float) -> Images:
    """Blur every channel; the edge's pixels go on outside the image.

    What scikit-image's `gaussian` does, without scikit-image.
    """
    return ndimage.gaussian_filter(images, (0, std, std, 0), mode="nearest", truncate=4.0)


def motion_blur(images: Images, radius: int, std: float, degrees: Floats) -> Images:
    """Draw images (N, H, W, C) out along a direction, one for each image.

    A pixel becomes the mean of those in its direction, with half a Gaussian as weights. This is
    ImageMagick's algorithm: 2 · radius + 1 taps at rounded positions, and the edge's pixels go on
    outside the image. Its result is in bytes, rounded to the nearest.
    """
    size, height, width, _ = images.shape
    distances = np.arange(2 * radius + 1)
    weights = np.exp(-(distances**2) / (2 * std**2))
    angles = np.deg2rad(degrees)[:, None]
    down, right = (np.ceil(distances * f(angles) - 0.5).astype(int) for f in (np.sin, np.cos))
    number = np.arange(size)[:, None, None]
    blurred = np.zeros_like(images)
    for i in distances:
        rows = np.clip(np.arange(height) + down[:, i, None], 0, height - 1)
        columns = np.clip(np.arange(width) + right[:, i, None], 0, width - 1)
        blurred += weights[i] * images[number, rows[:, :, None], columns[:, None, :]]
    return np.round(blurred / weights.sum() * 255) / 255


def zoom_in(images: Images, factor: float) -> Images:
    """Enlarge the middle of images (N, H, H, C) to their size, by linear interpolation."""
    matrix = zoom_matrix(images.shape[1], factor)
    return np.einsum("ij,kl,njlc->nikc", matrix, matrix, images, optimize=True)


def zoom_matrix(side: int, factor: float) -> Floats:
    """Return what zooming does to a column of pixels, and likewise to a row: (side, side).

    As in the original, the middle is cut out in whole pixels, enlarged by scipy's `zoom`, and what
    is then too much cut off.
    """
    kept = int(np.ceil(side / factor))
    first = (side - kept) // 2
    middle = np.eye(side)[first : first + kept]
    enlarged = ndimage.zoom(middle, (factor, 1), order=1)
    excess = (len(enlarged) - side) // 2
    return enlarged[excess : excess + side]
