"""Settings of a study: presets by name, and `--set name=value`.

Settings are frozen dataclasses. A text becomes the type of its field: an integer, a number, true or
false, text, a choice, several values with commas, or none. A dot names a setting inside another:
`--set training.epochs=5`.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import NoneType, UnionType
from typing import (
    Any,
    Literal,
    NamedTuple,
    TypeVar,
    Union,
    final,
    get_args,
    get_origin,
    get_type_hints,
)

from acnml._util.checks import require_positive

T = TypeVar("T")


@final
class SettingError(ValueError):
    """A setting that cannot be made so; the message names it and says what is allowed."""


class Form(NamedTuple):
    """What a text for a field must look like, and how it is read."""

    allowed: str
    parse: Callable[[str], Any]


def preset(presets: Mapping[str, T], name: str) -> T:
    """Return the study of this name, or say which there are."""
    if name not in presets:
        raise SettingError(f"there is no preset {name!r}, only {', '.join(presets)}")
    return presets[name]


def override(study: T, assignments: Iterable[str]) -> T:
    """Return the study with some settings changed, each given as "name=value".

    All are changed at once, so that the study checks the whole; of two for one name the last
    counts.
    """
    changes: dict[str, Any] = {}
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if not equals:
            raise SettingError(f"{assignment!r} is no setting; write name=value")
        _put(changes, study, name.strip(), text.strip())
    return _changed(study, changes)


def setting_names(study: Any) -> Iterator[str]:
    """Name all settings that `override` can change."""
    for name, hint in _hints(study).items():
        value = getattr(study, name)
        if dataclasses.is_dataclass(value):
            yield from (f"{name}.{inner}" for inner in setting_names(value))
        elif form_of(hint) is not None:
            yield name


def form_of(hint: Any) -> Form | None:
    """Return the form of a type, or None where no text stands for it."""
    if hint in FORMS:
        return FORMS[hint]
    arguments = get_args(hint)
    if get_origin(hint) is Literal:
        return _choice({str(value): value for value in arguments})
    if get_origin(hint) is tuple and arguments[1:] == (...,):
        return _several(form_of(arguments[0]))
    if get_origin(hint) in (Union, UnionType) and NoneType in arguments:
        others = [argument for argument in arguments if argument is not NoneType]
        return _or_none(form_of(others[0])) if len(others) == 1 else None
    return None


def _put(changes: dict[str, Any], study: Any, name: str, text: str) -> None:
    """Read one assignment into the tree of changes."""
    known = list(setting_names(study))
    if name not in known:
        raise SettingError(f"there is no setting {name!r}{_hint(name, known)}")
    *outer, last = name.split(".")
    for part in outer:
        study, changes = getattr(study, part), changes.setdefault(part, {})
    form = form_of(_hints(study)[last])
    assert form is not None  # or it would not be known
    try:
        changes[last] = form.parse(text)
    except ValueError as error:
        raise SettingError(f"{name} must be {form.allowed}, not {text!r}") from error


def _changed(study: T, changes: Mapping[str, Any]) -> T:
    values = {
        name: _changed(getattr(study, name), change) if isinstance(change, dict) else change
        for name, change in changes.items()
    }
    try:
        return dataclasses.replace(study, **values)  # type: ignore[type-var]
    except SettingError:
        raise
    except ValueError as error:
        raise SettingError(f"with {', '.join(values)} set so: {error}") from error


def _hint(name: str, known: list[str]) -> str:
    """Say what was perhaps meant, or else what there is."""
    inner = [setting for setting in known if setting.endswith(f".{name}")]
    close = inner or difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]}?" if close else f"; there are {', '.join(known)}"


def _hints(study: Any) -> dict[str, Any]:
    hints = get_type_hints(type(study))
    return {f.name: hints[f.name] for f in dataclasses.fields(study) if f.init}


# Forms -----------------------------------------------------------------------------------------


def _choice(values: Mapping[str, Any]) -> Form:
    def parse(text: str) -> Any:
        if text not in values:
            raise ValueError(text)
        return values[text]

    return Form(" or ".join(values), parse)


def _several(form: Form | None) -> Form | None:
    if form is None:
        return None
    parse_one = form.parse

    def parse(text: str) -> tuple[Any, ...]:
        items = text.removesuffix(",").split(",") if text else []
        return tuple(parse_one(item.strip()) for item in items)

    return Form(f"values with commas between them, each {form.allowed}", parse)


def _or_none(form: Form | None) -> Form | None:
    if form is None:
        return None
    parse = form.parse
    return Form(f"{form.allowed}, or none", lambda text: None if text == "none" else parse(text))


FORMS: Mapping[Any, Form] = {
    int: Form("a whole number", int),
    float: Form("a number", float),
    bool: _choice({"true": True, "false": False}),
    str: Form("text", str),
}


def require_positive_fields(settings: Any, *names: str) -> None:
    """Refuse numbers that are not positive, also in tuples, and empty tuples.

    None passes: it stands for everything there is, or for a value that is decided elsewhere.
    """
    for name in names:
        value = getattr(settings, name)
        values = value if isinstance(value, tuple) else (value,)
        if not values:
            raise ValueError(f"{name} must have at least one value")
        for each in values:
            if each is not None:
                require_positive(each, name)
