"""Keep what a benchmark measured as a CSV file, from which the pages of the site are filled."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path

from studies.files import write_file

RESULTS = Path(__file__).parents[1] / "docs" / "results"
MEASUREMENTS = RESULTS / "measurements"


def record(file: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Write rows to a CSV file; numbers have six significant digits."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: _short(value) for key, value in row.items()} for row in rows)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_file(file, text.getvalue().encode())


def recorded(file: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file, or none if there is no file."""
    if not file.exists():
        return []
    with file.open(newline="", encoding="utf-8") as lines:
        return list(csv.DictReader(lines))


def _short(value: object) -> object:
    return f"{value:.6g}" if isinstance(value, float) else value
