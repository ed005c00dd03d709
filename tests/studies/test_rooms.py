"""The list of rooms in the docstring of `studies` is complete."""

from __future__ import annotations

import re
from pathlib import Path

import studies


def test_every_room_is_listed():
    folder = Path(studies.__file__).parent
    rooms = {path.name if path.is_file() else f"{path.name}/" for path in folder.glob("[a-z]*")}
    listed = re.findall(r"^    ([a-z0-9_]+(?:/|\.py))  ", studies.__doc__, re.MULTILINE)
    assert sorted(listed) == sorted(rooms)
