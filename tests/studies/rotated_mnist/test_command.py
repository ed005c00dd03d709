"""The study's command and presets, and one sentence for whatever is wrong."""

from __future__ import annotations

from stores import made
from studies.engine.command import build, run_study
from studies.engine.run import phases, plan
from studies.rotated_mnist import KIND


def test_the_command_reports_what_is_finished(tmp_path, capsys):
    run_study(build(KIND, "quick", ["seeds=0,1"]), tmp_path, report_only=True)
    said = " ".join(capsys.readouterr().out.split())
    assert "using scikit-learn's 8x8 digits" in said
    assert "The study is not finished" in said
    assert "train network, seed 1" in (tmp_path / "report.html").read_text()


def test_the_plan_counts_the_stages_that_are_made(finished, study):
    out, _ = finished
    lines = {line.kind: line.stages for line in plan(study)}
    names = list(made(out))
    predicted = [name for name in names if name.startswith(("predict", "try", "sweep"))]
    extras = sum(len(phase.extras) for phase in phases(study))
    assert sum(lines[phase.title] for phase in phases(study)) - extras == len(predicted)
    fitted = [name for name in names if name.startswith("fit KFAC")]
    # The ensemble's heads include the single network's, which the plan counts once more.
    assert lines["fitting KFAC"] == len(fitted) + 1
    trained = [name for name in made(out) if name.startswith("train") and "Bayes" not in name]
    counted = sum(n for kind, n in lines.items() if kind.startswith("training"))
    assert counted == len(trained)
