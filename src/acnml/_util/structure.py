"""The structure of a user's module, copied for `Classifier` to run in the module's place.

Wrappers are taken off, and modules are refused that such a copy could not stand for.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, Mapping
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the module that a wrapper for several devices or for compilation holds."""
    if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        return unwrapped(model.module)
    inner = getattr(model, "_orig_mod", None)  # of torch.compile
    return unwrapped(inner) if isinstance(inner, nn.Module) else model


def require_viewable(model: nn.Module) -> None:
    """Refuse modules that a copy of the structure in eval mode would not stand for."""
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError("a scripted or traced module cannot be viewed; give the original nn.Module")
    for name, parameter in model.named_parameters():
        if parameter.is_inference():
            raise ValueError(
                f"{name!r} was made in torch.inference_mode, so that nothing can be differentiated "
                "by it; give copy.deepcopy(model), made outside of that mode"
            )
    modules, internal = set(model.modules()), set(vars(nn.Module()))  # such as the user's hooks
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and module.running_mean is None:
            raise ValueError(
                f"layer {name!r} ({type(module).__name__}) has no running statistics: its output "
                "for an input would depend on the rest of the batch"
            )
        for key, value in vars(module).items():
            if key not in internal and _holds_on_to(value, modules):
                raise TypeError(
                    f"attribute {key!r} of module {name!r} holds on to the model itself in the "
                    "closure of a function, and would run it; make it a method"
                )


def _holds_on_to(value: Any, modules: set[nn.Module]) -> bool:
    """Whether a function's closure holds one of the modules: a copy would still run that one."""
    if isinstance(value, Mapping):
        return any(_holds_on_to(item, modules) for item in value.values())
    if isinstance(value, (list, tuple)):
        return any(_holds_on_to(item, modules) for item in value)
    if not isinstance(value, FunctionType):
        return False
    held = inspect.getclosurevars(value).nonlocals.values()
    return any(isinstance(value, nn.Module) and value in modules for value in held)


def eval_structure(model: nn.Module) -> nn.Module:
    """Copy a module's structure into eval mode; its tensors are shared, not copied."""
    memo = {id(t): t for module in model.modules() for t in _own_tensors(module)}
    try:
        structure = copy.deepcopy(model, memo)
    except Exception as error:
        raise TypeError(
            f"{type(model).__name__} cannot be copied ({error}); "
            "remove the attribute that holds what Python cannot deepcopy"
        ) from error
    return structure.eval()


def _own_tensors(module: nn.Module) -> Iterable[Tensor]:
    """A module's parameters and buffers, and those plain attributes that deepcopy refuses."""
    yield from (t for t in module._parameters.values() if t is not None)
    yield from (t for t in module._buffers.values() if t is not None)
    plain = (value for value in vars(module).values() if isinstance(value, Tensor))
    yield from (tensor for tensor in plain if not tensor.is_leaf)
