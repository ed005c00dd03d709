"""Images to corrupt, random generators for them, and motion blur written out."""

from __future__ import annotations

import numpy as np
from scipy import ndimage


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
