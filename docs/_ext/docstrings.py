"""Docstrings are Google style with a little Markdown: make them reStructuredText for autodoc.

- An indented block behind an empty line is mathematics or code: it becomes a literal block.
- A Markdown table becomes a literal block, too.
- `|` and `(*` mean nothing in the text: |Σ| is a determinant, (*, in) a shape.
"""

from __future__ import annotations

import re
from typing import Any

from sphinx.application import Sphinx


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _escaped(line: str) -> str:
    """Return a line of text whose `|` and `(*` outside of backticks are no markup."""
    if line.lstrip().startswith((">>>", "...")):
        return line
    parts = re.split(r"(`[^`]*`)", line)
    parts[::2] = [part.replace("|", r"\|").replace("(*", r"(\*") for part in parts[::2]]
    return "".join(parts)


def as_rst(lines: list[str]) -> list[str]:
    """Return the lines with `::` in front of indented blocks and of Markdown tables."""
    found: list[str] = []
    last = ""  # the last line that is not empty
    literal: int | None = None  # the indentation of the text around the block that we are in
    for line in lines:
        is_table = line.lstrip().startswith("| ") or line.lstrip().startswith("|-")
        if literal is not None and line.strip() and _indent(line) <= literal and not is_table:
            literal = None
        starts = bool(found) and not found[-1].strip() and bool(line.strip())
        deeper = bool(last) and _indent(line) >= _indent(last) + 4
        if literal is None and starts and (is_table or deeper):
            literal = _indent(line) if is_table else _indent(last)
            found += [" " * literal + "::", ""]
        if line.strip():
            last = line
        if literal is None:
            line = _escaped(line)
        elif is_table:
            line = "    " + line
        found.append(line)
    return found


def prepared(what: str, lines: list[str]) -> list[str]:
    """Return the docstring of a property, function or class as napoleon can read it.

    Of the first line of a property, napoleon takes what stands before a colon for a type. So it
    gets an empty comment as the first line.
    """
    found = as_rst(lines)
    return ["..", "", *found] if what in ("attribute", "property") else found


def _process(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    lines[:] = prepared(what, lines)


def _skip(app: Sphinx, what: str, name: str, obj: Any, skip: bool, options: Any) -> bool | None:
    """Leave out fields of named tuples, and what scikit-learn adds to every estimator."""
    is_field = (getattr(obj, "__doc__", None) or "").startswith("Alias for field")
    return True if is_field or re.fullmatch(r"set_\w+_request", name) else None


def _signature(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, arguments: str, returns: str
) -> tuple[str, str] | None:
    """Leave out the arguments of protocols: nobody creates them."""
    return ("", returns) if arguments == "(*args, **kwargs)" else None


def setup(app: Sphinx) -> dict[str, Any]:
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", _process, priority=400)  # before napoleon
    app.connect("autodoc-skip-member", _skip)
    app.connect("autodoc-process-signature", _signature)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
