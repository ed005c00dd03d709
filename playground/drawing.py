"""Strokes become images, and images are distorted: the reference for the page's TypeScript.

The page has the same two functions in `src/digits/strokes.ts` and `src/digits/distort.ts`. The
tests compare them pixel by pixel on the drawings of `src/digits/drawings.json`.

Images are drawn by the rules of MNIST: the ink fits into a square of 20 pixels, and its centre of
mass is at the centre of 28 x 28 pixels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias, final

import numpy as np
from numpy.typing import NDArray

Image: TypeAlias = NDArray[np.float64]  # (28, 28), from 0 (paper) to 1 (ink); rows from the top
Stroke: TypeAlias = Sequence[tuple[float, float]]  # (x, y) in a unit square, y down

SIDE = 28
BOX = 20  # pixels that the ink covers, along its longer side
CENTRE = (SIDE - 1) / 2

# The pen, in pixels: where the ink is half as strong as in the middle of a line, and over how many
# pixels it fades. With these, lines look like those of MNIST.
PEN_RADIUS = 1.25
PEN_EDGE = 1.5

# A drawing is not enlarged as if it were smaller than this: a dot stays a dot.
SMALLEST = 0.15

NOISE_SEED = 7


@final
@dataclass(frozen=True)
class Distortion:
    """What the sliders do to an image, in this order: turn, scale and shift; blur; noise.

    Args:
        rotation: degrees, counter-clockwise.
        scale: factor around the centre.
        right: shift in pixels.
        down: shift in pixels.
        blur: standard deviation of a Gaussian in pixels.
        noise: standard deviation of Gaussian noise.
    """

    rotation: float = 0.0
    scale: float = 1.0
    right: float = 0.0
    down: float = 0.0
    blur: float = 0.0
    noise: float = 0.0


def render(strokes: Sequence[Stroke]) -> Image:
    """Draw strokes into a box of 20 pixels, centred by their mass."""
    lines = [np.asarray(stroke, dtype=np.float64) for stroke in strokes if len(stroke)]
    if not lines:
        return np.zeros((SIDE, SIDE))
    points = np.concatenate(lines)
    low, high = points.min(0), points.max(0)
    scale = (BOX - 2 * PEN_RADIUS) / max(*(high - low), SMALLEST)
    placed = [(line - (low + high) / 2) * scale + CENTRE for line in lines]
    first = _ink(placed)
    shift = CENTRE - _centre_of_mass(first)
    return _ink([line + shift for line in placed])


def _ink(lines: Sequence[NDArray[np.float64]]) -> Image:
    """Return 1 near a line, falling to 0 around a distance of PEN_RADIUS."""
    rows, columns = np.mgrid[:SIDE, :SIDE].astype(np.float64)
    nearest = np.full((SIDE, SIDE), np.inf)
    for line in lines:
        starts, ends = (line[:-1], line[1:]) if len(line) > 1 else (line, line)
        for (x, y), (to_x, to_y) in zip(starts, ends, strict=True):
            dx, dy = to_x - x, to_y - y
            length = dx * dx + dy * dy
            along = ((columns - x) * dx + (rows - y) * dy) / length if length > 0 else 0.0
            along = np.clip(along, 0, 1)
            gap = np.hypot(columns - x - along * dx, rows - y - along * dy)
            nearest = np.minimum(nearest, gap)
    return np.clip((PEN_RADIUS - nearest) / PEN_EDGE + 0.5, 0, 1)


def _centre_of_mass(image: Image) -> NDArray[np.float64]:
    """Return (x, y) in pixels."""
    rows, columns = np.mgrid[:SIDE, :SIDE]
    return np.array([(columns * image).sum(), (rows * image).sum()]) / image.sum()


def distort(image: Image, how: Distortion) -> Image:
    """Turn, scale and shift with linear interpolation, then blur and add noise."""
    moved = _moved(image, how)
    blurred = _blurred(moved, how.blur) if how.blur > 0 else moved
    if how.noise <= 0:
        return blurred
    return np.clip(blurred + how.noise * noise_pattern(), 0, 1)


def _moved(image: Image, how: Distortion) -> Image:
    """Return the image at p ↦ R⁻¹(p - centre - shift) / scale + centre; outside is paper."""
    angle = math.radians(how.rotation)
    cos, sin = math.cos(angle) / how.scale, math.sin(angle) / how.scale
    rows, columns = np.mgrid[:SIDE, :SIDE].astype(np.float64)
    x, y = columns - CENTRE - how.right, rows - CENTRE - how.down
    from_x, from_y = cos * x - sin * y + CENTRE, sin * x + cos * y + CENTRE
    left, top = np.floor(from_x), np.floor(from_y)
    right_share, down_share = from_x - left, from_y - top
    column, row = left.astype(int), top.astype(int)
    padded = np.pad(image, 1)

    def at(i: NDArray[np.int_], j: NDArray[np.int_]) -> Image:
        inside = (i >= 0) & (i < SIDE) & (j >= 0) & (j < SIDE)
        return np.where(inside, padded[np.where(inside, i, 0) + 1, np.where(inside, j, 0) + 1], 0)

    above = (1 - right_share) * at(row, column) + right_share * at(row, column + 1)
    below = (1 - right_share) * at(row + 1, column) + right_share * at(row + 1, column + 1)
    return (1 - down_share) * above + down_share * below


def _blurred(image: Image, deviation: float) -> Image:
    """Convolve with a Gaussian that is cut off at three standard deviations; outside is paper."""
    radius = math.ceil(3 * deviation)
    offsets = np.arange(-radius, radius + 1)
    kernel = np.exp(-0.5 * (offsets / deviation) ** 2)
    kernel /= kernel.sum()
    padded = np.pad(image, radius)
    down = sum(weight * padded[k : k + SIDE] for k, weight in enumerate(kernel))
    return np.asarray(sum(weight * down[:, k : k + SIDE] for k, weight in enumerate(kernel)))


def noise_pattern() -> Image:
    """Return standard normal numbers, always the same: Mulberry32 and Box-Muller."""
    state, uniform = NOISE_SEED, []
    for _ in range(2 * SIDE * SIDE):
        state = (state + 0x6D2B79F5) & 0xFFFFFFFF
        mixed = ((state ^ (state >> 15)) * (state | 1)) & 0xFFFFFFFF
        mixed ^= (mixed + (mixed ^ (mixed >> 7)) * (mixed | 61)) & 0xFFFFFFFF
        uniform.append(((mixed ^ (mixed >> 14)) & 0xFFFFFFFF) / 2**32)
    pairs = np.array(uniform).reshape(SIDE, SIDE, 2)
    return np.sqrt(-2 * np.log(1 - pairs[..., 0])) * np.cos(2 * math.pi * pairs[..., 1])
