"""Checks of arguments. Each error names the offending value and says what to do."""

from __future__ import annotations

import difflib
import math
import numbers
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from typing_extensions import Self


# An error message lists this many rows; the error itself knows them all.
LISTED = 10


class RowsError(ValueError):
    """Raised for some inputs of a batch. The message names the first of them.

    Attributes:
        rows: indices of all these inputs in the batch.
    """

    def __init__(
        self, what: str, rows: Sequence[int] = (), total: int = 0, remedy: str = ""
    ) -> None:
        self.what, self.rows, self.total, self.remedy = what, tuple(rows), total, remedy
        listed = ", ".join(map(str, self.rows[:LISTED]))
        listed += ", ..." if len(self.rows) > LISTED else ""
        where = f" for {len(self.rows)} of {total} inputs, first at index {listed}; {remedy}"
        super().__init__(what + where if self.rows else what)

    def moved(self, start: int, total: int) -> Self:
        """Return the error for a batch of `total` inputs of which this one begins at `start`."""
        return type(self)(self.what, [start + row for row in self.rows], total, self.remedy)

    def named(self, where: str) -> Self:
        """Return the error with a message that begins with the place that it comes from."""
        return type(self)(f"{where}: {self.what}", self.rows, self.total, self.remedy)


@contextmanager
def counting_from(start: int, total: int) -> Iterator[None]:
    """Let errors in a part of a batch name the rows by their index in the whole batch."""
    try:
        yield
    except RowsError as error:
        raise error.moved(start, total) from error


def require_finite(
    values: Tensor, what: str, remedy: str, error: type[RowsError] = RowsError
) -> Tensor:
    """Return the values (B, ...), or raise an error that names the inputs that are not finite.

    The message begins with `what`, for example "the logits are", and ends with the remedy.
    """
    # A sum is finite only if all are, and one pass over them.
    if math.isfinite(values.detach().sum()) or torch.isfinite(values).all():
        return values
    bad = (~torch.isfinite(values)).view(len(values), -1).any(1)
    raise error(f"{what} NaN or infinite", bad.nonzero().flatten().tolist(), len(bad), remedy)


def require_positive(value: float, what: str) -> float:
    """Return the number, or raise an error if it is not positive and finite."""
    if not 0 < value < float("inf"):
        raise ValueError(f"{what} must be a positive, finite number, got {value}")
    return value


def require_share(value: float, what: str) -> float:
    """Return the number, or raise an error if it is not between 0 and 1."""
    if not 0 < value < 1:
        raise ValueError(f"{what} must be between 0 and 1, got {value}")
    return value


def settle_integers(settings: object, **least: int | None) -> None:
    """Make fields of a frozen dataclass plain integers, each at least the number given for it.

    NumPy integers become Python's, because some functions of torch take only those.
    """
    for name, smallest in least.items():
        value = require_integer(getattr(settings, name), name, smallest)
        object.__setattr__(settings, name, value)


def require_integer(value: object, what: str, least: int | None = None) -> int:
    """Return an integer of any kind as a plain one, or raise an error."""
    if not isinstance(value, numbers.Integral):
        raise TypeError(f"{what} must be an integer, got {value!r}")
    if least is not None and value < least:
        raise ValueError(f"{what} must be at least {least}, got {value}")
    return int(value)


def require_same_names(
    given: Iterable[str], expected: Iterable[str], given_what: str, expected_what: str
) -> None:
    """Raise an error if two collections of names differ."""
    missing, extra = set(expected) - set(given), set(given) - set(expected)
    if missing or extra:
        raise ValueError(
            f"the names of {given_what} and {expected_what} differ: "
            f"missing {sorted(missing)}, unexpected {sorted(extra)}"
        )


def require_known(names: Iterable[str], model: Iterable[str]) -> None:
    """Raise an error if the model lacks a name, and suggest the closest one."""
    known = list(model)
    for name in sorted(set(names) - set(known)):
        close = difflib.get_close_matches(name, known, n=1, cutoff=0)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"the model has no parameter or buffer {name!r}{hint}")


def require_fits(given: Mapping[str, Tensor], model: Mapping[str, Tensor]) -> None:
    """Raise an error if tensors differ from the model's in their names or shapes."""
    require_known(given, model)
    for name, tensor in given.items():
        if tensor.shape != model[name].shape:
            raise ValueError(
                f"{name!r} has shape {tuple(tensor.shape)}, but its shape in the model is "
                f"{tuple(model[name].shape)}"
            )
