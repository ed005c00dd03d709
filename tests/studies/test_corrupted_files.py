"""CIFAR-10-C: from the official files where they are, else made and kept in a cache."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from studies.corruptions import CORRUPTIONS, SEVERITIES, Cifar10C, cifar10_c
from studies.data import Labelled, cifar10
from studies.data.folder import DataError, data_folder

# A made-up test set of twenty images, of which some are taken.
PICTURES = np.random.default_rng(3).integers(256, size=(20, 32, 32, 3), dtype=np.uint8)
SOME = (11, 2, 5)


@pytest.fixture
def data(folder, monkeypatch):
    monkeypatch.setattr(cifar10_c, "TEST_IMAGES", 20)
    labels = torch.arange(20) % 10
    images = torch.from_numpy(PICTURES).movedim(-1, 1)
    chosen = Labelled(images[list(SOME)], labels[list(SOME)])
    return Cifar10C(chosen, SOME, folder / "cache")


@pytest.fixture
def official(folder):
    """The official files for that test set."""
    place = folder / "CIFAR-10-C"
    place.mkdir(parents=True)
    np.save(place / "labels.npy", np.tile(np.arange(20) % 10, 5).astype(np.uint8))
    fog = np.random.default_rng(0).integers(256, size=(100, 32, 32, 3), dtype=np.uint8)
    np.save(place / "fog.npy", fog)
    return place, fog


def channels_last(images):
    return images.movedim(1, -1).numpy()


@pytest.mark.parametrize("severity", [0, 5])
def test_images_are_made_where_no_official_files_are(data, severity):
    assert not data.official
    images, labels = data.load("fog", severity)
    expected = CORRUPTIONS["fog"](PICTURES[list(SOME)], severity, SOME)
    assert np.array_equal(channels_last(images), expected)
    assert labels.tolist() == [1, 2, 5]


def test_the_cache_knows_all_that_images_depend_on(data, monkeypatch):
    data.load("fog", 3)
    data.load("fog", 4)
    data.load("contrast", 3)
    dataclasses.replace(data, numbers=(11, 2, 6)).load("fog", 3)
    dataclasses.replace(data, clean=Labelled(255 - data.clean.inputs, data.clean.labels)).load(
        "fog", 3
    )
    weaker = dataclasses.replace(CORRUPTIONS["fog"], parameters=((0.1, 3),) * 5)
    monkeypatch.setattr(cifar10_c, "CORRUPTIONS", {"fog": weaker})
    data.load("fog", 3)
    assert len(list(data.cache.iterdir())) == 6


@pytest.mark.parametrize("severity", SEVERITIES)
def test_official_files_are_preferred(data, official, severity):
    assert data.official
    images, labels = data.load("fog", severity)
    expected = official[1][[20 * (severity - 1) + number for number in SOME]]
    assert np.array_equal(channels_last(images), expected)
    assert labels.tolist() == [1, 2, 5]
    assert torch.equal(data.load("fog", 0).inputs, data.clean.inputs)
    assert not data.cache.exists()


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("fog", np.zeros((100, 32, 32, 3)), r"fog\.npy holds float64"),
        ("fog", np.zeros((20, 32, 32, 3), np.uint8), r"expected bytes of \(100, 32"),
        ("labels", np.zeros(100, np.uint8), "has other labels than CIFAR-10's test images"),
    ],
)
def test_damage_to_official_files_is_noticed(data, official, name, array, message):
    np.save(official[0] / f"{name}.npy", array)
    with pytest.raises(DataError, match=message):
        data.load("fog", 2)
    (official[0] / f"{name}.npy").write_bytes(b"something else")
    with pytest.raises(DataError, match=rf"{name}\.npy is corrupt"):
        data.load("fog", 2)


def test_the_real_test_set_under_a_real_frost(tmp_path):
    if not cifar10.available() or not (data_folder() / "frost").is_dir():
        pytest.skip("needs CIFAR-10 and the pictures of frost in ACNML_DATA")
    data = Cifar10C.of_test_set([7, 3], tmp_path)
    test = cifar10.load("test")
    assert torch.equal(data.load("frost", 0).inputs, test.inputs[[7, 3]])
    assert data.load("frost", 5).labels.tolist() == test.labels[[7, 3]].tolist()
    if not data.official:
        expected = CORRUPTIONS["frost"](channels_last(test.inputs[[7, 3]]), 5, [7, 3])
        assert np.array_equal(channels_last(data.load("frost", 5).inputs), expected)
