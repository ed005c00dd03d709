"""A `Typicality` as an `nn.Module`, which reads the features of a network while it runs."""

from __future__ import annotations

import threading
from typing import Any, final

import torch
from torch import Tensor, nn

from acnml.classifier import without_autocast
from acnml.typicality.density import Density, read
from acnml.typicality.mahalanobis import Typicality, mahalanobis
from acnml.typicality.places import Place, pooled_at


@final
class TypicalityModule(nn.Module):
    """Returns s (B,) of the inputs that a network has just seen, in the same thread.

    Args:
        typicality: the fitted score.
        network: with modules of the same names as the model that it was fitted on. Hooks on these
            modules keep the features of every run.
    """

    shift: Tensor
    scale: Tensor
    signs: Tensor | None
    mean: Tensor
    whitening: Tensor
    typical: Tensor

    def __init__(self, typicality: Density, network: nn.Module) -> None:
        super().__init__()
        if not isinstance(typicality, Typicality):
            kind = type(typicality).__name__
            raise TypeError(f"a {kind} cannot be exported; use one from acnml.fit_typicality")
        reader = typicality.reader
        self.register_buffer("shift", reader.shift.clone())
        self.register_buffer("scale", reader.scale.clone())
        self.register_buffer("signs", None if reader.signs is None else reader.signs.clone())
        self.register_buffer("mean", typicality.mean.clone())
        self.register_buffer("whitening", typicality.whitening.clone())
        # As a tensor: a plain number is rounded to single precision in an ONNX file.
        self.register_buffer("typical", typicality.whitening.new_tensor(typicality.typical))
        self._places, self._kept = reader.places, _Kept()
        # By number, because places that differ only in their channels have one name.
        for number, place in enumerate(reader.places):
            hook = _Keep(place, _slot(number), self._kept)
            network.get_submodule(place.module).register_forward_hook(hook, with_kwargs=True)

    def forward(self) -> Tensor:
        """Return s (B,), and forget the features.

        A run that takes another way through the network would otherwise return the features of the
        run before it.
        """
        slots = [_slot(number) for number in range(len(self._places))]
        for slot, place in zip(slots, self._places, strict=True):
            if getattr(self._kept, slot, None) is None:
                raise ValueError(f"the network did not run {place}: fit with other places")
        kept = torch.cat([getattr(self._kept, slot) for slot in slots], dim=1)
        for slot in slots:
            setattr(self._kept, slot, None)
        with without_autocast(kept):
            features = read(kept, self.shift, self.scale, self.signs)
            return mahalanobis(features, self.mean, self.whitening) / self.typical


def _slot(number: int) -> str:
    """Return the attribute in which the features of a place are kept."""
    return f"place_{number}"


@final
class _Kept(threading.local):
    """The features of the last run by place, for every thread its own."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _Kept:
        return _Kept()

    def __reduce__(self) -> tuple[type[_Kept], tuple[()]]:
        return _Kept, ()


@final
class _Keep:
    """A forward hook that pools what passes a place."""

    def __init__(self, place: Place, slot: str, kept: _Kept) -> None:
        self._place, self._slot, self._kept = place, slot, kept

    def __call__(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        pooled = pooled_at(self._place, args or tuple(kwargs.values()), output)
        setattr(self._kept, self._slot, pooled)
