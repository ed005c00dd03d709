"""Copy the structure of a user's module, so that `Classifier` can run the copy instead.

This module also removes wrappers such as `nn.DataParallel`, and raises an error for modules that a
copy cannot replace.
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
        if parameter.is_inference():
            raise ValueError(
                f"{name!r} was created in torch.inference_mode and has no gradients; "
                "pass copy.deepcopy(model), copied outside of that mode"
            )
        if parameter.is_meta:
            raise ValueError(
                f"{name!r} is on the meta device and has no values; load the model's weights first"
            )
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and module.running_mean is None:
            raise ValueError(
                f"layer {name!r} ({type(module).__name__}) has no running statistics, so its "
                "output for an input would depend on the rest of the batch; "
                "train it with track_running_stats=True"
            )


def require_independent(structure: nn.Module, model: nn.Module) -> None:
    """Raise an error if a function in a copied structure still refers to the original model.

    `copy.deepcopy` does not copy functions, so a closure over the model refers to the original. A
    module may renew its functions when it is copied, as the metrics of torchmetrics do.
    """
    # Attributes of every nn.Module, such as its hooks, are internal and not checked.
    originals, internal = set(model.modules()), set(vars(nn.Module()))
    for name, module in structure.named_modules():
        for key, value in vars(module).items():
            if key not in internal and _holds_on_to(value, originals):
                raise TypeError(
                    f"attribute {key!r} of module {name!r} is or contains a function whose closure "
                    "refers to the model, so a copy would run the original; make it a method"
                )


def _holds_on_to(value: Any, modules: set[nn.Module]) -> bool:
    """Return whether the closure of a function in `value` refers to one of the modules."""
    if isinstance(value, Mapping):
        return any(_holds_on_to(item, modules) for item in value.values())
    if isinstance(value, (list, tuple)):
        return any(_holds_on_to(item, modules) for item in value)
    if not isinstance(value, FunctionType):
        return False
    held = inspect.getclosurevars(value).nonlocals.values()
    return any(isinstance(value, nn.Module) and value in modules for value in held)


def eval_structure(model: nn.Module) -> nn.Module:
    """Copy a module's structure, in eval mode; the copy shares the tensors."""
    memo = {id(t): t for module in model.modules() for t in _own_tensors(module)}
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


def _own_tensors(module: nn.Module) -> Iterable[Tensor]:
    """Yield a module's parameters and buffers, and plain tensors that deepcopy cannot copy."""
    yield from (t for t in module._parameters.values() if t is not None)
    yield from (t for t in module._buffers.values() if t is not None)
    plain = (value for value in vars(module).values() if isinstance(value, Tensor))
    yield from (tensor for tensor in plain if not tensor.is_leaf)
