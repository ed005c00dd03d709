"""Snow, frost, fog and brightness, step by step."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib import colors

from studies.corruptions import CORRUPTIONS, SEVERITIES
from studies.corruptions.filters import zoom_in
from studies.corruptions.weather import plasma

from .pictures import PICTURES, drawn_out, generators, grey


@pytest.mark.parametrize("severity", SEVERITIES)
def test_snow_is_noise_zoomed_cut_off_and_drawn_out(severity):
    snow = CORRUPTIONS["snow"].parameters[severity - 1]
    image, (generator,) = PICTURES[0] / 255, generators(1)
    noise = generator.normal(snow.mean, snow.std, size=(32, 32))
    flakes = zoom_in(noise[None, :, :, None], snow.zoom)[0]
    flakes = np.floor(np.clip(np.where(flakes < snow.threshold, 0, flakes), 0, 1) * 255) / 255
    flakes = drawn_out(flakes, snow.radius, snow.blur, generator.uniform(-135, -45)) / 255
    grey = 0.299 * image[..., :1] + 0.587 * image[..., 1:2] + 0.114 * image[..., 2:]
    white = np.maximum(image, grey * 1.5 + 0.5)
    expected = snow.kept * image + (1 - snow.kept) * white + flakes + np.rot90(flakes, 2)
    actual = CORRUPTIONS["snow"].apply(image[None], snow, generators(1))[0]
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-12)


def test_frost_is_a_part_of_a_picture():
    weights = (0.0, 1.0)
    parts = CORRUPTIONS["frost"].apply(PICTURES[:100] / 255, weights, generators(100)) * 255
    top, left, which = parts[:, 0, 0, 0], parts[:, 0, 0, 1], parts[:, 0, 0, 2]
    rows, columns = np.arange(32)[:, None], np.arange(32)
    np.testing.assert_allclose(
        parts[..., 0], np.broadcast_to(top[:, None, None] + rows, (100, 32, 32))
    )
    np.testing.assert_allclose(
        parts[..., 1], np.broadcast_to(left[:, None, None] + columns, (100, 32, 32))
    )
    np.testing.assert_allclose(parts[..., 2], np.broadcast_to(which[:, None, None], (100, 32, 32)))
    assert set(np.round(which)) == {0, 40, 80, 120, 160}
    assert len(np.unique(np.round(top))) > 15


@pytest.mark.parametrize("severity", SEVERITIES)
def test_frost_is_weighed_with_the_image(severity, frost):
    frost[:] = [np.full((40, 40, 3), 200, np.uint8)] * 5
    image, ice = [(1, 0.2), (1, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45)][severity - 1]
    frosted = CORRUPTIONS["frost"](PICTURES[:5], severity, range(5))
    expected = np.minimum(image * PICTURES[:5] + ice * 200, 255)
    assert np.abs(frosted - (expected - 0.5)).max() <= 0.5 + 1e-5


def test_clouds_are_the_diamond_square_algorithm():
    decay, side = 1.75, 8
    expected = []
    for generator in generators(2):
        cloud = np.zeros((side, side))
        step, noise = side, 100.0
        while step > 1:
            half, cells = step // 2, side // step
            wobble = generator.uniform(-(noise**2), noise**2, size=(3, cells, cells))
            places = [(i, j) for i in range(cells) for j in range(cells)]
            known = lambda y, x: cloud[y % side, x % side]  # noqa: B023, E731
            for i, j in places:
                y, x = i * step + half, j * step + half
                around = [known(y + a, x + b) for a in (-half, half) for b in (-half, half)]
                cloud[y, x] = np.mean(around) + wobble[0, i, j]
            for kind, (a, b) in enumerate([(0, half), (half, 0)], start=1):
                for i, j in places:
                    y, x = i * step + a, j * step + b
                    around = [known(y - half, x), known(y + half, x)]
                    around += [known(y, x - half), known(y, x + half)]
                    cloud[y, x] = np.mean(around) + wobble[kind, i, j]
            step, noise = half, noise / decay
        expected.append((cloud - cloud.min()) / np.ptp(cloud))
    np.testing.assert_allclose(plasma(side, decay, generators(2)), expected, rtol=0, atol=1e-12)


def test_fog_adds_clouds_and_keeps_the_range():
    images, (density, decay) = PICTURES[:20] / 255, (1.5, 1.75)
    foggy = CORRUPTIONS["fog"].apply(images, (density, decay), generators(20))
    clouds = plasma(32, decay, generators(20))
    for image, cloud, actual in zip(images, clouds, foggy, strict=True):
        top = image.max()
        expected = (image + density * cloud[..., None]) / (top + density) * top
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-12)
    assert (CORRUPTIONS["fog"](grey(3, 0), 5, range(3)) == 0).all()


@pytest.mark.parametrize("added", [0.05, 0.1, 0.15, 0.2, 0.3])
def test_brightness_raises_the_value_of_hsv(added):
    images = np.concatenate([PICTURES[:20], grey(1, 0), grey(1, 255)]) / 255
    hsv = colors.rgb_to_hsv(images)
    hsv[..., 2] = np.minimum(hsv[..., 2] + added, 1)
    actual = CORRUPTIONS["brightness"].apply(images, added, [])
    np.testing.assert_allclose(actual, colors.hsv_to_rgb(hsv), rtol=0, atol=1e-12)
    assert added in CORRUPTIONS["brightness"].parameters
