"""A folder of results is of one job: what goes on after a kill, what is refused or left out."""

from __future__ import annotations

import signal
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("pyarrow", reason="needs the extra `predict`")

from PIL import Image

from acnml.scoring import Job, Reading, ScoringError, score
from acnml.scoring.job import COLUMNS
from acnml.scoring.output import fcntl
from acnml.scoring.run import locally
from dying import start_and_kill
from scored import contents, read, rows, write_parquet


def without_part(job: Job, number: int) -> dict[str, bytes]:
    """Remove a part, as if the run had been interrupted; return what is left."""
    (Path(job.output) / f"part-{number:08d}.parquet").unlink()
    return contents(job.output)


def write_images(folder: Path, count: int) -> None:
    folder.mkdir()
    for index, pixels in enumerate((rows(count) * 60 + 128).clip(0, 255).astype(np.uint8)):
        Image.fromarray(pixels.reshape(2, 3)).save(folder / f"{index}.png")


CODE = (
    "import numpy as np\ndef f(image): return {}np.asarray(image, dtype='f4').reshape(-1) / 255\n"
)


def test_a_run_does_not_go_on_with_another_transform(job, tmp_path):
    """The name of the function is the same, but not its file."""
    code = tmp_path / "crops_to_change.py"
    code.write_text(CODE.format(""))
    write_images(tmp_path / "images", 8)
    reading = Reading(image_mode="L", transform=f"{code}:f")
    job = replace(job, input=str(tmp_path / "images"), reading=reading, part_rows=4)
    score(job)
    whole = contents(job.output)
    left = without_part(job, 1)
    code.write_text(CODE.format("-"))
    with pytest.raises(ScoringError, match=r"another job: it had other code of the transform\."):
        score(job)
    assert contents(job.output) == left
    code.write_text(CODE.format(""))
    score(job)
    assert contents(job.output) == whole


@pytest.mark.parametrize("kind", ["folder", "pattern", "URI", "link"])
def test_an_output_folder_inside_of_the_input_is_left_out(kind, job, tmp_path):
    data = tmp_path / "data"
    (data / "more").mkdir(parents=True)
    write_parquet(data / "a.parquet", rows(60))
    write_parquet(data / "more" / "b.parquet", rows(60, seed=1))
    (tmp_path / "link").symlink_to(data)
    paths = {
        "folder": str(data),
        "pattern": str(data / "**" / "*.parquet"),
        "URI": data.as_uri(),
        "link": str(tmp_path / "link"),
    }
    job = replace(job, input=paths[kind], output=str(data / "scored"))
    expected = score(job)
    whole = contents(job.output)
    assert set(read(job)["file"].to_pylist()) == {"a.parquet", "more/b.parquet"}
    without_part(job, 1)
    assert score(job) == expected
    assert contents(job.output) == whole


def test_an_output_folder_that_has_the_input_is_refused(job, tmp_path):
    (tmp_path / "data").mkdir()
    np.save(tmp_path / "data" / "x.npy", rows(60))
    before = contents(tmp_path)
    for output in (tmp_path, tmp_path / "data"):
        with pytest.raises(ScoringError, match="is not empty, and not a folder of `acnml predict`"):
            score(replace(job, input=str(tmp_path / "data"), output=str(output)))
    assert contents(tmp_path) == before


@pytest.mark.skipif(fcntl is None, reason="there are no locks")
def test_one_run_at_a_time_uses_a_folder(job):
    """It has no part yet, but will have."""
    write_parquet(Path(job.input), rows(100))

    def begin_others_first(own: Job, units):
        for other in (job, replace(job, batch_rows=8)):
            with pytest.raises(ScoringError, match="another run uses"):
                score(other)
        yield from locally(own, units)

    assert score(job, begin_others_first).scored == 100
    with pytest.raises(ScoringError, match="has results of another job: it had other batch_rows"):
        score(replace(job, batch_rows=8))


def test_if_no_row_has_an_answer_all_are_rejected(job):
    x = rows(700)
    x[:600], x[600:] = np.nan, 3e38
    write_parquet(Path(job.input), x)
    summary = score(job)
    assert (summary.scored, summary.n_rejected) == (0, 700)
    assert sorted(summary.rejected.values()) == [100, 600]
    assert {*read(job).schema.names} <= {"file", "row", *COLUMNS}


def test_arrays_that_are_not_used_may_be_anything(job, tmp_path):
    x, path = rows(40), tmp_path / "data.npz"
    odd = {"objects": np.array([{}, None]), "number": np.array(3.0), "texts": np.array([["a"]])}
    np.savez(path, x=x, id=np.arange(40), by_columns=np.asfortranarray(x), **odd)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("damaged.npy", "nothing")
    found = []
    for name in ("x", "by_columns"):
        reading, output = Reading(columns=(name,), carry=("id",)), str(tmp_path / name)
        one = replace(job, input=str(path), output=output, reading=reading)
        assert score(one).scored == 40
        found.append(read(one))
    assert found[0].equals(found[1])
    for name, message in (
        ("objects", f"{path} is damaged, or has no arrays of numbers.*pickle"),
        ("number", f"{path} is damaged, or has no arrays.* an array has shape"),
        ("damaged", f"{path} is damaged"),
        ("texts", "column 'texts' has type"),
    ):
        with pytest.raises(ScoringError, match=message):
            score(replace(job, input=str(path), reading=Reading(columns=(name,))))


def test_killed_until_it_is_done(job, tmp_path):
    """Every process writes a little more than the one before."""
    x = rows(160)
    x[np.random.default_rng(0).choice(160, 8, replace=False)] = np.nan
    write_parquet(Path(job.input), x, group=70)
    unbroken = replace(job, part_rows=8, batch_rows=4)
    killed, step = replace(unbroken, output=str(tmp_path / "killed")), 12
    score(unbroken)
    while True:
        process = start_and_kill(step, killed.output, score, killed)
        process.join()
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
        step += 5  # each dies at another moment, and does more than it finds
    assert step > 12 + 5 * 5
    found, expected = contents(killed.output), contents(unbroken.output)
    assert len(expected) > 20
    assert found == expected
