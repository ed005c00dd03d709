"""Spatter: where there is no drop nothing changes, and drops have their colours."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import ndimage

from studies.corruptions.spatter import MUD, SPATTER, WATER

from .pictures import PICTURES, generators

IMAGES = PICTURES[:50] / 255
WATERS, MUDS = SPATTER.parameters[:3], SPATTER.parameters[3:]


def drops(parameter):
    """The smoothed noise of every image, by itself."""
    noise = [g.normal(parameter.mean, parameter.std, size=(32, 32)) for g in generators(50)]
    smooth = [ndimage.gaussian_filter(each, parameter.smoothness, mode="nearest") for each in noise]
    return np.stack(smooth)


@pytest.mark.parametrize("parameter", WATERS)
def test_water_brightens_drops_alone_and_by_its_amount_at_most(parameter):
    added = SPATTER.apply(IMAGES, parameter, generators(50)) - IMAGES
    wet = drops(parameter) >= parameter.threshold
    assert wet.any()
    assert not added[~wet].any()
    shining = added / WATER
    np.testing.assert_allclose(shining, shining[..., :1].repeat(3, -1), rtol=0, atol=1e-12)
    assert shining.min() >= -1e-12
    # The brightest pixel of every image that has an edge inside a drop has the whole amount.
    brightest = shining.max(axis=(1, 2, 3))
    np.testing.assert_allclose(brightest[brightest > 0], parameter.amount, rtol=0, atol=1e-12)
    assert (brightest > 0).mean() > 0.5


@pytest.mark.parametrize("parameter", MUDS)
def test_mud_covers_the_thick_of_drops(parameter):
    covered = drops(parameter) > parameter.threshold
    share = np.stack(
        [
            ndimage.gaussian_filter(c.astype(float), parameter.amount, mode="nearest")
            for c in covered
        ]
    )
    muddy = share >= 0.8
    assert muddy.any()
    spattered = SPATTER.apply(IMAGES, parameter, generators(50))
    expected = IMAGES + share[..., None] * (MUD - IMAGES)
    np.testing.assert_allclose(spattered[muddy], expected[muddy], rtol=0, atol=1e-12)
    np.testing.assert_array_equal(spattered[~muddy], IMAGES[~muddy])
