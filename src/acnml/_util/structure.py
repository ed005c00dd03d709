"""What a user's module consists of: its layers, its parameters, and a copy to run in its place.

`Classifier` runs a copy of the structure, in eval mode. Modules that a copy cannot replace raise an
error. Posteriors cover parameters that are selected by layer, by parameter or by name.
"""

from __future__ import annotations

import copy
import dis
import functools
import gc
import weakref
from collections.abc import Iterable, Iterator, Mapping
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from acnml._util import checks

# A layer, a parameter, or the name of one.
Layer: TypeAlias = str | nn.Module | nn.Parameter
# One or several of them; "last" is the last Linear layer, and None all that a fit can cover.
Layers: TypeAlias = Layer | Iterable[Layer] | None

# Attributes of every module with functions that run in a forward pass.
HOOKS = {"_forward_hooks", "_forward_pre_hooks"}

# Objects through which an attribute may refer to a module, and a copy of it to the original.
HOLDERS = (
    *(Mapping, list, tuple, set, frozenset),
    *(FunctionType, MethodType, CellType, functools.partial, weakref.ref),
)


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the module inside wrappers for several devices or for compilation."""
    if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        return unwrapped(model.module)
    inner = getattr(model, "_orig_mod", None)  # set by torch.compile
    return unwrapped(inner) if isinstance(inner, nn.Module) else model


def require_viewable(model: nn.Module) -> None:
    """Raise an error for modules that a copy of the structure in eval mode cannot replace."""
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError("scripted or traced modules are not supported; pass the original nn.Module")
    for name, parameter in model.named_parameters():
        if nn.parameter.is_lazy(parameter):
            raise ValueError(f"{name!r} has no shape yet; run the model once on a batch first")
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and module.running_mean is None:
            raise ValueError(
                f"layer {name!r} ({type(module).__name__}) has no running statistics, so its "
                "output for an input would depend on the rest of the batch; "
                "train it with track_running_stats=True"
            )


def require_independent(structure: nn.Module, model: nn.Module) -> None:
    """Raise an error if a function in a copied structure still refers to the original model.

    `copy.deepcopy` copies neither functions nor weak references, so what a closure over the model
    calls or changes is the original. A module may renew its functions when it is copied, as the
    metrics of torchmetrics do.
    """
    originals, internal = set(model.modules()), set(vars(nn.Module())) - HOOKS
    shared = [name for name, module in structure.named_modules() if module in originals]
    if shared:
        raise TypeError(
            f"a copy of {type(model).__name__} shares its module {shared[0]!r} with the original: "
            "copy it in __deepcopy__, or remove that method"
        )
    for name, module in structure.named_modules():
        for key, value in vars(module).items():
            if key not in internal and _refers_to(value, originals, set()):
                what = "a forward hook" if key in HOOKS else f"attribute {key!r}"
                remedy = "make it a method, or keep the value that it needs"
                if key in HOOKS:
                    remedy = "remove the hook, or register a method as the hook"
                raise TypeError(
                    f"{what} of module {name!r} is or contains a function or weak reference that "
                    f"refers to the model, so a copy would run the original; {remedy}"
                )


def _refers_to(value: Any, modules: set[nn.Module], seen: set[int]) -> bool:
    """Return whether a value refers to one of the modules through functions or containers."""
    if isinstance(value, nn.Module):
        return value in modules
    if id(value) in seen or not isinstance(value, HOLDERS):
        return False
    seen.add(id(value))
    held = [value()] if isinstance(value, weakref.ref) else gc.get_referents(value)
    if isinstance(value, FunctionType):  # of its many globals, only modules that it uses
        used = (value.__globals__.get(name) for name in _global_names(value.__code__))
        held = [each for each in held if each is not value.__globals__]
        held += [each for each in used if isinstance(each, nn.Module)]
    return any(_refers_to(each, modules, seen) for each in held)


def _global_names(code: CodeType) -> Iterator[str]:
    """Yield the global names that a function uses, also in functions that it defines."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield instruction.argval
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _global_names(inner)


def eval_structure(model: nn.Module) -> nn.Module:
    """Copy a module's structure, in eval mode; the copy shares the tensors."""
    memo = {id(t): t for t in (*model.parameters(), *model.buffers())}
    # Plain tensors with a graph cannot be copied. No gradient of theirs is wanted.
    plain = (value for module in model.modules() for value in vars(module).values())
    memo |= {id(t): t.detach() for t in plain if isinstance(t, Tensor) and t.requires_grad}
    try:
        structure = copy.deepcopy(model, memo)
    except Exception as error:
        raise TypeError(
            f"{type(model).__name__} cannot be copied ({error}); "
            "remove the attribute that copy.deepcopy cannot copy"
        ) from error
    return structure.eval()


def tracking_batch_norms(model: nn.Module) -> dict[str, _BatchNorm]:
    """Return the batch-norm layers that keep running statistics, by name."""
    layers = {name: m for name, m in model.named_modules() if isinstance(m, _BatchNorm)}
    return {name: layer for name, layer in layers.items() if layer.track_running_stats}


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
