"""Contrast, elastic transforms, pixels and JPEG against torch, scipy and Pillow."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import ndimage

from studies.corruptions import CORRUPTIONS, SEVERITIES
from studies.corruptions.digital import Elastic

from .pictures import PICTURES


@pytest.mark.parametrize("severity", SEVERITIES)
def test_contrast_shrinks_differences_to_the_mean(severity):
    kept = [0.75, 0.5, 0.4, 0.3, 0.15][severity - 1]
    images = torch.from_numpy(PICTURES[:20] / 255)
    mean = images.flatten(1, 2).mean(1)[:, None, None, :]
    expected = torch.lerp(mean, images, kept) * 255
    actual = CORRUPTIONS["contrast"](PICTURES[:20], severity, range(20))
    assert np.abs(actual - (expected.numpy() - 0.5)).max() <= 0.5 + 1e-5


class Given:
    """In the place of a random generator: gives what it was given, call by call."""

    def __init__(self, *values):
        self.values = list(values)

    def uniform(self, low, high, size):
        return np.broadcast_to(self.values.pop(0), size).astype(float)


def elastic(images, parameter, moves, field):
    """Bend all images by the same moves of the triangle's corners (x, y) and the same field."""
    given = [Given(moves, field) for _ in images]
    return CORRUPTIONS["elastic_transform"].apply(images, parameter, given)


def test_elastic_moves_a_triangle_to_where_its_corners_went():
    images, moves = PICTURES[:4] / 255, np.array([[1, -2], [0, 3], [-2, 1]])
    moved = elastic(images, Elastic(1, 0, 3), moves, 0.0)
    for (x, y), (dx, dy) in zip([(26, 26), (26, 6), (6, 6)], moves, strict=True):
        np.testing.assert_allclose(moved[:, y + dy, x + dx], images[:, y, x], rtol=0, atol=1e-12)


def test_elastic_bends_by_a_smooth_field():
    field = np.random.default_rng(1).uniform(-1, 1, size=(2, 32, 32))
    images = PICTURES[:3] / 255
    bent = elastic(images, Elastic(4, 1.5, 1), 0.0, field)
    smooth = [4 * ndimage.gaussian_filter(f, 1.5, mode="reflect", truncate=3) for f in field]
    where = np.indices((32, 32)) + smooth
    for image, actual in zip(images, bent, strict=True):
        channels = [
            ndimage.map_coordinates(c, where, order=1, mode="reflect")
            for c in image.T.swapaxes(1, 2)
        ]
        np.testing.assert_allclose(actual, np.stack(channels, axis=-1), rtol=0, atol=1e-12)


@pytest.mark.parametrize("severity", SEVERITIES)
def test_pixelate_gives_pixels_of_a_box_their_mean(severity):
    side = [30, 28, 27, 24, 20][severity - 1]
    box = ((np.arange(32) + 0.5) * side / 32).astype(int)  # by the middle of a pixel
    together = (box[:, None] == box).astype(float)
    together /= together.sum(1, keepdims=True)
    expected = np.einsum("ij,njkc,lk->nilc", together, PICTURES[:5].astype(float), together)
    actual = CORRUPTIONS["pixelate"](PICTURES[:5], severity, range(5))
    assert np.abs(actual - expected).max() <= 1  # bytes, rounded for columns and for rows


@pytest.mark.parametrize("severity", SEVERITIES)
def test_jpeg_has_the_given_quality(severity):
    for i, image in enumerate(PICTURES[:5]):
        file = io.BytesIO()
        Image.fromarray(image).save(file, format="JPEG", quality=[80, 65, 58, 50, 40][severity - 1])
        expected = np.asarray(Image.open(io.BytesIO(file.getvalue())))
        actual = CORRUPTIONS["jpeg_compression"](image[None], severity, [i])[0]
        assert np.array_equal(actual, expected)
