"""Results in the pages are inserted, not typed: other decimals are listed here."""

from __future__ import annotations

import re

import pytest

import pages
import results

# On any page: Python versions, items of the paper, prices in nats, and steps of a grid.
ANYWHERE = "3.10 3.11 3.1 3.2 0.01 0.003 0.03 0.1 0.3"

# Settings, definitions and examples of one page.
SETTINGS = {
    "cifar10-c.md": "0.25 0.5 0.05",
    "corruptions.md": "2.9",
    "howto/conformal.md": "0.90 1.6",
    "howto/playground.md": "20.19 22.12",
    "howto/set-the-price.md": "0.0100 0.0040",
    "paper.md": "0.05 0.5 1.5 0.25",
    "performance.md": "2.36",
    "reference/glossary.md": "0.80",
    "reference/stability.md": "1.0 0.2 3.13 2.6",
    "rotated-mnist.md": "0.5 0.9",
    "tutorials/first-network.md": "0.02",
}


def typed_decimals(text: str) -> list[str]:
    """Return the decimals outside of code, formulas, links, tables and queries."""
    text = re.sub(r"^ *```.*?^ *```", "", text, flags=re.M | re.S)
    text = results.TABLE.sub("", text)
    text = results.QUERY.sub("", text)
    for other in (r"<!--.*?-->", r"`[^`\n]*`", r"\]\([^)]*\)", r"\$[^$]*\$"):
        text = re.sub(other, "", text, flags=re.S)
    return re.findall(r"(?<![\w.])\d[\d,]*\.\d+(?![\w.]*\w)", text)


@pytest.mark.parametrize("page", results.pages(), ids=pages.name)
def test_results_are_not_typed(page):
    name = pages.name(page)
    known = f"{ANYWHERE} {SETTINGS.get(name, '')}".split()
    typed = [number for number in typed_decimals(page.read_text("utf-8")) if number not in known]
    assert typed == [], "add a query (CONTRIBUTING.md), or list a setting in this test"


def test_listed_numbers_are_there():
    for name, numbers in SETTINGS.items():
        text = (pages.ROOT / "docs" / name).read_text("utf-8")
        assert [n for n in numbers.split() if n not in typed_decimals(text)] == [], name
