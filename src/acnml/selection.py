"""Which parameters a posterior covers: named by the user, by module or by parameter name."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from torch import nn

from acnml import checks

# Parameter names and submodules of a model, mixed as one likes; None is everything.
Parameters: TypeAlias = Iterable[str | nn.Module] | None


def parameter_names(model: nn.Module, parameters: Parameters) -> list[str]:
    """Return the chosen parameters' names, in the model's order."""
    known = [name for name, _ in model.named_parameters()]
    if parameters is None:
        return known
    if isinstance(parameters, (str, nn.Module)):
        raise TypeError("parameters must be a list, e.g. [model.fc] or ['fc.weight']")
    chosen: set[str] = set()
    for item in parameters:
        chosen |= _names_in(model, item) if isinstance(item, nn.Module) else {item}
    if not chosen:
        raise ValueError("parameters is empty: name at least one parameter or module")
    checks.require_known(chosen, known)
    return [name for name in known if name in chosen]


def last_linear(model: nn.Module) -> nn.Linear:
    """Return the `nn.Linear` that the model registers last, usually its classification head.

    >>> last_linear(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)))
    Linear(in_features=8, out_features=3, bias=True)
    """
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    if not layers:
        raise ValueError(f"{type(model).__name__} has no nn.Linear layer")
    return layers[-1]


def _names_in(model: nn.Module, module: nn.Module) -> set[str]:
    """Names, as the model knows them, of the parameters of one of its submodules."""
    own = {id(parameter) for parameter in module.parameters()}
    names = {name for name, parameter in model.named_parameters() if id(parameter) in own}
    if not names:
        raise ValueError(
            f"the model holds no parameters of the given {type(module).__name__}: "
            "pass a submodule of the very model that the classifier views"
        )
    return names
