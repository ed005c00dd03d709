"""Functions that a user names: "package.module:function" or "file.py:function"."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from acnml.scoring.job import ScoringError


def load_function(name: str, what: str) -> Callable[..., Any]:
    """Return the function that "package.module:function" or "file.py:function" names.

    Modules are looked for in the working directory first, as `python -m` does.
    """
    place, attribute = _split(name, what)
    module = _module_of_file(Path(place)) if place.endswith(".py") else _imported(place, what)
    found = getattr(module, attribute, None)
    if not callable(found):
        raise ScoringError(f"{place} has no function {attribute!r}: check {what}")
    return found


def file_of(name: str, what: str) -> Path | None:
    """Return the file of the module that a function's name contains, or None if it has none."""
    place, _ = _split(name, what)
    if place.endswith(".py"):
        return Path(place)
    found = getattr(_imported(place, what), "__file__", None)
    return Path(found) if found and Path(found).is_file() else None


def _split(name: str, what: str) -> tuple[str, str]:
    """Return the module or file of a function, and its name there."""
    place, _, attribute = name.rpartition(":")
    if not (place and attribute):
        raise ScoringError(
            f"{what} must be package.module:function or file.py:function, got {name!r}"
        )
    if place.endswith(".py") and not Path(place).is_file():
        raise ScoringError(f"there is no file {place}: check {what}")
    return place, attribute


def _imported(name: str, what: str) -> Any:
    """Import a module, also from the working directory; raise an error if there is none."""
    here = os.getcwd()  # noqa: PTH109  # a string, as all entries of sys.path
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not name.startswith(error.name):
            raise  # a module that the module itself imports
        raise ScoringError(
            f"there is no module {name!r}: check {what}, and run the command in the folder that "
            "the module is in, or install its package"
        ) from error


def _module_of_file(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"_acnml_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look modules up by name
    spec.loader.exec_module(module)
    return module
