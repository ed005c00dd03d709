"""The structure of a user's module, copied so that `Classifier` runs the copy instead.

Wrappers are removed, and modules are refused that a copy could not replace.
"""

from __future__ import annotations

import copy
import inspect
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import FunctionType
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

# Replaces the forward pass of a module: (module, its input) -> output.
Forward: TypeAlias = Callable[[nn.Module, Tensor], Tensor]
# A forward hook: (module, its arguments, its output) -> new output.
Hook: TypeAlias = Callable[[nn.Module, tuple[Any, ...], Tensor], Tensor]


@final
class Structures:
    """Copies of a module's structure in eval mode, one for every run that is under way.

    The copies share all tensors with the module. `functional_call` and hooks change a module while
    it runs, so two threads must never run the same copy. The template itself is never run.
    """

    def __init__(self, model: nn.Module) -> None:
        self.template = eval_structure(model)
        self._idle: deque[nn.Module] = deque()  # append and pop are atomic

    @contextmanager
    def borrowed(
        self, hooks: Mapping[str, Hook], forwards: Mapping[str, Forward]
    ) -> Iterator[nn.Module]:
        """Lend a copy with these hooks and forward functions, by the name of the module."""
        try:
            structure = self._idle.pop()
        except IndexError:
            structure = eval_structure(self.template)
        handles = [
            structure.get_submodule(name).register_forward_hook(
                partial(_run_hook, hook), with_kwargs=True
            )
            for name, hook in hooks.items()
        ]
        replaced = [(structure.get_submodule(name), run) for name, run in forwards.items()]
        for module, run in replaced:
            module.forward = partial(_run_forward, run, module)
        try:
            yield structure
        finally:
            for handle in handles:
                handle.remove()
            for module, _ in replaced:
                del module.forward  # the method of the class is visible again
            self._idle.append(structure)


def _run_hook(
    hook: Hook, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
) -> Tensor:
    """Call a hook with a module's arguments, whether they came by position or by name."""
    return hook(module, args or tuple(kwargs.values()), output)


def _run_forward(run: Forward, module: nn.Module, *args: Tensor, **kwargs: Tensor) -> Tensor:
    """Run a module's only input, whether it came by position or by name."""
    (x,) = args or kwargs.values()
    return run(module, x)


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
