"""A data folder of its own for every test that asks for it."""

from __future__ import annotations

import pytest


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("ACNML_DATA", str(tmp_path))
    return tmp_path
