"""What commands share: options from a dataclass, and errors in one line."""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer


@contextmanager
def one_line() -> Iterator[None]:
    """Turn errors about files, packages and settings into one line and exit status 1."""
    try:
        yield
    except (OSError, ImportError, ValueError, TypeError) as error:
        sys.exit(f"{error}")
    except KeyboardInterrupt:
        sys.exit("Interrupted. Run the same command again to go on.")


def with_fields_of(kind: type[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command an option for every field of the dataclass that is its first argument.

    The help of an option is what the docstring says of its field. Fields that are dataclasses have
    options of their own in place of one. Tuples are written with commas.
    """

    def decorated(command: Callable[..., None]) -> Callable[..., None]:
        others = get_type_hints(command, include_extras=True)
        _, *rest = inspect.signature(command).parameters.values()

        def flat(**options: Any) -> None:
            own = {each.name: options.pop(each.name) for each in rest}
            command(_made(kind, options), **own)

        flat.__name__, flat.__doc__ = command.__name__, command.__doc__
        parameters = [*_parameters(kind), *(p.replace(annotation=others[p.name]) for p in rest)]
        flat.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        flat.__annotations__ = {}  # typer reads the signature
        return flat

    return decorated


def _parameters(kind: Any) -> Iterator[inspect.Parameter]:
    """Yield an option for every field."""
    hints, texts = get_type_hints(kind), _helps(kind)
    for field in dataclasses.fields(kind):
        name, hint = field.name, hints[field.name]
        if dataclasses.is_dataclass(hint):
            yield from _parameters(hint)
            continue
        flags = [f"--{name.replace('_', '-')}"] if hint is bool else []
        option = typer.Option(*flags, help=texts[name])
        if tuple in {get_origin(each) for each in (hint, *get_args(hint))}:
            option.parser = _integers if "int" in str(hint) else _words
            option.metavar, option.show_default, hint = "A,B,...", False, Any
        default = inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default
        only = inspect.Parameter.KEYWORD_ONLY
        yield inspect.Parameter(name, only, default=default, annotation=Annotated[hint, option])


def _helps(kind: type[Any]) -> dict[str, str]:
    """Return what a docstring says of every field."""
    found = re.findall(r"^    (\w+): (.+(?:\n {8}.+)*)", inspect.cleandoc(kind.__doc__ or ""), re.M)
    texts = {name: " ".join(text.split()).replace("`", "") for name, text in found}
    return {name: text[0].upper() + text[1:] for name, text in texts.items()}


def _made(kind: Any, options: dict[str, Any]) -> Any:
    """Return the dataclass that options describe."""
    hints = get_type_hints(kind)
    inner = {n: _made(hint, options) for n, hint in hints.items() if dataclasses.is_dataclass(hint)}
    return kind(**inner, **{name: options[name] for name in hints if name not in inner})


def _words(text: Any) -> Any:
    """Return what commas separate; a default is none."""
    return tuple(filter(None, map(str.strip, text.split(",")))) if isinstance(text, str) else text


def _integers(text: Any) -> Any:
    return tuple(map(int, _words(text))) if isinstance(text, str) else text
