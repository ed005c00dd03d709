"""Pictures of frost, in the place of those that have to be downloaded."""

from __future__ import annotations

import numpy as np
import pytest

from studies.corruptions import weather


@pytest.fixture(autouse=True)
def frost(monkeypatch):
    """Pictures whose colour says where in which picture it is."""
    places = np.stack(np.meshgrid(np.arange(70), np.arange(90), indexing="ij"), axis=-1)
    pictures = [np.dstack([places, np.full((70, 90), 40 * i)]).astype(np.uint8) for i in range(5)]
    monkeypatch.setattr(weather, "frost_pictures", lambda: pictures)
    return pictures
