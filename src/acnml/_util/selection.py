"""Select the parameters that a posterior covers, by name, by parameter or by submodule."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from torch import Tensor, nn

from acnml._util import checks

# Any mix of a model's parameters, their names and submodules; None selects all parameters.
Parameters: TypeAlias = Iterable[str | nn.Module | nn.Parameter] | None


def parameter_names(model: nn.Module, parameters: Parameters) -> list[str]:
    """Return the names of the selected parameters, in the model's order."""
    known = [name for name, _ in model.named_parameters()]
    items = listed(parameters)
    if items is None:
        return known
    chosen: set[str] = set()
    for item in items:
        chosen |= {item} if isinstance(item, str) else _names_in(model, item)
    if not chosen:
        raise ValueError("parameters is empty: name at least one parameter or module")
    checks.require_known(chosen, known)
    return [name for name in known if name in chosen]


def listed(parameters: Parameters) -> list[str | nn.Module | nn.Parameter] | None:
    """Check a selection and return it as a list, because an iterator can be used only once."""
    if parameters is None:
        return None
    if isinstance(parameters, (str, nn.Module, Tensor)):
        raise TypeError("parameters must be a list, e.g. [model.fc] or ['fc.weight']")
    checks.require_iterable(parameters, "a list of parameters")
    items = list(parameters)
    for item in items:
        if not isinstance(item, (str, nn.Module, nn.Parameter)):
            kind = type(item).__name__
            raise TypeError(f"parameters must be names, submodules or parameters, got a {kind}")
    return items


def last_linear(model: nn.Module) -> nn.Linear:
    """Return the `nn.Linear` that the model registers last, usually its classification head.

    >>> last_linear(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)))
    Linear(in_features=8, out_features=3, bias=True)
    """
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no nn.Linear layer: use a posterior over other layers, "
            "for example acnml.Acnml(classifier, acnml.fit_kfac_laplace(classifier, loader))"
        )
    return layers[-1]


def _names_in(model: nn.Module, part: nn.Module | nn.Parameter) -> set[str]:
    """Return the names in the model of a submodule's parameters, or of one parameter."""
    own = {id(each) for each in (part.parameters() if isinstance(part, nn.Module) else [part])}
    names = {name for name, parameter in model.named_parameters() if id(parameter) in own}
    if not names:
        raise ValueError(
            f"the model has no parameters of the given {type(part).__name__}: "
            "pass a part of the same model object that was passed to Classifier"
        )
    return names
