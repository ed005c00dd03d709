"""Scored files hold what the predictor says of every row, once, and the reasons for all others."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("pyarrow", reason="needs the extra `predict`")

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

import acnml
from acnml.scoring import Answers, Reading, ScoringError, score
from acnml.scoring.columns import Read
from acnml.scoring.inputs import open_source
from acnml.scoring.job import is_uri
from acnml.scoring.run import locally
from acnml.scoring.scorer import Scorer
from acnml.scoring.sources import Part
from scored import FEATURES, contents, predictor_of, read, rejects, rows, write_parquet


def assert_answers(table: pa.Table, files: dict[str, str], x: np.ndarray) -> None:
    """Compare with the predictor on all rows at once; batches round differently."""
    predictor = predictor_of(files)
    expected = predictor(torch.from_numpy(x))
    probs, label = expected.probs.max(-1)
    assert table["label"].to_pylist() == label.tolist()
    for name, values in (("confidence", probs), ("regret", expected.regret)):
        np.testing.assert_allclose(table[name].to_numpy(), values.numpy(), rtol=1e-4, atol=1e-6)
    limit = predictor.threshold(0.05)
    clear = np.abs(probs.numpy() - limit) > 1e-5
    assert (table["abstain"].to_numpy() == (probs.numpy() < limit))[clear].all()


def test_parquet(job, files):
    x = rows(230)
    write_parquet(Path(job.input), x, name=[f"row {i}" for i in range(len(x))], y=range(len(x)))
    job = replace(job, reading=Reading(carry=("name",)), answers=Answers(log_probs=True))
    summary = score(job)
    table = read(job)
    assert table.column_names == [
        *("file", "row", "name", "label", "confidence", "regret", "score", "abstain", "log_probs")
    ]
    assert table["row"].to_pylist() == list(range(230))
    assert set(table["file"].to_pylist()) == {"data.parquet"}
    assert table["name"].to_pylist() == [f"row {i}" for i in range(230)]
    assert_answers(table, files, x)
    assert table.schema.field("log_probs").type == pa.list_(pa.float32())
    log_probs = np.stack(table["log_probs"].to_numpy())
    np.testing.assert_allclose(log_probs, predictor_of(files).log_probs(x), rtol=1e-5, atol=1e-6)
    assert (summary.rows, summary.scored, summary.n_rejected, summary.parts) == (230, 230, 0, 5)
    assert summary.abstained == sum(table["abstain"].to_pylist()) > 0
    manifest = json.loads((Path(job.output) / "_manifest.json").read_text())
    assert manifest["status"] == "complete"
    assert manifest["counts"]["scored"] == 230
    assert manifest["settings"]["part_rows"] == 50


def test_the_threads_of_a_job_are_those_of_its_run_alone(job):
    write_parquet(Path(job.input), rows(120))
    before, seen = torch.get_num_threads(), []

    def engine(job, units):
        for rows_ in locally(job, units):
            seen.append(torch.get_num_threads())
            yield rows_

    score(job, engine)
    (Path(job.output) / "part-00000002.parquet").unlink()
    score(replace(job, threads=2), engine)
    assert seen == [1, 1, 1, 2]
    assert torch.get_num_threads() == before


def test_folders_of_parquet_files_by_path_and_by_uri(job, files, tmp_path):
    x, folder = rows(120), tmp_path / "all days"
    for day, part in enumerate((x[:70], x[70:70], x[70:])):
        (folder / f"day {day}").mkdir(parents=True)
        write_parquet(folder / f"day {day}" / "data.parquet", part)
    (folder / "_SUCCESS").touch()
    job = replace(job, input=str(folder))
    summary = score(job)
    table = read(job)
    assert table["row"].to_pylist() == [*range(70), *range(50)]
    assert table["file"].to_pylist() == ["day 0/data.parquet"] * 70 + ["day 2/data.parquet"] * 50
    assert_answers(table, files, x)
    by_uri = replace(job, input=folder.as_uri(), output=str(tmp_path / "by uri"))
    assert score(by_uri) == summary
    assert contents(by_uri.output) == contents(job.output)
    assert score(replace(by_uri, input=str(folder))).found == summary.parts  # the same job
    one = replace(
        by_uri, input=f"{folder.as_uri()}/day%202/data.parquet", output=str(tmp_path / "o")
    )
    assert score(one).rows == 50


def test_what_a_uri_cannot_be(job, tmp_path):
    write_parquet(tmp_path / "data.parquet", rows(20))
    np.save(tmp_path / "data.npy", rows(20))
    uri = tmp_path.as_uri()
    for path, message in (
        (f"{uri}/nothing.parquet", "there are no files of"),
        (uri, "and others, such as data.npy"),
        ("nowhere://bucket/data.parquet", "cannot be read: check the URI"),
    ):
        with pytest.raises(ScoringError, match=message):
            score(replace(job, input=path))
    with pytest.raises(ValueError, match="output must be a local path"):
        replace(job, output="s3://bucket/x")
    assert not is_uri("C:/data/x.parquet")


@pytest.mark.parametrize("kind", ["fixed", "nested", "list", "large_list", "tensor"])
def test_ways_to_store_tensors(kind, job, files):
    x = rows(40)
    flat = pa.array(x.reshape(-1))
    if kind == "fixed":
        column = pa.FixedSizeListArray.from_arrays(flat, FEATURES)
    elif kind == "nested":
        inner = pa.FixedSizeListArray.from_arrays(flat, 3)
        column = pa.FixedSizeListArray.from_arrays(inner, 2)
    elif kind == "tensor":
        column = pa.FixedShapeTensorArray.from_numpy_ndarray(x.reshape(40, 2, 3))
    else:
        types = {"list": pa.list_, "large_list": pa.large_list}
        column = pa.array(x.reshape(40, 2, 3).tolist(), types[kind](types[kind](pa.float32())))
    pq.write_table(pa.table({"other": range(40), "x": column}), job.input, row_group_size=7)
    score(job)
    assert_answers(read(job), files, x)


def test_columns_of_numbers_are_stacked(job, files):
    x = rows(40)
    table = pa.table({f"f{i}": x[:, i] for i in range(FEATURES)} | {"id": range(40)})
    pq.write_table(table, job.input)
    names = tuple(f"f{i}" for i in range(FEATURES))
    score(replace(job, reading=Reading(columns=names, stack=True, carry=("id",))))
    assert_answers(read(job), files, x)


@pytest.mark.parametrize("suffix", ["npy", "npz", "compressed.npz"])
def test_arrays(suffix, job, files, tmp_path):
    x, path, reading = rows(130), tmp_path / f"data.{suffix}", Reading(carry=("id",))
    if suffix == "npy":
        reading = Reading()
        np.save(path, x.astype(">f4"))
    else:
        write = np.savez_compressed if "compressed" in suffix else np.savez
        write(path, x=x, id=np.arange(130) * 2)
    job = replace(job, input=str(path), reading=reading)
    score(job)
    assert_answers(read(job), files, x)
    if suffix != "npy":
        assert read(job)["id"].to_pylist() == list(range(0, 260, 2))


def test_folders_of_images(job, files, tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (30, 2, 3), dtype=np.uint8)
    folder = tmp_path / "images"
    for index, image in enumerate(pixels):
        (folder / f"class{index % 2}").mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(folder / f"class{index % 2}" / f"{index:02d}.png")
    (folder / "class0" / "30.png").write_bytes(b"not an image")
    Image.fromarray(np.zeros((3, 3), np.uint8)).save(folder / "class1" / "31.png")
    job = replace(job, input=str(folder), reading=Reading(image_mode="L"))
    summary = score(job)
    assert summary.scored == 30
    assert {row["file"]: row["reject"] for row in rejects(job)} == {
        "class0/30.png": "the image cannot be decoded: UnidentifiedImageError",
        "class1/31.png": "the image has shape (1, 3, 3), not (1, 2, 3)",
    }
    table = read(job)
    order = [int(Path(name).stem) for name in table["file"].to_pylist()]
    assert sorted(order) == list(range(30))
    assert_answers(table, files, (pixels[order].astype(np.float32) / 255).reshape(30, -1))


def deep_images(folder: Path) -> np.ndarray:
    """Write the same pictures with 8 bits, 16 bits, 32 bits and floats; return the 8-bit ones."""
    pixels = np.random.default_rng(0).integers(0, 256, (8, 2, 3), dtype=np.uint8)
    folder.mkdir()
    for index, image in enumerate(pixels):
        wide = image.astype(np.uint16) * 257  # 65535 is white
        Image.fromarray(image).save(folder / f"{index}-0.png")
        Image.fromarray(wide).save(folder / f"{index}-1.png")
        Image.fromarray(wide.astype(np.int32)).save(folder / f"{index}-2.tif")
        Image.fromarray(image.astype(np.float32) / 255).save(folder / f"{index}-3.tif")
    return pixels


def test_images_that_a_conversion_would_clip_are_rejected(job, files, tmp_path):
    folder = tmp_path / "images"
    pixels = deep_images(folder)
    job = replace(job, input=str(folder), reading=Reading(image_mode="L"))
    assert score(job).scored == 8
    advice = "image: pass --transform with a function that scales it"
    expected = {
        f"{index}-{kind}": f"{depth} {advice}"
        for index in range(8)
        for kind, depth in (("1.png", "16-bit"), ("2.tif", "32-bit"), ("3.tif", "floating point"))
    }
    assert {row["file"]: row["reject"] for row in rejects(job)} == expected
    assert_answers(read(job), files, (pixels.astype(np.float32) / 255).reshape(8, -1))
    for path in folder.glob("*-0.png"):
        path.unlink()
    with pytest.raises(ScoringError, match=r"as an image; 0-1\.png: 16-bit image: pass --tran"):
        score(replace(job, output=str(tmp_path / "none")))


def test_a_transform_gets_deep_images_in_their_own_mode(job, files, tmp_path):
    folder, code = tmp_path / "images", tmp_path / "scaling.py"
    pixels = deep_images(folder)
    code.write_text(
        "import numpy as np\n"
        "def scaled(image):\n"
        "    white = {'L': 255, 'F': 1}.get(image.mode, 65535)\n"
        "    return np.asarray(image, dtype=np.float32)[None] / white\n"
    )
    reading = Reading(image_mode="L", transform=f"{code}:scaled")
    job = replace(job, input=str(folder), reading=reading)
    assert score(job).scored == 32
    x = (pixels.astype(np.float32) / 255).reshape(8, -1)
    assert_answers(read(job), files, x.repeat(4, axis=0))


def test_rows_that_cannot_be_scored_are_rejected_with_the_reason(job, files):
    x = rows(100)
    lists = [row.tolist() for row in x]
    lists[3], lists[17], lists[40], lists[77] = None, [1.0], [None] * FEATURES, [float("nan")] * 6
    lists[80][2] = float("inf")
    pq.write_table(pa.table({"x": lists, "id": [f"#{i}" for i in range(100)]}), job.input)
    job = replace(job, reading=Reading(carry=("id",)))
    summary = score(job)
    null = "column 'x' is null or has null entries"
    nan = "column 'x' has NaN or infinite entries"
    reasons = {3: null, 17: "column 'x' has another shape than (6,)", 40: null, 77: nan, 80: nan}
    assert rejects(job) == [
        {"file": "data.parquet", "row": row, "id": f"#{row}", "reject": reason}
        for row, reason in reasons.items()
    ]
    kept = [i for i in range(100) if i not in reasons]
    assert read(job)["row"].to_pylist() == kept
    assert_answers(read(job), files, x[kept])
    assert (summary.scored, summary.rejected) == (
        95,
        {null: 2, nan: 2, "column 'x' has another shape than (6,)": 1},
    )


def test_rows_on_which_the_model_fails_are_rejected(job, files, tmp_path):
    """Finite inputs can have logits that are not; rows of a later chunk are named as well."""
    x = rows(600)
    x[[5, 300, 599]] = 3e38
    write_parquet(Path(job.input), x)
    for kind in ("calibrated", "map"):
        job = replace(job, part_rows=600, batch_rows=600, output=str(tmp_path / kind))
        if kind == "map":
            own = acnml.Map(predictor_of(files).classifier)
            acnml.save(own, tmp_path / "map.safetensors")
            job = replace(job, predictor=str(tmp_path / "map.safetensors"))
        summary = score(job)
        assert [row["row"] for row in rejects(job)] == [5, 300, 599], kind
        assert all("NaN or infinite" in reason for reason in summary.rejected)
        assert summary.scored == 597
    assert "regret" not in read(job).column_names


def test_parts_that_are_there_are_kept_and_the_others_are_made(job):
    write_parquet(Path(job.input), rows(230))
    expected = score(job)
    before = contents(job.output)
    for name in ("part-00000001.parquet", "part-00000004.parquet"):
        (Path(job.output) / name).unlink()
    (Path(job.output) / f".{'0' * 32}.tmp").write_bytes(b"half a file")
    seen: list[Part] = []

    def engine(job, units):
        seen.extend(part for unit in units for part in unit)
        return locally(job, units)

    again = score(job, engine)
    assert again == expected
    assert again.found == 3
    assert [(part.number, part.start, part.stop) for part in seen] == [(1, 50, 100), (4, 200, 230)]
    assert contents(job.output) == before
    stamps = {p: p.stat().st_mtime_ns for p in Path(job.output).glob("part-*")}
    assert score(job).found == 5
    assert {p: p.stat().st_mtime_ns for p in Path(job.output).glob("part-*")} == stamps


@pytest.mark.parametrize("change", ["batch_rows", "log_probs", "input", "predictor"])
def test_other_settings_and_files_do_not_mix(change, job, files, tmp_path):
    write_parquet(Path(job.input), rows(60))
    score(job)
    if change == "batch_rows":
        job = replace(job, batch_rows=8)
    elif change == "log_probs":
        job = replace(job, answers=Answers(log_probs=True))
    elif change == "input":
        write_parquet(Path(job.input), rows(60, seed=5))
    else:
        other = acnml.Map(predictor_of(files).classifier)
        acnml.save(other, tmp_path / "map.safetensors")
        job = replace(job, predictor=str(tmp_path / "map.safetensors"))
    before = contents(job.output)
    named = "answers" if change == "log_probs" else change
    with pytest.raises(ScoringError, match=f"another job: it had other {named}"):
        score(job)
    assert contents(job.output) == before


@pytest.mark.parametrize("group", [500, 20_000])
def test_parquet_files_are_not_held_in_memory(group, tmp_path):
    """Arrow allocates a small part of a file, of one row group or of many, while it is read."""
    x = np.random.default_rng(0).normal(size=(20_000, 200)).astype(np.float32)
    write_parquet(tmp_path / "data.parquet", x, group=group)
    source = open_source(str(tmp_path / "data.parquet"), Reading())
    del x
    before = pa.total_allocated_bytes()
    most = 0
    for _, block in source.blocks((Part(0, 0, 0, 20_000),), 256):
        most = max(most, pa.total_allocated_bytes() - before)
        assert not block.read.reasons
    assert most < 20_000 * 200 * 4 / 2


REFUSALS = {
    "there are no files of nowhere.parquet": {"input": "nowhere.parquet"},
    "there is no file or module 'no_such_module'": {"model": "no_such_module:build"},
    "has no function 'nothing'": {"model": "scored:nothing"},
    "must return an nn.Module": {"model": "builtins:dict"},
    "the input has no column 'z'; there are: x,": {"reading": Reading(columns=("z",))},
    "cannot become": {"reading": Reading(shape=(5,))},
    "only columns of numbers can be stacked": {"reading": Reading(columns=("x",), stack=True)},
    "'label' cannot be carried over": {"reading": Reading(carry=("label",))},
    "'label' is named twice": {"reading": Reading(columns=("label", "label"), stack=True)},
    "has type string": {"reading": Reading(columns=("text",))},
    "check --weights and --device": {"device": "gpu"},
}


@pytest.mark.parametrize("message", REFUSALS)
def test_refusals_come_before_anything_is_scored(message, job):
    write_parquet(Path(job.input), rows(20), label=range(20), text=["a"] * 20)
    with pytest.raises(ScoringError, match=message.replace("(", r"\(")):
        score(replace(job, **REFUSALS[message]), locally)
    assert not list(Path(job.output).glob("part-*"))


def test_a_column_is_not_chosen_among_several_of_one_name(job):
    table = pa.Table.from_arrays([pa.array([1.0])] * 3, names=["a", "b", "a"])
    pq.write_table(table, job.input)
    with pytest.raises(ScoringError, match="has several columns 'a': rename all but one"):
        score(replace(job, reading=Reading(columns=("a", "b"), stack=True)), locally)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda p: p,
        lambda p: acnml.Tempered(p, 2.0),
        lambda p: acnml.Ensemble((p, p)),
        lambda p: acnml.Modes((p, p)),
    ],
    ids=["acnml", "tempered", "ensemble", "modes"],
)
def test_rows_that_a_member_flags_are_rejected(wrap):
    model = torch.nn.Linear(4, 3)
    classifier, x = acnml.Classifier(model), torch.ones(6, 4)
    posterior = acnml.fit_laplace(classifier, torch.randn(50, 4))
    x[2] = 3e38
    flagging = acnml.Acnml(classifier, posterior, alpha=0.1, on_error="flag")
    scored = Scorer(wrap(flagging), Answers())(Read({"x": x.numpy()}, {}))
    for row, answer in enumerate(scored.to_pylist()):
        is_flagged = row == 2
        assert (answer["label"] is None) == (answer["reject"] is not None) == is_flagged
        assert is_flagged or 0 < answer["confidence"] <= 1
