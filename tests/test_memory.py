"""Memory: budgets that are no numbers of bytes are refused, and limits of containers count."""

from __future__ import annotations

import pytest
import torch

import acnml
from acnml import Gradient, Linearised
from acnml._util import memory
from acnml._util.memory import free_bytes
from cases import MLP, diagonal

WITH_MEMORY = [Gradient, Linearised]
CPU = torch.device("cpu")
GB = 2**30


@pytest.mark.parametrize("solver", WITH_MEMORY)
@pytest.mark.parametrize("wrong", ["1", float("-inf"), float("nan"), 1e9, True, [1], -1, 0])
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
