"""Blurs against convolutions, walks and loops written out."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import ndimage
from torch.nn import functional

from studies.corruptions import CORRUPTIONS
from studies.corruptions.blur import disk
from studies.corruptions.filters import motion_blur, zoom_in

from .pictures import PICTURES, drawn_out, generators


def convolved(kernel, mode):
    """Three pictures, convolved channel by channel."""
    reach = len(kernel) // 2
    images = torch.from_numpy(PICTURES[:3] / 255).movedim(-1, 1).reshape(9, 1, 32, 32)
    padded = functional.pad(images, (reach,) * 4, mode=mode)
    found = functional.conv2d(padded, kernel[None, None])
    return found.reshape(3, 3, 32, 32).movedim(1, -1).numpy()


@pytest.mark.parametrize("parameter", CORRUPTIONS["defocus_blur"].parameters)
def test_defocus_is_a_convolution_with_a_soft_disk(parameter):
    radius, softening = parameter
    reach = np.arange(-4, 5)
    hard = np.array([[float(i * i + j * j <= radius**2) for j in reach] for i in reach])
    taps = np.exp(-(np.array([-1.0, 0, 1]) ** 2) / (2 * softening**2))
    soft = np.zeros((9, 9))
    for i in range(3):
        for j in range(3):
            shifted = np.roll(hard, (i - 1, j - 1), axis=(0, 1))
            soft += shifted * taps[i] * taps[j]
    soft /= soft.sum()
    kernel = disk(radius, softening)
    assert kernel.sum() == pytest.approx(1, abs=1e-12)
    expected = convolved(torch.from_numpy(soft), "reflect")
    actual = CORRUPTIONS["defocus_blur"].apply(PICTURES[:3] / 255, parameter, [])
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("parameter", CORRUPTIONS["glass_blur"].parameters)
def test_glass_blur_is_the_original_loop(parameter):
    std, repeats = parameter

    def blurred(image):
        return ndimage.gaussian_filter(image, (std, std, 0), mode="nearest")

    expected = []
    for image, generator in zip(PICTURES[:3], generators(3), strict=True):
        pixels = np.floor(blurred(image / 255) * 255 + 1e-6)
        steps = generator.integers(-1, 1, size=(repeats, 2, 30, 30))
        for down, right in steps:
            for h in range(31, 1, -1):
                for w in range(31, 1, -1):
                    i, j = h + down[h - 2, w - 2], w + right[h - 2, w - 2]
                    # Both sides are views: this is no swap, but it is what the files were made by.
                    pixels[h, w], pixels[i, j] = pixels[i, j], pixels[h, w]
        expected.append(blurred(pixels / 255))
    actual = CORRUPTIONS["glass_blur"].apply(PICTURES[:3] / 255, parameter, generators(3))
    np.testing.assert_allclose(actual, np.stack(expected), rtol=0, atol=1e-12)


@pytest.mark.parametrize("degrees", [-37.0, 12.5, -101.0])
def test_motion_blur_is_a_walk_along_its_direction(degrees):
    image = PICTURES[0] / 255
    actual = motion_blur(image[None], 6, 2.5, np.array([degrees]))[0] * 255
    # Sums in another order may be rounded to the next byte, but only at its edge.
    assert np.abs(actual - drawn_out(image, 6, 2.5, degrees)).max() <= 1
    assert (np.round(actual) == drawn_out(image, 6, 2.5, degrees)).mean() > 0.999


@pytest.mark.parametrize("factor", [1, 1.01, 1.13, 1.25, 1.75, 2.25])
def test_zooming_in_is_cutting_out_and_enlarging(factor):
    kept = int(np.ceil(32 / factor))
    first = (32 - kept) // 2
    for image in PICTURES[:3] / 255:
        middle = image[first : first + kept, first : first + kept]
        enlarged = ndimage.zoom(middle, (factor, factor, 1), order=1)
        excess = (len(enlarged) - 32) // 2
        expected = enlarged[excess : excess + 32, excess : excess + 32]
        np.testing.assert_allclose(zoom_in(image[None], factor)[0], expected, rtol=0, atol=1e-12)


def test_zoom_blur_is_the_mean_of_zooms():
    images = PICTURES[:3] / 255
    for largest in CORRUPTIONS["zoom_blur"].parameters:
        views = [images, *(zoom_in(images, factor) for factor in np.arange(1, largest, 0.01))]
        actual = CORRUPTIONS["zoom_blur"].apply(images, largest, [])
        np.testing.assert_allclose(actual, np.mean(views, axis=0), rtol=0, atol=1e-12)


@pytest.mark.parametrize("std", [0.4, 0.6, 0.7, 0.8, 1])
def test_gaussian_blur_is_a_convolution(std):
    reach = int(4 * std + 0.5)
    taps = torch.exp(-(torch.arange(-reach, reach + 1.0, dtype=torch.float64) ** 2) / (2 * std**2))
    expected = convolved(torch.outer(taps, taps) / taps.sum() ** 2, "replicate")
    actual = CORRUPTIONS["gaussian_blur"].apply(PICTURES[:3] / 255, std, [])
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-12)
    assert std in CORRUPTIONS["gaussian_blur"].parameters
