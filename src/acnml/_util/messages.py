"""What a user is told: progress of long work, warnings at their own line, packages to install.

Progress is a bar in a terminal; elsewhere it is lines to the logger "acnml" now and then. The
library prints nothing. A program that wants to see the lines configures logging, as the command
`acnml predict` does.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterable, Iterator, Sized
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic
from typing import TypeVar

import torch
from tqdm import TqdmExperimentalWarning

with warnings.catch_warnings():
    warnings.simplefilter("ignore", TqdmExperimentalWarning)
    # Not tqdm.auto: it calls iter() twice, which starts the workers of a DataLoader twice.
    from tqdm.autonotebook import tqdm

T = TypeVar("T")

LOG = logging.getLogger("acnml")
FIRST, EVERY = 5.0, 30.0  # seconds until the first line, and from one to the next

# The folders of this library and of torch, whose decorators lie between it and its callers.
FOLDERS = Path(__file__).parents[1], Path(torch.__file__).parent
INSIDE = tuple(f"{folder}{os.sep}" for folder in FOLDERS)


def track(
    items: Iterable[T], description: str, progress: bool | None, total: int | None = None
) -> Iterator[T]:
    """Iterate with a progress bar, or with lines in the log.

    None for `progress` shows the bar in a terminal, and logs lines elsewhere. The total is that of
    items without a length.
    """
    if progress is None and not sys.stderr.isatty():
        return _logged(items, description, total)
    return iter(tqdm(items, desc=description, total=total, disable=progress is False, leave=False))


def _logged(items: Iterable[T], description: str, total: int | None) -> Iterator[T]:
    """Log how much is done, the rate and the remaining time, now and then."""
    if total is None and isinstance(items, Sized):
        with suppress(TypeError):  # a DataLoader of an iterable data set has no length
            total = len(items)
    start = monotonic()
    following = start + FIRST
    for done, item in enumerate(items):
        now = monotonic()
        if now >= following:
            following = now + EVERY
            # Without columns for it, there is no bar.
            LOG.info(tqdm.format_meter(done, total, now - start, ncols=0, prefix=description))
        yield item


def callers_level() -> int:
    """Return the `stacklevel` with which the calling function warns at the library's caller.

    Python 3.12 has `skip_file_prefixes` of `warnings.warn` for this.
    """
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(INSIDE):
        frame, level = frame.f_back, level + 1
    return level


@contextmanager
def needed_by(what: str, install: str) -> Iterator[None]:
    """Turn a failed import in a block into an error that says what to install, for pip."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None:  # not a missing package; its own message says what it is
            raise
        message = f"{what} needs {error.name}: pip install '{install}'"
        raise ModuleNotFoundError(message, name=error.name) from error
