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
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("ACNML_DATA", str(tmp_path))
    monkeypatch.setattr(cifar10_c, "TEST_IMAGES", 20)
    return tmp_path


@pytest.fixture
def data(folder):
    labels = torch.arange(20) % 10
    images = torch.from_numpy(PICTURES).movedim(-1, 1)
    chosen = Labelled(images[list(SOME)], labels[list(SOME)])
    return Cifar10C(chosen, SOME, folder / "cache")


@pytest.fixture
def official(folder):
    """The official files for that test set."""
    place = folder / "CIFAR-10-C"
    place.mkdir()
    np.save(place / "labels.npy", np.tile(np.arange(20) % 10, 5).astype(np.uint8))
    fog = np.random.default_rng(0).integers(256, size=(100, 32, 32, 3), dtype=np.uint8)
    np.save(place / "fog.npy", fog)
    return place, fog


def channels_last(images):
    return images.movedim(1, -1).numpy()


@pytest.mark.parametrize("severity", range(6))
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


def halved(place):
    (place / "fog.npy").write_bytes((place / "fog.npy").read_bytes()[:1000])


def floats(place):
    np.save(place / "fog.npy", np.zeros((100, 32, 32, 3)))


def too_few(place):
    np.save(place / "fog.npy", np.zeros((20, 32, 32, 3), np.uint8))


def objects(place):
    np.save(place / "fog.npy", np.array([None]), allow_pickle=True)


def other_labels(place):
    np.save(place / "labels.npy", np.zeros(100, np.uint8))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (halved, r"fog\.npy is corrupt"),
        (floats, r"fog\.npy holds float64"),
        (too_few, r"fog\.npy holds uint8 of shape \(20, 32, 32, 3\), expected bytes of \(100, 32"),
        (objects, r"fog\.npy is corrupt"),
        (other_labels, "has other labels than CIFAR-10's test images"),
    ],
)
def test_damage_to_official_files_is_noticed(data, official, damage, message):
    damage(official[0])
    with pytest.raises(DataError, match=message):
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
