"""Noises have the moments of their distributions."""

from __future__ import annotations

import numpy as np
import pytest

from studies.corruptions import CORRUPTIONS

from .pictures import generators, grey


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
