"""Digital: brightness, contrast, elastic transform, pixelate and JPEG compression."""

from __future__ import annotations

from collections.abc import Callable
from io import BytesIO
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from scipy import ndimage

from studies.corruptions.base import Bytes, Corruption, Generators, Images, draw
from studies.corruptions.filters import Floats


def _brightness(images: Images, added: float, _: Generators) -> Images:
    """Raise the value V = max(R, G, B) of hue, saturation and value, up to 1.

    At the same hue and saturation R, G and B are proportional to V; black becomes grey.
    """
    value = images.max(axis=-1, keepdims=True)
    raised = np.minimum(value + added, 1)
    return np.where(value > 0, images * raised / np.where(value > 0, value, 1), raised)


def _contrast(images: Images, kept: float, _: Generators) -> Images:
    """Bring every channel closer to its mean."""
    mean = images.mean(axis=(1, 2), keepdims=True)
    return mean + kept * (images - mean)


class Elastic(NamedTuple):
    """How much an image is bent."""

    strength: float  # of the local displacements, in pixels
    smoothness: float  # standard deviation of the Gaussian that smooths them
    shift: float  # by how many pixels the corners of a triangle move, at most


def _elastic(images: Images, elastic: Elastic, generators: Generators) -> Images:
    """Move the image by a random affine map, and then every pixel by a smooth random field.

    Where OpenCV rounds the affine map's coordinates to 1/32 pixel, these are exact.
    """
    height, width = images.shape[1:3]
    moves = draw(generators, lambda g: g.uniform(-elastic.shift, elastic.shift, size=(3, 2)))
    field = draw(generators, lambda g: g.uniform(-1, 1, size=(2, height, width)))
    std = (0, 0, elastic.smoothness, elastic.smoothness)
    field = elastic.strength * ndimage.gaussian_filter(field, std, mode="reflect", truncate=3)
    grid = np.stack(np.meshgrid(np.arange(height), np.arange(width), indexing="ij"))
    moved = interpolate(images, _affine(grid, moves), mirrored)
    return interpolate(moved, (grid + field).swapaxes(0, 1), reflected)


def _affine(grid: NDArray[np.int_], moves: Floats) -> Floats:
    """Where in the image each pixel of the grid comes from: rows and columns (2, N, H, W).

    The map sends the corners of a triangle around the middle to where the moves (N, 3, 2) put them.
    """
    middle, reach = grid.shape[1] // 2, grid.shape[1] // 3
    triangle = middle + reach * np.array([[1, 1], [1, -1], [-1, -1]])  # (x, y) of three corners
    ones = np.ones((len(moves), 3, 1))
    # Rows (x', y', 1) times the matrix are (x, y): the map backwards.
    backwards = np.linalg.solve(np.concatenate([triangle + moves, ones], axis=2), triangle[None])
    y, x = grid.reshape(2, -1)
    xy: Floats = np.stack([x, y, np.ones(len(x))], axis=1) @ backwards  # (N, H · W, 2)
    return np.moveaxis(xy[..., ::-1], -1, 0).reshape(2, len(moves), *grid.shape[1:])


Fold = Callable[[NDArray[np.int_], int], NDArray[np.int_]]


def mirrored(index: NDArray[np.int_], length: int) -> NDArray[np.int_]:
    """Fold indices into an image that is mirrored at its outermost pixels: c b | a b c | b a."""
    return length - 1 - np.abs(np.mod(index, 2 * (length - 1)) - (length - 1))


def reflected(index: NDArray[np.int_], length: int) -> NDArray[np.int_]:
    """Fold indices into an image that is mirrored at its edges: b a | a b c | c b."""
    folded = np.mod(index, 2 * length)
    return np.minimum(folded, 2 * length - 1 - folded)


def interpolate(images: Images, where: Floats, fold: Fold) -> Images:
    """Read images (N, H, W, C) at rows and columns (2, N, H', W'), linearly between pixels."""
    number = np.arange(len(images))[:, None, None]
    low = np.floor(where).astype(int)
    share = (where - low)[..., None]
    rows = [fold(low[0] + i, images.shape[1]) for i in (0, 1)]
    columns = [fold(low[1] + i, images.shape[2]) for i in (0, 1)]
    upper, lower = (
        images[number, row, columns[0]] * (1 - share[1])
        + images[number, row, columns[1]] * share[1]
        for row in rows
    )
    return upper * (1 - share[0]) + lower * share[0]


def _pixelate(images: Images, kept: float, _: Generators) -> Images:
    """Shrink the image and enlarge it again, by Pillow's box filter."""
    height, width = images.shape[1:3]
    small = (int(width * kept), int(height * kept))

    def resized(image: Image.Image) -> Image.Image:
        box = Image.Resampling.BOX
        return image.resize(small, box).resize((width, height), box)

    return _by_pillow(images, resized)


def _jpeg(images: Images, quality: int, _: Generators) -> Images:
    def compressed(image: Image.Image) -> Image.Image:
        file = BytesIO()
        image.save(file, "JPEG", quality=quality)
        return Image.open(file)

    return _by_pillow(images, compressed)


def _by_pillow(images: Images, change: Callable[[Image.Image], Image.Image]) -> Images:
    """Change images one by one with Pillow, which works on bytes."""
    as_bytes: Bytes = np.round(images * 255).astype(np.uint8)
    return np.stack([np.asarray(change(Image.fromarray(image))) for image in as_bytes]) / 255


DIGITAL = (
    Corruption("brightness", _brightness, (0.05, 0.1, 0.15, 0.2, 0.3)),
    Corruption("contrast", _contrast, (0.75, 0.5, 0.4, 0.3, 0.15)),
    Corruption(
        "elastic_transform",
        _elastic,
        (
            Elastic(0, 0, 32 * 0.08),
            Elastic(32 * 0.05, 32 * 0.2, 32 * 0.07),
            Elastic(32 * 0.08, 32 * 0.06, 32 * 0.06),
            Elastic(32 * 0.1, 32 * 0.04, 32 * 0.05),
            Elastic(32 * 0.1, 32 * 0.03, 32 * 0.03),
        ),
    ),
    Corruption("pixelate", _pixelate, (0.95, 0.9, 0.85, 0.75, 0.65)),
    Corruption("jpeg_compression", _jpeg, (80, 65, 58, 50, 40)),
)
