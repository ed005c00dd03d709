"""Options of a command as values: one dataclass for every group of options."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, get_type_hints


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command for typer with an option for every field of the command's arguments.

    The arguments of `command` are dataclasses. Their fields are annotated as typer reads it, for
    example `rows: Annotated[int, typer.Option(help="…")] = 10`.
    """
    groups = {name: kind for name, kind in get_type_hints(command).items() if name != "return"}

    def flat(**options: Any) -> None:
        command(**{name: _taken(kind, options) for name, kind in groups.items()})

    flat.__name__, flat.__doc__ = command.__name__, command.__doc__
    parameters = [one for kind in groups.values() for one in _parameters(kind)]
    flat.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    flat.__annotations__ = {}  # typer reads the signature
    return flat


def _parameters(kind: type[Any]) -> list[inspect.Parameter]:
    hints = get_type_hints(kind, include_extras=True)
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=_default(field),
            annotation=hints[field.name],
        )
        for field in dataclasses.fields(kind)
    ]


def _default(field: dataclasses.Field[Any]) -> Any:
    is_required = field.default is dataclasses.MISSING
    return inspect.Parameter.empty if is_required else field.default


def _taken(kind: type[Any], options: dict[str, Any]) -> Any:
    return kind(**{field.name: options[field.name] for field in dataclasses.fields(kind)})
