"""Generated networks with inputs for them: every kind of layer, width and scale."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from acnml._util.batches import map_inputs


@final
@dataclass(frozen=True)
class Network:
    """A network, its inputs, and what it is called in a report."""

    name: str
    model: nn.Module
    inputs: Any
    classes: int
    dtype: torch.dtype


@final
class Sine(nn.Module):
    """An activation without a module of its own in torch."""

    def forward(self, x: Tensor) -> Tensor:
        """Return sin x."""
        return x.sin()


@final
class Square(nn.Module):
    """An activation that grows faster than its input."""

    def forward(self, x: Tensor) -> Tensor:
        """Return x²."""
        return x * x


ACTIVATIONS: list[Callable[[], nn.Module]] = [
    *(nn.ReLU, nn.Tanh, nn.GELU, nn.SiLU, nn.Sigmoid, nn.Softplus, nn.LeakyReLU),
    *(nn.ELU, nn.Hardtanh, nn.Softsign, nn.Identity, Sine, Square),
]


@final
class TwoInputs(nn.Module):
    """Two inputs, whose features are multiplied."""

    def __init__(self, left: int, right: int, width: int, classes: int) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(left, width), nn.Linear(right, width)
        self.head = nn.Linear(width, classes)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        """Return logits."""
        return self.head(torch.sigmoid(self.left(left)) * torch.tanh(self.right(right)))


@final
class Tied(nn.Module):
    """One layer that is used twice, and a weight that two layers share."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.twice, self.other = nn.Linear(width, width), nn.Linear(width, width)
        self.other.weight = self.twice.weight
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        return self.head(torch.tanh(self.other(torch.tanh(self.twice(self.twice(x))))))


@final
class Residual(nn.Module):
    """A residual connection around normalised layers."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(width), nn.Linear(width, width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        return self.head(x + torch.relu(self.inner(self.norm(x))))


@final
class Capped(nn.Module):
    """Changes the logits behind the last layer: no logit exceeds a cap, or all have length 1."""

    def __init__(self, width: int, classes: int, cap: float | None) -> None:
        super().__init__()
        self.body, self.head, self.cap = nn.Linear(3, width), nn.Linear(width, classes), cap

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        z = self.head(torch.tanh(self.body(x)))
        return (
            z / z.norm(dim=1, keepdim=True)
            if self.cap is None
            else self.cap * torch.tanh(z / self.cap)
        )


@final
class Words(nn.Module):
    """Embedded words, averaged."""

    def __init__(self, words: int, width: int, classes: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(words, width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        return self.head(torch.tanh(self.embed(x)).mean(1))


def _mlp(rng: random.Random, classes: int, n: int) -> tuple[nn.Module, Any]:
    widths = [rng.choice([1, 2, 3, 5, 9]) for _ in range(rng.randrange(1, 4))]
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(widths):
        layers += [nn.Linear(a, b, bias=rng.random() < 0.8), rng.choice(ACTIVATIONS)()]
    head = nn.Linear(widths[-1], classes, bias=rng.random() < 0.8)
    return nn.Sequential(*layers, head), torch.randn(n, widths[0])


def _batch_norm(rng: random.Random, classes: int, n: int) -> tuple[nn.Module, Any]:
    width = rng.choice([1, 4, 7])
    layers = (nn.Linear(3, width), nn.BatchNorm1d(width), rng.choice(ACTIVATIONS)())
    return nn.Sequential(*layers, nn.Linear(width, classes)), torch.randn(n, 3)


def _convolutional(rng: random.Random, classes: int, n: int) -> tuple[nn.Module, Any]:
    groups = rng.choice([1, 2])
    layers = [
        nn.Conv2d(2, 4, 3, stride=rng.choice([1, 2]), padding=1, bias=rng.random() < 0.5),
        *([nn.BatchNorm2d(4)] if rng.random() < 0.5 else []),
        rng.choice(ACTIVATIONS)(),
        nn.Conv2d(4, 4, rng.choice([1, 3]), padding=1, groups=groups),
        *(nn.AdaptiveAvgPool2d(rng.choice([1, 2])), nn.Flatten()),
        nn.LazyLinear(classes),
    ]
    model, x = nn.Sequential(*layers), torch.randn(n, 2, 5, 5)
    model.eval()(x)  # gives the last layer its size
    return model, x


def _sequence(rng: random.Random, classes: int, n: int) -> tuple[nn.Module, Any]:
    width = rng.choice([2, 4])
    layers = (nn.Linear(3, width, bias=False), nn.LayerNorm(width), rng.choice(ACTIVATIONS)())
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(5 * width, classes)), torch.randn(n, 5, 3)


def _two_inputs(rng: random.Random, classes: int, n: int) -> tuple[nn.Module, Any]:
    left, right = torch.randn(n, 3), torch.randn(n, 2)
    x = (left, right) if rng.random() < 0.5 else {"left": left, "right": right}
    return TwoInputs(3, 2, rng.choice([1, 4]), classes), x


def _tied(rng: random.Random, classes: int, n: int) -> tuple[nn.Module, Any]:
    return Tied(3, classes), torch.randn(n, 3)


def _residual(rng: random.Random, classes: int, n: int) -> tuple[nn.Module, Any]:
    return Residual(4, classes), torch.randn(n, 4)


def _capped(rng: random.Random, classes: int, n: int) -> tuple[nn.Module, Any]:
    return Capped(rng.choice([1, 4]), classes, rng.choice([None, 1.0, 30.0])), torch.randn(n, 3)


def _words(rng: random.Random, classes: int, n: int) -> tuple[nn.Module, Any]:
    return Words(7, 3, classes), torch.randint(7, (n, 4))


FAMILIES = [
    *(_mlp, _mlp, _batch_norm, _convolutional, _sequence),
    *(_two_inputs, _tied, _residual, _capped, _words),
]


def scale_of(rng: random.Random, usual: float, rare: float) -> float:
    """Return a scale within `usual` powers of ten around 1, now and then within `rare` powers."""
    powers = usual if rng.random() < 0.85 else rare
    return float(10 ** rng.uniform(-powers, powers))


def network(rng: random.Random, n: int | None = None) -> Network:
    """Generate a network in eval mode, with inputs."""
    family = rng.choice(FAMILIES)
    classes = rng.choice([2, 3, 3, 5, 10]) if rng.random() < 0.95 else rng.choice([65, 100, 200])
    dtype = torch.float32 if rng.random() < 0.3 else torch.float64
    torch.manual_seed(rng.randrange(2**31))
    model, x = family(rng, classes, n or rng.randrange(1, 5))
    weights, inputs = scale_of(rng, 0.5, 6), scale_of(rng, 0.7, 6)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name.endswith("running_var"):
                tensor.uniform_(0.5, 2)
            elif tensor.is_floating_point() and tensor.ndim > 1:
                tensor.mul_(weights)
    x = map_inputs(x, lambda t: (inputs * t).to(dtype) if t.is_floating_point() else t)
    name = f"{family.__name__[1:]} K={classes} weights×{weights:.2g} inputs×{inputs:.2g} {dtype}"
    return Network(name, model.to(dtype).eval(), x, classes, dtype)
