"""Plain data: what settings are made of, as JSON that is the same for the same settings."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

EXACT = 2**53  # up to here every whole number is a float


def to_plain(value: Any, what: str = "settings") -> Any:
    """Return the value as JSON has it: a dataclass becomes {its name: its fields}.

    1 and 1.0 are the same setting, and so are a tuple and a list.

    >>> to_plain({"rates": (1.0, 0.5)})
    {'rates': [1, 0.5]}
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return {type(value).__name__: to_plain(fields, what)}
    if isinstance(value, Mapping):
        return {_text(key, what): to_plain(item, f"{what}.{key}") for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [to_plain(item, f"{what}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, float):
        return int(value) if value.is_integer() and abs(value) <= EXACT else float(value)
    if value is None or isinstance(value, (bool, int, str)):
        return value
    raise TypeError(
        f"{what} is a {type(value).__name__}; only plain data can be kept: numbers, text, tuples, "
        "mappings and dataclasses of them"
    )


def canonical(value: Any, what: str = "settings") -> str:
    """Return the one JSON text that stands for the value."""
    return json.dumps(to_plain(value, what), sort_keys=True, separators=(",", ":"))


def digest(*parts: str | bytes | memoryview) -> str:
    """Return the SHA-256 of some texts or bytes, each counted with its length."""
    total = hashlib.sha256()
    for part in parts:
        content = part.encode() if isinstance(part, str) else part
        total.update(len(content).to_bytes(8, "big"))
        total.update(content)
    return total.hexdigest()


def _text(key: Any, what: str) -> str:
    if not isinstance(key, str):
        raise TypeError(f"{what} has the key {key!r}; keys must be text")
    return key
