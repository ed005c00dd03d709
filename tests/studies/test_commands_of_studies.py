"""Commands of studies: what a report says of them, and where they write."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from studies import tabular
from studies.__main__ import build_app

NAMED = "python -m studies tabular --preset"


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        ([], f"{NAMED} quick"),
        (
            ["--preset", "full", "--set", "price=0.02", "--set", "tables=wine, digits"],
            f"{NAMED} full --set price=0.02 --set 'tables=wine, digits'",
        ),
    ],
)
def test_the_command_has_preset_and_settings_but_no_folder(
    arguments, command, tmp_path, monkeypatch
):
    given = []
    monkeypatch.setattr(tabular, "run", lambda *arguments: given.append(arguments) or tmp_path)
    result = CliRunner().invoke(build_app(), ["tabular", "--out", str(tmp_path), *arguments])
    assert result.exit_code == 0, result.output
    (((study, out, _, said)),) = given
    assert (out, said) == (tmp_path, command)
    assert study.price == (0.02 if arguments else tabular.PRESETS["quick"].price)


def test_folders_that_studies_write_by_default_are_ignored_by_git():
    commands = typer.main.get_command(build_app()).commands.values()
    folders = {
        str(option.default)
        for command in commands
        for option in command.params
        if option.name == "out" and option.default is not None
    }
    assert {"toy", "evidence", "paper-mnist"} <= folders
    ignored = (Path(__file__).parents[2] / ".gitignore").read_text().split()
    assert sorted(f"/{folder}/" for folder in folders if f"/{folder}/" not in ignored) == []
