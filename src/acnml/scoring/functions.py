"""Functions that a user names: "package.module:function" or "file.py:function"."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from acnml.scoring.job import ScoringError


def load_function(name: str, what: str) -> Callable[..., Any]:
    """Return the function that "package.module:function" or "file.py:function" names."""
    spec, attribute = _found(name, what)
    if name.rpartition(":")[0].endswith(".py") and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # dataclasses and pickle look modules up by name
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(spec.name)
    found = getattr(module, attribute, None)
    if not callable(found):
        raise ScoringError(f"{spec.origin} has no function {attribute!r}: check {what}")
    return found


def file_of(name: str, what: str) -> Path | None:
    """Return the file of the module that a function's name contains, or None if it has none."""
    spec, _ = _found(name, what)
    return Path(spec.origin) if spec.has_location and spec.origin else None


def _found(name: str, what: str) -> tuple[ModuleSpec, str]:
    """Return where a module is, and the name of the function.

    Modules are looked for in the working directory first, as `python -m` does.
    """
    place, _, attribute = name.rpartition(":")
    if not (place and attribute):
        text = f"{what} must be package.module:function or file.py:function, got {name!r}"
        raise ScoringError(text)
    if place.endswith(".py"):
        own = f"_acnml_{Path(place).stem}"
        spec = importlib.util.spec_from_file_location(own, place) if Path(place).is_file() else None
    else:
        here = os.getcwd()  # noqa: PTH109  # a string, as all entries of sys.path
        sys.path[:0] = [] if here in sys.path else [here]
        spec = importlib.util.find_spec(place)
    if spec is None:
        raise ScoringError(
            f"there is no file or module {place!r}: check {what}, and run the command in the "
            "folder that it is in, or install its package"
        )
    return spec, attribute
