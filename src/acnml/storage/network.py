"""What identifies a network: its modules with their settings, and hashes of all its tensors.

Hashes are of numbers: they do not depend on the device, on the layout in memory or on the sign of
zero. A tensor has a hash for its own type and for every type that networks are converted to. So a
half-precision copy of a network can be told from a network with other weights, although the file
does not contain the weights.

Settings are attributes of modules that are plain data: numbers, strings, tensors, arrays, functions
and enums by their names, and lists and mappings of them. What cannot be seen here: the code of the
modules, attributes that are other objects, and hooks.
"""

from __future__ import annotations

import enum
import hashlib
import json
import numbers
from collections.abc import Collection, Mapping
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from acnml._util.params import COARSE, conversions
from acnml.classifier import Classifier
from acnml.storage.disk import as_bytes

# How the weights of a network may differ from those that it had when the predictor was stored.
Weights: TypeAlias = Literal["exact", "rounded"]
ROUNDED = "rounded"

# Attributes that do not matter in eval mode. The last two are of models of transformers.
WITHOUT_EFFECT = {*vars(nn.Module()), "inplace", "gradient_checkpointing"}
WITHOUT_EFFECT |= {"name_or_path", "_is_hf_initialized"}
# Libraries whose modules count what they do in private attributes.
COUNTING = {"lightning", "pytorch_lightning", "torchmetrics"}
LONGEST_SETTING = 200  # characters of JSON; longer ones, such as vocabularies, are hashed


def describe(classifier: Classifier, replaced: Collection[str]) -> dict[str, Any]:
    """Return a description as plain JSON data, without hashes of the tensors in `replaced`."""
    tensors = {}
    for name, tensor in _relevant(classifier).items():
        coarse = COARSE if tensor.is_floating_point() else ()
        dtypes = () if name in replaced else dict.fromkeys((tensor.dtype, *coarse))
        hashes = {str(dtype): digest(tensor.to(dtype)) for dtype in dtypes}
        tensors[name] = {"dtype": str(tensor.dtype), "shape": list(tensor.shape), "hashes": hashes}
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
    return {n: t for n, t in classifier.tensors.items() if not n.endswith("num_batches_tracked")}


# Tensors -----------------------------------------------------------------------------------------


def digest(tensor: Tensor) -> str:
    """Return a hash of a tensor's numbers, in the order of its indices."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu()
    if plain.is_floating_point():
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
    is_same = str(tensor.dtype) == saved and digest(tensor) == hashes.get(saved)
    if is_same or not hashes:  # those that the predictor replaces have none
        return
    advice = "load the weights that the network had then"
    if tensor.is_floating_point():
        # The saved tensor, up to the rounding of one of them to a type?
        each = conversions(tensor, getattr(torch, saved.removeprefix("torch.")))
        if any(digest(t) == hashes.get(str(t.dtype)) for t in each):
            if weights == ROUNDED:
                return
            advice = "if a copy in another precision is meant, use load(..., weights='rounded')"
    was = "" if str(tensor.dtype) == saved else f" ({tensor.dtype} instead of {saved})"
    raise ValueError(
        f"{name!r} of the given network differs from when the file was saved{was}; {advice}"
    )


# Modules -----------------------------------------------------------------------------------------


def _modules(model: nn.Module) -> list[list[Any]]:
    """Return name, type and settings of every module, in the model's order."""
    return [[n, type(m).__name__, _settings(m)] for n, m in model.named_modules()]


def _settings(module: nn.Module) -> dict[str, str]:
    """Return the settings of a module as JSON."""
    settings: dict[str, str] = {}
    libraries = {base.__module__.partition(".")[0] for base in type(module).__mro__}
    for name, value in vars(module).items():
        is_counter = name.startswith("_") and libraries & COUNTING
        if is_counter or name in WITHOUT_EFFECT:
            continue
        try:
            text = json.dumps(value, default=_plain)
        except (TypeError, ValueError, AttributeError, RuntimeError):
            continue
        is_long = len(text) > LONGEST_SETTING
        settings[name] = hashlib.sha256(text.encode()).hexdigest() if is_long else text
    return settings


def _plain(value: Any) -> Any:
    """Return something simpler for what JSON does not have: functions and enums by their names."""
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(value)
    if isinstance(value, Tensor):
        # Parameters are compared by themselves; the file may have others, and what follows from
        # them, such as a pruned weight.
        if isinstance(value, nn.Parameter) or value.grad_fn is not None:
            raise TypeError("no setting")
        return f"{value.dtype} {tuple(value.shape)} {digest(value)}"
    if isinstance(value, numbers.Real):  # of NumPy
        return int(value) if isinstance(value, numbers.Integral) else float(value)
    if isinstance(value, Mapping):
        return dict(value)
    return value.name if isinstance(value, enum.Enum) else value.__name__


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
        for key in sorted(settings.keys() & before.keys()):
            if settings[key] != before[key]:
                raise ValueError(
                    f"{key} of {name or 'the model'!r} ({kind}) is {settings[key]} in the given "
                    f"network, but was {before[key]} when the file was saved; build the network "
                    "as it was then, or set the attribute to this value before loading"
                )
