"""The pipeline's parts: keys, records, what is made again and what is not, times, reports."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import re
import runpy
import shutil
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn

import acnml
from acnml.experiments.files import write_file
from acnml.experiments.pipeline import (
    Content,
    DamagedError,
    Reporter,
    Stage,
    Store,
    blocks,
    lock,
    override,
    restore_training,
    training_state,
    work,
)
from acnml.experiments.pipeline.plain import canonical, to_plain
from acnml.experiments.pipeline.record import encode, read_header, read_record
from acnml.experiments.pipeline.reporter import Bar
from cases import MODELS, POSTERIORS
from tiny_study import Run, TinyStudy, calls, contents, stages

ALL = {"train", "fit", "bma", "map"}


@dataclass(frozen=True)
class Linear:
    slope: float = 1.0


@dataclass(frozen=True)
class Square:
    slope: float = 1.0


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path, Linear(), Reporter(Console(quiet=True), tmp_path / "run.log"))


def numbers(work) -> Content:
    return Content({"numbers": torch.arange(3.0)})


# Keys ------------------------------------------------------------------------------------------

BASE = Stage("fit", Linear(), seed=0, needs=(Stage("train", Linear()),))


@pytest.mark.parametrize(
    "same",
    [
        Stage("fit", Linear(1), seed=0, needs=(Stage("train", Linear()),)),
        Stage("fit", {"Linear": {"slope": 1}}, needs=(Stage("train", Linear()),)),
    ],
)
def test_equal_settings_have_equal_keys(same):
    assert (same.key, same.label) == (BASE.key, BASE.label)


@pytest.mark.parametrize(
    "other",
    [
        dataclasses.replace(BASE, name="fit again"),
        dataclasses.replace(BASE, settings=Linear(1.5)),
        dataclasses.replace(BASE, settings=Square()),
        dataclasses.replace(BASE, seed=1),
        dataclasses.replace(BASE, version=2),
        dataclasses.replace(BASE, needs=()),
        dataclasses.replace(BASE, needs=(Stage("train", Linear(2)),)),
        dataclasses.replace(BASE, needs=(Stage("train", Linear(), version=2),)),
        dataclasses.replace(BASE, needs=BASE.needs * 2),
    ],
)
def test_whatever_decides_a_result_changes_its_key(other):
    assert other.key != BASE.key
    assert other.label != BASE.label


def test_keys_are_the_same_in_every_process():
    """Written down once: a change would make every artefact that people have out of date."""
    expected = '["fit",{"Linear":{"slope":1}},0,1,["x"]]'
    assert canonical(["fit", Linear(), 0, 1, ("x",)]) == expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"a": {1, 2}}, r"stage 'train'\.a is a set; only plain data"),
        ((1, torch.ones(1)), r"stage 'train'\[1\] is a Tensor"),
        ({1: 2}, "has the key 1; keys must be text"),
    ],
)
def test_settings_that_are_not_plain_are_refused(settings, message):
    with pytest.raises(TypeError, match=message):
        Stage("train", settings)


@pytest.mark.parametrize(
    "value", [True, 3, 0.1, 2.0**60, -1.5, math.inf, "°", None, [1, "a"], {"a": [None]}]
)
def test_plain_data_survive_json(value):
    assert json.loads(canonical(value)) == to_plain(value) == value
    assert type(to_plain(value)) is type(value)


# Records ---------------------------------------------------------------------------------------


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
    first, _ = encode(Content(tensors, facts), {"seconds": 1.5})
    second, _ = encode(Content(tensors, facts), {"seconds": 2.5})
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
    path = tmp_path / "record"
    damaged = 0
    for position in range(len(data)):
        for flip in (1, 32, 128):
            path.write_bytes(
                data[:position] + bytes([data[position] ^ flip]) + data[position + 1 :]
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


@pytest.mark.parametrize("keep", [0, 7, 100, -1])
def test_torn_files_are_damaged(tmp_path, keep):
    _, data = encode(Content({"a": torch.ones(20)}), {})
    (tmp_path / "record").write_bytes(data[:keep])
    with pytest.raises(DamagedError, match="is torn or not a safetensors file"):
        read_record(tmp_path / "record")


def test_other_files_are_no_records(tmp_path):
    acnml.save(POSTERIORS["diagonal"](MODELS[1].model()), tmp_path / "posterior")
    with pytest.raises(DamagedError, match="no header that can be read"):
        read_record(tmp_path / "posterior")


@pytest.mark.parametrize("name", POSTERIORS)
def test_an_artefact_of_a_posterior_is_a_file_that_acnml_loads(store, name):
    posterior = POSTERIORS[name](MODELS[1].model())
    artefact = store.make(Stage("fit"), lambda _: Content.of_posterior(posterior, {"tau": 3}))
    assert artefact.facts == {"tau": 3}
    for loaded in (artefact.load_posterior(), acnml.load(artefact.path)):
        drawn = loaded.sample(2, torch.Generator().manual_seed(0))
        expected = posterior.sample(2, torch.Generator().manual_seed(0))
        assert all(torch.equal(drawn[key], expected[key]) for key in expected)


# What is made again ----------------------------------------------------------------------------


def made(out: Path, study: TinyStudy) -> set[str]:
    """Run the study and return the stages that did any work."""
    before = len(calls(out))
    Run(out, study)()
    return {call.split()[0] for call in calls(out)[before:]}


@pytest.mark.parametrize(
    ("assignment", "again"),
    [
        ("seed=1", ALL),
        ("training.epochs=3", ALL),
        ("training.learning_rate=0.2", ALL),
        ("prior_std=0.25", {"fit", "bma"}),
        ("samples=4", {"bma"}),
        ("temperature=3", {"map"}),
        ("inputs=6", {"bma", "map"}),
        ("block=3", set()),
        ("temperature=2.0", set()),
    ],
)
def test_a_changed_setting_makes_again_exactly_what_depends_on_it(tmp_path, assignment, again):
    assert made(tmp_path, TinyStudy()) == ALL
    assert made(tmp_path, override(TinyStudy(), [assignment])) == again
    assert made(tmp_path, TinyStudy()) == set()  # going back costs nothing


def damage_truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def damage_flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


DAMAGES = {
    "truncated": damage_truncate,
    "a flipped bit": damage_flip,
    "empty": lambda path: path.write_bytes(b""),
    "removed": Path.unlink,
}


@pytest.mark.parametrize("name", sorted(ALL))
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_artefact_is_made_again_and_nothing_else(tmp_path, name, damage):
    before = Run(tmp_path)()
    DAMAGES[damage](before[name].path)
    # What comes out is the same, so that what was made from it stays right.
    assert made(tmp_path, TinyStudy()) == {name}
    after = read_header(before[name].path)
    assert after["content_hash"] == before[name].header["content_hash"]


def test_an_artefact_in_the_wrong_place_is_not_used(store):
    first, second = store.make(Stage("a"), numbers), store.make(Stage("b"), numbers)
    shutil.copy(first.path, second.path)
    assert store.find(Stage("b")) is None
    assert store.make(Stage("b"), numbers).header["stage"] == "b"


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


def test_parts_of_another_origin_are_not_used(store, tmp_path):
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


def test_needs_must_be_there(store):
    with pytest.raises(ValueError, match=r"fit, seed 0 needs train-seed0-\w+: make it first"):
        store.make(Stage("fit", needs=(Stage("train"),)), numbers)


def test_nothing_is_written_before_there_is_something_to_write(store, tmp_path):
    assert store.find(Stage("train")) is None
    assert list(tmp_path.iterdir()) == []


def test_a_header_says_all(tmp_path):
    study = TinyStudy(seed=3)
    artefacts = Run(tmp_path, study)()
    for name, stage in stages(study).items():
        header = artefacts[name].header
        assert header == read_header(artefacts[name].path)
        assert header == json.loads((artefacts[name].path.parent / "header.json").read_text())
        assert header["study"] == to_plain(study)
        assert header["settings"] == to_plain(stage.settings)
        assert (header["stage"], header["seed"]) == (stage.name, 3)
        assert header["versions"]["torch"] == torch.__version__
        assert header["hardware"]["threads"] == torch.get_num_threads()
        made_from = {
            need.label: artefacts[need.name].header["content_hash"] for need in stage.needs
        }
        assert header["origin"] == {"key": stage.key, "made_from": made_from}


# Predictions -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("inputs", "block"), [(1, 1), (5, 1), (5, 2), (5, 5), (5, 99)])
def test_blocks_join_to_the_whole(store, inputs, block):
    x = torch.randn(inputs, 3, generator=torch.Generator().manual_seed(0))
    artefact = store.predict(
        Stage("predict"), inputs, block, lambda rows: {"x": x[rows], "sum": x[rows].sum(1)}
    )
    assert artefact.facts["inputs"] == inputs
    assert torch.equal(artefact.load()["x"], x)
    assert torch.equal(artefact.load()["sum"], x.sum(1))


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
    DAMAGES[damage](sorted(tmp_path.glob("artefacts/*/parts/*"))[1])
    artefact = store.predict(Stage("predict"), 5, 1, compute)
    assert computed == [0, 1, 2, 3, 1, 3, 4]
    assert torch.equal(artefact.load()["rows"], torch.arange(5))


@pytest.mark.parametrize(
    ("inputs", "block", "compute", "message"),
    [
        (0, 1, None, "0 inputs in blocks of 1: both must be at least 1"),
        (1, 0, None, "1 inputs in blocks of 0"),
        (2, 1, lambda rows: {"p": torch.ones(2)}, r"inputs 0 to 0, 'p' has the shape \(2,\)"),
        (2, 2, lambda rows: {"p": torch.tensor(1)}, r"'p' has the shape \(\)"),
        (2, 2, lambda rows: {}, "must have the same tensors"),
        (2, 1, lambda rows: {f"{rows.start}": torch.ones(1)}, "must have the same tensors"),
    ],
)
def test_predictions_that_do_not_fit_are_refused(store, inputs, block, compute, message):
    with pytest.raises(ValueError, match=message):
        store.predict(Stage("predict"), inputs, block, compute)


def test_the_number_of_inputs_belongs_to_the_settings(store):
    store.predict(Stage("predict"), 2, 2, lambda rows: {"p": torch.ones(2)})
    with pytest.raises(ValueError, match="finished for 2 inputs, now there are 3"):
        store.predict(Stage("predict"), 3, 3, lambda rows: {"p": torch.ones(3)})


def test_a_function_must_return_content(store):
    with pytest.raises(TypeError, match="must return Content, not dict"):
        store.make(Stage("train"), lambda _: {"a": torch.ones(1)})


# Randomness ------------------------------------------------------------------------------------


def test_global_randomness_depends_on_the_stage_alone(tmp_path):
    state = torch.get_rng_state()
    Run(tmp_path / "first")()
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(1)
    Run(tmp_path / "second")()
    first, second = contents(tmp_path / "first"), contents(tmp_path / "second")
    for label, tensors in first.items():
        assert all(torch.equal(second[label][name], tensor) for name, tensor in tensors.items())
    noise = next(tensors["noise"] for label, tensors in first.items() if "bma" in label)
    assert len(noise.unique()) == len(noise)  # every block has its own


OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, 0.1),
    "adamw, amsgrad": lambda parameters: torch.optim.AdamW(parameters, 0.1, amsgrad=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_as_if_it_had_not_stopped(name, tmp_path):
    def fresh():
        with torch.random.fork_rng():
            torch.manual_seed(0)
            network = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
        return network, OPTIMIZERS[name](network.parameters()), torch.Generator().manual_seed(0)

    def steps(network, optimizer, generator) -> None:
        for _ in range(3):
            x = torch.randn(8, 3, generator=generator, dtype=torch.float64)
            optimizer.zero_grad()
            network(x).square().mean().backward()
            optimizer.step()

    straight, stopped, resumed = fresh(), fresh(), fresh()
    steps(*straight)
    steps(*straight)
    steps(*stopped)
    write_file(tmp_path / "state", encode(Content(training_state(*stopped)), {})[1])
    steps(*stopped)  # what happens after must not show
    restore_training(read_record(tmp_path / "state").content.tensors, *resumed)
    steps(*resumed)
    expected, found = training_state(*straight), training_state(*resumed)
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())


# Times and reports -----------------------------------------------------------------------------


class Clock:
    """A clock that goes only when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(work, "perf_counter", clock)
    monkeypatch.setattr(blocks, "perf_counter", clock)
    return clock


def test_the_time_of_predictions_is_that_of_their_blocks(store, clock):
    dies = True

    def compute(rows: slice) -> dict[str, torch.Tensor]:
        clock.now += 3
        if rows.start == 4 and dies:
            raise KeyboardInterrupt
        return {"p": torch.ones(2)}

    with pytest.raises(KeyboardInterrupt):
        store.predict(Stage("predict"), 8, 2, compute)
    clock.now += 1000  # a pause
    dies = False
    artefact = store.predict(Stage("predict"), 8, 2, compute)
    assert (artefact.seconds, artefact.seconds_per_input) == (12, 1.5)


def test_the_time_of_training_goes_on_from_the_checkpoint(store, clock):
    dies = True

    def train(work) -> Content:
        clock.now += 10  # to read the data, in every run: counted once
        checkpoint = work.resume()
        for epoch in range(0 if checkpoint is None else checkpoint.facts["epochs"], 4):
            clock.now += 5
            if epoch == 2 and dies:
                raise KeyboardInterrupt
            work.checkpoint(Content({}, {"epochs": epoch + 1}))
        return Content({})

    with pytest.raises(KeyboardInterrupt):
        store.make(Stage("train"), train)
    clock.now += 1000
    dies = False
    assert store.make(Stage("train"), train).seconds == 30


def events(out: Path) -> list[str]:
    return [line.split()[3] for line in (out / "run.log").read_text().splitlines()]


def test_the_log_tells_what_happened(tmp_path, store):
    stage = Stage("train", seed=7)
    with pytest.raises(ZeroDivisionError):
        store.make(stage, lambda _: 1 / 0)
    store.make(stage, numbers)
    store.make(stage, numbers).path.write_bytes(b"")
    store.make(stage, numbers)
    expected = ["started", "begun", "stopped", "begun", "made", "reused", "again", "begun", "made"]
    assert events(tmp_path) == expected
    lines = (tmp_path / "run.log").read_text().splitlines()
    assert lines[0].endswith(
        f"python {acnml.experiments.pipeline.environment.versions()['python']}"
    )
    assert lines[2].endswith("ZeroDivisionError: division by zero")
    assert "is torn or not a safetensors file" in lines[6]
    assert all("train, seed 7" in line for line in lines[1:])


def test_the_log_tells_where_a_run_goes_on(tmp_path, store):
    def compute(rows: slice) -> dict[str, torch.Tensor]:
        if rows.start == 2 and "stopped" not in events(tmp_path):
            raise KeyboardInterrupt
        return {"p": torch.ones(1)}

    with pytest.raises(KeyboardInterrupt):
        store.predict(Stage("predict"), 3, 1, compute)
    store.predict(Stage("predict"), 3, 1, compute)
    assert events(tmp_path) == ["started", "begun", "stopped", "resumed", "begun", "made"]
    assert "after rows-0000001-0000002" in (tmp_path / "run.log").read_text()


def test_without_a_terminal_every_stage_is_one_line(tmp_path):
    output = io.StringIO()
    store = Store(tmp_path, Linear(), Reporter(Console(file=output), tmp_path / "run.log"))
    store.make(Stage("train [bold]"), numbers)
    store.predict(Stage("predict"), 4, 1, lambda rows: {"p": torch.ones(1)})
    store.make(Stage("train [bold]"), numbers)
    lines = output.getvalue().splitlines()
    assert [line.split()[0] for line in lines] == ["made", "made", "reused"]
    assert "train [bold], seed 0" in lines[0]
    assert lines[1].endswith("per input")
    assert "\x1b" not in output.getvalue()


def test_in_a_terminal_a_stage_has_a_bar(tmp_path):
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=120)
    store = Store(tmp_path, Linear(), Reporter(console, tmp_path / "run.log"))
    store.predict(Stage("predict"), 4, 1, lambda rows: {"p": torch.ones(1)})
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", output.getvalue())
    assert re.search(r"predict, seed 0 ━+ 100% 0:00:0\d left 0:00:00", shown)
    assert shown.splitlines()[-1].startswith("made     predict, seed 0")


@pytest.mark.parametrize("start", [0, 5000])
def test_the_time_that_remains_is_that_of_this_run(start):
    """What an earlier run has done, long ago, says nothing about the speed."""
    clock = Clock()
    bar = Bar(Console(file=io.StringIO(), force_terminal=True, get_time=clock), "predict")
    bar.progress(start, 10_000)
    for block in range(1, 5):
        clock.now += 100  # each longer than rich's memory of 30 seconds
        bar.progress(start + 500 * block, 10_000)
    remaining = (10_000 - start - 2000) / 5
    assert bar.rich.tasks[0].time_remaining == pytest.approx(remaining)


def test_without_locks_a_run_says_so_once(monkeypatch, tmp_path):
    monkeypatch.setattr(lock, "fcntl", None)
    assert made(tmp_path, TinyStudy()) == ALL
    assert events(tmp_path).count("careful") == 1


# The page that explains it ---------------------------------------------------------------------


def test_the_study_in_the_documentation_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parent.parent / "docs" / "pipeline.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    Path("study.py").write_text(code)
    runpy.run_path("study.py")
    first = capsys.readouterr().out
    runpy.run_path("study.py")
    again = capsys.readouterr().out
    assert len(re.findall(r"^made ", first, re.MULTILINE)) == 5
    assert len(re.findall(r"^reused ", again, re.MULTILINE)) == 5
    scores = re.findall(r"^predict ACNML (\d+)°, seed 0 NLL ([\d.]+)", first, re.MULTILINE)
    assert scores == re.findall(r"^predict ACNML (\d+)°, seed 0 NLL ([\d.]+)", again, re.MULTILINE)
    assert [angle for angle, _ in scores] == ["0", "45", "90"]
    assert float(scores[0][1]) < float(scores[1][1]) < float(scores[2][1])
