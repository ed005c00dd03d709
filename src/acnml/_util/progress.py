"""Progress of long work: a bar in a terminal, elsewhere lines to the logger "acnml" now and then.

The library prints nothing. A program that wants to see the lines configures logging, as the command
`acnml predict` does.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterable, Iterator, Sized
from contextlib import suppress
from time import monotonic
from typing import TypeVar, final

from tqdm import TqdmExperimentalWarning

with warnings.catch_warnings():
    warnings.simplefilter("ignore", TqdmExperimentalWarning)
    # Not tqdm.auto: it calls iter() twice, which starts the workers of a DataLoader twice.
    from tqdm.autonotebook import tqdm

T = TypeVar("T")

LOG = logging.getLogger("acnml")
FIRST, EVERY = 5.0, 30.0  # seconds until the first line, and from one to the next


@final
class Lines:
    """Logs how much is done, the rate and the remaining time.

    Args:
        description: text before the numbers.
        total: of the work, if it is known.
        done: of the total, where the work begins.
        unit: of the work.
    """

    def __init__(
        self, description: str, total: int | None, done: int = 0, unit: str = "it"
    ) -> None:
        self._description, self._total, self._unit = description, total, unit
        self._initial, self._start = done, monotonic()
        self._next = self._start + FIRST

    def reached(self, done: int) -> None:
        """Log a line, unless the last one was a moment ago."""
        now = monotonic()
        if now < self._next:
            return
        self._next = now + EVERY
        line = tqdm.format_meter(
            done,
            self._total,
            now - self._start,
            ncols=0,  # no bar
            prefix=self._description,
            unit=self._unit,
            unit_scale=True,
            initial=self._initial,
        )
        LOG.info(line)


def track(
    items: Iterable[T], description: str, progress: bool | None, total: int | None = None
) -> Iterator[T]:
    """Iterate with a progress bar, or with lines in the log.

    Args:
        items: the items to iterate over.
        description: text before the bar.
        progress: whether to show the bar; None shows it in a terminal, and logs lines elsewhere.
        total: number of items, if `items` has no length.
    """
    if progress is None and not sys.stderr.isatty():
        return _logged(items, description, total)
    return iter(tqdm(items, desc=description, total=total, disable=progress is False, leave=False))


def _logged(items: Iterable[T], description: str, total: int | None) -> Iterator[T]:
    if total is None and isinstance(items, Sized):
        with suppress(TypeError):  # a DataLoader of an iterable data set has no length
            total = len(items)
    lines = Lines(description, total)
    for done, item in enumerate(items):
        lines.reached(done)
        yield item
