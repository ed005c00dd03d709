"""Noise: Gaussian, shot and impulse."""

from __future__ import annotations

import numpy as np

from studies.corruptions.base import Corruption, Generators, Images, draw


def _gaussian(images: Images, std: float, generators: Generators) -> Images:
    return images + std * draw(generators, lambda g: g.normal(size=images.shape[1:]))


def _shot(images: Images, photons: float, generators: Generators) -> Images:
    """Count photons: the brightest value stands for this many, on average."""
    pairs = zip(generators, images, strict=True)
    return np.stack([generator.poisson(image * photons) for generator, image in pairs]) / photons


def _impulse(images: Images, share: float, generators: Generators) -> Images:
    """Set a share of the values to 0 or 1, evenly, each channel by itself."""
    hit, white = draw(generators, lambda g: g.random((2, *images.shape[1:]))).swapaxes(0, 1)
    return np.where(hit < share, (white < 0.5).astype(images.dtype), images)


NOISE = (
    Corruption("gaussian_noise", _gaussian, (0.04, 0.06, 0.08, 0.09, 0.10)),
    Corruption("shot_noise", _shot, (500, 250, 100, 75, 50)),
    Corruption("impulse_noise", _impulse, (0.01, 0.02, 0.03, 0.05, 0.07)),
)
