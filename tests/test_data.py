"""Data sets: the catalogue, what the data folder holds, idx files, rotations, the fallback."""

from __future__ import annotations

import gzip
import hashlib
import math
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from torch.nn import functional

from acnml.experiments.data import handwritten, idx, mnist, notmnist
from acnml.experiments.data.catalogue import (
    CATALOGUE,
    CIFAR10_C,
    MNIST,
    STUDIES,
    DataFile,
    DataSet,
    Download,
)
from acnml.experiments.data.folder import DataError, State, data_folder, inspect, locate, read
from acnml.experiments.data.handwritten import handwritten_digits
from acnml.experiments.data.labelled import Labelled, split
from acnml.experiments.data.rotation import random_angles, rotate

DIGEST_LENGTHS = {"md5": 32, "sha1": 40, "sha256": 64}


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("ACNML_DATA", str(tmp_path))
    return tmp_path


def encode(values: np.ndarray) -> bytes:
    """An idx file, written by its specification."""
    header = struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape)
    return header + values.astype(np.uint8).tobytes()


def described(path: str, content: bytes, *alternatives: DataFile) -> DataFile:
    return DataFile(path, len(content), f"md5:{hashlib.md5(content).hexdigest()}", alternatives)


def put(folder: Path, path: str, content: bytes) -> None:
    (folder / path).parent.mkdir(parents=True, exist_ok=True)
    (folder / path).write_bytes(content)


# Catalogue -------------------------------------------------------------------------------------


@pytest.mark.parametrize("data_set", CATALOGUE.values(), ids=CATALOGUE)
def test_an_entry_is_well_formed(data_set):
    files = [form for file in data_set.files for form in (file, *file.alternatives)]
    files += [download.file for download in data_set.downloads]
    for file in files:
        algorithm, _, digest = (file.checksum or "").partition(":")
        assert len(digest) == DIGEST_LENGTHS.get(algorithm, 0)
        assert set(digest) <= set("0123456789abcdef")
        assert file.size > 0
        assert not file.path.startswith("/")
        assert ".." not in file.path.split("/")
    for download in data_set.downloads:
        assert download.file.checksum, "what is downloaded has a checksum"
        assert len(set(download.mirrors)) == len(download.mirrors) >= 2
        for address in download.mirrors:
            assert address.startswith("https://")
            assert address.endswith(f"/{download.file.name}")


def test_no_two_files_have_the_same_place():
    files = [file for each in CATALOGUE.values() for file in each.files]
    paths = [form.path for file in files for form in (file, *file.alternatives)]
    assert len(set(paths)) == len(paths)


def test_the_sizes_of_cifar10_c_make_up_its_archive():
    def blocks(size: int, block: int) -> int:
        return math.ceil(size / block) * block

    content = sum(512 + blocks(file.size, 512) for file in CIFAR10_C.files)
    whole = blocks(512 + content + 1024, 10240)  # with the folder's entry and the end of the tar
    assert whole == CIFAR10_C.download_size


def test_studies_use_what_the_catalogue_has():
    assert {each.name for study in STUDIES for each in study.uses} == set(CATALOGUE)


@pytest.mark.parametrize("data_set", CATALOGUE.values(), ids=CATALOGUE)
def test_the_files_at_hand_are_those_of_the_catalogue(data_set):
    condition = inspect(data_set)
    if condition.state in (State.ABSENT, State.INCOMPLETE):
        pytest.skip(f"{data_set.name} is not in the data folder")
    assert condition.flaws == ()
    assert condition.state is State.PRESENT


# Folder ----------------------------------------------------------------------------------------

ONE, TWO = b"one file", b"another"
PLAIN_ONE = described("set/one", b"one, unzipped")
SET = DataSet(
    "set",
    "for tests",
    (
        Download(described("set/one.gz", ONE, PLAIN_ONE), ("https://nowhere/one.gz",)),
        Download(described("set/two", TWO), ("https://nowhere/two",)),
    ),
)


def test_the_data_folder(monkeypatch):
    monkeypatch.setenv("ACNML_DATA", "/some/where")
    assert data_folder() == Path("/some/where")
    monkeypatch.setenv("ACNML_DATA", "")
    assert data_folder() == Path("data")
    monkeypatch.delenv("ACNML_DATA")
    assert data_folder() == Path("data")


@pytest.mark.parametrize(
    ("files", "state", "flaws"),
    [
        ({}, State.ABSENT, []),
        ({"set/one.gz": ONE, "set/two": TWO}, State.PRESENT, []),
        ({"set/one": b"one, unzipped", "set/two": TWO}, State.PRESENT, []),
        ({"set/one.gz": ONE, "set/two": TWO, "set/two.part": b"x"}, State.PRESENT, []),
        ({"set/two": TWO}, State.INCOMPLETE, ["set/one.gz is missing"]),
        ({"set/two.part": b"ano"}, State.INCOMPLETE, ["set/two is downloaded to 3 of 7 bytes"]),
        (
            {"set/one.gz": ONE[:-1], "set/two": TWO},
            State.CORRUPT,
            ["set/one.gz is corrupt, it has 7 bytes, expected 8"],
        ),
        (
            {"set/one.gz": b"one_file"},
            State.CORRUPT,
            [
                "set/one.gz is corrupt, its md5 is "
                f"{hashlib.md5(b'one_file').hexdigest()}, expected {hashlib.md5(ONE).hexdigest()}",
                "set/two is missing",
            ],
        ),
    ],
)
def test_the_state_of_a_data_set(folder, files, state, flaws):
    for path, content in files.items():
        put(folder, path, content)
    condition = inspect(SET)
    assert condition.state is state
    assert list(condition.flaws) == flaws
    expected = sum(len(content) for path, content in files.items() if not path.endswith(".part"))
    assert condition.size == expected
    assert condition.folder == "set"


def test_what_is_read_is_what_was_checked(folder):
    put(folder, "set/two", TWO)
    assert read(SET, SET.files[1]) == TWO


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "is missing"),
        (TWO[:-1], "is corrupt, it has 6 bytes, expected 7"),
        (TWO.upper(), f"expected {hashlib.md5(TWO).hexdigest()}"),
    ],
)
def test_errors_name_the_file_and_the_command_that_gets_it(folder, content, expected):
    if content is not None:
        put(folder, "set/two", content)
    with pytest.raises(DataError) as error:
        read(SET, SET.files[1])
    assert str(error.value).startswith(f"{folder / 'set/two'} is ")
    assert expected in str(error.value)
    assert "`acnml data download set`" in str(error.value)


def test_the_published_form_is_preferred(folder):
    put(folder, "set/one", b"one, unzipped")
    assert locate(SET.files[0]) == (folder / "set/one", PLAIN_ONE)
    put(folder, "set/one.gz", ONE)
    assert locate(SET.files[0]) == (folder / "set/one.gz", SET.files[0])


# Idx files -------------------------------------------------------------------------------------


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "zipped"])
@pytest.mark.parametrize("shape", [(5,), (3, 2), (4, 28, 28), (0, 28, 28)])
def test_idx_files_are_read_as_they_were_written(shape, pack):
    values = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    decoded = idx.decode(pack(encode(values)), "file")
    assert decoded.dtype == torch.uint8
    assert torch.equal(decoded, torch.from_numpy(values))


GOOD = encode(np.zeros((3, 2)))


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "the-file is not an idx file of unsigned bytes"),
        (b"<html>", "the-file is not an idx file of unsigned bytes"),
        (GOOD[:3], "the-file is not an idx file of unsigned bytes"),
        (GOOD[:10], "the-file is not an idx file of unsigned bytes"),
        (GOOD[:2] + b"\x0d" + GOOD[3:], "the-file is not an idx file of unsigned bytes"),  # floats
        (GOOD[:-1], r"the-file holds 5 values, its header promises \(3, 2\)"),
        (GOOD + b"\0", r"the-file holds 7 values, its header promises \(3, 2\)"),
        (gzip.compress(GOOD)[:-9], "the-file cannot be unzipped"),
        (gzip.compress(GOOD)[:-8] + bytes(8), "the-file cannot be unzipped"),
    ],
)
def test_what_is_no_idx_file_is_refused(content, expected):
    with pytest.raises(ValueError, match=expected):
        idx.decode(content, "the-file")


def tiny_mnist(folder: Path) -> tuple[DataSet, list[np.ndarray]]:
    """Files like MNIST's, and what is in them: one of them unzipped, the others zipped."""
    generator = np.random.default_rng(0)
    values = [generator.integers(0, 256, shape) for shape in [(6, 28, 28), (6,), (4, 28, 28), (4,)]]
    downloads = []
    for download, array in zip(MNIST.downloads, values, strict=True):
        content = gzip.compress(encode(array))
        plain = described(download.file.path.removesuffix(".gz"), encode(array))
        downloads.append(replace(download, file=described(download.file.path, content, plain)))
        put(folder, download.file.path, content)
    put(folder, downloads[1].file.alternatives[0].path, encode(values[1]))
    (folder / downloads[1].file.path).unlink()
    return replace(MNIST, downloads=tuple(downloads)), values


def test_images_come_with_their_labels(folder):
    data_set, (images, labels, *_) = tiny_mnist(folder)
    loaded = idx.load_labelled(data_set, *data_set.files[:2])
    assert loaded.images.shape == (6, 1, 28, 28)
    assert loaded.images.dtype == torch.float32
    assert torch.equal((loaded.images[:, 0] * 255).round(), torch.from_numpy(images).float())
    assert torch.equal(loaded.labels, torch.from_numpy(labels))


def test_files_that_do_not_belong_together_are_refused(folder):
    data_set, _ = tiny_mnist(folder)
    with pytest.raises(ValueError, match=r"hold \(6, 28, 28\) and \(4,\), no images and labels"):
        idx.load_labelled(data_set, data_set.files[0], data_set.files[3])


@pytest.mark.skipif(not mnist.available(), reason="MNIST is not in the data folder")
def test_mnist():
    for name, size in {"train": 60000, "test": 10000}.items():
        images, labels = mnist.load(name)
        assert images.shape == (size, 1, 28, 28)
        assert (images.min(), images.max()) == (0, 1)
        assert labels.bincount().shape == (10,)
    assert labels[:10].tolist() == [7, 2, 1, 0, 4, 1, 4, 9, 5, 9]  # as every textbook shows them


@pytest.mark.skipif(not notmnist.available(), reason="notMNIST is not in the data folder")
def test_notmnist():
    images, labels = notmnist.load()
    assert images.shape == (10000, 1, 28, 28)
    assert (images.min(), images.max()) == (0, 1)
    assert labels.bincount().tolist() == [1000] * 10


# Splits ----------------------------------------------------------------------------------------


def test_a_split_shares_nothing_and_loses_nothing():
    data = Labelled(torch.arange(10.0).view(10, 1, 1, 1), torch.arange(10))
    parts = split(data, (5, 2, 3), seed=1)
    assert [len(part.labels) for part in parts] == [5, 2, 3]
    assert torch.cat([part.labels for part in parts]).sort()[0].tolist() == list(range(10))
    assert all(torch.equal(part.images.flatten().long(), part.labels) for part in parts)
    again, other = split(data, (5, 2, 3), seed=1), split(data, (5, 2, 3), seed=2)
    assert torch.equal(parts[0].labels, again[0].labels)
    assert not torch.equal(parts[0].labels, other[0].labels)
    for sizes in [(5, 4), (12, -2)]:
        with pytest.raises(ValueError, match="10 images cannot be split"):
            split(data, sizes, seed=1)


# Rotations -------------------------------------------------------------------------------------

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


@pytest.mark.parametrize("shape", [(6,), (7, 1), ()])
def test_as_many_angles_as_images(shape):
    with pytest.raises(ValueError, match="7 images need one angle each"):
        rotate(IMAGES, torch.zeros(shape))


def test_random_angles_are_uniform_and_depend_on_the_seed_alone():
    state = torch.get_rng_state()
    angles = random_angles(2000, seed=5)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(angles, random_angles(2000, seed=5))
    assert not torch.equal(angles, random_angles(2000, seed=6))
    assert stats.kstest(angles.numpy() / 360, "uniform").pvalue > 0.01


# The fallback ----------------------------------------------------------------------------------


def test_without_mnist_there_are_the_digits_of_scikit_learn(folder):
    data = handwritten_digits()
    assert data.name == "scikit-learn digits"
    assert data.train.images.shape == (1397, 1, 8, 8)
    assert data.test.images.shape == (400, 1, 8, 8)
    assert f"There is no MNIST in the folder {folder}" in data.note
    assert "taking scikit-learn's 8x8 digits" in data.note
    assert "`acnml data download mnist`" in data.note
    assert torch.equal(data.test.images, handwritten_digits().test.images)


@pytest.fixture
def small_mnist(folder, monkeypatch):
    data_set, values = tiny_mnist(folder)
    for module in (mnist, handwritten):
        monkeypatch.setattr(module, "MNIST", data_set)
    return values


def test_with_mnist_there_is_mnist(small_mnist):
    data = handwritten_digits()
    assert data.name == "MNIST"
    assert data.note == "MNIST: 6 digits to train on, 4 to test."
    assert data.train.labels.tolist() == small_mnist[1].tolist()
    assert data.test.labels.tolist() == small_mnist[3].tolist()
    assert mnist.available()


def test_some_of_mnist_is_no_reason_to_take_something_else(small_mnist, folder):
    missing = folder / MNIST.files[3].path
    missing.unlink()
    assert not mnist.available()
    with pytest.raises(DataError, match=f"{missing} is missing: `acnml data download mnist`"):
        handwritten_digits()
    missing.write_bytes(b"something else")
    with pytest.raises(DataError, match=f"{missing} is corrupt"):
        handwritten_digits()
