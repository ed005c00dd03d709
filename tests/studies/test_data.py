"""Data sets: the catalogue, the data folder, idx files, handwritten digits, rotations, splits."""

from __future__ import annotations

import gzip
import hashlib
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from torch.nn import functional
from typer.main import get_command

from described import described
from studies.__main__ import build_app
from studies.data import Labelled, digits, split
from studies.data.catalogue import CATALOGUE, MNIST, STUDIES, DataSet, Download
from studies.data.digits import handwritten_digits, random_angles, rotate
from studies.data.folder import DataError, State, data_folder, inspect, locate, read

# The catalogue -----------------------------------------------------------------------------------

DIGEST_LENGTHS = {"md5": 32, "sha1": 40, "sha256": 64}
each_data_set = pytest.mark.parametrize("data_set", CATALOGUE.values(), ids=CATALOGUE)


@each_data_set
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


def test_every_study_says_what_data_it_uses():
    commands = {command.name for command in get_command(build_app()).commands.values()}
    assert {study.name for study in STUDIES} == commands - {"train", "data"}


@each_data_set
def test_the_files_at_hand_are_those_of_the_catalogue(data_set):
    condition = inspect(data_set)
    if condition.state in (State.ABSENT, State.INCOMPLETE):
        pytest.skip(f"{data_set.name} is not in the data folder")
    assert condition.flaws == ()
    assert condition.state is State.PRESENT


# The data folder ---------------------------------------------------------------------------------

ONE, PLAIN, TWO = b"one file", b"one, unzipped", b"another"
FILES = described("set/one.gz", ONE, described("set/one", PLAIN)), described("set/two", TWO)
SET = DataSet("set", "for tests", tuple(Download(file, ("https://nowhere",)) for file in FILES))


def put(folder: Path, path: str, content: bytes) -> None:
    (folder / path).parent.mkdir(parents=True, exist_ok=True)
    (folder / path).write_bytes(content)


@pytest.mark.parametrize("told", ["/some/where", "", None])
def test_the_data_folder(monkeypatch, told):
    monkeypatch.delenv("ACNML_DATA", raising=False)
    if told is not None:
        monkeypatch.setenv("ACNML_DATA", told)
    assert data_folder() == Path(told or "data")


@pytest.mark.parametrize(
    ("files", "state", "flaws"),
    [
        ({}, State.ABSENT, []),
        ({"set/one.gz": ONE, "set/two": TWO, "set/two.part": b"x"}, State.PRESENT, []),
        ({"set/one": PLAIN, "set/two": TWO}, State.PRESENT, []),
        ({"set/two": TWO}, State.INCOMPLETE, ["set/one.gz is missing"]),
        ({"set/two.part": b"ano"}, State.INCOMPLETE, ["set/two is downloaded to 3 of 7 bytes"]),
        (
            {"set/one.gz": ONE[:-1]},
            State.CORRUPT,
            ["set/one.gz is corrupt, it has 7 bytes, expected 8", "set/two is missing"],
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
    assert "`python -m studies data download set`" in str(error.value)


# Idx files and MNIST -----------------------------------------------------------------------------


def encode(values: np.ndarray) -> bytes:
    """An idx file, written by its specification."""
    header = struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape)
    return header + values.astype(np.uint8).tobytes()


@pytest.fixture
def small_mnist(folder, monkeypatch):
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
    monkeypatch.setattr(digits, "MNIST", replace(MNIST, downloads=tuple(downloads)))
    return values


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "zipped"])
@pytest.mark.parametrize("shape", [(5,), (4, 28, 28), (0, 28, 28)])
def test_idx_files_are_read_as_they_were_written(shape, pack):
    values = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    decoded = digits.decode(pack(encode(values)), "file")
    assert decoded.dtype == torch.uint8
    assert torch.equal(decoded, torch.from_numpy(values))


GOOD = encode(np.zeros((3, 2)))


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"<html>", "the-file is not an idx file of unsigned bytes"),
        (GOOD[:10], "the-file is not an idx file of unsigned bytes"),
        (GOOD[:-1], r"the-file holds 5 values, its header promises \(3, 2\)"),
        (gzip.compress(GOOD, mtime=0)[:-9], "the-file cannot be unzipped"),
    ],
)
def test_what_is_no_idx_file_is_refused(content, expected):
    with pytest.raises(ValueError, match=expected):
        digits.decode(content, "the-file")


def test_images_come_with_their_labels(small_mnist):
    images, labels, *_ = small_mnist
    loaded = digits.load_mnist("train")
    assert loaded.inputs.shape == (6, 1, 28, 28)
    assert loaded.inputs.dtype == torch.float32
    assert torch.equal((loaded.inputs[:, 0] * 255).round(), torch.from_numpy(images).float())
    assert torch.equal(loaded.labels, torch.from_numpy(labels))


@pytest.mark.skipif(not all(map(locate, MNIST.files)), reason="MNIST is not in the data folder")
def test_mnist():
    images, labels = digits.load_mnist("test")
    assert images.shape == (10_000, 1, 28, 28)
    assert (images.min(), images.max()) == (0, 1)
    assert labels[:10].tolist() == [7, 2, 1, 0, 4, 1, 4, 9, 5, 9]  # as every textbook shows them


def test_without_mnist_there_are_the_digits_of_scikit_learn(folder):
    data = handwritten_digits()
    assert data.name == "scikit-learn digits"
    assert data.train.inputs.shape == (1397, 1, 8, 8)
    assert data.test.inputs.shape == (400, 1, 8, 8)
    assert f"There is no MNIST in the folder {folder}" in data.note
    assert "`python -m studies data download mnist`" in data.note
    assert torch.equal(data.test.inputs, handwritten_digits().test.inputs)


def test_some_of_mnist_is_no_reason_to_take_something_else(small_mnist, folder):
    missing = folder / MNIST.files[3].path
    missing.unlink()
    with pytest.raises(
        DataError, match=f"{missing} is missing: `python -m studies data download mnist`"
    ):
        handwritten_digits()


# Rotations and splits ----------------------------------------------------------------------------

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
    torch.testing.assert_close(turned, grid_sampled(IMAGES, ANGLES), rtol=0, atol=1e-12)
    for i, angle in enumerate(ANGLES.tolist()):
        assert torch.equal(turned[i], rotate(IMAGES, angle)[i])
    assert rotate(IMAGES.float(), ANGLES).dtype == torch.float32


@pytest.mark.parametrize("turns", range(-2, 4))
def test_right_angles_only_move_pixels(turns):
    expected = torch.rot90(IMAGES, turns, (-2, -1))
    assert torch.equal(rotate(IMAGES, 90 * turns), expected)
    assert torch.equal(rotate(IMAGES, torch.full((7,), 90.0 * turns)), expected)


def test_random_angles_are_uniform_and_depend_on_the_seed_alone():
    state = torch.get_rng_state()
    angles = random_angles(2000, seed=5)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(angles, random_angles(2000, seed=5))
    assert not torch.equal(angles, random_angles(2000, seed=6))
    assert stats.kstest(angles.numpy() / 360, "uniform").pvalue > 0.01


def test_a_split_shares_nothing_and_loses_nothing():
    data = Labelled(torch.arange(10.0).view(10, 1, 1, 1), torch.arange(10))
    parts = split(data, (5, 2, 3), seed=1)
    assert [len(part.labels) for part in parts] == [5, 2, 3]
    assert torch.cat([part.labels for part in parts]).sort()[0].tolist() == list(range(10))
    assert all(torch.equal(part.inputs.flatten().long(), part.labels) for part in parts)
    again, other = split(data, (5, 2, 3), seed=1), split(data, (5, 2, 3), seed=2)
    assert torch.equal(parts[0].labels, again[0].labels)
    assert not torch.equal(parts[0].labels, other[0].labels)
