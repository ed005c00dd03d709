"""Box plots from a metrics.csv alone."""

from __future__ import annotations

import csv

from studies.cifar10_c import methods as ms
from studies.cifar10_c.redraw import redraw, rows_of
from studies.cifar10_c.settings import PRESETS

COLUMNS = ("method", "posterior", "solver", "knob", "seed", "shift", "n")
SCORES = ("accuracy", "nll", "brier", "ece")


def row(method, posterior, solver="", knob="", shift="fog 5", ece=0.1, n=1000, seed=0):
    words = (method, posterior, solver, knob, seed, shift, n)
    return dict(zip(COLUMNS, map(str, words), strict=True), **dict.fromkeys(SCORES, str(ece)))


ROWS = [
    row("MAP", "SWA"),
    row("MAP", "SWA", knob="temperature=2"),
    row("MAP", "SWA", knob="temperature=3"),
    row("ACNML", "SWAG-D", "linearised", "alpha=2", ece=0.3),
    row("ACNML", "SWAG-D", "linearised", "alpha=2", ece=0.5, seed=1),
    row("ACNML", "SWAG-D", "linearised", "alpha=2, T=2"),
    row("ACNML", "SWAG-D", "linearised", "alpha=7"),
    row("ACNML", "SWAG-D", "paper's steps", "alpha=2"),
]


def test_a_method_is_recognised_by_its_words_and_its_first_choice():
    assert rows_of(ms.MAP_SWA, ROWS) == ROWS[:1]
    assert rows_of(ms.TEMPERED, ROWS) == ROWS[1:2]
    assert rows_of(ms.ACNML_SWAG_D_PAPERS, ROWS) == ROWS[3:5]
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
