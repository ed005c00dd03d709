"""The report of a run that is finished, half finished or not begun."""

from __future__ import annotations

import shutil

from stores import store_in
from studies.cifar10_c import methods
from studies.engine.figures import bootstrap_median
from studies.engine.report import write_report
from studies.engine.results import collect
from studies.engine.workshop import Finished

from .tiny import judged


def test_a_report_of_an_unfinished_run_shows_what_there_is(finished, tiny, study, data, tmp_path):
    """As if it had been killed after severity 5: that is there, severity 4 is named as missing."""
    kept = tmp_path / "artefacts"
    shutil.copytree(finished[0] / "artefacts", kept)
    for folder in [*kept.glob("predict-acnml*contrast-4*"), *kept.glob("sweep-acnml*")]:
        shutil.rmtree(folder)
    results = collect(study, data, Finished(store_in(tmp_path, tiny)))
    ours = methods.ACNML_SWAG_D_PAPERS
    whole = finished[1].each(ours, "ece", ["contrast 5"], 10)
    assert results.each(ours, "ece", ["contrast 5"], 10) == whole != []
    assert results.each(ours, "ece", ["contrast 4"], 10) == []
    assert any("contrast 4" in name for name in results.missing)
    page = write_report(results, tmp_path).read_text()
    assert "Not finished" in page
    assert "The study is not finished" in page
    assert judged(results, "with SWAG-D has a lower ECE") == [None]
    assert None not in judged(results, "In distribution")


def test_the_bootstrap_of_a_median():
    assert bootstrap_median([0.5] * 15) == (0.5, 0.5, 0.5)
    middle, low, high = bootstrap_median([float(i) for i in range(15)])
    assert middle == 7
    assert 2 <= low < 7 < high <= 12
