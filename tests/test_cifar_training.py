"""Training as in the SWAG paper: against SGD written out, broken off anywhere, in two processes."""

from __future__ import annotations

import copy
import os
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file
from torch import Tensor, distributed, nn

from acnml import Classifier, Map
from acnml.experiments.cifar10_c.training import (
    PRESETS,
    Nobody,
    Processes,
    Recipe,
    Task,
    Training,
    joined,
    load_trained,
    make_together,
    prepare_task,
    train,
    training_stage,
)
from acnml.experiments.cifar10_c.training.__main__ import main
from acnml.experiments.data import cifar10
from acnml.experiments.data.augmentation import crop_and_flip
from acnml.experiments.data.cifar10 import LabelledBytes, to_unit
from acnml.experiments.models import MODELS
from acnml.experiments.models.resnet import ResNet, SubsampleAndPad, projection
from acnml.experiments.models.vgg import vgg16, vgg16_dropout
from acnml.experiments.models.wide_resnet import WideResNet
from acnml.experiments.pipeline import Content, Reporter, Stage, Store
from acnml.experiments.pipeline.work import mixed
from acnml.random import seeded
from tiny_study import contents, start

SEED = 3
TRAINING = Training(
    epochs=5, swa_start=2, learning_rate=0.05, swa_learning_rate=0.02, batch_size=8, rank=2
)
STAGES = ((2, 3), (4,), (4,))


def plain() -> nn.Module:
    """Neither batch norm nor dropout."""
    convolution = nn.Conv2d(3, 4, 3, stride=2, padding=1)
    return nn.Sequential(convolution, nn.Tanh(), nn.Flatten(), nn.Linear(64, 3))


TINY: dict[str, Callable[[], nn.Module]] = {
    "plain": plain,
    "resnet_a": lambda: ResNet(3, (2, 4), 2, SubsampleAndPad),
    "resnet_b": lambda: ResNet(3, (2, 4), 2, projection),
    "wide_resnet": lambda: WideResNet(3, 1, 2),
    "vgg": lambda: vgg16(3, STAGES),
    "vgg_dropout": lambda: vgg16_dropout(3, STAGES),
}
each_tiny = pytest.mark.parametrize("name", TINY)


def tiny(name: str) -> nn.Module:
    with seeded(0):
        return TINY[name]().double()


def bytes_of(images: int) -> LabelledBytes:
    """Images of 8×8 whose class is the channel that is bright."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(3, (images,), generator=generator)
    pixels = torch.randint(100, (images, 3, 8, 8), generator=generator)
    pixels += 150 * nn.functional.one_hot(labels, 3)[:, :, None, None]
    return LabelledBytes(pixels.to(torch.uint8), labels)


DATA = bytes_of(26)  # batches of 8, 8, 8 and 2


def normalise(images: Tensor) -> Tensor:
    return (images.double() - 0.4) / 0.3


def task_of(name: str) -> Task:
    return Task(tiny(name), DATA, normalise)


# Oracles -----------------------------------------------------------------------------------------


def batches_of(epoch: int):
    """The batches of an epoch, written out."""
    generator = torch.Generator().manual_seed(mixed(SEED, epoch))
    for rows in torch.randperm(26, generator=generator).split(8):
        images = crop_and_flip(to_unit(DATA.images[rows]), generator)
        yield normalise(images), DATA.labels[rows]


def swag_rate(epoch: int, start: int, first: float, last: float) -> float:
    """The schedule as SWAG's code has it: a factor of the first rate."""
    t = epoch / start
    if t <= 0.5:
        factor = 1.0
    elif t <= 0.9:
        factor = 1.0 - (1.0 - last / first) * (t - 0.5) / 0.4
    else:
        factor = last / first
    return first * factor


def gradients(network: nn.Module, images: Tensor, labels: Tensor, random: list[Tensor]) -> list:
    """Those of the mean loss over a batch that some processes share, each with its random state.

    Every process has batch-norm statistics of its own share; the network keeps the first's.
    """
    parts, count = [], len(random)
    for rank in range(count):
        torch.set_rng_state(random[rank])
        process, own = copy.deepcopy(network), labels[rank::count]
        log_probs = process(images[rank::count]).log_softmax(1)
        loss = nn.functional.nll_loss(log_probs, own, reduction="sum") / len(labels)
        parts.append(torch.autograd.grad(loss, list(process.parameters())))
        random[rank] = torch.get_rng_state()
        if rank == 0:
            buffers = dict(process.named_buffers())
    network.load_state_dict(buffers, strict=False)
    return [torch.stack(shares).sum(0) for shares in zip(*parts, strict=True)]


def random_states(epoch: int, count: int) -> list[Tensor]:
    """What dropout starts from in every process."""
    seeds = [mixed(mixed(SEED, epoch), rank) for rank in range(count)]
    return [torch.Generator().manual_seed(seed).get_state() for seed in seeds]


def visited(name: str, count: int = 1) -> list[dict[str, Tensor]]:
    """The state after every epoch, by v ← mv + g + λθ and θ ← θ - ηv."""
    network, states = tiny(name).train(), []
    velocities = [torch.zeros_like(p) for p in network.parameters()]
    for epoch in range(TRAINING.epochs):
        rate, random = swag_rate(epoch, 2, 0.05, 0.02), random_states(epoch, count)
        for images, labels in batches_of(epoch):
            with seeded(0):  # puts back what the gradients take
                found = gradients(network, images, labels, random)
            with torch.no_grad():
                for p, v, g in zip(network.parameters(), velocities, found, strict=True):
                    v.mul_(0.9).add_(g + 5e-4 * p)
                    p.sub_(rate * v)
        states.append(copy.deepcopy(network.state_dict()))
    return states


def renewed_statistics(name: str, mean: dict[str, Tensor]) -> dict[str, Tensor]:
    """Batch norm's averages over the batches of one more epoch, with dropout off."""
    network = tiny(name).eval()
    network.load_state_dict(mean, strict=False)
    layers = {n: m for n, m in network.named_modules() if isinstance(m, nn.BatchNorm2d)}
    seen: dict[str, list[tuple[Tensor, Tensor]]] = {n: [] for n in layers}
    for n, layer in layers.items():
        layer.train()
        layer.register_forward_pre_hook(lambda _, x, n=n: seen[n].append(moments(x[0])))
    with torch.no_grad():
        for images, _ in batches_of(TRAINING.epochs):
            network(images)
    means = {f"{n}.running_mean": torch.stack([m for m, _ in s]).mean(0) for n, s in seen.items()}
    variances = {
        f"{n}.running_var": torch.stack([v for _, v in s]).mean(0) for n, s in seen.items()
    }
    return means | variances


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.mean((0, 2, 3)), x.var((0, 2, 3))


def assert_close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12)


# Settings ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", [r for preset in PRESETS.values() for r in preset.values()])
def test_the_schedule_is_that_of_swag(recipe):
    t = recipe.training
    expected = [
        swag_rate(epoch, t.swa_start, t.learning_rate, t.swa_learning_rate)
        for epoch in range(t.epochs)
    ]
    assert [t.rate(epoch) for epoch in range(t.epochs)] == pytest.approx(expected, rel=1e-12)
    plain_sgd = t.without_averaging()
    expected = [
        swag_rate(epoch, t.epochs, t.learning_rate, 0.01 * t.learning_rate)
        for epoch in range(t.epochs)
    ]
    assert [plain_sgd.rate(e) for e in range(t.epochs)] == pytest.approx(expected, rel=1e-12)
    assert plain_sgd.collected == 0


def test_the_presets_are_what_swags_commands_say():
    paper = {name: recipe.training for name, recipe in PRESETS["paper"].items()}
    assert paper["vgg16"] == paper["vgg16_dropout"]
    assert paper["vgg16"] == Training(300, 161, 0.05, 0.01, 5e-4, 0.9, 128, 20)
    assert paper["wide_resnet28x10"] == Training(300, 161, 0.1, 0.05, 5e-4, 0.9, 128, 20)
    assert paper["vgg16"].collected == 139
    assert all(recipe.start == "random" for recipe in PRESETS["paper"].values())


def test_the_cpu_preset_starts_from_given_weights_at_a_constant_rate():
    for name, recipe in PRESETS["cpu"].items():
        t = recipe.training
        assert recipe.model == name
        assert recipe.start == "given"
        assert MODELS[name].weights is not None
        assert len({t.rate(epoch) for epoch in range(t.epochs)}) == 1
        assert t.collected >= 5


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"epochs": 0}, "epochs must be a positive"),
        ({"swa_start": 301}, "swa_start must be from 0 to 300, got 301"),
        ({"swa_start": 299}, "one collected epoch has no variance"),
        ({"learning_rate": 0.0}, "learning_rate must be a positive"),
        ({"swa_learning_rate": float("nan")}, "swa_learning_rate must be a positive"),
        ({"batch_size": 0}, "batch_size must be a positive"),
        ({"rank": 1}, "rank must be at least 2"),
        ({"momentum": 1.0}, "momentum must be in"),
    ],
)
def test_settings_that_make_no_sense_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        replace(Training(), **wrong)


# One process -------------------------------------------------------------------------------------


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
    assert_close(trained.sgd, visited(name)[-1])


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
    assert trained.swa.keys() == {**trained.swag.mean, **trained.statistics}.keys()
    Classifier(tiny(name)).at(trained.swa)  # its names and shapes fit


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


def test_what_can_be_learnt_is_learnt():
    longer = replace(TRAINING, epochs=30, swa_start=10)
    trained = train(task_of("wide_resnet"), longer, SEED, Processes(), Nobody())
    classifier = Classifier(tiny("wide_resnet"))
    for tensors in (trained.sgd, trained.swa):
        predicted = Map(classifier.at(tensors))(normalise(to_unit(DATA.images))).argmax(1)
        assert (predicted == DATA.labels).double().mean() > 0.9


def test_without_averaging_there_is_no_average():
    trained = train(task_of("vgg"), TRAINING.without_averaging(), SEED, Processes(), Nobody())
    assert trained.swag is None
    assert trained.statistics == {}
    with pytest.raises(ValueError, match="no weights were collected"):
        _ = trained.swa


def test_the_global_random_state_is_left_alone():
    before = torch.get_rng_state()
    train(task_of("vgg"), TRAINING, SEED, Processes(), Nobody())
    assert torch.equal(torch.get_rng_state(), before)


def test_a_loss_that_explodes_is_an_error():
    wild = replace(TRAINING, learning_rate=1e200)
    with pytest.raises(ValueError, match="the loss is nan in epoch 0: lower the learning rate"):
        train(task_of("plain"), wild, SEED, Processes(), Nobody())


def test_labels_that_the_network_does_not_have_are_refused():
    with pytest.raises(ValueError, match="label 3 at index 1 is outside the model's 3 classes"):
        Task(tiny("vgg"), LabelledBytes(DATA.images[:2], torch.tensor([0, 3])), normalise)


def test_no_images_are_refused():
    with pytest.raises(ValueError, match="no images"):
        Task(tiny("vgg"), LabelledBytes(DATA.images[:0], DATA.labels[:0]), normalise)


def test_batches_too_small_for_the_processes_are_refused():
    with pytest.raises(ValueError, match="26 images in batches of 8 have a batch of 2, too small"):
        train(task_of("plain"), TRAINING, SEED, Processes(0, 3), Nobody())


# Broken off and taken up -------------------------------------------------------------------------


class BreakError(Exception):
    """What breaks a training off."""


@dataclass
class Fuse:
    """A normalisation that does something when it is called for the n-th time."""

    left: int
    burn: Callable[[], None]

    def __call__(self, images: Tensor) -> Tensor:
        self.left -= 1
        if self.left == 0:
            self.burn()
        return normalise(images)


def raise_break() -> None:
    raise BreakError


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def make_in(out: Path, name: str, normalised: Callable[[Tensor], Tensor], processes: Processes):
    """Train a tiny network as a stage in a folder."""
    store = Store(out, TRAINING, Reporter(Console(quiet=True), out / "run.log"))
    stage = Stage(f"train {name}", TRAINING, SEED)
    return make_together(
        store, stage, TRAINING, lambda: Task(tiny(name), DATA, normalised), processes
    )


def assert_same_artefacts(actual: Path, expected: Path) -> None:
    found, wanted = contents(actual), contents(expected)
    assert len(wanted) == 1
    assert found.keys() == wanted.keys()
    for label, tensors in wanted.items():
        assert found[label].keys() == tensors.keys()
        assert all(torch.equal(found[label][name], tensors[name]) for name in tensors)


def test_broken_off_anywhere_and_taken_up(tmp_path):
    """Every third call: first, middle and last batches of epochs, and the renewal of statistics."""
    whole, name = tmp_path / "whole", "vgg_dropout"
    count = Fuse(0, raise_break)
    make_in(whole, name, count, Processes())
    calls = -count.left
    assert calls >= 4 * TRAINING.epochs + 4  # all batches, and those for the statistics
    for step in range(1, calls + 1, 3):
        out = tmp_path / f"{step}"
        with pytest.raises(BreakError):
            make_in(out, name, Fuse(step, raise_break), Processes())
        again = Fuse(0, raise_break)
        make_in(out, name, again, Processes())
        assert_same_artefacts(out, whole)
        assert step - again.left <= calls + 4 + 2  # one epoch at most was done twice


def test_an_artefact_holds_all_of_the_result(tmp_path):
    made = train(task_of("vgg"), TRAINING, SEED, Processes(), Nobody())
    artefact = make_in(tmp_path, "vgg", normalise, Processes())
    read = load_trained(artefact)
    exactly = {"rtol": 0, "atol": 0}
    torch.testing.assert_close(read.sgd, made.sgd, **exactly)
    torch.testing.assert_close(read.swa, made.swa, **exactly)
    torch.testing.assert_close(read.swag.diagonal().var, made.swag.diagonal().var, **exactly)
    ours, theirs = read.swag.low_rank().directions, made.swag.low_rank().directions
    torch.testing.assert_close(ours, theirs, **exactly)
    assert read.facts == made.facts
    assert read.swag.updates == TRAINING.collected


# Two processes -----------------------------------------------------------------------------------

together = pytest.mark.skipif(
    not (distributed.is_available() and distributed.is_gloo_available()),
    reason="this PyTorch has no torch.distributed with gloo",
)
PATIENCE = 120  # seconds for what takes one


def one_of_two(rank: int, port: int, out: Path, name: str, breaks_at: int) -> None:
    """Train as one process of two, as `torchrun` would start it; the first may die."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}"}
    with joined() as processes:
        assert (processes.rank, processes.count) == (rank, 2)
        fuse = Fuse(breaks_at if rank == 0 else 0, die)
        artefact = make_in(out, name, fuse, processes)
        assert (artefact is None) == (rank == 1)
        if (out / "forbidden").exists():
            assert fuse.left == 0  # nothing was computed


def run_two(out: Path, name: str, breaks_at: int = 0) -> list[int | None]:
    """Run both processes and return how they ended."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pair = [start(one_of_two, rank, port, out, name, breaks_at) for rank in range(2)]
    for process in pair:
        process.join(PATIENCE)
        if process.is_alive():
            process.kill()
            process.join()
    return [process.exitcode for process in pair]


def result_in(out: Path) -> dict[str, Tensor]:
    (tensors,) = contents(out).values()
    return tensors


def sgd_weights(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n.removeprefix("sgd/"): t for n, t in tensors.items() if n.startswith("sgd/")}


@together
def test_two_processes_are_one_without_batch_norm(tmp_path):
    make_in(tmp_path / "one", "plain", normalise, Processes())
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


# Recipes -----------------------------------------------------------------------------------------


@pytest.fixture
def given(tmp_path, monkeypatch):
    """A data folder with weights for ResNet-20, and a few images in the place of CIFAR-10."""
    folder = tmp_path / "data"
    (folder / "weights").mkdir(parents=True)
    network = MODELS["resnet20"].untrained(seed=1)
    save_file(network.state_dict(), folder / "weights" / "resnet20.safetensors")
    monkeypatch.setenv("ACNML_DATA", str(folder))
    monkeypatch.setattr(cifar10, "load", lambda split: DATA)
    return network


def test_the_command_trains_from_given_weights(given, tmp_path):
    settings = ["training.epochs=3", "training.learning_rate=1e-30"]
    main("resnet20", tmp_path, SEED, [*settings, "training.swa_learning_rate=1e-30"])
    tensors = result_in(tmp_path)
    assert int(tensors["swag/updates"]) == 2
    for name, parameter in given.named_parameters():
        for result in ("sgd", "swag/mean"):
            found = tensors[f"{result}/{name}"]
            torch.testing.assert_close(found, parameter.detach(), rtol=1e-6, atol=1e-20)


def test_the_stage_tells_recipes_images_weights_and_seeds_apart(given, tmp_path):
    recipe = PRESETS["cpu"]["resnet20"]
    longer = replace(recipe, training=replace(recipe.training, epochs=7))
    keys = [
        training_stage(recipe, DATA, SEED).key,
        training_stage(longer, DATA, SEED).key,
        training_stage(recipe, bytes_of(25), SEED).key,
        training_stage(recipe, DATA, SEED + 1).key,
        training_stage(replace(recipe, start="random"), DATA, SEED).key,
    ]
    assert training_stage(recipe, DATA, SEED).key == keys[0]
    path = tmp_path / "data" / "weights" / "resnet20.safetensors"
    save_file(MODELS["resnet20"].untrained(seed=2).state_dict(), path)
    keys.append(training_stage(recipe, DATA, SEED).key)
    assert len(set(keys)) == len(keys)
    path.unlink()
    with pytest.raises(FileNotFoundError, match="there is no weight file"):
        training_stage(recipe, DATA, SEED)


def test_random_starts_come_from_the_seed():
    recipe = Recipe("resnet20")
    first, again, other = (prepare_task(recipe, DATA, seed).network for seed in (0, 0, 1))
    assert torch.equal(first.conv1.weight, again.conv1.weight)
    assert not torch.equal(first.conv1.weight, other.conv1.weight)


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (Recipe("resnet21"), "there is no network 'resnet21', only mlp"),
        (Recipe("vgg16", "given"), "no weights are given for 'vgg16'"),
    ],
)
def test_recipes_that_cannot_be_followed_are_refused(recipe, message):
    with pytest.raises(ValueError, match=message):
        prepare_task(recipe, DATA, SEED)


@pytest.mark.parametrize("recipe", PRESETS["paper"].values(), ids=lambda recipe: recipe.model)
def test_the_papers_networks_take_a_step_at_full_size(recipe):
    images = torch.randint(256, (2, 3, 32, 32), generator=torch.Generator().manual_seed(0))
    data = LabelledBytes(images.to(torch.uint8), torch.tensor([0, 9]))
    task = prepare_task(recipe, data, SEED)
    before = {name: p.detach().clone() for name, p in task.network.named_parameters()}
    step = replace(recipe.training, epochs=1, swa_start=1)
    trained = train(task, step, SEED, Processes(), Nobody())
    assert all(torch.isfinite(tensor).all() for tensor in trained.sgd.values())
    assert all(not torch.equal(trained.sgd[name], tensor) for name, tensor in before.items())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
def test_a_gpu_computes_in_bfloat16_and_keeps_weights_in_single_precision():
    kinds = set()
    network = tiny("plain").float()
    network[0].register_forward_hook(lambda _, x, output: kinds.add(output.dtype))
    task = Task(network, DATA, lambda images: normalise(images).float())
    kinds.clear()
    trained = train(task, TRAINING, SEED, Processes(device=torch.device("cuda", 0)), Nobody())
    assert torch.bfloat16 in kinds
    assert {tensor.dtype for tensor in trained.sgd.values()} == {torch.float32}
