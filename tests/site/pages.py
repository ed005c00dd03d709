"""Run the code of the documentation: how the blocks of a page are read, run and compared.

The Python blocks of a page run in order, in one namespace and in an empty folder. A page that
speaks of "your model" starts with names that a function in page_fixtures.py provides. A block
`output` holds what the block before it prints.
"""

from __future__ import annotations

import contextlib
import io
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import torch

import results

ROOT = Path(__file__).parents[2]
NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")

Names = dict[str, Any]


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    language: str
    text: str
    line: int


def blocks(page: Path) -> list[Block]:
    """Return all fenced blocks of a page."""
    text = page.read_text(encoding="utf-8")
    fences = re.finditer(r"^```([a-z]*)\n(.*?)^```$", text, flags=re.M | re.S)
    return [Block(m[1], m[2], text[: m.start()].count("\n") + 2) for m in fences]


def name(page: Path) -> str:
    """Return the name of a page: its path, from docs where it is there."""
    return page.relative_to(ROOT).as_posix().removeprefix("docs/")


def pages(*languages: str) -> list[Path]:
    """Return all pages that have blocks in these languages."""
    return [p for p in results.pages() if any(b.language in languages for b in blocks(p))]


@dataclass(frozen=True)
class Fixture:
    """What a page needs: names to start with, packages, and checks of the names at the end."""

    make: Callable[[], Iterator[Names]]
    packages: tuple[str, ...]


FIXTURES: dict[str, Fixture] = {}

# Pages with a network that trains differently on other processors, and by how much the decimals of
# their outputs may differ. Found by running all pages with ATEN_CPU_CAPABILITY=default.
VARYING = {"tutorials/image-model.md": 0.1}


def fixture(page: str, *packages: str) -> Callable[[Callable[[], Iterator[Names]]], Any]:
    """Register a generator that yields the names a page starts with, and then checks them."""

    def register(make: Callable[[], Iterator[Names]]) -> Callable[[], Iterator[Names]]:
        FIXTURES[page] = Fixture(make, packages)
        return make

    return register


def run(page: Path) -> None:
    """Run all Python blocks of a page, and compare what they print with its output blocks."""
    known = FIXTURES.get(name(page), Fixture(lambda: iter([{}]), ()))
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of other packages, and about few validation data
        for package in known.packages:
            pytest.importorskip(package)
        torch.manual_seed(0)
        prepared = known.make()
        names = next(prepared)
        printed = ""
        for block in blocks(page):
            if block.language == "python":
                printed = _run(block, page, names)
            elif block.language == "output" and has_pinned_torch():
                compare(printed, block.text, VARYING.get(name(page), 0.0))
        next(prepared, None)  # the checks behind `yield`


def _run(block: Block, page: Path, names: Names) -> str:
    """Run a block so that a traceback shows the line of the page."""
    code = compile("\n" * (block.line - 1) + block.text, str(page), "exec")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(code, names)
    return printed.getvalue()


def has_pinned_torch() -> bool:
    """Return whether networks train as they did for the outputs in the pages."""
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    return f"torch=={torch.__version__.partition('+')[0]}" in pins


def compare(printed: str, shown: str, error: float = 0.0) -> None:
    """Require the same words and whole numbers, and nearly the same decimals.

    Decimals come from trained networks, which depend on the processor in their last digits: they
    may differ by two units of the last digit shown, by 2 %, or by `error`. With another version of
    torch than the pinned one, outputs are not compared.
    """
    assert _words(printed) == _words(shown)
    for ours, theirs in zip(NUMBER.findall(printed), NUMBER.findall(shown), strict=True):
        number, expected = (Decimal(each.replace(",", "")) for each in (ours, theirs))
        unit = 10.0 ** int(expected.as_tuple().exponent)  # of the last digit
        near = pytest.approx(float(expected), rel=0.02, abs=max(2 * unit, error))
        same = number == expected if unit >= 1 else float(number) == near
        assert same, f"{ours}, shown as {theirs}"


def _words(text: str) -> list[str]:
    lines = [NUMBER.sub("0", line) for line in text.strip().splitlines()]
    return [re.sub(r"[-─\s]+", " ", line).strip() for line in lines]
