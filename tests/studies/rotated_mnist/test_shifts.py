"""Shifts: images that are turned, and their labels."""

from __future__ import annotations

import pytest
import torch


def test_shifts(data):
    upright = data.shifted("0°", 7)
    assert torch.equal(upright.images, data.test.images[:7])
    assert torch.equal(data.shifted("180°", 7).images, upright.images.flip(-1, -2))
    turned = data.shifted("random", 7)
    assert torch.equal(turned.labels, upright.labels)
    assert not torch.equal(turned.images, upright.images)
    with pytest.raises(ValueError, match="there is no shift 'sideways'"):
        data.shifted("sideways", 7)
    assert len(data.shifted("0°", 10**6).labels) == data.count(10**6) == 400
