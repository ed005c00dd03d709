"""Data folders that hold nothing, so that no test depends on the data at hand."""

from __future__ import annotations

import pytest


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """An empty data folder of its own for every test that asks for it."""
    monkeypatch.setenv("ACNML_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("no_proxy", "*")
    return tmp_path / "data"


@pytest.fixture(scope="module")
def no_mnist(tmp_path_factory):
    """An empty data folder for a module: its digits are those of scikit-learn."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACNML_DATA", str(tmp_path_factory.mktemp("empty")))
        yield
