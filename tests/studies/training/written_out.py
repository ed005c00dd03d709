"""Oracles: SGD, its schedule, its batches and batch norm's statistics, all written out."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from acnml._util.torch_state import seeded
from studies.data.cifar10 import crop_and_flip, to_unit
from studies.store.work import mixed

from .tiny import DATA, SEED, TRAINING, normalise, tiny


def batches_of(epoch: int):
    """The batches of an epoch, written out."""
    generator = torch.Generator().manual_seed(mixed(SEED, epoch))
    for rows in torch.randperm(26, generator=generator).split(8):
        images = crop_and_flip(to_unit(DATA.inputs[rows]), generator)
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
    """Batch norm's averages over the images of one more epoch, with dropout off."""
    network = tiny(name).eval()
    network.load_state_dict(mean, strict=False)
    layers = {n: m for n, m in network.named_modules() if isinstance(m, nn.BatchNorm2d)}
    seen: dict[str, list[tuple[Tensor, Tensor]]] = {n: [] for n in layers}
    sizes = []
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


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.mean((0, 2, 3)), x.var((0, 2, 3))
