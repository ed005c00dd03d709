"""The store of artefacts: what is kept, what is made again, and that no interruption shows."""

from __future__ import annotations

import errno
import os
import time
from collections import Counter
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

import pytest
import torch

import acnml
from cases import MLP, POSTERIORS
from dying import start, start_and_kill
from stores import store_in
from studies.files import CannotWriteError, write_file
from studies.settings import override
from studies.store import Content, DamagedError, Stage
from studies.store.parts import locked
from studies.store.record import canonical, encode, read_header, read_record
from tiny_study import Run, TinyStudy, calls, contents, stages

ALL = {"train", "fit", "bma", "map"}
WORK = [f"train {epoch}" for epoch in range(2)] + ["fit 0"]
WORK += [f"{method} {row}" for method in ("bma", "map") for row in (0, 2, 4)]


@dataclass(frozen=True)
class Linear:
    slope: float = 1.0


@dataclass(frozen=True)
class Square:
    slope: float = 1.0


@pytest.fixture
def store(tmp_path):
    return store_in(tmp_path, Linear())


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The artefacts of a run that nothing happened to."""
    out = tmp_path_factory.mktemp("undisturbed")
    Run(out)()
    assert calls(out) == WORK
    return contents(out)


def made(out: Path, study: TinyStudy) -> set[str]:
    """Run the study and return the stages that did any work."""
    before = len(calls(out))
    Run(out, study)()
    return {call.split()[0] for call in calls(out)[before:]}


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


DAMAGES = (truncate, flip, lambda path: path.write_bytes(b""), Path.unlink)


# Keys and records --------------------------------------------------------------------------------

BASE = Stage("fit", Linear(), seed=0, needs=(Stage("train", Linear()),))


@pytest.mark.parametrize(
    "change",
    [
        {"name": "fit again"},
        {"settings": Linear(1.5)},
        {"settings": Square()},
        {"seed": 1},
        {"version": 2},
        {"needs": ()},
        {"needs": (Stage("train", Linear(2)),)},
        {"needs": (Stage("train", Linear(), version=2),)},
        {"needs": BASE.needs * 2},
    ],
)
def test_whatever_decides_a_result_changes_its_key_and_nothing_else(change):
    same = replace(BASE, settings={"Linear": {"slope": 1}}, needs=(Stage("train", Linear(1)),))
    assert (same.key, same.label) == (BASE.key, BASE.label)
    other = replace(BASE, **change)
    assert other.key != BASE.key
    assert other.label != BASE.label


def test_keys_stay_what_they_are():
    """Written down once: a change would make every artefact that people have out of date."""
    expected = '["fit",{"Linear":{"slope":1}},0,1,["x"]]'
    assert canonical(["fit", Linear(), 0, 1, ("x",)]) == expected


def test_content_comes_back_as_it_was(tmp_path):
    shared = torch.arange(6.0, dtype=torch.float64).reshape(2, 3)
    tensors = {
        "a": shared,
        "transposed": shared.T,
        "scalar": torch.tensor(True),
        "half": torch.ones(2, dtype=torch.bfloat16, requires_grad=True),
        "empty": torch.zeros(0, 4),
    }
    header, data = encode(Content(tensors, {"chosen": (1, None)}), {"stage": "x"})
    write_file(tmp_path / "record", data)
    record = read_record(tmp_path / "record")
    assert record.header == read_header(tmp_path / "record") == header
    assert record.content.facts == {"chosen": [1, None]}
    assert record.content.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(record.content.tensors[name], tensor)
        assert record.content.tensors[name].dtype == tensor.dtype


def test_the_hash_is_that_of_the_content_alone():
    tensors, facts = {"a": torch.ones(2)}, {"b": 1}
    first, second = (encode(Content(tensors, facts), {"seconds": s})[0] for s in (1.5, 2.5))
    assert first["content_hash"] == second["content_hash"]
    others = [
        Content({"a": torch.tensor([1, 1.5])}, facts),
        Content({"a": torch.ones(2).double()}, facts),
        Content({"a": torch.ones(2, 1)}, facts),
        Content({"b": torch.ones(2)}, facts),
        Content(tensors, {"b": 2}),
        Content(tensors, facts, {"b": "1"}),
    ]
    hashes = {encode(content, {})[0]["content_hash"] for content in others}
    assert len(hashes | {first["content_hash"]}) == 7


def test_no_byte_can_change_unnoticed(tmp_path):
    content = Content({"a": torch.arange(3.0), "b": torch.ones(1).double()}, {"best": 0.5})
    header, data = encode(content, {"seconds": 1.25})
    path, damaged = tmp_path / "record", 0
    for position in range(len(data)):
        for bits in (1, 32, 128):
            path.write_bytes(
                data[:position] + bytes([data[position] ^ bits]) + data[position + 1 :]
            )
            try:
                record = read_record(path)
            except DamagedError:
                damaged += 1
                continue
            # What is left are bytes that mean the same, as e+1 does for E+1 in JSON.
            assert record.header == header
            assert all(torch.equal(record.content.tensors[n], content.tensors[n]) for n in "ab")
    assert damaged > 2.9 * len(data)


def test_an_artefact_of_a_posterior_is_a_file_that_acnml_loads(store):
    posterior = POSTERIORS["kronecker_eigen"](MLP.model())
    artefact = store.make(Stage("fit"), lambda _: Content.of_saved(posterior, {"tau": 3}))
    assert artefact.facts == {"tau": 3}
    for loaded in (artefact.load_saved(), acnml.load(artefact.path)):
        drawn = loaded.sample(2, torch.Generator().manual_seed(0))
        expected = posterior.sample(2, torch.Generator().manual_seed(0))
        assert all(torch.equal(drawn[key], expected[key]) for key in expected)


# What is made again ------------------------------------------------------------------------------


def test_a_changed_setting_makes_again_exactly_what_depends_on_it(tmp_path):
    assert made(tmp_path, TinyStudy()) == ALL
    for assignment, again in (
        ("seed=1", ALL),
        ("training.learning_rate=0.2", ALL),
        ("prior_std=0.25", {"fit", "bma"}),
        ("samples=4", {"bma"}),
        ("temperature=3", {"map"}),
        ("inputs=6", {"bma", "map"}),
        ("block=3", set()),
        ("temperature=2.0", set()),
    ):
        assert made(tmp_path, override(TinyStudy(), [assignment])) == again, assignment
        assert made(tmp_path, TinyStudy()) == set()  # going back costs nothing


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_artefact_is_made_again_and_nothing_else(tmp_path, damage):
    """What comes out is the same, so that what was made from it stays right."""
    before = Run(tmp_path)()
    for name, artefact in before.items():
        damage(artefact.path)
        assert made(tmp_path, TinyStudy()) == {name}
        assert read_header(artefact.path)["content_hash"] == artefact.header["content_hash"]


def test_what_was_made_from_something_else_is_made_again(store):
    numbers_of_run, train = count(), Stage("train")
    fit = Stage("fit", needs=(train,))

    def random_numbers(_) -> Content:
        return Content({"a": torch.tensor([next(numbers_of_run)])})

    first = store.make(train, random_numbers)
    second = store.make(fit, lambda _: Content(first.load()))
    assert store.find(fit) == second
    first.path.write_bytes(b"")
    assert store.find(fit) is None
    first = store.make(train, random_numbers)
    assert store.find(fit) is None
    assert torch.equal(store.make(fit, lambda _: Content(first.load())).load()["a"], torch.ones(1))


def test_parts_of_another_origin_are_not_used(store):
    """A half finished prediction, and then another network to predict with."""
    train = Stage("train")
    predict = Stage("predict", needs=(train,))
    for value in (1.0, 2.0):
        network = store.make(train, lambda _, value=value: Content({"a": torch.tensor(value)}))
        if value == 1:
            with pytest.raises(ZeroDivisionError):
                store.predict(
                    predict, 2, 1, lambda rows: {"p": torch.full((1,), 1 / (1 - rows.start))}
                )
            network.path.unlink()
    result = store.predict(predict, 2, 1, lambda rows: {"p": network.load()["a"].expand(1)})
    assert torch.equal(result.load()["p"], torch.tensor([2.0, 2.0]))


# Predictions in blocks ---------------------------------------------------------------------------


@pytest.mark.parametrize("block", [1, 2, 5, 99])
def test_blocks_join_to_the_whole(store, block):
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    stage = Stage("predict")
    artefact = store.predict(stage, 5, block, lambda rows: {"x": x[rows], "sum": x[rows].sum(1)})
    assert artefact.facts["inputs"] == 5
    assert torch.equal(artefact.load()["x"], x)
    assert torch.equal(artefact.load()["sum"], x.sum(1))
    with pytest.raises(ValueError, match="finished for 5 inputs, now there are 3"):
        store.predict(stage, 3, 3, lambda rows: {"p": torch.ones(3)})


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_block_is_computed_again_and_no_other(store, tmp_path, damage):
    computed: list[int] = []

    def compute(rows: slice) -> dict[str, torch.Tensor]:
        computed.append(rows.start)
        if rows.start == 3 and len(computed) == 4:
            raise KeyboardInterrupt
        return {"rows": torch.arange(rows.start, rows.stop)}

    with pytest.raises(KeyboardInterrupt):
        store.predict(Stage("predict"), 5, 1, compute)
    damage(sorted(tmp_path.glob("artefacts/*/parts/*"))[1])
    artefact = store.predict(Stage("predict"), 5, 1, compute)
    assert computed == [0, 1, 2, 3, 1, 3, 4]
    assert torch.equal(artefact.load()["rows"], torch.arange(5))


def test_the_log_tells_what_happened(tmp_path, store):
    def numbers(_) -> Content:
        return Content({"numbers": torch.arange(3.0)})

    stage = Stage("train", seed=7)
    with pytest.raises(ZeroDivisionError):
        store.make(stage, lambda _: 1 / 0)
    store.make(stage, numbers)
    store.make(stage, numbers).path.write_bytes(b"")
    store.make(stage, numbers)
    lines = (tmp_path / "run.log").read_text().splitlines()
    expected = ["started", "begun", "stopped", "begun", "made", "reused", "again", "begun", "made"]
    assert [line.split()[3] for line in lines] == expected
    assert lines[2].endswith("ZeroDivisionError: division by zero")
    assert "is torn or not a safetensors file" in lines[6]


# Interruptions: kills, races, a full disk --------------------------------------------------------
# Real processes are killed by SIGKILL. Whatever happens, the artefacts must equal, bit for bit,
# those of a run that nothing happened to.


def test_global_randomness_depends_on_the_stage_alone(tmp_path, undisturbed):
    torch.rand(1)
    state = torch.get_rng_state()
    Run(tmp_path)()
    assert torch.equal(torch.get_rng_state(), state)
    assert_complete(tmp_path, undisturbed, lost=0)
    noise = next(tensors["noise"] for label, tensors in undisturbed.items() if "bma" in label)
    assert len(noise.unique()) == len(noise)  # every block has its own


def assert_complete(out: Path, undisturbed, lost: int) -> None:
    """The run's folder is as it should be, and at most `lost` pieces of work were done twice."""
    found = contents(out)
    assert found.keys() == undisturbed.keys()
    for label, tensors in undisturbed.items():
        assert found[label].keys() == tensors.keys()
        assert all(torch.equal(found[label][name], tensors[name]) for name in tensors)
    done = Counter(calls(out))
    assert set(done) == set(WORK)
    assert done.total() - len(WORK) <= lost
    files = {path.name for path in (out / "artefacts").glob("*/*")}
    assert files == {"artefact.safetensors", "header.json", "lock"}


def finished_stages(out: Path) -> set[str]:
    """The first words of the calls that belong to stages with an artefact."""
    folders = {path.parent.name for path in (out / "artefacts").glob("*/artefact.safetensors")}
    return {name for name, stage in stages(TinyStudy()).items() if stage.label in folders}


def test_killed_at_every_moment(tmp_path, undisturbed):
    """Every third moment, which is not the period of anything that a run does."""
    for step in range(1, 1000, 3):
        out = tmp_path / f"{step}"
        process = start_and_kill(step, out, Run(out))
        process.join()
        finished = finished_stages(out)
        assert not made(out, TinyStudy()) & finished
        assert_complete(out, undisturbed, lost=1)
        if process.exitcode == 0:
            break
    assert process.exitcode == 0
    assert step > 40  # there were so many moments


def wait_for(out: Path, line: str, times: int) -> None:
    """Wait until the log has a word so many times."""
    log, deadline = out / "run.log", time.monotonic() + 600
    while not log.exists() or log.read_text().count(line) < times:
        assert time.monotonic() < deadline, f"{line!r} never came"
        time.sleep(0.01)


@pytest.mark.parametrize("step", [None, 30])
def test_runs_in_one_folder_wait_for_each_other(tmp_path, undisturbed, step):
    place = tmp_path / "artefacts" / stages(TinyStudy())["train"].label
    place.mkdir(parents=True)
    run = Run(tmp_path, pause=0.01)
    with locked(place / "lock", on_wait=pytest.fail, on_missing=pytest.fail):
        others = [start(run), start(run)]
        if step is not None:  # one of them dies on its way
            others.append(start_and_kill(step, tmp_path, run))
        wait_for(tmp_path, "waiting", times=len(others))
        assert calls(tmp_path) == []
    for process in others:
        process.join()
    assert [process.exitcode for process in others[:2]] == [0, 0]
    # Without a death nothing is done twice: what one makes, the others use.
    assert_complete(tmp_path, undisturbed, lost=0 if step is None else 1)


def test_a_full_disk_is_said_clearly_and_loses_nothing(tmp_path, undisturbed, monkeypatch):
    """Every file that is written is once the one that finds the disk full."""
    for step in range(1, 1000):
        out, writes = tmp_path / f"{step}", iter(range(1, 1000))

        def fail(file: int, step: int = step, writes=writes) -> None:
            if next(writes) >= step:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "fsync", fail)
        try:
            Run(out)()
            break
        except CannotWriteError as error:
            message = str(error)
        monkeypatch.undo()
        assert message.startswith("Cannot write /")
        assert "No space left on device. Nothing that was finished is lost: free some" in message
        assert "run the same command again" in message
        assert list(out.rglob("*.tmp")) == []
        Run(out)()
        assert_complete(out, undisturbed, lost=1)
    assert step > 15


@pytest.mark.parametrize("file", ["out", "out/artefacts", "out/run.log"])
def test_a_place_that_cannot_be_written_is_named(tmp_path, file):
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    path.mkdir() if file.endswith("log") else path.touch()
    with pytest.raises(CannotWriteError, match=f"Cannot write {path}.*run the same command again"):
        Run(tmp_path / "out")()
