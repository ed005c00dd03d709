"""Select the parameters that a posterior covers, by layer, by parameter or by name."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from torch import nn

from acnml._util import checks

# A layer, a parameter, or the name of one.
Layer: TypeAlias = str | nn.Module | nn.Parameter
# One or several of them; "last" is the last Linear layer, and None all that a fit can cover.
Layers: TypeAlias = Layer | Iterable[Layer] | None


def parameter_names(model: nn.Module, layers: Layers) -> list[str]:
    """Return the names of the selected parameters, in the model's order."""
    known = [name for name, _ in model.named_parameters()]
    if layers is None:
        return known
    if isinstance(layers, str) and layers == "last":
        layers = last_linear(model)
    each = [layers] if isinstance(layers, Layer) else layers
    chosen = {name for layer in each for name in _names_in(model, layer)}
    if not chosen:
        raise ValueError("layers is empty: name at least one layer or parameter")
    return [name for name in known if name in chosen]


def last_linear(model: nn.Module) -> nn.Linear:
    """Return the `nn.Linear` that the model registers last, usually its classification head.

    >>> last_linear(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)))
    Linear(in_features=8, out_features=3, bias=True)
    """
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no nn.Linear layer: use a posterior over other layers, "
            "for example acnml.Acnml(classifier, acnml.fit_laplace(classifier, loader))"
        )
    return layers[-1]


def _names_in(model: nn.Module, layer: Layer) -> set[str]:
    """Return the names in the model of a layer's parameters, or of one parameter."""
    named = dict(model.named_parameters())
    if isinstance(layer, str):
        names = {name for name in named if name == layer or name.startswith(f"{layer}.")}
        checks.require_known([] if names else [layer], named)
        return names
    own = {id(each) for each in (layer.parameters() if isinstance(layer, nn.Module) else [layer])}
    names = {name for name, parameter in named.items() if id(parameter) in own}
    if not names:
        raise ValueError(
            f"the model has no parameters of the given {type(layer).__name__}: pass a part of the "
            "same model object, or its name"
        )
    return names
