"""`acnml predict` and `acnml merge`, as a user runs them."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import numpy as np
import pytest
from torch import nn
from typer.testing import CliRunner

pytest.importorskip("pyarrow", reason="needs the extra `predict`")

import pyarrow.parquet as pq

import acnml
from acnml import Classifier, cli
from acnml._util import messages
from acnml.fit import fit_curvature
from cases import normal, small_network
from scored import rows, write_parquet


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(cli.build_app(), [str(argument) for argument in arguments])
    return result.exit_code, result.output


@pytest.fixture
def predict(files, tmp_path):
    x = rows(100)
    x[[3, 50]] = np.nan
    write_parquet(tmp_path / "data.parquet", x, name=[str(i) for i in range(100)])
    names = {**files, "input": tmp_path / "data.parquet", "output": tmp_path / "scored"}
    return ["predict", *(text for k, v in names.items() for text in (f"--{k}", str(v)))]


def test_predict(predict, tmp_path):
    code, output = run(*predict, "--carry", "name", "--log-probs", "--part-rows", 40)
    assert code == 3  # some rows were rejected
    assert "98 of 100 rows scored in 3 parts." in output
    assert "2 rows rejected: column 'x' has NaN or infinite entries." in output
    table = pq.read_table(tmp_path / "scored")
    assert table["name"].to_pylist() == [str(i) for i in range(100) if i not in (3, 50)]
    assert "log_probs" in table.column_names
    code, output = run(*predict, "--carry", "name", "--log-probs", "--part-rows", 40)
    assert code == 3
    assert "3 parts were complete before this run." in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--columns", "z"], "no column 'z'"),
        (["--image-size", "3"], "image_size must be (height, width)"),
        (["--actors", "2"], "are for --engine ray"),
        (["--transform", "prepare.py:crop"], "`transform` is for folders of images"),
    ],
)
def test_errors_of_predict_are_one_line(predict, arguments, message):
    code, output = run(*predict, *arguments)
    assert code == 1
    assert message in output
    assert len(output.splitlines()) == 1


def test_long_work_is_logged_to_the_standard_error(predict, monkeypatch):
    seconds = iter(range(0, 10_000, 10))  # pass whenever progress is told
    monkeypatch.setattr(messages, "monotonic", lambda: float(next(seconds)))
    result = CliRunner().invoke(cli.build_app(), [*predict, "--part-rows", "20"])
    lines = result.stderr.splitlines()
    assert [line.partition("parts: ")[2] for line in lines] == [
        "  0% 0/5 [00:10<?, ?it/s]",
        " 60% 3/5 [00:40<00:26, 13.33s/it]",
    ]
    assert "98 of 100 rows scored" in result.stdout
    assert not logging.getLogger("acnml").handlers


def test_missing_packages_are_one_line_and_the_version_needs_none(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "typer", None)
    monkeypatch.setattr("sys.argv", ["acnml", "merge"])
    message = r"^the command acnml needs typer: pip install 'acnml\[predict\]'$"
    with pytest.raises(SystemExit, match=message):
        cli.main()
    monkeypatch.setattr("sys.argv", ["acnml", "--version"])
    cli.main()
    assert capsys.readouterr().out == f"acnml {acnml.__version__}\n"


def test_merge(tmp_path):
    classifier = Classifier(small_network(nn.Linear(4, 3)))
    x, paths = normal(12, 4), [tmp_path / f"{i}.safetensors" for i in range(3)]
    for part, path in zip(x.split(5), paths, strict=True):
        acnml.save(fit_curvature(classifier, part), path)
    code, output = run("merge", *paths, "--output", tmp_path / "all.safetensors")
    assert (code, "a KroneckerCurvature of 3 parts" in output) == (0, True)
    found, whole = acnml.load(tmp_path / "all.safetensors"), fit_curvature(classifier, x)
    assert found.factors[0].counts.tolist() == [12, 12]
    assert found.log_evidence(2.0) == pytest.approx(whole.log_evidence(2.0), rel=1e-12)


def test_errors_of_merge_are_one_line(tmp_path):
    classifier, path = Classifier(small_network(nn.Linear(4, 3))), tmp_path / "a.safetensors"
    curvature, posterior = fit_curvature(classifier, normal(5, 4)), tmp_path / "b.safetensors"
    acnml.save(curvature, path)
    acnml.save(curvature.posterior(1.0), posterior)
    for files, message in (
        ([path, path], "named twice"),
        ([path, posterior], "holds a Kronecker; only curvatures"),
        ([path, tmp_path / "none"], "No such file"),
    ):
        code, output = run("merge", *files, "--output", tmp_path / "all.safetensors")
        assert code == 1
        assert message in output
        assert len(output.splitlines()) == 1
    assert not Path(tmp_path / "all.safetensors").exists()
