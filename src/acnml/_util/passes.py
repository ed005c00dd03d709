"""Go over the batches of a loader and the chunks of a batch. Errors say where they come from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from acnml._util import checks
from acnml._util.batches import CHUNK, Inputs, WholeData, as_loader, chunks, size, split_labels
from acnml._util.progress import track

T = TypeVar("T")

NO_BATCH = (
    "the loader gave no batch: it is empty, or it is an iterator that was used before; "
    "pass a loader that can be iterated again"
)


def each_batch(
    loader: Iterable[Any],
    use: Callable[[Any], None],
    description: str,
    progress: bool | None,
) -> None:
    """Call a function with every batch of a loader, or of a data set in memory.

    A `RowsError` is raised again with the index of the batch, and keeps its class and its rows. For
    a data set in memory, the library makes the batches, so the rows become those of the data set.
    Any other TypeError or ValueError is raised again with the index of the batch, or with the range
    of rows in the data set.

    Args:
        loader: a loader, or data as in `as_loader`.
        use: the function.
        description: text before the progress bar.
        progress: whether to show the bar; None shows it only in a terminal.
    """
    data, is_empty = as_loader(loader), True
    for index, batch in enumerate(track(data, description, progress)):
        is_empty = False
        try:
            use(batch)
        except (TypeError, ValueError) as error:
            raise _located(error, data, index) from error
    if is_empty:
        raise ValueError(NO_BATCH)


def _located(error: Exception, data: Iterable[Any], index: int) -> Exception:
    """Return the error of a batch for those who know only the loader or the data set."""
    where = f"batch {index}"
    if isinstance(data, WholeData):
        start, total = index * CHUNK, size(data.inputs)
        if isinstance(error, checks.RowsError) and error.rows:
            return error.moved(start, total)
        where = f"rows {start} to {min(start + CHUNK, total) - 1}"
    if isinstance(error, checks.RowsError):
        return error.named(where)
    kind = TypeError if isinstance(error, TypeError) else ValueError
    return kind(f"{where}: {error}")


def in_chunks(x: Inputs, use: Callable[[Inputs], T], length: int = CHUNK) -> Iterator[T]:
    """Yield the results of a function for the chunks of a prepared batch, of at most this length.

    Errors about single inputs name them by their index in the batch, not in the chunk.
    """
    done, total = 0, size(x)
    for chunk in chunks(x, length):
        with checks.counting_from(done, total):
            found = use(chunk)
        done += size(chunk)
        yield found


def batch_sizes(loader: Iterable[Any]) -> list[int]:
    """Return the number of inputs in every batch, from one pass over the loader."""
    sizes: list[int] = []

    def count(batch: Any) -> None:
        sizes.append(size(split_labels(batch)[0]))

    each_batch(loader, count, "", progress=False)
    if not sum(sizes):
        raise ValueError("all batches of the loader are empty")
    return sizes
