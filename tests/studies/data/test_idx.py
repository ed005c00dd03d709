"""Idx files: read as they were written, or refused; MNIST and notMNIST where they are at hand."""

from __future__ import annotations

import gzip

import numpy as np
import pytest
import torch

from studies.data import digits
from studies.data.catalogue import MNIST
from studies.data.folder import locate

from .files import encode, tiny_mnist


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "zipped"])
@pytest.mark.parametrize("shape", [(5,), (3, 2), (4, 28, 28), (0, 28, 28)])
def test_idx_files_are_read_as_they_were_written(shape, pack):
    values = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    decoded = digits.decode(pack(encode(values)), "file")
    assert decoded.dtype == torch.uint8
    assert torch.equal(decoded, torch.from_numpy(values))


GOOD = encode(np.zeros((3, 2)))
ZIPPED = gzip.compress(GOOD, mtime=0)


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
        (ZIPPED[:-9], "the-file cannot be unzipped"),
        (ZIPPED[:-8] + bytes(8), "the-file cannot be unzipped"),
    ],
)
def test_what_is_no_idx_file_is_refused(content, expected):
    with pytest.raises(ValueError, match=expected):
        digits.decode(content, "the-file")


def test_images_come_with_their_labels(folder):
    data_set, (images, labels, *_) = tiny_mnist(folder)
    loaded = digits.load_labelled(data_set, *data_set.files[:2])
    assert loaded.inputs.shape == (6, 1, 28, 28)
    assert loaded.inputs.dtype == torch.float32
    assert torch.equal((loaded.inputs[:, 0] * 255).round(), torch.from_numpy(images).float())
    assert torch.equal(loaded.labels, torch.from_numpy(labels))


@pytest.mark.skipif(not all(map(locate, MNIST.files)), reason="MNIST is not in the data folder")
def test_mnist():
    for name, size in {"train": 60000, "test": 10000}.items():
        images, labels = digits.load_mnist(name)
        assert images.shape == (size, 1, 28, 28)
        assert (images.min(), images.max()) == (0, 1)
        assert labels.bincount().shape == (10,)
    assert labels[:10].tolist() == [7, 2, 1, 0, 4, 1, 4, 9, 5, 9]  # as every textbook shows them
