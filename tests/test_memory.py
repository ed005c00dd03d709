"""Memory: budgets that are no numbers of bytes are refused, and limits of containers count."""

from __future__ import annotations

import pytest
import torch

import acnml
from acnml import Gradient, Linearised
from acnml._util import memory
from acnml._util.memory import free_bytes
from acnml.fit.refitting import Refit
from cases import MLP, diagonal

WITH_MEMORY = [Gradient, Linearised, Refit]
CPU = torch.device("cpu")
GB = 2**30


@pytest.mark.parametrize("solver", WITH_MEMORY)
@pytest.mark.parametrize("wrong", ["1", float("-inf"), float("nan"), 1e9, True, [1], -1, 0])
def test_a_budget_is_a_positive_number_of_bytes(solver, wrong):
    with pytest.raises((TypeError, ValueError), match="memory must be"):
        solver(memory=wrong)


def write(folder, **numbers) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in numbers.items():
        (folder / name.replace("__", ".")).write_text(f"{value}\n")


@pytest.fixture
def cgroups(tmp_path, monkeypatch):
    """A machine with 100 GB of free memory and control groups of its own."""
    monkeypatch.setattr(memory, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(memory, "OWN_CGROUPS", tmp_path / "own")
    sizes = {"SC_AVPHYS_PAGES": 100 * GB // 4096, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr(memory.os, "sysconf", sizes.__getitem__)
    return tmp_path / "cgroup"


def test_without_limits_the_free_memory_counts(cgroups):
    assert free_bytes(CPU) == 100 * GB  # no /proc: not on Linux
    memory.OWN_CGROUPS.write_text("0::/user\n")
    assert free_bytes(CPU) == 100 * GB
    write(cgroups / "user", memory__max="max", memory__current=GB)
    assert free_bytes(CPU) == 100 * GB


def test_memory_that_holds_cached_files_is_free(cgroups):
    memory.MEMINFO.write_text(f"MemTotal: {2**40} kB\nMemAvailable:   {300 * 2**20} kB\nX: 1 kB\n")
    assert free_bytes(CPU) == 300 * GB
    memory.OWN_CGROUPS.write_text("0::/\n")
    write(cgroups, memory__max=4 * GB, memory__current=3 * GB)
    assert free_bytes(CPU) == GB


@pytest.mark.parametrize(
    "text", ["", "MemTotal: 5 kB\n", "MemAvailable:\n", "MemAvailable: x kB\n"]
)
def test_without_a_number_the_unused_memory_counts(cgroups, text):
    memory.MEMINFO.write_text(text)
    assert free_bytes(CPU) == 100 * GB


@pytest.mark.parametrize("place", ["", "pod", "pod/container"])
def test_limits_of_containers(cgroups, place):
    """The limit of the group itself, or of one around it."""
    memory.OWN_CGROUPS.write_text("0::/pod/container\n")
    write(cgroups / "pod/container", memory__max="max", memory__current=GB)
    write(cgroups / place, memory__max=4 * GB, memory__current=3 * GB)
    assert free_bytes(CPU) == GB
    (cgroups / place / "memory.stat").write_text(f"anon 5\ninactive_file {GB}\n")
    assert free_bytes(CPU) == 2 * GB


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
