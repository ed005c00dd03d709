"""Progress bars: on in a terminal, off elsewhere, and as the caller says when the caller says."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from typing import TypeVar

from tqdm import TqdmExperimentalWarning

with warnings.catch_warnings():
    warnings.simplefilter("ignore", TqdmExperimentalWarning)
    # Not tqdm.auto: it begins to iterate twice, which starts the workers of a DataLoader twice.
    from tqdm.autonotebook import tqdm

T = TypeVar("T")


def track(
    items: Iterable[T], description: str, progress: bool | None, total: int | None = None
) -> Iterator[T]:
    """Iterate with a progress bar.

    Args:
        items: what to iterate over.
        description: stands before the bar.
        progress: True or False; None shows the bar in a terminal only.
        total: number of items where `items` does not know it.
    """
    disable = None if progress is None else not progress
    return iter(tqdm(items, desc=description, total=total, disable=disable, leave=False))
