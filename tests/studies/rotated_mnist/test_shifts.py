"""Shifts: images that are turned, and their labels."""

from __future__ import annotations

import pytest
import torch


def test_shifts(data):
    upright = data.load("0°", 7)
    assert torch.equal(upright.inputs, data.test.inputs[:7])
    assert torch.equal(data.load("180°", 7).inputs, upright.inputs.flip(-1, -2))
    turned = data.load("random", 7)
    assert torch.equal(turned.labels, upright.labels)
    assert not torch.equal(turned.inputs, upright.inputs)
    with pytest.raises(ValueError, match="there is no shift 'sideways'"):
        data.load("sideways", 7)
    assert len(data.load("0°", 10**6).labels) == data.count(10**6) == 400
