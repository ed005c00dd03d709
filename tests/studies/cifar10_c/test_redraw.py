"""Box plots from a metrics.csv alone."""

from __future__ import annotations

import csv
from dataclasses import replace

from studies.cifar10_c import methods as ms
from studies.cifar10_c.redraw import redraw, rows_of
from studies.cifar10_c.settings import PRESETS
from studies.engine.tables import METHOD

COLUMNS = (*METHOD, "seed", "shift", "n")
SCORES = ("accuracy", "nll", "brier", "ece")


def row(method, value=1.0, shift="fog 5", ece=0.1, n=1000, seed=0):
    words = (*method.at(value).words, seed, shift, n)
    return dict(zip(COLUMNS, map(str, words), strict=True), **dict.fromkeys(SCORES, str(ece)))


ROWS = [
    row(ms.MAP_SWA),
    row(ms.TEMPERED, 2),
    row(ms.TEMPERED_BUDGET, 3),
    row(ms.ACNML_SWAG_D_PAPERS, 2, ece=0.3),
    row(ms.ACNML_SWAG_D_PAPERS, 1, ece=0.5, seed=1),
    row(replace(ms.ACNML_SWAG_D_TEMPERED, likelihood=2.0), 2),
    row(ms.ACNML_SWAG_D, 7),
    row(ms.ACNML_SWAG_D, 2, seed=1),
    row(ms.ACNML_SWAG_D_STEPS, 2),
]


def test_a_method_has_the_rows_of_all_its_seeds():
    """Its knob differs between seeds, and another choice of the knob can have its value."""
    assert rows_of(ms.MAP_SWA, ROWS) == ROWS[:1]
    assert rows_of(ms.TEMPERED, ROWS) == ROWS[1:2]
    assert rows_of(ms.ACNML_SWAG_D_PAPERS, ROWS) == ROWS[3:5]
    assert rows_of(ms.ACNML_SWAG_D, ROWS) == ROWS[6:8]
    assert rows_of(ms.BMA_KFAC, ROWS) == []


def test_every_score_is_drawn(tmp_path):
    with (tmp_path / "metrics.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, (*COLUMNS, *SCORES))
        table.writeheader()
        table.writerows(ROWS)
    names = redraw(tmp_path, PRESETS["cpu"], 1000)
    assert set(names) == {f"boxes-{score}" for score in SCORES}
    assert all((tmp_path / f"{name}.png").is_file() for name in names)
    text = (tmp_path / "boxes-ece.svg").read_text()
    assert "ACNML-SWAGD" in text
    assert "KFAC-Laplace" not in text  # it has no rows
