"""Commands of studies: what a report says of them, where they write; rooms and columns by name."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import typer

import studies
from short import command
from studies import tabular
from studies.__main__ import build_app
from studies.cifar10_c import methods as cifar10_c
from studies.engine import tables
from studies.paper_mnist import report as paper_mnist
from studies.rotated_mnist import methods as rotated_mnist

ROOT = Path(studies.__file__).parents[1]


def test_the_command_has_preset_and_settings_but_no_folder(tmp_path, monkeypatch):
    given = []
    monkeypatch.setattr(tabular, "run", lambda *arguments: given.append(arguments) or tmp_path)
    options = ["--preset", "full", "--set", "price=0.02", "--set", "tables=wine, digits"]
    command("tabular", "--out", tmp_path, *options)
    (((study, out, _, said)),) = given
    assert (out, study.price) == (tmp_path, 0.02)
    said_again = "--preset full --set price=0.02 --set 'tables=wine, digits'"
    assert said == f"python -m studies tabular {said_again}"


def test_folders_that_studies_write_by_default_are_ignored_by_git():
    folders = {
        str(option.default)
        for each in typer.main.get_command(build_app()).commands.values()
        for option in each.params
        if option.name == "out" and option.default is not None
    }
    assert {"toy", "evidence", "paper-mnist"} <= folders
    ignored = (ROOT / ".gitignore").read_text().split()
    assert sorted(f"/{folder}/" for folder in folders if f"/{folder}/" not in ignored) == []


def test_the_docstring_lists_every_room():
    folder = ROOT / "studies"
    rooms = {path.name if path.is_file() else f"{path.name}/" for path in folder.glob("[a-z]*")}
    listed = re.findall(r"^    ([a-z0-9_]+(?:/|\.py))  ", studies.__doc__, re.MULTILINE)
    assert sorted(listed) == sorted(rooms)


def test_no_column_of_metrics_is_a_time():
    """So that a resumed run equals an unbroken one byte for byte."""
    files = (ROOT / "docs" / "results").glob("*/metrics.csv")
    headers = [next(csv.reader(path.read_text().splitlines())) for path in files]
    assert len(headers) > 3
    for columns in (tables.METRICS, *headers):
        assert {"nll", "auroc"} & {*columns}
        assert not [name for name in columns if "second" in name or "time" in name]


def test_no_two_methods_of_a_figure_look_the_same():
    ours, rotated = cifar10_c, rotated_mnist
    groups = [ours.PAPER_GROUP, ours.BUDGET_GROUP, ours.NEAR_GROUP, ours.FAMILIES]
    drawn = [[ours.LOOKS[method] for method in group] for group in groups]
    groups = [rotated.PAPER, rotated.MATCHED, rotated.AROUND_NETWORK, rotated.AROUND_BBP]
    drawn += [[rotated.LOOKS[method] for method in group] for group in groups]
    for looks in (*drawn, list(paper_mnist.LOOKS.values())):
        for field in ("label", "colour", "marker"):
            assert len({getattr(look, field) for look in looks}) == len(looks)
