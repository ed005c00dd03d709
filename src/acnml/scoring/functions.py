"""Functions that a user names: "package.module:function" or "file.py:function"."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from acnml.scoring.job import ScoringError


def load_function(name: str, what: str) -> Callable[..., Any]:
    """Return the function that "package.module:function" or "file.py:function" names."""
    path = file_of(name, what)
    place, _, attribute = name.rpartition(":")
    if path is not None and place.endswith(".py"):
        module = _module_of_file(path)
    else:
        module = importlib.import_module(place)
    found = getattr(module, attribute, None)
    if not callable(found):
        raise ScoringError(f"{place} has no function {attribute!r}: check {what}")
    return found


def file_of(name: str, what: str) -> Path | None:
    """Return the file of the module that a function's name contains, or None if it has none.

    Modules are looked for in the working directory first, as `python -m` does.
    """
    place, _, attribute = name.rpartition(":")
    if not (place and attribute):
        raise ScoringError(
            f"{what} must be package.module:function or file.py:function, got {name!r}"
        )
    if place.endswith(".py"):
        if not Path(place).is_file():
            raise ScoringError(f"there is no file {place}: check {what}")
        return Path(place)
    here = os.getcwd()  # noqa: PTH109  # a string, as all entries of sys.path
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        spec = importlib.util.find_spec(place)
    except ModuleNotFoundError as error:
        if error.name is None or not place.startswith(error.name):
            raise  # a module that the package itself imports
        spec = None
    if spec is None:
        raise ScoringError(
            f"there is no module {place!r}: check {what}, and run the command in the folder that "
            "the module is in, or install its package"
        )
    return Path(spec.origin) if spec.has_location and spec.origin else None


def _module_of_file(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"_acnml_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look modules up by name
    spec.loader.exec_module(module)
    return module
