"""Which images are for what: held-out ones for choices alone, and the others corrupted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from stores import store_in
from studies.cifar10_c import methods
from studies.cifar10_c.settings import Choice
from studies.cifar10_c.study import build, load_data
from studies.data import Labelled, cifar10
from studies.engine.choose import chosen
from studies.engine.workshop import Making, Workshop

from .tiny import HELD, SPLITS, TEST, TRAIN


def choices_of(described, images, out) -> dict[str, float]:
    makers = Workshop(build(described), images, Making(store_in(out, described)), 0)
    some = (methods.TEMPERED, methods.TEMPERED_NEAR, methods.ACNML_HEAD, methods.BMA_KFAC)
    some += (methods.ACNML_HEAD_TEMPERED, methods.ACNML_SWAG_D_PAPERS)
    return {method.name: chosen(method, makers).value for method in some}


def test_choices_see_held_out_images_alone(tiny, data, finished, tmp_path, monkeypatch):
    """Other evaluation images and labels change no choice; other held-out labels do."""
    expected = choices_of(tiny, data, finished[0])
    order = torch.randperm(TEST, generator=torch.Generator().manual_seed(0))

    def load(rows):
        images, labels = (tensor.clone() for tensor in SPLITS["test"])
        images[rows], labels[rows] = 255 - images[rows], (labels[rows] + 1) % 10
        changed = {**SPLITS, "test": Labelled(images, labels)}
        monkeypatch.setattr(cifar10, "load", lambda split: changed[split])
        return load_data(tiny, tmp_path / "cache")

    evaluated, held_out = load(order[HELD:]), load(order[:5])
    assert evaluated.checksum != data.checksum
    assert choices_of(tiny, evaluated, tmp_path) == expected
    assert choices_of(tiny, held_out, tmp_path) != expected


@pytest.mark.parametrize("source", ["train", "test"])
def test_held_out_images_are_no_others(tiny, tmp_path, source):
    fresh = replace(tiny, model="fresh", choice=Choice(HELD, source))
    data = load_data(fresh, tmp_path)
    parts = {name: {i.numpy().tobytes() for i in getattr(data, name).inputs} for name in PARTS}
    sizes = {name: len(part) for name, part in parts.items()}
    assert not parts["held_out"] & (parts["train"] | parts["test"])
    cut = {"train": (TRAIN - HELD, HELD, TEST), "test": (TRAIN, HELD, TEST - HELD)}
    assert tuple(sizes.values()) == cut[source]


PARTS = ("train", "held_out", "test")


def test_a_shift_corrupts_the_first_evaluation_images(tiny, data):
    first = data.load("clean", 5)
    corrupted = data.load("contrast 5", 5)
    assert torch.equal(corrupted.labels, first.labels)
    spread = [images.float().std((2, 3)) for images in (first.inputs, corrupted.inputs)]
    assert (spread[1] < 0.3 * spread[0]).all()
    assert data.count(10**6) == TEST - HELD
    assert len(data.load("contrast 5", 10**6).labels) == tiny.images.cheap
