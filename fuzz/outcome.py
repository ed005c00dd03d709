"""What may come out of a case, and how a refusal by name is told from an accident."""

from __future__ import annotations

import enum
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, final

import acnml

LIBRARY = Path(acnml.__file__).parent

# What Python and torch say when nobody has looked at the arguments.
ACCIDENTS = (
    "not supported between",
    "unsupported operand",
    "object has no attribute",
    "object is not",
    "has no len()",
    "must be real number",
    "unexpected keyword",
    "required positional",
    "cannot be interpreted as an integer",
    "Boolean value of Tensor",
    "truth value of an array",
    "could not convert",
    "not implemented for",
    "Expected all tensors",
)


@final
class Outcome(enum.Enum):
    """The ways in which a case may end well."""

    EQUAL = "equal"
    REFUSED = "refused"
    FLAGGED = "flagged"


@final
class WrongError(AssertionError):
    """A case did not end well: a silent wrong answer, or an error that nobody wrote."""


def require(condition: Any, what: str) -> None:
    """Raise an error unless the condition holds; NaN does not."""
    if not bool(condition):
        raise WrongError(what)


def refused_or(result: Callable[[], Outcome]) -> Outcome:
    """Return the outcome of a function, or REFUSED if the library raises an error of its own."""
    try:
        return result()
    except WrongError:
        raise
    except (ValueError, TypeError) as error:
        if reason := _accident(error):
            raise WrongError(
                f"{type(error).__name__} that is no refusal ({reason}): {error}"
            ) from error
        return Outcome.REFUSED
    except Exception as error:
        raise WrongError(f"raw {type(error).__name__}: {error}") from error


def _accident(error: Exception) -> str | None:
    """Return why an error is not a refusal, or None if the library raised it on purpose."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    if not Path(frame.filename).is_relative_to(LIBRARY):
        return f"raised in {Path(frame.filename).name}"
    text = str(error)
    if found := next((words for words in ACCIDENTS if text.startswith(words)), None):
        return found
    own = (frame.line or "").lstrip().startswith("raise")
    in_constructor = "Error(" in (frame.line or "") or own
    return None if in_constructor and " " in text else "no sentence of the library"
