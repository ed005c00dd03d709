"""Corruptions against literal oracles, and what is true of all of them."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from matplotlib import colors
from PIL import Image
from scipy import ndimage
from torch.nn import functional

from studies.corruptions import BENCHMARK, CORRUPTIONS, SEVERITIES, base, contact_sheet, weather
from studies.corruptions.blur import disk
from studies.corruptions.digital import Elastic
from studies.corruptions.filters import motion_blur, zoom_in
from studies.corruptions.weather import plasma

# Images to corrupt, random generators for them, and motion blur written out -----------------------


def photographs(count):
    """Made-up images (N, 32, 32, 3): coloured blobs with edges, from black to white."""
    generator = np.random.default_rng(7)
    noise = generator.normal(size=(count, 32, 32, 3))
    smooth = ndimage.gaussian_filter(noise, (0, 3, 3, 0.4)) * 8
    edges = 0.4 * np.sign(ndimage.gaussian_filter(noise, (0, 4, 4, 1)))
    return (np.clip(0.5 + 0.5 * np.tanh(smooth) * 0.6 + edges, 0, 1) * 255).astype(np.uint8)


PICTURES = photographs(200)


def grey(count, value):
    return np.full((count, 32, 32, 3), value, np.uint8)


def generators(count, seed=0):
    return [np.random.default_rng([seed, i]) for i in range(count)]


def drawn_out(image, radius, std, degrees):
    """Motion blur of one image (H, W, C), tap by tap and pixel by pixel, in bytes."""
    taps = np.exp(-(np.arange(2 * radius + 1) ** 2) / (2 * std**2))
    result = np.zeros_like(image)
    for y, x in np.ndindex(image.shape[:2]):
        for distance, tap in enumerate(taps / taps.sum()):
            below = y + np.ceil(distance * np.sin(np.pi * degrees / 180) - 0.5)
            beside = x + np.ceil(distance * np.cos(np.pi * degrees / 180) - 0.5)
            result[y, x] += tap * image[int(np.clip(below, 0, 31)), int(np.clip(beside, 0, 31))]
    return np.round(result * 255)


# Pictures of frost, in the place of those that have to be downloaded ------------------------------


@pytest.fixture(autouse=True)
def frost(monkeypatch):
    """Pictures whose colour says where in which picture it is."""
    places = np.stack(np.meshgrid(np.arange(70), np.arange(90), indexing="ij"), axis=-1)
    pictures = [np.dstack([places, np.full((70, 90), 40 * i)]).astype(np.uint8) for i in range(5)]
    monkeypatch.setattr(weather, "frost_pictures", lambda: pictures)
    return pictures


# What is true of all corruptions, and the sheet that shows them -----------------------------------

RANDOM = (
    *("gaussian_noise", "shot_noise", "impulse_noise", "glass_blur", "motion_blur"),
    *("snow", "frost", "fog", "elastic_transform"),
)
each_name = pytest.mark.parametrize("name", CORRUPTIONS)


def test_the_benchmark_has_fifteen_corruptions():
    assert len(BENCHMARK) == 15
    assert {*BENCHMARK, "gaussian_blur"} == set(CORRUPTIONS)
    assert all(corruption.name == name for name, corruption in CORRUPTIONS.items())


@each_name
def test_severity_0_changes_nothing_and_others_change_something(name):
    images = PICTURES[:4].copy()
    corrupted = [CORRUPTIONS[name](images, severity, range(4)) for severity in range(6)]
    assert np.array_equal(corrupted[0], images)
    assert corrupted[0] is not images
    assert all(one.dtype == np.uint8 and one.shape == images.shape for one in corrupted)
    assert all((one != images).any() for one in corrupted[1:])
    assert np.array_equal(images, PICTURES[:4])


@each_name
def test_an_image_is_corrupted_alike_alone_and_among_others(name, monkeypatch):
    some = [17, 3, 19]
    for severity in SEVERITIES:
        together = CORRUPTIONS[name](PICTURES[:20], severity, range(20))
        assert np.array_equal(CORRUPTIONS[name](PICTURES[some], severity, some), together[some])
        monkeypatch.setattr(base, "BLOCK", 7)
        assert np.array_equal(CORRUPTIONS[name](PICTURES[:20], severity, range(20)), together)


@each_name
def test_the_number_of_an_image_decides_what_is_drawn_for_it(name):
    twice = CORRUPTIONS[name](PICTURES[[0, 0]], 5, [0, 1])
    assert (twice[0] != twice[1]).any() == (name in RANDOM)


def test_the_contact_sheet_shows_what_the_corruptions_make():
    sheet = np.asarray(contact_sheet(PICTURES[:2], [0, 1], ["contrast", "fog"]))
    fog = CORRUPTIONS["fog"](PICTURES[:2], 3, [0, 1])[1].repeat(2, axis=0).repeat(2, axis=1)
    left, top = sheet.shape[1] - 3 * 68, sheet.shape[0] - 68  # the last row, third from the right
    assert np.array_equal(sheet[top : top + 64, left : left + 64], fog)


# Noises have the moments of their distributions ---------------------------------------------------


def severities(*parameters):
    """Every severity with its parameter."""
    return pytest.mark.parametrize(("severity", "parameter"), list(enumerate(parameters, start=1)))


@severities(0.04, 0.06, 0.08, 0.09, 0.10)
def test_gaussian_noise_has_its_mean_and_variance(severity, parameter):
    std = 255 * parameter
    noise = CORRUPTIONS["gaussian_noise"](grey(100, 128), severity, range(100)) - 128.0
    # Rounding down takes ½ on average and adds the variance of a uniform number, 1/12.
    assert noise.mean() == pytest.approx(-0.5, abs=5 * std / noise.size**0.5)
    assert noise.var() == pytest.approx(std**2 + 1 / 12, rel=0.02)


@severities(500, 250, 100, 75, 50)
def test_shot_noise_has_the_variance_of_counts(severity, parameter):
    shot_noise = CORRUPTIONS["shot_noise"]
    assert shot_noise.parameters[severity - 1] == parameter
    images = np.full((100, 32, 32, 3), 100 / 255)
    counts = shot_noise.apply(images, parameter, generators(100)) * parameter
    np.testing.assert_allclose(counts, np.round(counts), atol=1e-9)
    assert counts.mean() == pytest.approx(parameter * 100 / 255, rel=0.01)
    assert counts.var() == pytest.approx(parameter * 100 / 255, rel=0.02)


@severities(0.01, 0.02, 0.03, 0.05, 0.07)
def test_impulse_noise_hits_its_share_of_values(severity, parameter):
    noisy = CORRUPTIONS["impulse_noise"](grey(100, 128), severity, range(100))
    assert set(np.unique(noisy)) == {0, 128, 255}
    std = (parameter / 2 / noisy.size) ** 0.5
    for value in (0, 255):
        assert abs((noisy == value).mean() - parameter / 2) < 5 * std
    hit = noisy != 128
    assert (hit.any(-1) & ~hit.all(-1)).any()  # channels one by one


# Blurs against convolutions, walks and loops written out ------------------------------------------


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


# Snow, frost, fog and brightness, step by step ----------------------------------------------------


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


# Contrast, elastic transforms, pixels and JPEG against torch, scipy and Pillow --------------------


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
