"""Splits of labelled images."""

from __future__ import annotations

import pytest
import torch

from studies.data import Labelled, split


def test_a_split_shares_nothing_and_loses_nothing():
    data = Labelled(torch.arange(10.0).view(10, 1, 1, 1), torch.arange(10))
    parts = split(data, (5, 2, 3), seed=1)
    assert [len(part.labels) for part in parts] == [5, 2, 3]
    assert torch.cat([part.labels for part in parts]).sort()[0].tolist() == list(range(10))
    assert all(torch.equal(part.inputs.flatten().long(), part.labels) for part in parts)
    again, other = split(data, (5, 2, 3), seed=1), split(data, (5, 2, 3), seed=2)
    assert torch.equal(parts[0].labels, again[0].labels)
    assert not torch.equal(parts[0].labels, other[0].labels)
    for sizes in [(5, 4), (12, -2)]:
        with pytest.raises(ValueError, match="10 inputs cannot be split"):
            split(data, sizes, seed=1)
