"""What identifies a network: its modules with their settings, and hashes of all its tensors.

Hashes are of numbers: they do not depend on the device, on the layout in memory or on the sign of
zero. A tensor has one hash for its own type and one for every type with fewer digits, rounded to
that type. So a half-precision copy of a network can be told from a network with other weights,
although the file does not contain the weights.

What cannot be seen here: the code of the modules, tensors and objects that are plain attributes of
modules, and hooks.
"""

from __future__ import annotations

import enum
import hashlib
import json
import numbers
from collections.abc import Collection, Mapping
from types import BuiltinFunctionType, FunctionType
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from acnml._util.params import conversions
from acnml.classifier import Classifier
from acnml.storage.disk import as_bytes

# How the weights of a network may differ from those that it had when the predictor was stored.
Weights: TypeAlias = Literal["exact", "rounded"]
EXACT, ROUNDED = "exact", "rounded"

# Types to which a tensor may be rounded, by its own type.
COARSER = {
    torch.float64: (torch.float32, torch.float16, torch.bfloat16),
    torch.float32: (torch.float16, torch.bfloat16),
    torch.float16: (torch.bfloat16,),
    torch.bfloat16: (torch.float16,),
}
DTYPES = {str(dtype): dtype for dtype in (*COARSER, torch.float32)}

# Attributes of modules that do not matter in eval mode; a model of transformers is loaded from
# `name_or_path`.
WITHOUT_EFFECT = {*vars(nn.Module()), "inplace", "gradient_checkpointing", "name_or_path"}
LONGEST_SETTING = 200  # characters of JSON; longer ones, such as vocabularies, are hashed


def describe(classifier: Classifier, replaced: Collection[str]) -> dict[str, Any]:
    """Return a description as plain JSON data, without hashes of the tensors in `replaced`."""
    tensors = {
        name: _describe_tensor(tensor, hashed=name not in replaced)
        for name, tensor in _relevant(classifier).items()
    }
    return {"modules": _modules(classifier.model), "tensors": tensors}


def require_same(classifier: Classifier, expected: Mapping[str, Any], weights: Weights) -> None:
    """Raise an error that names the first difference between a network and a description."""
    _require_same_modules(_modules(classifier.model), expected["modules"])
    tensors, described = _relevant(classifier), expected["tensors"]
    if extra := sorted(tensors.keys() ^ described.keys()):
        has, had = ("has", "had no") if extra[0] in tensors else ("has no", "had")
        raise ValueError(
            f"the given network {has} {extra[0]!r}, but {had} such tensor when the file was saved; "
            "build the network as it was then"
        )
    for name, tensor in tensors.items():
        _require_same_tensor(name, tensor, described[name], weights)


def _relevant(classifier: Classifier) -> dict[str, Tensor]:
    """Return the tensors that predictions depend on: all but the counters of batch norm."""
    counters = {
        f"{name}.num_batches_tracked" if name else "num_batches_tracked"
        for name, module in classifier.model.named_modules()
        if isinstance(module, _NormBase)
    }
    return {name: t for name, t in classifier.tensors.items() if name not in counters}


# Tensors -----------------------------------------------------------------------------------------


def _describe_tensor(tensor: Tensor, *, hashed: bool) -> dict[str, Any]:
    dtypes = (tensor.dtype, *COARSER.get(tensor.dtype, ())) if hashed else ()
    hashes = {str(dtype): digest(tensor.to(dtype)) for dtype in dtypes}
    return {"dtype": str(tensor.dtype), "shape": list(tensor.shape), "hashes": hashes}


def digest(tensor: Tensor) -> str:
    """Return a hash of a tensor's numbers, in the order of its indices."""
    if tensor.device.type == "meta":
        raise ValueError("the network is on the meta device and has no weights: load them first")
    plain = tensor.detach().resolve_conj().resolve_neg().cpu()
    if plain.dtype in COARSER:
        plain = plain + 0.0  # -0.0 becomes 0.0
    return hashlib.sha256(as_bytes(plain)).hexdigest()[:32]


def _require_same_tensor(
    name: str, tensor: Tensor, expected: Mapping[str, Any], weights: Weights
) -> None:
    if list(tensor.shape) != expected["shape"]:
        raise ValueError(
            f"{name!r} of the given network has shape {tuple(tensor.shape)}, but had "
            f"{tuple(expected['shape'])} when the file was saved"
        )
    hashes, saved = expected["hashes"], expected["dtype"]
    if not hashes:  # the predictor replaces it
        return
    if str(tensor.dtype) == saved and digest(tensor) == hashes[saved]:
        return
    is_rounded = _is_rounded(tensor, hashes, saved)
    if is_rounded and weights == ROUNDED:
        return
    advice = "load the weights that the network had then"
    if is_rounded:
        advice = "if a copy in another precision is meant, use load(..., weights='rounded')"
    was = "" if str(tensor.dtype) == saved else f" ({tensor.dtype} instead of {saved})"
    raise ValueError(
        f"{name!r} of the given network differs from when the file was saved{was}; {advice}"
    )


def _is_rounded(tensor: Tensor, hashes: Mapping[str, str], saved: str) -> bool:
    """Return whether a tensor is the saved one, up to the rounding of one of them to a type."""
    if tensor.dtype not in COARSER or saved not in DTYPES:
        return False
    known = (t for t in conversions(tensor, DTYPES[saved]) if str(t.dtype) in hashes)
    return any(digest(rounded) == hashes[str(rounded.dtype)] for rounded in known)


# Modules -----------------------------------------------------------------------------------------


def _modules(model: nn.Module) -> list[list[Any]]:
    """Return name, type and settings of every module, in the model's order."""
    return [[n, type(m).__name__, _settings(m)] for n, m in model.named_modules()]


def _settings(module: nn.Module) -> dict[str, Any]:
    """Return the public attributes of a module that are plain data or functions."""
    settings = {}
    for name, value in vars(module).items():
        if name not in WITHOUT_EFFECT and not name.startswith("_"):
            try:
                plain = _plain(value)
            except TypeError:
                continue
            text = json.dumps(plain)
            is_long = len(text) > LONGEST_SETTING
            settings[name] = hashlib.sha256(text.encode()).hexdigest() if is_long else plain
    return settings


def _plain(value: Any) -> Any:
    """Return a value as JSON data, or raise a TypeError if it is something else."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return repr(float(value))  # text, because NaN does not equal itself
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, (FunctionType, BuiltinFunctionType, type)):
        return value.__name__
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    raise TypeError(f"{type(value).__name__} is not plain data")


def _require_same_modules(given: list[list[Any]], expected: list[list[Any]]) -> None:
    found, wanted = ([(name, kind) for name, kind, _ in part] for part in (given, expected))
    if found != wanted:
        name, kind = next((pair for pair in wanted if pair not in found), ("", ""))
        what = f"no {kind} at {name!r}" if kind else "more modules, or another order of them"
        raise ValueError(
            f"the given network has another structure than when the file was saved: {what}; "
            "build the network as it was then"
        )
    for (name, kind, settings), (_, _, before) in zip(given, expected, strict=True):
        # A setting may be new in one version of torch, so only those that both have are compared.
        for key in settings.keys() & before.keys():
            if settings[key] != before[key]:
                raise ValueError(
                    f"{key} of {name or 'the model'!r} ({kind}) is {settings[key]} in the given "
                    f"network, but was {before[key]} when the file was saved; build the network "
                    "as it was then. If the attribute is not a setting but changes while the "
                    f"network runs, such as a counter, set it to {before[key]!r} before loading, "
                    f"and name it _{key} in networks to be saved: such attributes are not compared"
                )
