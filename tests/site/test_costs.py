"""Costs that the benchmarks compute from others."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks import measure
from benchmarks.subjects import CIFAR_IMAGES, MNIST_IMAGES, Subject


@pytest.mark.parametrize("images", [MNIST_IMAGES, CIFAR_IMAGES])
def test_an_epoch_of_naive_cnml_is_over_the_subject_s_training_set(images, monkeypatch):
    monkeypatch.setattr(measure, "fastest", lambda calls, *_: dict.fromkeys(calls, 0.5))
    data = torch.rand(4, 3), torch.tensor([0, 1, 0, 1])
    subject = Subject("tiny", nn.Linear(3, 2), data, {}, {}, 1, 1, 1, 1, images)
    (seconds,) = measure._naive_cnml(subject).values()
    assert seconds == pytest.approx(0.5 * 10 * images / measure.BATCH)
