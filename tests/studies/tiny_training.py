"""Tiny networks to train, SGD and its parts written out, and trainings that break off."""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from acnml._util.torch_state import seeded
from stores import store_in
from studies.data import Labelled
from studies.data.cifar10 import crop_and_flip, to_unit
from studies.models.resnet import ResNet, SubsampleAndPad, projection
from studies.models.vgg import vgg16_bn, vgg16_bn_dropout
from studies.models.wide_resnet import WideResNet
from studies.store import Stage
from studies.store.work import mixed
from studies.training import Averaging, Processes, Task, make_together
from tiny_study import contents

SEED = 3
TRAINING = Averaging(
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
    "vgg": lambda: vgg16_bn(3, STAGES),
    "vgg_dropout": lambda: vgg16_bn_dropout(3, STAGES),
}


def tiny(name: str) -> nn.Module:
    with seeded(0):
        return TINY[name]().double()


def bytes_of(images: int) -> Labelled:
    """Images of 8×8 whose class is the channel that is bright."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(3, (images,), generator=generator)
    pixels = torch.randint(100, (images, 3, 8, 8), generator=generator)
    pixels += 150 * nn.functional.one_hot(labels, 3)[:, :, None, None]
    return Labelled(pixels.to(torch.uint8), labels)


DATA = bytes_of(26)  # batches of 8, 8, 8 and 2


def normalise(images: Tensor) -> Tensor:
    return (images.double() - 0.4) / 0.3


def augment(images: Tensor, generator: torch.Generator) -> Tensor:
    return normalise(crop_and_flip(to_unit(images), generator))


def task_of(name: str) -> Task:
    return Task(tiny(name), DATA, augment)


# Written out -------------------------------------------------------------------------------------


def batches_of(epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The batches of an epoch."""
    generator = torch.Generator().manual_seed(mixed(SEED, epoch))
    for rows in torch.randperm(26, generator=generator).split(8):
        yield augment(DATA.inputs[rows], generator), DATA.labels[rows]


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


def visited(name: str, count: int = 1) -> list[dict[str, Tensor]]:
    """The state after every epoch, by v ← mv + g + λθ and θ ← θ - ηv."""
    network, states = tiny(name).train(), []
    velocities = [torch.zeros_like(p) for p in network.parameters()]
    for epoch in range(TRAINING.epochs):
        rate = swag_rate(epoch, 2, 0.05, 0.02)
        # What dropout starts from in every process.
        seeds = [mixed(mixed(SEED, epoch), rank) for rank in range(count)]
        random = [torch.Generator().manual_seed(seed).get_state() for seed in seeds]
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
    """Batch norm's averages over the images of one more epoch, with dropout off."""
    network, sizes = tiny(name).eval(), []
    network.load_state_dict(mean, strict=False)
    layers = {n: m for n, m in network.named_modules() if isinstance(m, nn.BatchNorm2d)}
    seen: dict[str, list[tuple[Tensor, Tensor]]] = {n: [] for n in layers}

    def moments(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.mean((0, 2, 3)), x.var((0, 2, 3))

    for n, layer in layers.items():
        layer.train()
        layer.register_forward_pre_hook(lambda _, x, n=n: seen[n].append(moments(x[0])))
    with torch.no_grad():
        for images, _ in batches_of(TRAINING.epochs):
            network(images)
            sizes.append(len(images))
    shares = torch.tensor(sizes, dtype=torch.float64) / sum(sizes)
    return {
        f"{n}.{key}": torch.einsum("b,bc->c", shares, torch.stack(each))
        for n, s in seen.items()
        for key, each in zip(("running_mean", "running_var"), zip(*s, strict=True), strict=True)
    }


# Broken off --------------------------------------------------------------------------------------


@dataclass
class Fuse:
    """An augmentation that does something when it is called for the n-th time."""

    left: int
    burn: Callable[[], None]

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        self.left -= 1
        if self.left == 0:
            self.burn()
        return augment(images, generator)


def interrupt() -> None:
    raise KeyboardInterrupt


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def make_in(out: Path, name: str, augmented=augment, processes: Processes | None = None):
    """Train a tiny network as a stage in a folder."""
    store, stage = store_in(out, TRAINING), Stage(f"train {name}", TRAINING, SEED)
    processes = processes or Processes()
    return make_together(
        store, stage, TRAINING, lambda: Task(tiny(name), DATA, augmented), processes
    )


def result_in(out: Path) -> dict[str, Tensor]:
    (tensors,) = contents(out).values()
    return tensors
