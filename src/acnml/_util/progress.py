"""Progress bars, shown by default only in a terminal."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from typing import TypeVar

from tqdm import TqdmExperimentalWarning

from acnml._util import checks

with warnings.catch_warnings():
    warnings.simplefilter("ignore", TqdmExperimentalWarning)
    # Not tqdm.auto: it calls iter() twice, which starts the workers of a DataLoader twice.
    from tqdm.autonotebook import tqdm

T = TypeVar("T")


def track(
    items: Iterable[T], description: str, progress: bool | None, total: int | None = None
) -> Iterator[T]:
    """Iterate with a progress bar.

    Args:
        items: the items to iterate over.
        description: text before the bar.
        progress: whether to show the bar; None shows it only in a terminal.
        total: number of items, if `items` has no length.
    """
    checks.require_iterable(items, "a loader: something that yields batches")
    disable = None if progress is None else not progress
    return iter(tqdm(items, desc=description, total=total, disable=disable, leave=False))
