"""Averaging in two processes: as in one, as DDP written out, and after a kill."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from torch import Tensor, distributed

from studies.training import Processes, joined
from tiny_study import contents, start

from .runs import Fuse, assert_same_artefacts, die, make_in, result_in
from .tiny import assert_close, augment
from .written_out import visited

together = pytest.mark.skipif(
    not (distributed.is_available() and distributed.is_gloo_available()),
    reason="this PyTorch has no torch.distributed with gloo",
)
PATIENCE = 1200  # seconds for what takes one, on a machine that does much else


def one_of_two(rank: int, port: int, out: Path, name: str, breaks_at: int) -> None:
    """Train as one process of two, as `torchrun` would start it; the first may die."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}"}
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # the store of `run_two`
    with joined() as processes:
        assert (processes.rank, processes.count) == (rank, 2)
        fuse = Fuse(breaks_at if rank == 0 else 0, die)
        artefact = make_in(out, name, fuse, processes)
        assert (artefact is None) == (rank == 1)
        if (out / "forbidden").exists():
            assert fuse.left == 0  # nothing was computed


def run_two(out: Path, name: str, breaks_at: int = 0) -> list[int | None]:
    """Run both processes and return how they ended."""
    # The store has its port before anyone asks for it, so no other program can take it.
    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pair = [start(one_of_two, rank, store.port, out, name, breaks_at) for rank in range(2)]
    for process in pair:
        process.join(PATIENCE)
        if process.is_alive():
            process.kill()
            process.join()
    return [process.exitcode for process in pair]


def sgd_weights(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n.removeprefix("last/"): t for n, t in tensors.items() if n.startswith("last/")}


@together
def test_two_processes_are_one_without_batch_norm(tmp_path):
    make_in(tmp_path / "one", "plain", augment, Processes())
    assert run_two(tmp_path / "two", "plain") == [0, 0]
    assert_close(result_in(tmp_path / "two"), result_in(tmp_path / "one"))


@together
def test_two_processes_with_batch_norm_and_dropout_are_ddp_written_out(tmp_path):
    assert run_two(tmp_path, "vgg_dropout") == [0, 0]
    assert_close(sgd_weights(result_in(tmp_path)), visited("vgg_dropout", count=2)[-1])


@together
def test_two_processes_go_on_after_a_kill_and_use_what_is_finished(tmp_path):
    whole, out = tmp_path / "whole", tmp_path / "out"
    assert run_two(whole, "vgg_dropout") == [0, 0]
    first, second = run_two(out, "vgg_dropout", breaks_at=4 * 3 + 5)  # in the fourth epoch
    assert first == -signal.SIGKILL
    assert second not in (0, None)
    assert contents(out) == {}
    assert run_two(out, "vgg_dropout") == [0, 0]
    assert_same_artefacts(out, whole)
    (out / "forbidden").touch()
    assert run_two(out, "vgg_dropout") == [0, 0]
