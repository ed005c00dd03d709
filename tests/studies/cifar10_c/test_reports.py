"""The report of a run that is finished, half finished or not begun."""

from __future__ import annotations

import csv
import shutil

from studies.cifar10_c.figures import bootstrap_median
from studies.cifar10_c.looks import label
from studies.cifar10_c.methods import images_of
from studies.cifar10_c.report import report, write_report
from studies.cifar10_c.results import collect
from studies.cifar10_c.tables import severity_table
from studies.study.artefacts import Finished

from stores import store_in
from studies.cifar10_c import methods, verdict

from .tiny import judged


def test_the_report_says_what_it_is(finished):
    out, results = finished
    page = write_report(results, out).read_text()
    assert "made here, with the parameters of CIFAR-10-C" in page
    assert "no SWA-Ensemble" in page
    assert "standard error over images" in page
    assert "Not finished" not in page
    assert page.count("<svg") >= 20
    with (out / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    expected = "study method posterior solver knob seed shift n accuracy nll brier ece"
    assert list(rows[0]) == [*expected.split(), "seconds_per_input"]
    assert len(rows) == len(results.rows)
    assert {row["study"] for row in rows} == {"cifar10-c"}


def test_few_images_are_not_scored(finished):
    """Ten images are five a bin; the paper's steps see five, and what stands beside eight."""
    _, results = finished
    shown = {row[0] for row in severity_table(results, "ece")[1]}
    all_labels = {label(method): method for method in methods.methods_of(results.study)}
    enough = {name for name, m in all_labels.items() if images_of(m, "", results.study) >= 10}
    assert shown == enough < set(all_labels)


def test_a_report_of_nothing_names_what_is_missing(tmp_path, tiny, data):
    results = collect(tiny, data, Finished(store_in(tmp_path, tiny)))
    assert results.rows == ()
    assert "train tiny, seed 0" in results.missing
    assert "Not finished" in write_report(results, tmp_path).read_text()
    assert all(v.holds is None for v in verdict.verdicts(results))
    assert not (tmp_path / "artefacts").exists()


def test_a_report_of_an_unfinished_run_shows_what_there_is(finished, tiny, data, tmp_path):
    """As if it had been killed after severity 5: that is there, severity 4 is named as missing."""
    kept = tmp_path / "artefacts"
    shutil.copytree(finished[0] / "artefacts", kept)
    for folder in [*kept.glob("predict-acnml*contrast-4*"), *kept.glob("sweep-acnml*")]:
        shutil.rmtree(folder)
    results = collect(tiny, data, Finished(store_in(tmp_path, tiny)))
    ours = methods.ACNML_SWAG_D_PAPERS
    assert results.at_severity(ours, "ece", 5, 10) == finished[1].at_severity(ours, "ece", 5, 10)
    assert results.at_severity(ours, "ece", 4, 10) == []
    assert any("contrast 4" in name for name in results.missing)
    page = report(results, {})
    assert "Not finished" in page
    assert "The study is not finished" in page
    assert judged(results, "with SWAG-D has a lower ECE") == [None]
    assert None not in judged(results, "In distribution")


def test_the_bootstrap_of_a_median():
    assert bootstrap_median([0.5] * 15) == (0.5, 0.5, 0.5)
    middle, low, high = bootstrap_median([float(i) for i in range(15)])
    assert middle == 7
    assert 2 <= low < 7 < high <= 12
