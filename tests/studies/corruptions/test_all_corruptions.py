"""What is true of all corruptions, and the sheet that shows them."""

from __future__ import annotations

import numpy as np
import pytest

from studies.corruptions import BENCHMARK, CORRUPTIONS, SEVERITIES, base, contact_sheet

from .pictures import PICTURES

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
