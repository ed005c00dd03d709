"""No file of an input is left out or exchanged unnoticed, and no damage of the output is."""

from __future__ import annotations

import glob
import json
import os
import subprocess
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("pyarrow", reason="needs the extra `predict`")

from numpy.lib import format as npy
from PIL import Image
from typer.testing import CliRunner

import acnml
from acnml.cli import build_app
from acnml.scoring import Answers, Job, Reading, ScoringError, score, verify
from acnml.scoring.columns import Read
from acnml.scoring.files import find_files
from acnml.scoring.inputs import open_source
from acnml.scoring.output import Folder
from acnml.scoring.run import Worker
from acnml.scoring.scorer import Scorer
from cases import MLP, diagonal
from scored import contents, read, rejects, rows, write_parquet


@pytest.fixture
def job(files, tmp_path) -> Job:
    paths = {"input": str(tmp_path / "data"), "output": str(tmp_path / "scored")}
    (tmp_path / "data").mkdir()
    return Job(**files, **paths, part_rows=4, batch_rows=3)


def picture(path: Path, value: int, kind: str = "PNG") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((2, 3), value, np.uint8)).save(path, kind)
    return path


# What is left out ---------------------------------------------------------------------------


def test_every_file_is_scored_rejected_or_skipped_by_its_name(job, tmp_path):
    """Whatever its suffix, and whichever links lead to it."""
    data, elsewhere = Path(job.input), tmp_path / "elsewhere"
    for value, name in enumerate(("a.png", "b.jfif", "c.jpe", "d.tga", "e", "f.PNG", "sub/g.x")):
        picture(data / name, value, {".tga": "TGA", ".jpe": "JPEG"}.get(Path(name).suffix, "PNG"))
    picture(elsewhere / "h.png", 7)
    (data / "linked").symlink_to(elsewhere)
    (data / "i.png").symlink_to(elsewhere / "h.png")
    (data / "notes.txt").write_text("not an image")
    for hidden in ("_SUCCESS", ".DS_Store", "_hidden/j.png", "_hidden/k.png"):
        picture(data / hidden, 9)
    summary = score(replace(job, reading=Reading(image_mode="L")))
    scored = "a.png b.jfif c.jpe d.tga e f.PNG i.png linked/h.png sub/g.x"
    assert " ".join(read(job)["file"].to_pylist()) == scored
    assert [row["file"] for row in rejects(job)] == ["notes.txt"]
    assert (summary.rows, summary.files, summary.skipped) == (10, 10, 4)
    manifest = json.loads((Path(job.output) / "_manifest.json").read_text())
    assert manifest["counts"]["skipped"] == 4
    named = replace(job, input=str(data / "_SUCCESS"), output=str(tmp_path / "named"))
    assert score(replace(named, reading=Reading(image_mode="L"))).files == 1


@pytest.mark.parametrize("input_", ["data", "d*/s*", "data/*/*.npy", "data/**/*.npy"])
@pytest.mark.parametrize("kind", ["dangling", "circle", "pipe", "forbidden"])
def test_what_cannot_be_read_ends_the_run(kind, input_, job, tmp_path, monkeypatch):
    sub, scandir = Path(job.input) / "sub", os.scandir
    sub.mkdir()
    for folder in (Path(job.input), sub):
        np.save(folder / "x.npy", rows(5))

    def refuse(folder):
        if Path(folder) == sub:
            raise PermissionError(13, "Permission denied", str(folder))
        return scandir(folder)

    if kind == "pipe":
        os.mkfifo(sub / "odd.npy")
    elif kind == "forbidden":  # root may list all
        monkeypatch.setattr(os, "scandir", refuse)
    else:
        (sub / "odd.npy").symlink_to({"dangling": "nowhere", "circle": sub}[kind])
    with pytest.raises(ScoringError, match=r"sub.*(cannot be read|link to nothing|that it is in)"):
        score(replace(job, input=str(tmp_path / input_)))
    assert not Path(job.output).exists()


PATTERNS = "* *.a ** **/*.a s[tu]b/**/*.a **/sub/**"


@pytest.mark.parametrize("pattern", PATTERNS.split())
def test_patterns_are_those_of_glob(pattern, tmp_path):
    """But that a folder at the end of a pattern is taken whole."""
    for name in ("1.a", "2.b", "a", "b", "sub/3.a", "sub/4.b", "sub/sub/5.a", "stb/x/6.b", "s/7.a"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    matched = [Path(name) for name in glob.glob(str(tmp_path / pattern), recursive=True)]  # noqa: PTH207
    below = {file for path in matched for file in path.rglob("*")}
    found = find_files(str(tmp_path / pattern)).paths
    assert [*found] == sorted(path for path in {*matched, *below} if path.is_file())


@pytest.mark.parametrize("pattern", ["**/*.npy", "*/*.npy", "**", "l*"])
def test_patterns_enter_linked_folders(pattern, tmp_path):
    for folder in ("data", "elsewhere"):
        (tmp_path / folder).mkdir()
    np.save(tmp_path / "elsewhere" / "x.npy", rows(5))
    (tmp_path / "data" / "linked").symlink_to(tmp_path / "elsewhere")
    assert find_files(str(tmp_path / "data" / pattern)).paths == [tmp_path / "data/linked/x.npy"]


def test_a_pattern_reads_no_folders_but_those_that_it_names(tmp_path):
    np.save(tmp_path / "x.npy", rows(5))
    (tmp_path / "circle").symlink_to(tmp_path)
    assert find_files(str(tmp_path / "*.npy")).paths == [tmp_path / "x.npy"]


# Files that change ---------------------------------------------------------------------------


def write_data(kind: str, folder: Path, seed: int = 0) -> None:
    if kind == "parquet":
        write_parquet(folder / "x.parquet", rows(12, seed=seed))
    elif kind == "npy":
        np.save(folder / "x.npy", rows(12, seed=seed))
    else:
        for index in range(12):
            picture(folder / f"{index:02d}.png", 20 * index + seed)


@pytest.mark.parametrize("kind", ["parquet", "npy", "png"])
@pytest.mark.parametrize("how", ["replaced", "removed"])
@pytest.mark.parametrize("when", ["before the worker reads", "after the first part"])
def test_inputs_that_change_during_a_run_are_noticed(kind, how, when, job, tmp_path):
    """No part has rows of the new file."""
    job = replace(job, reading=Reading(image_mode="L") if kind == "png" else Reading())
    write_data(kind, Path(job.input))
    clean = replace(job, output=str(tmp_path / "clean"))
    score(clean)
    (tmp_path / "new").mkdir()
    write_data(kind, tmp_path / "new", seed=1)
    last = max(Path(job.input).iterdir())
    new = tmp_path / "new" / last.name

    def engine(own: Job, units):
        worker = Worker(own)
        for number, part in enumerate(part for unit in units for part in unit):
            if number == (when == "after the first part"):
                new.replace(last) if how == "replaced" else last.unlink()
            yield from worker.run([[part]])

    with pytest.raises((ScoringError, FileNotFoundError)):
        score(job, engine)
    left, whole = contents(job.output), contents(clean.output)
    del left["_manifest.json"]
    assert left.items() <= whole.items()
    assert len(left) < len(whole) - 1


@pytest.mark.parametrize("as_stored", [np.asarray, np.asfortranarray, lambda x: x.astype(">f4")])
def test_rows_that_were_read_do_not_change_with_their_file(as_stored, tmp_path):
    path, x = tmp_path / "x.npy", rows(40_000)
    np.save(path, as_stored(x))
    source = open_source(str(path), Reading())
    (part,) = source.parts(len(x))
    blocks = source.blocks((part,), len(x) // 2)
    _, block = next(blocks)
    os.truncate(path, 4096)
    np.testing.assert_array_equal(block.read.inputs["x"], x[: len(x) // 2])
    with pytest.raises(ScoringError, match=r"x\.npy (is truncated|was changed)"):
        next(blocks)


# Damage of the output ------------------------------------------------------------------------


def test_every_damaged_byte_of_the_output_is_noticed(job):
    x = rows(12)
    x[5] = np.nan
    np.save(Path(job.input) / "x.npy", x)
    with pytest.raises(ScoringError, match="is missing: run the same command"):
        verify(job)
    assert not Path(job.output).exists()
    assert score(job) == verify(job)
    folder = Folder(Path(job.output))
    parts = [*open_source(job.input, job.reading).parts(job.part_rows)]
    for name in ("part-00000001.parquet", "_rejects/part-00000001.parquet"):
        path = folder.path / name
        content = path.read_bytes()
        for position in range(0, len(content), 5):
            path.write_bytes(flipped(content, position))
            with pytest.raises(ScoringError, match="or its rejects are damaged"):
                folder.counts(parts[1])
        path.write_bytes(content)
    sums = folder.path / "_sums" / "part-00000001.parquet.sha256"
    content = sums.read_bytes()
    for position in range(len(content)):
        sums.write_bytes(flipped(content, position))
        with pytest.raises(ScoringError):
            folder.counts(parts[1])


def flipped(content: bytes, position: int) -> bytes:
    changed = bytearray(content)
    changed[position] ^= 1 << position % 8
    return bytes(changed)


def test_resumes_and_verify_notice_damage(job):
    np.save(Path(job.input) / "x.npy", rows(12))
    score(job)
    before = contents(job.output)
    path = Path(job.output) / "part-00000001.parquet"
    path.write_bytes(flipped(before[path.name], 200))
    for again in (score, verify):
        with pytest.raises(ScoringError, match=r"part-00000001.parquet or its rejects are damaged"):
            again(job)
    path.unlink()
    with pytest.raises(ScoringError, match="is missing: run the same command"):
        verify(job)
    score(job)
    assert contents(job.output) == before
    manifest = Path(job.output) / "_manifest.json"
    manifest.write_text(manifest.read_text().replace('"scored": 12', '"scored": 13'))
    with pytest.raises(ScoringError, match=r"_manifest.json has other counts"):
        verify(job)
    manifest.write_bytes(before[manifest.name])
    path.with_name("copy.parquet").write_bytes(before[path.name])
    with pytest.raises(ScoringError, match="more Parquet files than its parts"):
        verify(job)


def test_the_hashes_are_those_of_sha256sum(job):
    x = rows(12)
    x[0] = np.nan
    np.save(Path(job.input) / "x.npy", x)
    score(job)
    sums = sorted(str(path) for path in Path(job.output, "_sums").iterdir())
    command = ["sha256sum", "--check", "--quiet", *sums]
    assert subprocess.run(command, cwd=job.output, check=False).returncode == 0


def test_the_command_verifies(job):
    np.save(Path(job.input) / "x.npy", rows(12))
    names = ("model", "predictor", "weights", "input", "output")
    options = [text for name in names for text in (f"--{name}", getattr(job, name))]
    command = ["predict", *options, "--part-rows", "4", "--batch-rows", "3"]

    def run(*more: str) -> tuple[int, str]:
        found = CliRunner().invoke(build_app(), [*command, *more])
        return found.exit_code, found.stdout

    assert run("--verify")[0] == 1
    assert run()[0] == 0
    code, output = run("--verify")
    assert (code, "complete and undamaged" in output) == (0, True)
    part = Path(job.output) / "part-00000002.parquet"
    part.write_bytes(flipped(part.read_bytes(), 99))
    assert run("--verify")[0] == 1


# Claims of headers ---------------------------------------------------------------------------


def write_claim(path: Path, shape: tuple[int, ...], numbers: int = 0) -> None:
    """A header with any shape, and so many numbers."""
    with path.open("wb") as file:
        header = {"descr": "<f4", "fortran_order": False, "shape": shape}
        npy.write_array_header_1_0(file, header)
        file.write(bytes(4 * numbers))


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((10**12, 4), r"x.npy is damaged, .*: mmap length is greater than file size"),
        ((3, 0), r"first dimension counts rows: an array has shape \(3, 0\)"),
        ((), r"x.npy is damaged, or has no arrays"),
        ((0, 6), "has no rows: check --input"),
    ],
)
def test_headers_are_compared_with_the_file_before_anything_is_allocated(shape, message, job):
    write_claim(Path(job.input) / "x.npy", shape)
    with pytest.raises(ScoringError, match=message):
        score(job)
    assert not Path(job.output).exists()


def test_tensors_can_be_carried(job):
    np.savez(Path(job.input) / "x.npz", x=rows(5), y=rows(5, seed=1).reshape(5, 2, 3))
    score(replace(job, reading=Reading(columns=("x",), carry=("y",))))
    found = read(job)["y"].combine_chunks().to_numpy_ndarray()
    np.testing.assert_array_equal(found, rows(5, seed=1).reshape(5, 2, 3))


# Warnings ------------------------------------------------------------------------------------


def test_scoring_says_what_is_unsolved_without_a_warning():
    model, solver = MLP.model(), acnml.Gradient(1, 1e-6)  # far from an optimum
    predictor = acnml.Acnml(acnml.Classifier(model), diagonal(model), solver, alpha=5.0)
    x = MLP.x(4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        answers = Scorer(predictor, Answers())(Read({"x": x.numpy()}, {}))
    assert not any(answers["solved"].to_pylist())
    with pytest.warns(acnml.UnsolvedWarning):
        regret = predictor.solve(x).regret
    np.testing.assert_allclose(answers["regret"].to_numpy(), regret.numpy(), rtol=1e-6)
