"""How large the project is, and how far one has to read: `python -m benchmarks.house`.

Prints the table that CONTRIBUTING.md shows. What a prediction passes is counted by
tests/test_locality.py.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

import acnml

ROOT = Path(__file__).parents[1]
LIBRARY = ROOT / "src" / "acnml"
INTEGRATIONS = (
    *("sklearn", "transformers", "lightning", "torchmetrics", "laplace_torch", "plots"),
    *("scoring", "ray", "cli"),
)


def lines(files: Iterable[Path]) -> int:
    """Count the lines of files."""
    return sum(len(path.read_text().splitlines()) for path in files)


def words(files: Iterable[Path]) -> int:
    """Count the words of pages, as `wc -w` does."""
    return sum(len(path.read_text().split()) for path in files)


def imports() -> dict[str, set[str]]:
    """Return which modules of the library every module imports when it is imported itself."""
    paths = {_name(path): path for path in LIBRARY.rglob("*.py")}
    found = {}
    for name, path in paths.items():
        named = set[str]()
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Import):
                named |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                full = {f"{node.module}.{alias.name}" for alias in node.names}
                named |= {each if each in paths else str(node.module) for each in full}
        found[name] = {each for each in named if each in paths and each not in ("acnml", name)}
    return found


def longest_chain(known: Mapping[str, set[str]]) -> tuple[str, ...]:
    """Return the longest chain of imports."""

    @cache
    def below(name: str) -> tuple[str, ...]:
        return name, *max(map(below, known[name]), key=len, default=())

    return max((below(name) for name in known if name != "acnml"), key=len)


def _name(path: Path) -> str:
    parts = ("acnml", *path.relative_to(LIBRARY).with_suffix("").parts)
    return ".".join(part for part in parts if part != "__init__")


def table() -> dict[str, int]:
    """Return what is counted."""
    sources = list(LIBRARY.rglob("*.py"))
    others = [p for p in sources if p.relative_to(LIBRARY).parts[0].split(".")[0] in INTEGRATIONS]
    pages = [p for p in (ROOT / "docs").rglob("*.md") if "results" not in p.parts]
    pages = [p for p in pages if p.parent.name != "gallery" or p.name == "index.md"]  # others: made
    refusals = re.compile(r"\braise \w*(?:Error|Failure)\b")
    return {
        "lines of src": lines(sources),
        "of these, integrations, scoring and commands": lines(others),
        "lines of tests": lines((ROOT / "tests").rglob("*.py")),
        "names in `acnml`": len(acnml.__all__),
        "longest chain of imports": len(longest_chain(imports())),
        "`raise` statements": sum(len(refusals.findall(p.read_text())) for p in sources),
        "words of the README": words([ROOT / "README.md"]),
        "words of docs, without results": words(pages),
    }


if __name__ == "__main__":
    for what, number in table().items():
        print(f"| {what} | {number:,} |")
