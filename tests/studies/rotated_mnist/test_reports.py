"""The report of a run that is finished or not begun."""

from __future__ import annotations

import csv
import html

from acnml import __version__
from stores import store_in
from studies.engine.claims import verdicts
from studies.engine.report import write_report
from studies.engine.results import collect
from studies.engine.workshop import Finished

from .tiny import TINY


def test_the_report_says_what_it_is(finished):
    out, results = finished
    page = write_report(results, out).read_text()
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


def test_a_report_of_nothing_names_what_is_missing(tmp_path, study, data):
    results = collect(study, data, Finished(store_in(tmp_path, TINY)))
    assert results.rows == ()
    assert "train network, seed 0" in results.missing
    assert "Not finished" in write_report(results, tmp_path).read_text()
    assert all(v.holds is None for v in verdicts(results))
    assert not (tmp_path / "artefacts").exists()


def test_the_report_says_which_code_wrote_it(finished):
    out, results = finished
    write_report(results, out)
    line = f"Written by `python -m studies rotated-mnist`, acnml {__version__}"
    assert line in (out / "results.md").read_text()
    assert f"acnml {__version__}" in (out / "report.html").read_text().split("<footer>")[1]


def test_page_and_markdown_show_the_same_tables(finished):
    out, results = finished
    page = write_report(results, out).read_text()
    text = (out / "results.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| ") and "---" not in line]
    cells = {cell.strip() for row in rows for cell in row.strip("|").split("|")}
    assert len(cells) > 100
    assert not [cell for cell in cells if html.escape(cell) not in page and cell != "holds if"]
