"""Rotations against torch's grid sampling, and angles drawn at random."""

from __future__ import annotations

import pytest
import torch
from scipy import stats
from torch.nn import functional

from studies.data.digits import random_angles, rotate

IMAGES = torch.rand(7, 1, 28, 28, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
ANGLES = torch.tensor([0.0, 15.0, 90.0, 133.7, 180.0, -30.0, 359.0], dtype=torch.float64)


def grid_sampled(images: torch.Tensor, degrees: torch.Tensor) -> torch.Tensor:
    """The same rotation by torch: every pixel takes its value from where it came from."""
    radians = degrees.deg2rad()
    cos, sin, zero = radians.cos(), radians.sin(), torch.zeros_like(radians)
    affine = torch.stack([cos, -sin, zero, sin, cos, zero], 1).view(-1, 2, 3)
    grid = functional.affine_grid(affine, list(images.shape), align_corners=True)
    return functional.grid_sample(images, grid, "bilinear", "zeros", align_corners=True)


def test_each_image_turns_by_its_own_angle():
    turned = rotate(IMAGES, ANGLES)
    assert torch.allclose(turned, grid_sampled(IMAGES, ANGLES), rtol=0, atol=1e-12)
    for i, angle in enumerate(ANGLES.tolist()):
        assert torch.equal(turned[i], rotate(IMAGES, angle)[i])


@pytest.mark.parametrize("turns", range(-4, 5))
def test_right_angles_only_move_pixels(turns):
    expected = torch.rot90(IMAGES, turns, (-2, -1))
    assert torch.equal(rotate(IMAGES, 90 * turns), expected)
    assert torch.equal(rotate(IMAGES, torch.full((7,), 90.0 * turns)), expected)


def test_rotation_leaves_its_input_alone_and_keeps_the_type():
    images, before = IMAGES.float(), IMAGES.float()
    assert rotate(images, ANGLES).dtype == torch.float32
    assert torch.equal(images, before)
    assert rotate(IMAGES[:0], ANGLES[:0]).shape == (0, 1, 28, 28)


def test_random_angles_are_uniform_and_depend_on_the_seed_alone():
    state = torch.get_rng_state()
    angles = random_angles(2000, seed=5)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(angles, random_angles(2000, seed=5))
    assert not torch.equal(angles, random_angles(2000, seed=6))
    assert stats.kstest(angles.numpy() / 360, "uniform").pvalue > 0.01
