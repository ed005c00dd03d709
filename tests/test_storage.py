"""No change of a stored file goes unnoticed, readers do not race with saves; invalid files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

import acnml
from acnml import Acnml, Classifier, Diagonal, Gradient, Map
from acnml.storage import StorageError
from cases import MLP, diagonal
from stored import contents, rewrite


def small() -> Diagonal:
    mean = {"a": torch.tensor([1.0, -2.0]), "b": torch.tensor([0.5, 3.0])}
    return Diagonal(mean, {name: t.abs() for name, t in mean.items()})


@pytest.fixture
def path(tmp_path):
    acnml.save(small(), tmp_path / "posterior")
    return tmp_path / "posterior"


def test_every_flip_of_a_bit_and_every_other_byte_is_noticed(path):
    content = bytearray(path.read_bytes())
    flips = [1 << bit for bit in range(8)] + [0xFF, 0x05]
    for position in range(len(content)):
        for flip in flips:
            content[position] ^= flip
            path.write_bytes(content)
            with pytest.raises(StorageError):
                acnml.load(path)
            content[position] ^= flip


def test_every_truncation_and_extension_is_noticed(path):
    content = path.read_bytes()
    for length in range(len(content)):
        path.write_bytes(content[:length])
        with pytest.raises(StorageError):
            acnml.load(path)
    for more in (b"\0", b" ", content):
        path.write_bytes(content + more)
        with pytest.raises(StorageError):
            acnml.load(path)


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.update({"mean/a": t["mean/b"], "mean/b": t["mean/a"]}),
        lambda t: t.update({"mean/a": t["mean/a"].view(torch.int32)}),
        lambda t: t.update({"mean/a": t["mean/a"][None]}),
        lambda t: t.update({"mean/c": t.pop("mean/a")}),
        lambda t: t.update({"more": torch.ones(1)}),
        lambda t: t.pop("mean/a"),
    ],
    ids=["swapped", "another type", "another shape", "renamed", "added", "removed"],
)
def test_tensors_are_under_the_checksum_with_their_names(path, change):
    with safetensors.safe_open(path, "pt") as file:
        metadata = file.metadata()
    _, tensors = contents(path)
    change(tensors)
    path.write_bytes(safetensors.torch.save(tensors, metadata))
    with pytest.raises(StorageError, match="does not match its checksum"):
        acnml.load(path)


def test_a_splice_of_two_files_is_noticed(tmp_path, path):
    other = small().scaled(2.0)
    acnml.save(other, tmp_path / "other")
    first, second = path.read_bytes(), (tmp_path / "other").read_bytes()
    assert len(first) == len(second)
    for cut in range(8, len(first), 8):
        mixed = first[:cut] + second[cut:]
        if mixed not in (first, second):
            path.write_bytes(mixed)
            with pytest.raises(StorageError):
                acnml.load(path)


def assert_equal(actual: Diagonal, expected: Diagonal) -> None:
    for name in expected.mean:
        assert torch.equal(actual.mean[name], expected.mean[name])
        assert torch.equal(actual.var[name], expected.var[name])


def test_a_file_without_its_checksum_is_damaged(path):
    header, tensors = contents(path)
    path.write_bytes(safetensors.torch.save(tensors, {"acnml": json.dumps(header)}))
    with pytest.raises(StorageError, match="does not match its checksum"):
        acnml.load(path)


def test_a_save_while_a_file_is_loaded_changes_nothing(path, monkeypatch):
    """It takes place after the file is opened, wherever that is; the old content is loaded."""
    opened, other = Path.open, small().scaled(2.0)

    def open_and_save(name, *args, **kwargs):
        file = opened(name, *args, **kwargs)
        if name == path:
            monkeypatch.undo()
            acnml.save(other, path)
        return file

    monkeypatch.setattr(Path, "open", open_and_save)
    assert_equal(acnml.load(path), small())
    assert_equal(acnml.load(path), other)


# Invalid files, and values that cannot be stored -------------------------------------------------


def test_foreign(tmp_path):
    path = tmp_path / "weights.safetensors"
    safetensors.torch.save_file({"weight": torch.ones(2)}, path)
    with pytest.raises(StorageError, match=r"not one that acnml.save wrote"):
        acnml.load(path)


def test_newer(path):
    rewrite(path, lambda header: header.update(format_version=99))
    with pytest.raises(StorageError, match=r"has format 99, .* reads format 4: save it again, or"):
        acnml.load(path)


def test_predictor_needs_the_classifier(path, tmp_path):
    classifier = Classifier(MLP.model())
    acnml.save(Map(classifier), tmp_path / "map")
    with pytest.raises(StorageError, match=r"holds a Map\. .* use load\(path, model\)"):
        acnml.load(tmp_path / "map")
    with pytest.raises(StorageError, match=r"a Diagonal\. Of its 0 .* 1 were given: use load"):
        acnml.load(path, classifier)


def test_another_class_of_the_same_name_is_refused(tmp_path):
    known = small()
    stranger = type("Diagonal", (Diagonal,), {})(known.mean, known.var)
    with pytest.raises(TypeError, match="cannot store a value of type Diagonal"):
        acnml.save(stranger, tmp_path / "posterior.safetensors")


def test_numpy_numbers_are_stored(tmp_path):
    model, path = MLP.model(), tmp_path / "predictor.safetensors"
    alpha, steps = np.float32(0.5), np.int64(3)
    acnml.save(Acnml(Classifier(model), diagonal(model), Gradient(steps, 0.5), alpha), path)
    loaded = acnml.load(path, Classifier(model))
    assert (loaded.alpha, loaded.solver) == (0.5, Gradient(3, 0.5))
