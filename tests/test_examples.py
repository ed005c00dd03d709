"""Every example prints its table, with tiny settings and digits that need no download."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
SCRIPTS = sorted(path.stem for path in EXAMPLES.glob("*.py") if path.stem != "common")


@pytest.fixture(autouse=True)
def no_data(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setenv("ACNML_DATA", str(tmp_path))


def test_there_is_one_for_every_posterior():
    expected = {"bayes_by_backprop", "swag", "laplace_diagonal", "kfac_laplace", "last_layer"}
    assert set(SCRIPTS) >= expected


@pytest.mark.parametrize("name", SCRIPTS)
def test_prints_its_table(name, capsys):
    importlib.import_module(name).main(hidden=8, epochs=2, queries=3)
    printed = capsys.readouterr().out
    assert "using scikit-learn's 8x8 digits" in printed
    assert "accuracy of the mean on all 400 test images" in printed
    *_, map_row, bma_row, acnml_row = printed.splitlines()
    rows = zip(("MAP", "BMA", "ACNML"), (map_row, bma_row, acnml_row), strict=True)
    for rule, row in rows:
        assert row.startswith(rule)
        assert row.count("%") == 4


@pytest.mark.parametrize("name", SCRIPTS)
def test_is_short(name):
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) <= 50
