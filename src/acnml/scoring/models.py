"""The predictor of a job: a network from a factory, its weights, and a file of `acnml.save`."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, final

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import nn

from acnml.classifier import Classifier
from acnml.predictors import Predictor
from acnml.scoring.job import Job
from acnml.storage import load


@final
class ScoringError(ValueError):
    """Raised when a job cannot be run. The message says why, and what to do.

    >>> from acnml.scoring import Job, score
    >>> score(Job("network.py:build", "calibrated.safetensors", "nowhere.parquet", "scored"))
    Traceback (most recent call last):
    acnml.scoring.models.ScoringError: there is no file or folder nowhere.parquet: check --input
    """


def load_predictor(job: Job) -> Predictor:
    """Return the predictor of a job on its device."""
    built = load_function(job.model, "model")()
    model = built.model if isinstance(built, Classifier) else built
    if not isinstance(model, nn.Module):
        kind = type(built).__name__
        raise ScoringError(f"{job.model} must return an nn.Module or a Classifier, got a {kind}")
    if job.weights is not None:
        _load_weights(model, Path(job.weights))
    model.to(_device(job.device))
    return load(job.predictor, built if isinstance(built, Classifier) else Classifier(model))


def load_function(name: str, what: str) -> Callable[..., Any]:
    """Return the function that "package.module:function" or "file.py:function" names.

    Modules are looked for in the working directory first, as `python -m` does.
    """
    place, attribute = _split(name, what)
    if place.endswith(".py"):
        module = _module_of_file(_require_code(Path(place)))
    else:
        module = _of_module(importlib.import_module, place, what)
    found = getattr(module, attribute, None)
    if not callable(found):
        raise ScoringError(f"{place} has no function {attribute!r}: check {what}")
    return found


def file_of(name: str, what: str) -> Path | None:
    """Return the file of the module that a function's name contains, or None if it has none.

    The module is not run, and what it imports is not looked at.
    """
    place, _ = _split(name, what)
    if place.endswith(".py"):
        return _require_code(Path(place))
    if place in sys.modules:  # __main__, for one, cannot be found in another way
        found = getattr(sys.modules[place], "__file__", None)
    else:
        spec = _of_module(importlib.util.find_spec, place, what)
        found = spec.origin if spec.has_location else None
    return Path(found) if found and Path(found).is_file() else None


def _split(name: str, what: str) -> tuple[str, str]:
    """Return the module or file of a function, and its name there."""
    place, colon, attribute = name.rpartition(":")
    if not (place and colon and attribute):
        raise ScoringError(
            f"{what} must be package.module:function or file.py:function, got {name!r}"
        )
    return place, attribute


def _of_module(find: Callable[[str], Any], name: str, what: str) -> Any:
    """Import or find a module, also in the working directory; raise an error if there is none."""
    here = os.getcwd()  # noqa: PTH109  # a string, as all entries of sys.path
    if here not in sys.path:
        sys.path.insert(0, here)
    missing = f"there is no module {name!r}: check {what}, and run the command in the folder that "
    missing += "the module is in, or install its package"
    try:
        found = find(name)
    except ModuleNotFoundError as error:
        if error.name is None or not name.startswith(error.name):
            raise  # a module that the module itself imports
        raise ScoringError(missing) from error
    if found is None:
        raise ScoringError(missing)
    return found


def _require_code(path: Path) -> Path:
    if not path.is_file():
        raise ScoringError(f"there is no file {path}: check --model and --transform")
    return path


def _module_of_file(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"_acnml_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look modules up by name
    spec.loader.exec_module(module)
    return module


def _load_weights(model: nn.Module, path: Path) -> None:
    if not path.is_file():
        raise ScoringError(f"there is no file {path} with weights: check --weights")
    try:
        safetensors.torch.load_model(model, path)
    except (SafetensorError, RuntimeError) as error:
        raise ScoringError(f"the weights in {path} do not fit the model: {error}") from error


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ScoringError(f"{name!r} is not a device: use cpu or cuda") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ScoringError(f"there is no GPU for device {name!r}: use cpu")
    return device
