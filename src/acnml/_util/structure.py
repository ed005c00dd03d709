"""Copy the structure of a user's module, so that `Classifier` can run the copy instead.

This module also removes wrappers such as `nn.DataParallel`, and raises an error for modules that a
copy cannot replace.
"""

from __future__ import annotations

import contextlib
import copy
import dis
import functools
import weakref
from collections.abc import Iterable, Iterator, Mapping
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

# Attributes of every module with functions that run in a forward pass.
HOOKS = {"_forward_hooks", "_forward_pre_hooks"}


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
            if key not in internal and _holds_on_to(value, originals, set()):
                what = "a forward hook" if key in HOOKS else f"attribute {key!r}"
                remedy = "make it a method, or keep the value that it needs"
                if key in HOOKS:
                    remedy = "remove the hook, or register a method as the hook"
                raise TypeError(
                    f"{what} of module {name!r} is or contains a function or weak reference that "
                    f"refers to the model, so a copy would run the original; {remedy}"
                )


def _holds_on_to(value: Any, modules: set[nn.Module], seen: set[int]) -> bool:
    """Return whether a value refers to one of the modules through functions or containers."""
    if isinstance(value, nn.Module):
        return value in modules
    if id(value) in seen:
        return False
    seen.add(id(value))
    held: Iterable[Any] = ()
    if isinstance(value, Mapping):
        held = value.values()
    elif isinstance(value, (list, tuple, set, frozenset)):
        held = value
    elif isinstance(value, FunctionType):
        held = _held_by_function(value)
    elif isinstance(value, MethodType):
        held = (value.__self__, value.__func__)
    elif isinstance(value, functools.partial):
        held = (value.func, value.args, value.keywords)
    elif isinstance(value, weakref.ref):
        held = (value(),)
    return any(_holds_on_to(item, modules, seen) for item in held)


def _held_by_function(function: FunctionType) -> Iterator[Any]:
    """Yield what a function refers to: its closure, its defaults, and global modules."""
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # an empty cell
            yield cell.cell_contents
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    for name in _global_names(function.__code__):
        named = function.__globals__.get(name)
        if isinstance(named, nn.Module):
            yield named


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
