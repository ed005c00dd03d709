"""The report of a run that is finished or not begun."""

from __future__ import annotations

import csv

from studies.rotated_mnist.results import collect
from studies.study.artefacts import Finished

from stores import store_in
from studies.rotated_mnist import verdict
from studies.rotated_mnist.report import write_report

from .tiny import TINY


def test_the_report_says_what_it_is(finished):
    out, results = finished
    page = write_report(results, out).read_text()
    assert "scikit-learn" in page
    assert "Not finished" not in page
    assert page.count("<svg") >= 14
    with (out / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    expected = "study method posterior solver knob seed shift n accuracy nll brier ece"
    assert list(rows[0]) == [*expected.split(), "seconds_per_input"]
    assert len(rows) == len(results.rows)
    assert {row["study"] for row in rows} == {"rotated-mnist"}


def test_a_report_of_nothing_names_what_is_missing(tmp_path, data):
    results = collect(TINY, data, Finished(store_in(tmp_path, TINY)))
    assert results.rows == ()
    assert "train network, seed 0" in results.missing
    assert "Not finished" in write_report(results, tmp_path).read_text()
    assert all(v.holds is None for v in verdict.verdicts(results))
    assert not (tmp_path / "artefacts").exists()
