"""A store in a folder of its own."""

from __future__ import annotations

import pytest

from stores import store_in

from .parts import Linear


@pytest.fixture
def store(tmp_path):
    return store_in(tmp_path, Linear())
