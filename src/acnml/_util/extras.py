"""Imports of optional packages, with an error that says what to install."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def needed_by(what: str, install: str) -> Iterator[None]:
    """Turn a failed import in a block into an error that says what to install.

    Args:
        what: the part of the library that needs the packages.
        install: what pip installs, for example "acnml[plots]".
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None:  # not a missing package; its own message says what it is
            raise
        message = f"{what} needs {error.name}: pip install '{install}'"
        raise ModuleNotFoundError(message, name=error.name) from error
