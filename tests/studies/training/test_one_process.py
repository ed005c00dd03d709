"""Averaging in one process: SGD written out, the moments of SWAG, and what is refused."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from acnml import Classifier
from studies.store import Content
from studies.training import Nobody, Processes, Task, train

from .tiny import DATA, SEED, TRAINING, assert_close, augment, each_tiny, task_of, tiny
from .written_out import batches_of, renewed_statistics, visited


class Recorder:
    """Keeps the checkpoints of all epochs."""

    def __init__(self) -> None:
        self.contents: list[Content] = []

    def resume(self) -> None:
        return None

    def checkpoint(self, content: Content) -> None:
        self.contents.append(Content(copy.deepcopy(dict(content.tensors)), dict(content.facts)))

    def progress(self, done: int, total: int) -> None:
        assert 0 <= done < total == 4 * TRAINING.epochs


def trained_states(recorder: Recorder) -> list[dict[str, Tensor]]:
    """The network's state in every checkpoint."""
    return [
        {n.removeprefix("network/"): t for n, t in content.tensors.items() if "network/" in n}
        for content in recorder.contents
    ]


@each_tiny
def test_training_is_sgd_written_out(name):
    recorder = Recorder()
    trained = train(task_of(name), TRAINING, SEED, Processes(), recorder)
    assert_close(trained_states(recorder), visited(name))
    assert_close(trained.last, visited(name)[-1])


@each_tiny
def test_swag_has_the_moments_of_the_weights_after_each_epoch(name):
    recorder = Recorder()
    swag = train(task_of(name), TRAINING, SEED, Processes(), recorder).swag
    states = trained_states(recorder)[TRAINING.swa_start :]
    diagonal, low_rank = swag.diagonal(), swag.low_rank()
    assert diagonal.mean.keys() == dict(tiny(name).named_parameters()).keys()
    for parameter in diagonal.mean:
        weights = torch.stack([state[parameter] for state in states])
        running = torch.stack([weights[: n + 1].mean(0) for n in range(len(weights))])
        deviations = (weights - running)[-TRAINING.rank :]
        var = weights.var(0, correction=0)
        assert_close(diagonal.mean[parameter], weights.mean(0))
        assert_close(diagonal.var[parameter], var)
        assert_close(low_rank.directions[parameter], deviations / 2**0.5)


@each_tiny
def test_batch_norm_statistics_are_those_at_the_average(name):
    trained = train(task_of(name), TRAINING, SEED, Processes(), Nobody())
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
    kinds.clear()
    trained = train(task, TRAINING, SEED, Processes(device=torch.device("cuda", 0)), Nobody())
    assert torch.bfloat16 in kinds
    assert {tensor.dtype for tensor in trained.last.values()} == {torch.float32}
