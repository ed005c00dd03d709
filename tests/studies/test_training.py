"""SGD and averaging: as written out, in two processes as in one, and after interruptions."""

from __future__ import annotations

import copy
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, distributed

from acnml import Classifier
from dying import start
from studies.cifar10_c.recipes import RECIPES
from studies.store import Content
from studies.training import Descent, Nobody, Processes, Task, joined, load_trained, train
from tiny_study import contents
from tiny_training import (
    DATA,
    SEED,
    TINY,
    TRAINING,
    Fuse,
    augment,
    batches_of,
    die,
    interrupt,
    make_in,
    renewed_statistics,
    result_in,
    swag_rate,
    task_of,
    tiny,
    visited,
)

each_tiny = pytest.mark.parametrize("name", TINY)
PATIENCE = 1200  # seconds for what takes one, on a machine that does much else
EXACTLY = {"rtol": 0, "atol": 0}


def assert_close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12)


# In one process ----------------------------------------------------------------------------------


class Recorder:
    """Keeps the network's state in the checkpoints of all epochs."""

    def __init__(self) -> None:
        self.states: list[dict[str, Tensor]] = []

    def resume(self) -> None:
        return None

    def checkpoint(self, content: Content) -> None:
        tensors = copy.deepcopy(dict(content.tensors))
        state = {n.removeprefix("network/"): t for n, t in tensors.items() if "network/" in n}
        self.states.append(state)

    def progress(self, done: int, total: int) -> None:
        assert 0 <= done < total == 4 * TRAINING.epochs


@each_tiny
def test_training_is_sgd_written_out_and_swag_its_moments(name):
    recorder, expected = Recorder(), visited(name)
    trained = train(task_of(name), TRAINING, SEED, Processes(), recorder)
    assert_close(recorder.states, expected)
    assert_close(trained.last, expected[-1])
    states = recorder.states[TRAINING.swa_start :]
    diagonal, low_rank = trained.swag.diagonal(), trained.swag.low_rank()
    assert diagonal.mean.keys() == dict(tiny(name).named_parameters()).keys()
    for parameter in diagonal.mean:
        weights = torch.stack([state[parameter] for state in states])
        running = torch.stack([weights[: n + 1].mean(0) for n in range(len(weights))])
        deviations = (weights - running)[-TRAINING.rank :]
        assert_close(diagonal.mean[parameter], weights.mean(0))
        assert_close(diagonal.var[parameter], weights.var(0, correction=0))
        assert_close(low_rank.directions[parameter], deviations / 2**0.5)
    assert_close(trained.statistics, renewed_statistics(name, trained.swag.mean))
    assert trained.average.keys() == {**trained.swag.mean, **trained.statistics}.keys()
    Classifier(tiny(name)).at(trained.average)  # its names and shapes fit


def test_facts_are_losses_and_accuracies_of_the_epochs():
    """At a rate that moves nothing they are the network's own, over the augmented images."""
    still = replace(TRAINING, learning_rate=1e-300, swa_learning_rate=1e-300)
    facts = train(task_of("plain"), still, SEED, Processes(), Nobody()).facts
    network = tiny("plain")
    for epoch in range(still.epochs):
        images, labels = (torch.cat(parts) for parts in zip(*batches_of(epoch), strict=True))
        log_probs = network(images).log_softmax(1)
        loss = -log_probs[torch.arange(26), labels].mean()
        assert facts["losses"][epoch] == pytest.approx(loss.item(), rel=1e-9)
        right = (log_probs.argmax(1) == labels).double().mean().item()
        assert facts["accuracies"][epoch] == pytest.approx(right, rel=1e-12)
    assert facts["epochs"] == still.epochs


def test_a_loss_that_explodes_is_an_error():
    wild = replace(TRAINING, learning_rate=1e200)
    with pytest.raises(ValueError, match="the loss is nan in epoch 0: lower the learning rate"):
        train(task_of("plain"), wild, SEED, Processes(), Nobody())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
def test_a_gpu_computes_in_bfloat16_and_keeps_weights_in_single_precision():
    kinds = set()
    network = tiny("plain").float()
    network[0].register_forward_hook(lambda _, x, output: kinds.add(output.dtype))
    task = Task(network, DATA, lambda images, generator: augment(images, generator).float())
    trained = train(task, TRAINING, SEED, Processes(device=torch.device("cuda", 0)), Nobody())
    assert torch.bfloat16 in kinds
    assert {tensor.dtype for tensor in trained.last.values()} == {torch.float32}


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=list(RECIPES))
def test_the_schedule_is_that_of_swag(recipe):
    t = recipe.training
    for schedule, start_of_swa, last in (
        (t, t.swa_start, t.swa_learning_rate),
        (t.without_averaging(), t.epochs, 0.01 * t.learning_rate),
    ):
        expected = [swag_rate(e, start_of_swa, t.learning_rate, last) for e in range(t.epochs)]
        assert [schedule.rate(e) for e in range(t.epochs)] == pytest.approx(expected, rel=1e-12)
    assert t.without_averaging().collected == 0


def test_the_cosine_falls_from_the_rate_to_zero():
    t = Descent(epochs=4, learning_rate=0.3)
    rates = [t.rate(step / 2) for step in range(9)]
    assert [rates[0], rates[4]] == pytest.approx([0.3, 0.15])
    assert rates[8] == pytest.approx(0, abs=1e-12)
    assert rates == sorted(rates, reverse=True)
    assert t.swa_start == t.epochs  # nothing is collected


# Interrupted -------------------------------------------------------------------------------------


def test_broken_off_anywhere_and_taken_up(tmp_path):
    """Every fifth call: batches of all epochs, and the renewal of statistics."""
    whole, name = tmp_path / "whole", "vgg_dropout"
    count = Fuse(0, interrupt)
    make_in(whole, name, count)
    calls = -count.left
    assert calls >= 4 * TRAINING.epochs + 4  # all batches, and those for the statistics
    for step in range(1, calls + 1, 5):
        out, again = tmp_path / f"{step}", Fuse(0, interrupt)
        with pytest.raises(KeyboardInterrupt):
            make_in(out, name, Fuse(step, interrupt))
        make_in(out, name, again)
        torch.testing.assert_close(contents(out), contents(whole), **EXACTLY)
        assert step - again.left <= calls + 4 + 2  # one epoch at most was done twice


def test_an_artefact_holds_all_of_the_result(tmp_path):
    made = train(task_of("vgg"), TRAINING, SEED, Processes(), Nobody())
    read = load_trained(make_in(tmp_path, "vgg"))
    for ours, theirs in (
        (read.last, made.last),
        (read.average, made.average),
        (read.swag.diagonal().var, made.swag.diagonal().var),
        (read.swag.low_rank().directions, made.swag.low_rank().directions),
    ):
        torch.testing.assert_close(ours, theirs, **EXACTLY)
    assert read.facts == made.facts
    assert read.swag.updates == TRAINING.collected


# In two processes --------------------------------------------------------------------------------

together = pytest.mark.skipif(
    not (distributed.is_available() and distributed.is_gloo_available()),
    reason="this PyTorch has no torch.distributed with gloo",
)


def one_of_two(rank: int, port: int, out: Path, name: str, breaks_at: int) -> None:
    """Train as one process of two, as `torchrun` would start it; the first may die."""
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


@together
def test_two_processes_are_one_without_batch_norm(tmp_path):
    make_in(tmp_path / "one", "plain")
    assert run_two(tmp_path / "two", "plain") == [0, 0]
    assert_close(result_in(tmp_path / "two"), result_in(tmp_path / "one"))


@together
def test_two_processes_are_ddp_written_out_also_after_a_kill(tmp_path):
    """With batch norm and dropout. What is finished is used."""
    whole, out = tmp_path / "whole", tmp_path / "out"
    assert run_two(whole, "vgg_dropout") == [0, 0]
    found = result_in(whole).items()
    weights = {n.removeprefix("last/"): t for n, t in found if n.startswith("last/")}
    assert_close(weights, visited("vgg_dropout", count=2)[-1])
    first, second = run_two(out, "vgg_dropout", breaks_at=4 * 3 + 5)  # in the fourth epoch
    assert first == -signal.SIGKILL
    assert second not in (0, None)
    assert contents(out) == {}
    assert run_two(out, "vgg_dropout") == [0, 0]
    torch.testing.assert_close(contents(out), contents(whole), **EXACTLY)
    (out / "forbidden").touch()
    assert run_two(out, "vgg_dropout") == [0, 0]
