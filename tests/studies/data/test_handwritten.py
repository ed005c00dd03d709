"""Handwritten digits: MNIST where it is at hand, else those of scikit-learn."""

from __future__ import annotations

import pytest
import torch

from studies.data import digits
from studies.data.catalogue import MNIST
from studies.data.digits import handwritten_digits
from studies.data.folder import DataError

from .files import tiny_mnist


def test_without_mnist_there_are_the_digits_of_scikit_learn(folder):
    data = handwritten_digits()
    assert data.name == "scikit-learn digits"
    assert data.train.inputs.shape == (1397, 1, 8, 8)
    assert data.test.inputs.shape == (400, 1, 8, 8)
    assert f"There is no MNIST in the folder {folder}" in data.note
    assert "using scikit-learn's 8x8 digits" in data.note
    assert "`python -m studies data download mnist`" in data.note
    assert torch.equal(data.test.inputs, handwritten_digits().test.inputs)


@pytest.fixture
def small_mnist(folder, monkeypatch):
    data_set, values = tiny_mnist(folder)
    monkeypatch.setattr(digits, "MNIST", data_set)
    return values


def test_some_of_mnist_is_no_reason_to_take_something_else(small_mnist, folder):
    missing = folder / MNIST.files[3].path
    missing.unlink()
    with pytest.raises(
        DataError, match=f"{missing} is missing: `python -m studies data download mnist`"
    ):
        handwritten_digits()
    missing.write_bytes(b"something else")
    with pytest.raises(DataError, match=f"{missing} is corrupt"):
        handwritten_digits()
