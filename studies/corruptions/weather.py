"""Weather: snow, frost and fog."""

from __future__ import annotations

from functools import cache
from io import BytesIO
from typing import NamedTuple

import numpy as np
from PIL import Image

from studies.corruptions.base import (
    Bytes,
    Corruption,
    Generators,
    Images,
    draw,
    to_bytes,
)
from studies.corruptions.filters import Floats, motion_blur, zoom_in
from studies.data.catalogue import FROST
from studies.data.folder import DataError, read

FROST_FILES = FROST.files[:5]  # of six pictures the original draws from the first five
LUMA = np.array([0.299, 0.587, 0.114])  # how bright red, green and blue look


class Snow(NamedTuple):
    """How much it snows."""

    mean: float  # of the noise that flakes are made of
    std: float
    zoom: float  # size of the flakes
    threshold: float  # noise below it is no snow
    radius: int  # of the motion blur
    blur: float  # its standard deviation
    kept: float  # share of the image that is not whitened


def _snow(images: Images, snow: Snow, generators: Generators) -> Images:
    """Whiten the image, and let flakes fall over it and from the other side."""
    noise = draw(generators, lambda g: g.normal(snow.mean, snow.std, size=images.shape[1:3]))
    degrees = draw(generators, lambda g: g.uniform(-135, -45))
    flakes = zoom_in(noise[..., None], snow.zoom)
    flakes = to_bytes(np.where(flakes < snow.threshold, 0, flakes)) / 255
    flakes = motion_blur(flakes, snow.radius, snow.blur, degrees)
    grey = (images @ LUMA)[..., None]
    whitened = np.maximum(images, 1.5 * grey + 0.5)
    landscape = snow.kept * images + (1 - snow.kept) * whitened
    return landscape + flakes + flakes[:, ::-1, ::-1]


def _frost(images: Images, weights: tuple[float, float], generators: Generators) -> Images:
    """Add a random part of a picture of frost."""
    pictures = frost_pictures()
    side = images.shape[1]
    frost = draw(generators, lambda g: _random_part(pictures[g.integers(len(pictures))], side, g))
    return weights[0] * images + weights[1] * frost / 255


def frost_pictures() -> list[Bytes]:
    """Return the pictures of frost at a fifth of their size, as bytes (H, W, 3)."""
    try:
        return [_fifth(read(FROST, file)) for file in FROST_FILES]
    except DataError as error:
        raise DataError(f"{error}; or leave the corruption 'frost' out") from error


@cache
def _fifth(content: bytes) -> Bytes:
    """Shrink the picture in a file fivefold by taking the middle pixel of every 5 × 5.

    OpenCV's `resize` by 0.2, which interpolates at just these pixels, and rounds the size.
    """
    with Image.open(BytesIO(content)) as image:
        picture = np.asarray(image.convert("RGB"))
    height, width = (round(0.2 * side) for side in picture.shape[:2])
    rows = np.minimum(5 * np.arange(height) + 2, picture.shape[0] - 1)
    columns = np.minimum(5 * np.arange(width) + 2, picture.shape[1] - 1)
    return picture[rows[:, None], columns]


def _random_part(picture: Bytes, side: int, generator: np.random.Generator) -> Bytes:
    top, left = (generator.integers(length - side) for length in picture.shape[:2])
    return picture[top : top + side, left : left + side]


def _fog(images: Images, parameter: tuple[float, float], generators: Generators) -> Images:
    """Add clouds, and darken so that the brightest value stays what it was."""
    density, decay = parameter
    brightest = images.max(axis=(1, 2, 3), keepdims=True)
    clouds = plasma(images.shape[1], decay, generators)[..., None]
    return (images + density * clouds) * brightest / (brightest + density)


def plasma(side: int, decay: float, generators: Generators) -> Floats:
    """Return random clouds (N, side, side) from 0 to 1, by the diamond-square algorithm.

    On a grid that wraps around, first the middles of squares and then those of their sides become
    the mean of their four neighbours plus noise, and so on at half the distance with noise that is
    `decay`² times weaker. The side is a power of two.
    """
    clouds = np.zeros((len(generators), side, side))
    step, noise = side, 100.0**2
    while step > 1:
        _fill_middles(clouds, step, noise, generators)
        step, noise = step // 2, noise / decay**2
    clouds -= clouds.min(axis=(1, 2), keepdims=True)
    return clouds / clouds.max(axis=(1, 2), keepdims=True)


def _fill_middles(clouds: Floats, step: int, noise: float, generators: Generators) -> None:
    """Halve the distance between the known points of a grid."""
    half = step // 2
    corners = clouds[:, ::step, ::step]
    shape = (3, *corners.shape[1:])
    wobble = draw(generators, lambda g: g.uniform(-noise, noise, size=shape))
    sides = corners + np.roll(corners, -1, axis=1)
    middles = (sides + np.roll(sides, -1, axis=2)) / 4 + wobble[:, 0]
    above, before = (middles + np.roll(middles, 1, axis=axis) for axis in (1, 2))
    clouds[:, half::step, half::step] = middles
    clouds[:, ::step, half::step] = (above + corners + np.roll(corners, -1, axis=2)) / 4 + wobble[
        :, 1
    ]
    clouds[:, half::step, ::step] = (before + sides) / 4 + wobble[:, 2]


WEATHER = (
    Corruption(
        "snow",
        _snow,
        (
            Snow(0.1, 0.2, 1, 0.6, 8, 3, 0.95),
            Snow(0.1, 0.2, 1, 0.5, 10, 4, 0.9),
            Snow(0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
            Snow(0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
            Snow(0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
        ),
    ),
    Corruption("frost", _frost, ((1, 0.2), (1, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45))),
    Corruption("fog", _fog, ((0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75))),
)
