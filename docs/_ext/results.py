"""Numbers in the pages come from the files of results.

A number is followed by a comment with a query, and a table stands between two comments:

    ECE falls to 0.113<!-- mean evidence/metrics.csv ece network=resnet20 shift=fog -->

    <!-- table: gain -->
    ...
    <!-- end table -->

Comments are not shown, so pages read well as plain Markdown. The build of the site computes every
number and table anew from docs/results. `python docs/_ext/results.py` writes them into the pages,
and tests/site/test_pages.py fails if a page is not current.

A query is a statistic (`mean`, `max`, `min`, `count` or `only`), a file, a column, and conditions
`column=value` on the rows. Or it is one of `VALUES` in values.py, with its arguments: these can
return several numbers, for several numbers in front of the comment:

    ECE 0.172 / 0.249<!-- cifar ece ACNML-SWAGD 4 5 -->

A comment directly behind a number must be a query, and must return as many numbers as are separated
by commas or slashes in front of it. Other comments are left alone.

Values with spaces are quoted. A number is shown as it was written: with the same number of
decimals, and as a percentage if a percent sign follows it.
"""

from __future__ import annotations

import csv
import re
import shlex
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results"

Row = dict[str, str]

_DIGITS = r"\d+(?:,\d{3})*(?:\.\d+)?"
NUMBER = re.compile(rf"(?P<number>{_DIGITS})(?P<percent> ?%)?")
QUERY = re.compile(
    rf"(?<![\d.,])(?P<numbers>{_DIGITS}(?: ?%)?(?:(?:\s/\s|,\s){_DIGITS}(?: ?%)?)*)"
    r"(?P<comment><!-- (?P<query>.*?) -->)",
    re.S,
)
COMMENT = re.compile(r"<!--(.*?)-->", re.S)
TABLE = re.compile(r"(<!-- table: (?P<name>\S+) -->\n)(?P<old>.*?)(<!-- end table -->)", re.S)


def _only(values: list[float]) -> float:
    if len(set(values)) != 1:
        raise ValueError(f"`only` expects one value, not {len(set(values))}")
    return values[0]


STATISTICS: dict[str, Callable[[list[float]], float]] = {
    "mean": statistics.fmean,
    "max": max,
    "min": min,
    "count": lambda values: float(len(values)),
    "only": _only,
}


@cache
def read(file: str) -> tuple[Row, ...]:
    """Return the rows of a CSV file in docs/results."""
    with (RESULTS / file).open(newline="", encoding="utf-8") as lines:
        return tuple(csv.DictReader(lines))


def select(file: str, **conditions: str | float) -> list[Row]:
    """Return the rows with these values. Numbers are compared as numbers.

    Raises:
        ValueError: if there are none, or if the file has no such column.
    """
    rows = read(file)
    unknown = set(conditions) - set(rows[0])
    if unknown:
        raise ValueError(f"{file} has no column {sorted(unknown)[0]!r}")
    found = list(rows)
    for column, wanted in conditions.items():
        texts = {text for text in {row[column] for row in found} if _equal(text, wanted)}
        found = [row for row in found if row[column] in texts]
    if not found:
        raise ValueError(f"{file} has no row with {conditions}")
    return found


def _equal(text: str, wanted: str | float) -> bool:
    try:
        return float(text) == float(wanted)
    except ValueError:
        return text == str(wanted)


def evaluate(query: str) -> tuple[float, ...]:
    """Return the numbers that a query asks for.

    Raises:
        ValueError: if the query cannot be read, or selects nothing.
    """
    from values import VALUES

    name, *words = shlex.split(query)
    if name in VALUES:
        return tuple(VALUES[name](*words))
    if name not in STATISTICS or len(words) < 2 or not all("=" in w for w in words[2:]):
        raise ValueError(f"not a query: {query!r}")
    file, column = words[:2]
    rows = select(file, **dict(word.split("=", 1) for word in words[2:]))
    if column not in rows[0]:
        raise ValueError(f"{file} has no column {column!r}")
    return (STATISTICS[name]([float(row[column]) for row in rows]),)


def is_query(comment: str) -> bool:
    """Return whether a comment is a query, by its first word."""
    from values import VALUES

    return next(iter(comment.split()), "") in {*STATISTICS, *VALUES}


def like(value: float, written: str) -> str:
    """Return a number with the decimals and the thousands separators of another."""
    decimals = len(written.partition(".")[2])
    return f"{value:,.{decimals}f}"


def lowest_bold(values: Sequence[float]) -> list[str]:
    """Return numbers with three decimals, the lowest in bold; none if all look the same."""
    texts = [f"{value:.3f}" for value in values]
    best = min(texts, key=float)
    return texts if set(texts) == {best} else [f"**{t}**" if t == best else t for t in texts]


def markdown(head: Sequence[str], lines: Iterable[Sequence[str]], left: int = 1) -> str:
    """Return a table whose first `left` columns are text, and whose others are numbers."""
    rule = ["---"] * left + ["---:"] * (len(head) - left)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, rule, *lines))


def filled(text: str) -> str:
    """Return the text of a page with all numbers and tables computed from the results.

    Raises:
        ValueError: if a query or the name of a table is wrong, if a comment behind a number is no
            query, or if a query does not return as many numbers as stand in front of it.
    """
    from tables import TABLES

    for comment in COMMENT.findall(QUERY.sub("", text)):
        if is_query(comment):
            raise ValueError(f"there is no number directly in front of the query: {comment}")

    def numbers(match: re.Match[str]) -> str:
        written, values = list(NUMBER.finditer(match["numbers"])), evaluate(match["query"])
        if len(values) != len(written):
            raise ValueError(f"{len(values)} numbers for {match['numbers']!r}: {match['query']}")
        text = match["numbers"]
        for old, value in reversed(list(zip(written, values, strict=True))):
            percent = old["percent"] or ""
            new = like(value * (100 if percent else 1), old["number"]) + percent
            text = text[: old.start()] + new + text[old.end() :]
        return text + match["comment"]

    def table(match: re.Match[str]) -> str:
        if match["name"] not in TABLES:
            raise ValueError(f"no table is named {match['name']!r}; there are {sorted(TABLES)}")
        return f"{match[1]}\n{TABLES[match['name']]()}\n\n{match[4]}"

    return TABLE.sub(table, QUERY.sub(numbers, text))


def pages() -> list[Path]:
    """Return all pages with text of their own: the README, and docs without the results."""
    found = sorted((ROOT / "docs").rglob("*.md"))
    return [ROOT / "README.md", *(page for page in found if RESULTS not in page.parents)]


def main() -> None:
    """Write current numbers and tables into all pages, and name the pages that changed."""
    for page in pages():
        text = page.read_text(encoding="utf-8")
        if filled(text) != text:
            page.write_text(filled(text), encoding="utf-8")
            sys.stdout.write(f"updated {page.relative_to(ROOT)}\n")


def setup(app: Any) -> dict[str, Any]:
    """Called by Sphinx."""

    def fill(app: Any, name: str, source: list[str]) -> None:
        source[0] = filled(source[0])

    app.connect("source-read", fill)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


if __name__ == "__main__":
    main()
