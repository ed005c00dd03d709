"""Spatter: drops of water or mud on the lens."""

from __future__ import annotations

from typing import NamedTuple

import cv2
import numpy as np
from scipy import ndimage

from studies.corruptions.base import Corruption, Generators, Images, draw
from studies.corruptions.filters import Floats

WATER = np.array([175, 238, 238]) / 255  # pale turquoise
MUD = np.array([63, 42, 20]) / 255  # brown

# How water breaks light: its edges, found by Canny's thresholds, throw soft shadows of this reach.
EDGES, REACH = (50, 150), 20
RELIEF = np.array([[-2, -1, 0], [-1, 1, 1], [0, 1, 2]])  # light from one corner


class Spatter(NamedTuple):
    """How much liquid there is."""

    mean: float  # of the noise that drops are made of
    std: float
    smoothness: float  # standard deviation of the Gaussian that joins noise to drops
    threshold: float  # noise below it is no drop
    amount: float  # of water: how bright it is; of mud: standard deviation of its soft edges
    mud: bool


def _spatter(images: Images, spatter: Spatter, generators: Generators) -> Images:
    """Add bright water, or cover parts with mud."""
    noise = draw(generators, lambda g: g.normal(spatter.mean, spatter.std, size=images.shape[1:3]))
    smooth = (0, spatter.smoothness, spatter.smoothness)
    drops = ndimage.gaussian_filter(noise, smooth, mode="nearest", truncate=4.0)
    drops = np.where(drops < spatter.threshold, 0, drops)
    if spatter.mud:
        edges = (0, spatter.amount, spatter.amount)
        covered = (drops > spatter.threshold).astype(float)
        covered = ndimage.gaussian_filter(covered, edges, mode="nearest", truncate=4.0)
        covered = np.where(covered < 0.8, 0, covered)[..., None]
        return (1 - covered) * images + covered * MUD
    shining = np.stack([_shining(each) for each in drops])[..., None]
    return images + spatter.amount * shining * WATER


def _shining(drops: Floats) -> Floats:
    """Return how brightly each pixel (H, W) of water shines, from 0 to 1.

    The distance to the nearest edge of a drop is cut off, smoothed and spread over all bytes. It is
    then lit from one corner. Thick water shines more, and pixels without water do not. All steps
    are OpenCV's, in bytes, as in the original. An image without drops stays as it is, where the
    original divides by 0.
    """
    thickness = (drops * 255).astype(np.uint8)
    no_edge = 255 - cv2.Canny(thickness, *EDGES)
    distance = np.minimum(cv2.distanceTransform(no_edge, cv2.DIST_L2, 5), REACH)
    surface = cv2.equalizeHist(cv2.blur(distance, (3, 3)).astype(np.uint8))
    light = cv2.blur(cv2.filter2D(surface, cv2.CV_8U, RELIEF), (3, 3))
    shining = thickness.astype(np.float64) * light
    return shining / max(shining.max(), 1.0)


SPATTER = Corruption(
    "spatter",
    _spatter,
    (
        Spatter(0.62, 0.1, 0.7, 0.7, 0.5, mud=False),
        Spatter(0.65, 0.1, 0.8, 0.7, 0.5, mud=False),
        Spatter(0.65, 0.3, 1, 0.69, 0.5, mud=False),
        Spatter(0.65, 0.1, 0.7, 0.69, 0.6, mud=True),
        Spatter(0.65, 0.1, 0.5, 0.68, 0.6, mud=True),
    ),
)
