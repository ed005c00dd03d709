"""Test cases for the whole suite: tiny models in float64, and posteriors over them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from acnml import Classifier, Diagonal, Full, Kronecker, LowRank
from acnml.posteriors import Affine, EigenBlock, Posterior


class Convolutional(nn.Module):
    """Strided and grouped convolutions, batch norm, a residual connection and pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 4, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.grouped = nn.Conv2d(4, 4, 3, padding=1, groups=2)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.norm(self.stem(x)))
        hidden = hidden + torch.tanh(self.grouped(hidden))
        return self.head(hidden.mean((2, 3)))


class Sequence(nn.Module):
    """Linear layers over positions, one without bias, with layer norm."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 4, bias=False)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.norm(self.embed(x))).mean(1))


class TwoInputs(nn.Module):
    """Two inputs, given as a tuple or by name."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(3, 4)
        self.right = nn.Linear(2, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return self.head(torch.sigmoid(self.left(left)) * torch.tanh(self.right(right)))


class TwoLayers(nn.Module):
    """The logits are head(tanh(body(x))). Tests of odd models change what is between."""

    def __init__(self, hidden: int = 5) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, hidden), nn.Linear(hidden, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x)))


@dataclass(frozen=True)
class Case:
    """A model and a batch of inputs for it, the same for the same seed."""

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[int], Any]

    def model(self) -> nn.Module:
        return seeded(self._with_statistics)

    def x(self, n: int = 3) -> Any:
        return self.inputs(n)

    def _with_statistics(self) -> nn.Module:
        model = self.build().double()
        for name, buffer in model.named_buffers():
            if name.endswith("running_mean"):
                buffer.normal_()
            elif name.endswith("running_var"):
                buffer.uniform_(0.5, 2)
        return model


def seeded(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """Build a model in float64 with the same weights for the same seed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return build().double()


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


MODELS = [
    Case("linear", lambda: nn.Linear(4, 3), lambda n: normal(n, 4)),
    Case("mlp", _mlp, lambda n: normal(n, 4)),
    Case("conv", Convolutional, lambda n: normal(n, 2, 5, 5)),
    Case("sequence", Sequence, lambda n: normal(n, 6, 3)),
    Case("tuple", TwoInputs, lambda n: (normal(n, 3), normal(n, 2))),
    Case("mapping", TwoInputs, lambda n: {"left": normal(n, 3), "right": normal(n, 2)}),
]
LINEAR, MLP, CONV = MODELS[:3]


def small_network(*layers: nn.Module) -> nn.Module:
    """Layers in float64 with the same weights in every test."""
    model, generator = nn.Sequential(*layers).double(), torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.7, generator=generator)
    return model


def affine_layers(model: nn.Module) -> list[Affine]:
    """All Linear and Conv2d layers of a model."""
    layers = []
    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, nn.Conv2d)):
            prefix = f"{name}." if name else ""
            bias = None if module.bias is None else f"{prefix}bias"
            layers.append(Affine(f"{prefix}weight", bias, getattr(module, "groups", 1)))
    return layers


def spd(*batch_and_size: int, seed: int) -> Tensor:
    """A well-conditioned symmetric positive definite matrix."""
    root = normal(*batch_and_size, batch_and_size[-1], seed=seed)
    return root @ root.mT / batch_and_size[-1] + torch.eye(batch_and_size[-1], dtype=root.dtype) / 2


def diagonal(model: nn.Module, names: list[str] | None = None) -> Diagonal:
    mean = Classifier(model).copy_parameters(names or [n for n, _ in model.named_parameters()])
    return Diagonal(mean, {n: 0.3 * normal(*t.shape, seed=1).exp() for n, t in mean.items()})


def low_rank(model: nn.Module) -> LowRank:
    base = diagonal(model)
    directions = {n: 0.4 * normal(2, *t.shape, seed=2) for n, t in base.mean.items()}
    return LowRank(base.mean, base.var, directions)


def _kronecker(model: nn.Module, block: Callable[..., Any]) -> Kronecker:
    layers = affine_layers(model)
    mean = Classifier(model).copy_parameters([name for layer in layers for name in layer.names])
    blocks = []
    for seed, layer in enumerate(layers):
        *groups, out_size, in_size = layer.join(mean, mean).shape
        A, G = spd(*groups, in_size, seed=2 * seed), spd(*groups, out_size, seed=2 * seed + 1)
        blocks.append(block(layer, A, G, 1.5))
    return Kronecker(mean, tuple(blocks))


def eigen_kronecker(model: nn.Module) -> Kronecker:
    return _kronecker(model, EigenBlock.from_factors)


def full(model: nn.Module) -> Full:
    """A dense covariance, with correlations between all parameters."""
    mean = Classifier(model).copy_parameters([name for name, _ in model.named_parameters()])
    return Full(mean, 0.3 * spd(sum(tensor.numel() for tensor in mean.values()), seed=3))


def last_layer(model: nn.Module) -> Diagonal:
    return diagonal(model, list(affine_layers(model)[-1].names))


POSTERIORS: dict[str, Callable[[nn.Module], Posterior]] = {
    "diagonal": diagonal,
    "low_rank": low_rank,
    "kronecker_eigen": eigen_kronecker,
    "full": full,
    "last_layer": last_layer,
}


def layer_inputs(layer: Affine, *shape: int, seed: int) -> Tensor:
    """Inputs of a layer, which end with a 1 where it has a bias."""
    inputs = normal(*shape, seed=seed)
    if layer.bias is not None:
        inputs[..., -1] = 1
    return inputs
