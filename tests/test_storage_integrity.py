"""No change of a stored file goes unnoticed, and files of the first format say what is missing."""

from __future__ import annotations

import json
import os

import pytest
import safetensors.torch
import torch
from torch import Tensor

import acnml
from acnml import Classifier, Diagonal, Map, StorageError
from cases import MODELS
from stored import contents, write_format_1, write_sealed


def small() -> Diagonal:
    mean = {"a": torch.tensor([1.0, -2.0]), "b": torch.tensor([0.5, 3.0])}
    return Diagonal(mean, {name: t.abs() for name, t in mean.items()})


@pytest.fixture
def path(tmp_path):
    acnml.save(small(), tmp_path / "posterior")
    return tmp_path / "posterior"


def test_names_that_are_not_unicode(path):
    """Safetensors cannot open such files; they load all the same, and damage is noticed."""
    content, odd = path.read_bytes(), path.with_name(os.fsdecode(b"posterior \xff"))
    try:
        odd.touch()
    except OSError:
        pytest.skip("this file system has no such names")
    acnml.save(small(), odd)
    loaded, saved = acnml.load(odd), small()
    assert loaded.mean.keys() == saved.mean.keys()
    assert all(torch.equal(loaded.mean[name], saved.mean[name]) for name in saved.mean)
    flipped = bytes([*content[:-1], content[-1] ^ 1])
    for damaged in (b"", content[:5], content[:40], content[:-1], b"[]" + content, flipped):
        odd.write_bytes(damaged)
        with pytest.raises(StorageError):
            acnml.load(odd)


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


def test_what_is_loaded_does_not_follow_the_file(path):
    loaded = acnml.load(path)
    with path.open("r+b") as file:
        file.write(bytes(len(path.read_bytes())))
    assert_equal(loaded, small())


# The first format ----------------------------------------------------------------------------


def test_a_posterior_of_the_first_format_loads_with_a_warning(path):
    write_format_1(path, *contents(path))
    with pytest.warns(UserWarning, match=r"has no checksum.*only a sample.*Save it again") as found:
        assert_equal(acnml.load(path), small())
    assert found[0].filename == __file__


def sampled(tensor: Tensor) -> list[float]:
    """What the first format kept of a tensor with fewer than 10,000 entries."""
    flat = tensor.detach().flatten()
    return [float(flat @ torch.arange(len(flat), dtype=flat.dtype).cos()), float(flat.norm())]


def test_a_predictor_of_the_first_format_has_a_sample_of_the_weights(tmp_path):
    model, path = MODELS[1].model(), tmp_path / "map"
    acnml.save(Map(Classifier(model)), path)
    header, tensors = contents(path)
    del header["value"]["classifier"]["network"]
    prints = {name: sampled(tensor) for name, tensor in model.named_parameters()}
    header["value"]["classifier"]["fingerprints"] = {"map": prints}
    write_format_1(path, header, tensors)
    x = MODELS[1].x(3)
    with pytest.warns(UserWarning, match="older version"):
        torch.testing.assert_close(
            acnml.load(path, Classifier(model))(x), Map(Classifier(model))(x)
        )
    with torch.no_grad():
        model[0].weight.mul_(1.5)
    with (
        pytest.warns(UserWarning, match="older version"),
        pytest.raises(StorageError, match=r"'0\.weight' of the given network differs"),
    ):
        acnml.load(path, Classifier(model))


def test_a_file_without_its_checksum_is_damaged(path):
    header, tensors = contents(path)
    write_sealed(path, header, tensors)
    acnml.load(path)
    path.write_bytes(safetensors.torch.save(tensors, {"acnml": json.dumps(header)}))
    with pytest.raises(StorageError, match="files of format 2 have a checksum"):
        acnml.load(path)
