"""Go over the batches of a loader. Errors name the batch that they come from."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from acnml._util.batches import as_loader, size, split_labels
from acnml._util.progress import track

NO_BATCH = (
    "the loader gave no batch: it is empty, or it is an iterator that was used before; "
    "pass a loader that can be iterated again"
)


def each_batch(
    loader: Iterable[Any],
    use: Callable[[Any], None],
    description: str,
    progress: bool | None,
    kinds: tuple[type[Exception], ...] = (TypeError, ValueError),
) -> None:
    """Call a function with every batch of a loader, or of a data set in memory.

    Args:
        loader: a loader, or data as in `as_loader`.
        use: the function.
        description: text before the progress bar.
        progress: whether to show the bar; None shows it only in a terminal.
        kinds: kinds of errors that are raised again with the index of the batch. An error becomes
            the first of these that it is an instance of.
    """
    is_empty = True
    for index, batch in enumerate(track(as_loader(loader), description, progress)):
        is_empty = False
        try:
            use(batch)
        except kinds as error:
            kind = next(kind for kind in kinds if isinstance(error, kind))
            raise kind(f"batch {index}: {error}") from error
    if is_empty:
        raise ValueError(NO_BATCH)


def batch_sizes(loader: Iterable[Any]) -> list[int]:
    """Return the number of inputs in every batch, from one pass over the loader."""
    sizes: list[int] = []

    def count(batch: Any) -> None:
        sizes.append(size(split_labels(batch)[0]))

    each_batch(loader, count, "", progress=False)
    if not sum(sizes):
        raise ValueError("all batches of the loader are empty")
    return sizes
