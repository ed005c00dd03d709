"""metrics.csv has no times, so that a resumed run equals an unbroken one byte for byte."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from studies.engine import tables

RESULTS = Path(__file__).parents[2] / "docs" / "results"
COLUMNS = {
    "the engine": tables.METRICS,
    **{
        path.parent.name: tuple(next(csv.reader(path.read_text().splitlines())))
        for path in RESULTS.glob("*/metrics.csv")
    },
}


@pytest.mark.parametrize("columns", COLUMNS.values(), ids=COLUMNS)
def test_no_column_of_metrics_is_a_time(columns):
    assert {"nll", "auroc"} & {*columns}
    assert not [name for name in columns if "second" in name or "time" in name]
