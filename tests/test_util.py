"""Small tools: memory, progress, and what a part says whose packages are missing."""

from __future__ import annotations

import importlib
import logging
import sys

import pytest
import torch

import acnml
from acnml import Gradient, Linearised
from acnml._util import memory
from acnml._util import messages as module
from acnml._util.memory import free_bytes
from acnml._util.messages import track
from acnml.laplace_torch import from_laplace
from cases import MLP, diagonal

# Memory: budgets that are no numbers of bytes are refused, and limits of containers count ---------

WITH_MEMORY = [Gradient, Linearised]
CPU = torch.device("cpu")
GB = 2**30


@pytest.mark.parametrize("solver", WITH_MEMORY)
@pytest.mark.parametrize("wrong", ["1", float("nan"), 1e9, -1, 0])
def test_a_budget_is_a_positive_number_of_bytes(solver, wrong):
    with pytest.raises((TypeError, ValueError), match="memory must be"):
        solver(memory=wrong)


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A folder with the files of a machine."""
    monkeypatch.setattr(memory, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "CONTAINER", tmp_path)
    return tmp_path


def test_free_memory_is_what_machine_and_container_leave(machine):
    assert free_bytes(CPU) == GB  # not on Linux
    memory.MEMINFO.write_text(f"MemTotal: {2**40} kB\nMemAvailable:   {300 * 2**20} kB\nX: 1 kB\n")
    assert free_bytes(CPU) == 300 * GB
    for name, value in (("max", "max"), ("current", 3 * GB), ("stat", "anon 5\ninactive_file 7")):
        (machine / f"memory.{name}").write_text(f"{value}\n")
    assert free_bytes(CPU) == 300 * GB
    (machine / "memory.max").write_text(f"{4 * GB}\n")
    assert free_bytes(CPU) == GB + 7


def test_limits_are_looked_up_once(monkeypatch):
    """And not at every prediction: the files of a container are many."""
    asked = []
    monkeypatch.setattr(memory, "free_bytes", lambda device: asked.append(device) or GB)
    memory.default_budget.cache_clear()
    predict = acnml.Acnml(acnml.Classifier(MLP.model()), diagonal(MLP.model()))
    for size in (1, 5, 300):
        predict(MLP.x(size))
    assert asked == [CPU]
    memory.default_budget.cache_clear()


# Progress neither changes what is iterated over nor iterates more than once, and is logged --------


class Counted:
    """Counts how often an iteration starts, because a DataLoader then starts its workers."""

    def __init__(self) -> None:
        self.begun = 0

    def __iter__(self):
        self.begun += 1
        return iter("abc")


@pytest.mark.parametrize("progress", [True, False, None])
def test_an_iteration_is_begun_once(progress):
    items = Counted()
    assert list(track(items, "letters", progress)) == ["a", "b", "c"]
    assert items.begun == 1


@pytest.mark.parametrize(("progress", "shown"), [(True, True), (False, False), (None, False)])
def test_a_bar_is_shown_when_asked_for(progress, shown, capsys):
    list(track("abc", "letters", progress))
    assert ("letters" in capsys.readouterr().err) == shown


@pytest.fixture
def clock(monkeypatch, caplog):
    """Seconds that pass only when a test says so; the library's log is recorded."""
    caplog.set_level(logging.INFO, "acnml")
    passed = [0.0]
    monkeypatch.setattr(module, "monotonic", lambda: passed[0])
    return passed


def test_lines_come_after_5_seconds_and_then_every_30(clock, caplog):
    told = []

    def slow():
        for second in range(1, 101):
            clock[0] = float(second)
            yield second

    for second in track(slow(), "parts", None, total=1000):
        told += [second] * (len(caplog.records) - len(told))
    assert told == [5, 35, 65, 95]
    assert caplog.messages[1] == "parts:   3% 34/1000 [00:35<16:34,  1.03s/it]"


@pytest.mark.parametrize("progress", [True, False])
def test_nothing_is_logged_beside_a_bar_or_if_nothing_was_asked_for(progress, clock, caplog):
    for _ in track("abc", "letters", progress):
        clock[0] += 100
    assert caplog.messages == []


def test_a_terminal_has_a_bar_and_no_lines(clock, caplog, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    for _ in track("abc", "letters", None):
        clock[0] += 100
    assert "letters" in capsys.readouterr().err
    assert caplog.messages == []


# A part of the library whose packages are missing says what to install ----------------------------

PARTS = {
    "lightning": (("lightning", "pytorch_lightning"), "lightning"),
    "plots": (("matplotlib",), "plots"),
    "ray": (("ray", "pyarrow"), "ray"),
    "scoring": (("pyarrow",), "predict"),
    "sklearn": (("sklearn",), "sklearn"),
    "torchmetrics": (("torchmetrics",), "lightning"),
}


def block(monkeypatch, *packages: str) -> None:
    """Let imports of packages fail, as if they were not installed."""
    loaded = [name for name in sys.modules if name.split(".")[0] in packages]
    for name in (*packages, *loaded):
        monkeypatch.setitem(sys.modules, name, None)


@pytest.fixture(autouse=True)
def _modules():
    """Forget parts of the library that were imported while packages were missing."""
    before = set(sys.modules)
    yield
    for name in [n for n in sys.modules if n.startswith("acnml.") and n not in before]:
        del sys.modules[name]


@pytest.mark.parametrize("part", PARTS)
def test_a_missing_package_is_named_with_its_extra(part, monkeypatch):
    packages, extra = PARTS[part]
    own = f"acnml.{part}"
    for name in [name for name in sys.modules if name == own or name.startswith(f"{own}.")]:
        monkeypatch.delitem(sys.modules, name)
    block(monkeypatch, *packages)
    message = rf"^{own} needs {packages[-1]}[\w.]*: pip install 'acnml\[{extra}\]'$"
    with pytest.raises(ModuleNotFoundError, match=message):
        importlib.import_module(own)


@pytest.mark.parametrize(
    ("use", "package", "message"),
    [
        (lambda: from_laplace(None), "laplace", "from_laplace .* 'laplace-torch'"),
        (lambda: acnml.export_onnx(None, None, ""), "onnx", r"ONNX export .* 'acnml\[onnx\]'"),
        (
            lambda: importlib.import_module("acnml.transformers").loader(None, None, None),
            "transformers",
            r"acnml.transformers .* 'acnml\[transformers\]'",
        ),
    ],
)
def test_a_function_without_its_package(use, package, message, monkeypatch):
    block(monkeypatch, package)
    with pytest.raises(ModuleNotFoundError, match=message) as refused:
        use()
    assert refused.value.name == package
