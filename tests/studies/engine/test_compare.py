"""Comparing methods of a metrics.csv: means over shifts and seeds, and counts of wins."""

import pytest
from typer.testing import CliRunner

from studies.__main__ import build_app
from studies.engine.compare import Compared, compare

HEAD = "study,name,method,posterior,solver,knob,seed,shift,n,accuracy,nll,brier,ece\n"


def line(method, shift, ece, seed=0, n=100, nll=1.0):
    return f"s,{method},{seed},{shift},{n},0.5,{nll},0.3,{ece}\n"


OURS = '"ACNML SWAG-D, budget",ACNML,SWAG-D,linearised,"alpha=1, scale=2"'
OURS_OF_SEED_1 = OURS.replace("alpha=1", "alpha=3")
OTHER = "MAP SWA,MAP,SWA,,"
TEMPERED = '"MAP SWA, tempered, near",MAP,SWA,,temperature=2'


@pytest.fixture
def metrics(tmp_path):
    path = tmp_path / "metrics.csv"
    rows = [
        line(OURS, "fog 5", 0.1),
        line(OURS_OF_SEED_1, "fog 5", 0.3, seed=1),
        line(OURS, "snow 5", 0.4),
        line(OURS_OF_SEED_1, "snow 5", 0.4, seed=1),
        line(OURS, "fog 4", 9.0),
        line(OURS, "fog 5", 9.0, n=10),
        line(OTHER, "fog 5", 0.3),
        line(OTHER, "fog 5", 0.3, seed=1),
        line(OTHER, "snow 5", 0.2),
        line(OTHER, "snow 5", 0.2, seed=1),
        line(OTHER, "fog 4", 8.0),
        line(TEMPERED, "fog 5", 0.0),
        line(TEMPERED, "snow 4", 0.0),
    ]
    path.write_text(HEAD + "".join(rows))
    return path


ours = "ACNML SWAG-D, budget"


def test_means_over_seeds_and_shifts_and_counts(metrics):
    (found,) = compare(metrics, ours, ["MAP SWA"], [" 5$"], 100, ["ece"])
    assert found[:3] == ("ece", " 5$", "MAP SWA")
    assert found[3:5] == pytest.approx((0.3, 0.25))
    assert found[5:] == (1, 2)


def test_every_score_and_group(metrics):
    found = list(compare(metrics, ours, ["MAP SWA"], [" 5$", " 4$"], 100, ["ece", "nll"]))
    assert [(each.score, each.shifts) for each in found] == [
        ("ece", " 5$"),
        ("ece", " 4$"),
        ("nll", " 5$"),
        ("nll", " 4$"),
    ]
    assert found[1] == Compared("ece", " 4$", "MAP SWA", 9.0, 8.0, 0, 1)


def test_the_command_prints_a_table(metrics):
    arguments = ["compare", str(metrics), ours, "MAP SWA", "--shifts", " 5$", "--inputs", "100"]
    result = CliRunner().invoke(build_app(), arguments)
    assert result.exit_code == 0
    assert "| ece | ` 5$` | MAP SWA | 0.300 | 0.250 | 1 of 2 |" in result.output
