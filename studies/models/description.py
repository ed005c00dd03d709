"""How a network is built, what its inputs look like, and where its trained weights are."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from acnml._util.torch_state import seeded


@final
@dataclass(frozen=True)
class Description:
    """A network of the studies.

    Attributes:
        build: number of classes -> network with random weights.
        mean: of every channel, subtracted from images in [0, 1].
        std: of every channel, by which they are divided then.
        weights: name of the file with trained weights, if there is one.
    """

    build: Callable[[int], nn.Module]
    mean: tuple[float, ...] = (0.0, 0.0, 0.0)
    std: tuple[float, ...] = (1.0, 1.0, 1.0)
    weights: str | None = None

    def untrained(self, seed: int, classes: int = 10) -> nn.Module:
        """Return the network with random weights, the same for the same seed.

        The global random state is left as it was.
        """
        with seeded(seed):
            return self.build(classes)

    def trained(self, folder: Path, classes: int = 10) -> nn.Module:
        """Return the network in eval mode with its trained weights, from a file in the folder."""
        if self.weights is None:
            raise ValueError("this network has no trained weights: train it, or take another")
        network = self.untrained(seed=0, classes=classes)
        load_weights(network, folder / self.weights)
        return network.eval()

    def normalise(self, images: Tensor) -> Tensor:
        """Bring images (B, C, H, W) in [0, 1] to what the network was trained on."""
        channels = len(self.mean)
        if images.ndim != 4 or images.shape[1] != channels or not images.is_floating_point():
            raise ValueError(
                f"images must be floats of shape (B, {channels}, H, W) in [0, 1], "
                f"got {images.dtype} of shape {tuple(images.shape)}"
            )
        mean, std = (torch.tensor(v).to(images).view(-1, 1, 1) for v in (self.mean, self.std))
        return (images - mean) / std


# Batch norm counts its batches, which no prediction depends on: many files leave it out.
COUNTER = "num_batches_tracked"


@final
class WeightsError(ValueError):
    """A weight file that cannot be read or does not fit the model; the message says why."""


def load_weights(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Copy the tensors of a safetensors file into the model, all of them or none.

    Names and shapes must be exactly the model's; only batch norm's count of batches may be missing.
    """
    tensors, own = _read(Path(path)), model.state_dict()
    _require_names(tensors, own, path)
    _require_classes(tensors, model, path)
    for name, tensor in tensors.items():
        _require_fits(name, tensor, own[name], path)
    with torch.no_grad():
        for name, tensor in tensors.items():
            own[name].copy_(tensor)


def _read(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise FileNotFoundError(f"there is no weight file {path}")
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise WeightsError(f"{path} is truncated or not a safetensors file: {error}") from error


def _require_names(given: Iterable[str], own: Iterable[str], path: str | os.PathLike[str]) -> None:
    """Refuse a file whose names are not the model's."""
    missing = {n for n in set(own) - set(given) if not n.endswith(f".{COUNTER}")}
    unexpected = set(given) - set(own)
    if missing or unexpected:
        raise WeightsError(
            f"{path} is a weight file for another architecture: "
            f"it lacks {_listed(missing)}, and has {_listed(unexpected)} that the model has not"
        )


def _listed(names: Iterable[str]) -> str:
    """The first few of the names, and how many more there are."""
    ordered = sorted(names)
    more = f" and {len(ordered) - 3} more" if len(ordered) > 3 else ""
    return f"{', '.join(ordered[:3]) or 'nothing'}{more}"


def _require_classes(
    given: Mapping[str, Tensor], model: nn.Module, path: str | os.PathLike[str]
) -> None:
    """Refuse a file for another number of classes: the outputs of the last linear layer."""
    heads = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.Linear)]
    if not heads:
        return
    name, head = heads[-1]
    weight = given[f"{name}.weight" if name else "weight"]
    if weight.shape[1:] == head.weight.shape[1:] and len(weight) != head.out_features:
        raise WeightsError(
            f"{path} is for {len(weight)} classes, the model has {head.out_features}: "
            f"build the model for {len(weight)} classes"
        )


def _require_fits(name: str, given: Tensor, own: Tensor, path: str | os.PathLike[str]) -> None:
    """Refuse a tensor of another shape or kind, or one with NaN or infinite entries."""
    if given.shape != own.shape:
        raise WeightsError(
            f"{path} is a weight file for another architecture: its {name!r} has shape "
            f"{tuple(given.shape)}, the model's {tuple(own.shape)}"
        )
    if given.is_floating_point() != own.is_floating_point():
        raise WeightsError(f"{path}: {name!r} is {given.dtype}, the model's is {own.dtype}")
    if not torch.isfinite(given).all():
        raise WeightsError(f"{path}: {name!r} has NaN or infinite entries")
