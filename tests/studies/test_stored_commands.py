"""Studies that use only the store get the command that started them, for their report."""

from __future__ import annotations

import pytest
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
