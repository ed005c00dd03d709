"""The report of a run that is finished or not begun."""

from __future__ import annotations

import csv
import html

import pytest

from studies.engine.report import write_report


@pytest.fixture(scope="module")
def page(finished):
    return write_report(finished[1], finished[0]).read_text()


def test_the_report_says_what_it_is(finished, page):
    out, results = finished
    assert "scikit-learn" in page
    assert "Not finished" not in page
    assert page.count("<svg") >= 12
    with (out / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    expected = "study name method posterior solver knob seed shift n accuracy nll brier ece"
    assert list(rows[0]) == expected.split()
    with (out / "timings.csv").open() as file:
        timed = list(csv.DictReader(file))
    assert {row["shift"] for row in timed} == {row["shift"] for row in rows}
    assert all(float(row["seconds_per_input"]) > 0 for row in timed)
    assert len(rows) == len(results.rows)
    assert {row["name"] for row in rows} == {method.name for method in results.study.methods}
    assert {row["study"] for row in rows} == {"rotated-mnist"}


def test_page_and_markdown_show_the_same_tables(finished, page):
    text = (finished[0] / "results.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| ") and "---" not in line]
    cells = {cell.strip() for row in rows for cell in row.strip("|").split("|")}
    assert len(cells) > 100
    assert not [cell for cell in cells if html.escape(cell) not in page and cell != "holds if"]
