"""CIFAR-10 from all kinds of its files, damage to them, and the augmentation of images."""

from __future__ import annotations

import hashlib
import pickle
import re
import struct
from collections import Counter

import numpy as np
import pytest
import torch

from studies.data import cifar10
from studies.data.catalogue import DataFile
from studies.data.cifar10 import crop_and_flip, random_crop
from studies.data.folder import DataError

COUNT = 10  # images in each made-up file
NAMES = [name for names in cifar10.SPLITS.values() for name in names]


@pytest.fixture
def records(folder, monkeypatch):
    """Made-up images by the name of their file, published as the real ones are."""
    generator, made, published = np.random.default_rng(0), {}, {}
    for name in NAMES:
        rows = made[name] = generator.integers(256, size=(COUNT, 3073), dtype=np.uint8)
        rows[:, 0] %= 10
        digest = hashlib.sha1(rows.tobytes()).hexdigest()
        published[name] = DataFile(f"{name}.bin", rows.size, f"sha1:{digest}")
    monkeypatch.setattr(cifar10, "FILES", published)
    return made


def write_binary(folder, name, rows):
    path = folder / "cifar-10-batches-bin" / f"{name}.bin"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(rows.tobytes())
    return path


def write_python(folder, name, rows):
    """As Python 2 wrote it: strings are bytes."""

    def string(value):
        return b"T" + struct.pack("<i", len(value)) + value

    labels = b"".join(b"K" + bytes([label]) for label in rows[:, 0])
    pixels = string(rows[:, 1:].tobytes())
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\nq\x03(cnumpy\nndarray\nK\x00\x85U\x01b\x87Rq\x04"
        b"(K\x01K\nM\x00\x0c\x86cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff"
        b"\xffJ\xff\xff\xff\xffK\x00tb\x89" + pixels + b"tb"
    )
    items = string(b"labels") + b"]q\x02(" + labels + b"e" + string(b"data") + array
    return write_pickle(folder, name, b"\x80\x02}q\x01(" + items + b"u.")


def write_pickle(folder, name, content):
    path = folder / "cifar-10-batches-py" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("write", [write_binary, write_python])
def test_images_and_labels_are_read_in_order(records, folder, write):
    assert not cifar10.available()
    for name, rows in records.items():
        write(folder, name, rows)
    assert cifar10.available()
    for split, names in cifar10.SPLITS.items():
        images, labels = cifar10.load(split)
        expected = torch.from_numpy(np.concatenate([records[name] for name in names]))
        assert labels.tolist() == expected[:, 0].tolist()
        assert images.dtype == torch.uint8
        for channel in range(3):
            pixels = expected[:, 1 + 1024 * channel :][:, :1024]
            assert torch.equal(images[:, channel].flatten(1), pixels)


def shortened(path):
    path.write_bytes(path.read_bytes()[:-3073])


def altered(path):
    content = bytearray(path.read_bytes())
    content[2000] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("write", [write_binary, write_python])
@pytest.mark.parametrize("damage", [shortened, altered])
def test_damage_is_noticed_and_the_file_named(records, folder, write, damage):
    path = write(folder, "test_batch", records["test_batch"])
    damage(path)
    with pytest.raises(
        DataError, match=f"{re.escape(str(path))} is corrupt, .*python -m studies data"
    ):
        cifar10.load("test")


def test_nothing_in_a_pickle_is_run(records, folder, tmp_path):
    class Trap:
        def __reduce__(self):
            return exec, (f"open({str(tmp_path / 'trapped')!r}, 'w')",)

    write_pickle(folder, "test_batch", pickle.dumps({"labels": Trap()}, protocol=2))
    with pytest.raises(DataError, match="is corrupt"):
        cifar10.load("test")
    assert not (tmp_path / "trapped").exists()


def test_the_real_test_set():
    if not cifar10.available():
        pytest.skip("needs CIFAR-10 in ACNML_DATA")
    images, labels = cifar10.load("test")
    assert images.shape == (10_000, 3, 32, 32)
    assert labels.bincount().tolist() == [1000] * 10
    assert [cifar10.CLASSES[label] for label in labels[:4]] == ["cat", "ship", "ship", "airplane"]


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def test_a_crop_is_a_shift_and_every_shift_comes_up():
    images = torch.rand(3000, 2, 5, 5, generator=generator())
    crops = random_crop(images, 2, generator(1))
    padded = torch.zeros(3000, 2, 9, 9)
    padded[:, :, 2:7, 2:7] = images
    found = Counter()
    for image, crop in zip(padded, crops, strict=True):
        for top, left in [(i, j) for i in range(5) for j in range(5)]:
            if torch.equal(image[:, top : top + 5, left : left + 5], crop):
                found[top, left] += 1
    assert sum(found.values()) == 3000  # each crop is one shift
    assert len(found) == 25
    # Each of 25 shifts 120 times on average; 5 standard deviations are 54.
    assert max(abs(count - 120) for count in found.values()) < 54


def test_augmentation_keeps_bytes_and_follows_its_generator():
    images = torch.randint(256, (8, 3, 32, 32), generator=generator(), dtype=torch.uint8)
    before, state = images.clone(), torch.get_rng_state()
    first, again, other = (crop_and_flip(images, generator(seed)) for seed in (1, 1, 2))
    assert first.dtype == torch.uint8
    assert first.shape == images.shape
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(images, before)
    assert torch.equal(torch.get_rng_state(), state)
