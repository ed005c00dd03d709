"""`acnml monitor`: windows over the files of `acnml predict`, the report, and mistakes."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

import acnml
from test_decisions import calibrator

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
pytest.importorskip("typer")

from acnml.cli.monitor import CHANGED, run_monitor  # noqa: E402


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """900 scored rows in files of 400, the last 300 of them strange, and a monitor."""
    folder = tmp_path_factory.mktemp("monitor")
    fitted, x, _ = calibrator()
    acnml.save(fitted.monitor(), folder / "reference.safetensors")
    acnml.save(fitted, folder / "calibrator.safetensors")
    x = torch.cat([x[:600], 3 * x[600:900]])
    answer = fitted(5 * x, x)
    names = ("label", "confidence", "regret", "score", "abstain")
    month = [f"month {row // 300 + 1}" for row in range(900)]
    table = pa.table({**{n: getattr(answer, n).numpy() for n in names}, "month": month})
    (folder / "scored").mkdir()
    for part in range(3):
        own = table.slice(400 * part, 400)
        pq.write_table(own, folder / "scored" / f"part-{part:08d}.parquet")
    return SimpleNamespace(folder=folder, fitted=fitted, x=x, answer=answer)


def content(folder):
    return json.loads((folder / "monitor.json").read_text())


def test_windows_are_those_of_a_monitor(files, tmp_path, capsys):
    status = run_monitor(
        files.folder / "scored", files.folder / "reference.safetensors", tmp_path, 250
    )
    assert status == CHANGED
    found = content(tmp_path)
    names = [each["name"] for each in found["windows"]]
    assert names == ["1 to 250", "251 to 500", "501 to 750", "751 to 900"]
    monitor = files.fitted.monitor()
    for x, each in zip(files.x.split(250), found["windows"], strict=True):
        own = monitor.update(files.fitted(5 * x, x))
        assert each["accuracy"]["accuracy"] == pytest.approx(own.accuracy.accuracy, rel=1e-6)
        assert each["evidence"] == pytest.approx(own.evidence, rel=1e-4)
    assert 600 < found["changed_at"] == monitor.changed_at
    assert [each["alarm"] for each in found["windows"]] == [False, False, True, False]
    said = capsys.readouterr().out
    assert f"alarm at answer {monitor.changed_at} of 900, in window 501 to 750." in said
    own = found["windows"][2]
    line = next(line for line in said.splitlines() if line.startswith("501 to 750"))
    low, high = own["accuracy"]["low"], own["accuracy"]["high"]
    shown = f"250 {own['accuracy']['accuracy']:.3f}, {low:.3f} to {high:.3f} {own['abstained']:.3f}"
    shown += f" {own['score']:.2f} {own['evidence']:.2f} ALARM"
    assert " ".join(line.split()[3:]) == shown


def test_windows_by_a_column_and_in_two_runs(files, tmp_path):
    scored = files.folder / "scored"
    run_monitor(scored, files.folder / "calibrator.safetensors", tmp_path / "one", by="month")
    windows = content(tmp_path / "one")["windows"]
    assert [each["name"] for each in windows] == ["month 1", "month 2", "month 3"]
    assert [each["count"] for each in windows] == [300] * 3
    run_monitor(scored, tmp_path / "one" / "monitor.safetensors", tmp_path / "two", by="month")
    two = content(tmp_path / "two")
    assert two["seen"] == 1800
    assert two["finding"].endswith("in an earlier run.")


def test_a_window_without_answers_has_no_numbers(files, tmp_path):
    table = pq.read_table(files.folder / "scored" / "part-00000000.parquet")
    none = table.set_column(0, "label", pa.array([-1] * len(table)))
    (tmp_path / "scored").mkdir()
    pq.write_table(none, tmp_path / "scored" / "part-00000000.parquet")
    reference = files.folder / "reference.safetensors"
    assert run_monitor(tmp_path / "scored", reference, tmp_path, 400) == 0
    (window,) = content(tmp_path)["windows"]
    assert (window["count"], window["unanswered"], window["score"]) == (0, 400, None)
    assert "NaN" not in (tmp_path / "monitor.json").read_text()


def test_the_files_of_the_folder_itself_count_and_no_others(files, tmp_path):
    part, reference = "part-00000000.parquet", files.folder / "reference.safetensors"
    table = pq.read_table(files.folder / "scored" / part)
    (tmp_path / "scored" / "old").mkdir(parents=True)
    (tmp_path / "scored" / "notes.txt").write_text("July")
    for place in ("scored", "scored/old"):
        pq.write_table(table, tmp_path / place / part)
    run_monitor(tmp_path / "scored", reference, tmp_path)
    assert content(tmp_path)["seen"] == len(table)
    pq.write_table(table.drop_columns("score"), tmp_path / "scored" / "part-00000001.parquet")
    with pytest.raises(ValueError, match=r"part-00000001.parquet has no column 'score'"):
        run_monitor(tmp_path / "scored", reference, tmp_path)


def test_mistakes(files, tmp_path):
    reference = files.folder / "reference.safetensors"
    with pytest.raises((TypeError, ValueError), match="has no Parquet files: name"):
        run_monitor(tmp_path, reference, tmp_path)
    with pytest.raises((TypeError, ValueError), match="has no column 'week'"):
        run_monitor(files.folder / "scored", reference, tmp_path, by="week")
    acnml.save(files.fitted.abstention(0.2), tmp_path / "other.safetensors")
    with pytest.raises((TypeError, ValueError), match="holds a Abstention, no monitor"):
        run_monitor(files.folder / "scored", tmp_path / "other.safetensors", tmp_path)
