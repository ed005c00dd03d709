"""Numbers of the pages: queries and tables from docs/results, measurements, and none typed."""

from __future__ import annotations

import csv
import json
import re

import pytest

import pages
import results
import values
from benchmarks.recording import MEASUREMENTS, record, recorded
from tables import TABLES, lowest_bold

TOY = "toy/results.csv"


def numbers(column: str, **conditions: str) -> list[float]:
    """Read the file in another way than the extension does."""
    with (results.RESULTS / TOY).open(newline="") as lines:
        rows = [row for row in csv.DictReader(lines) if conditions.items() <= row.items()]
    return [float(row[column]) for row in rows]


def test_statistics_are_of_the_selected_rows():
    found = numbers("confidence", sample="separable", method="CNMAP")
    query = f"{TOY} confidence sample=separable method=CNMAP"
    assert len(found) == 3
    assert results.evaluate(f"mean {query}") == (pytest.approx(sum(found) / 3, rel=1e-12),)
    assert results.evaluate(f"max {query}") == (max(found),)
    assert results.evaluate(f"min {query}") == (min(found),)
    assert results.evaluate(f"count {query}") == (3,)
    (one,) = numbers("confidence", sample="separable", method="CNMAP", **{"lambda": "0.1"})
    assert results.evaluate(f"only {query} lambda=0.10") == (one,)  # as a number


def test_a_number_keeps_its_form():
    query = f"<!-- only {TOY} white_share sample=separable method=CNML -->"
    share = numbers("white_share", sample="separable", method="CNML")[0]
    assert results.filled(f"a 0.1{query} b") == f"a {share:.1f}{query} b"
    assert results.filled(f"9.9999{query}") == f"{share:.4f}{query}"
    assert (
        results.filled(f"1 %{query}, 2{query}") == f"{100 * share:.0f} %{query}, {share:.0f}{query}"
    )
    assert results.like(1234.5, "1") == "1,234"


@pytest.mark.parametrize("text", ["1, 2", "in 2021, 1, 2, 3", "1 and 2 / 3"])
def test_a_query_returns_as_many_numbers_as_are_in_front_of_it(text):
    query = "<!-- toy confidence separable -->"
    assert results.filled(f"in 2021 1 / 2 / 3{query}").startswith("in 2021 ")
    with pytest.raises(ValueError, match="3 numbers for"):
        results.filled(f"{text}{query}")


def test_scores_of_cifar_10_c_are_those_of_its_report():
    report = "with SWAG-D has a lower ECE than SWA and SWAG-D. ... ACNML-SWAGD {} / {};"
    expected = results.evaluate(f'quote cifar10-c/results.md "{report}"')
    assert results.evaluate("cifar ece ACNML-SWAGD 4 5") == pytest.approx(expected, abs=5e-4)
    report = (
        "ACNML-KFAC has a lower ECE under strong corruption than SWA-Temp. ... for {} / {} of 15"
    )
    expected = results.evaluate(f'quote cifar10-c/results.md "{report}"')
    assert results.evaluate("cifar-lower ece ACNML-KFAC SWA-Temp 4 5") == expected


def test_scores_of_rotated_mnist_are_those_of_its_report():
    report = "With Bayes by Backprop, ACNML has a lower ECE ... MAP {}, BMA {}, ACNML {}; below"
    expected = results.evaluate(f'quote rotated-mnist/results.md "{report}"')
    query = "mnist rotated-mnist 10000 ece 45+ MAP BMA linearised"
    assert results.evaluate(query) == pytest.approx(expected, abs=5e-4)
    lower = "mnist-lower rotated-mnist 10000 ece 45+ linearised MAP BMA"
    assert results.evaluate(lower) == results.evaluate("angles rotated-mnist 10000 45+") == (10,)


@pytest.mark.parametrize(
    ("query", "problem"),
    [
        ("mean nowhere.csv ece", "nowhere.csv"),
        (f"mean {TOY} ece", "no column 'ece'"),
        (f"mean {TOY} confidence colour=red", "no column 'colour'"),
        (f"mean {TOY} confidence method=none", "no row with"),
        (f"only {TOY} confidence", "expects one value"),
        (f"mean {TOY}", "not a query"),
        ("cifar-lowr ece ACNML-SWAGD SWA 4", "not a query: 'cifar-lowr"),
        ("the year", "not a query"),
    ],
)
def test_wrong_queries_are_refused(query, problem):
    with pytest.raises((ValueError, OSError), match=problem):
        results.filled(f"0.5<!-- {query} -->")


def test_a_table_replaces_what_stood_there():
    text = "<!-- table: theory -->\nold\n<!-- end table -->"
    filled = results.filled(text)
    assert filled == f"<!-- table: theory -->\n\n{TABLES['theory']()}\n\n<!-- end table -->"
    assert results.filled(filled) == filled
    with pytest.raises(ValueError, match="no table is named 'nothing'"):
        results.filled("<!-- table: nothing -->\n<!-- end table -->")


@pytest.mark.parametrize("name", TABLES)
def test_tables_are_rectangular(name):
    lines = TABLES[name]().splitlines()
    assert len({line.count("|") for line in lines}) == 1
    assert len(lines) > 2
    assert "nan" not in " ".join(lines)


def test_the_lowest_is_bold_as_it_is_printed():
    assert lowest_bold([0.2, 0.1004, 0.1]) == ["0.200", "**0.100**", "**0.100**"]
    assert lowest_bold([0.1, 0.1]) == ["0.100", "0.100"]
    assert results.markdown(["a", "b"], [["x", "1"]]) == "| a | b |\n| --- | ---: |\n| x | 1 |"


def test_a_ratio_is_of_two_rows():
    low, high = numbers("confidence", sample="separable", method="CNMAP")[::2]
    rows = "sample=separable method=CNMAP lambda"
    query = f"ratio {TOY} confidence {rows}=0.1 over {rows}=10"
    assert results.evaluate(query) == (low / high,)


def test_numbers_of_a_benchmark_are_combined_from_left_to_right():
    found = json.loads((results.ROOT / "benchmarks" / "scoring.json").read_text())["ray"]
    rows, alone = found["rows"], found["local, two threads"]
    query = 'benchmark scoring.json ray/rows over "ray/local, two threads/rows_per_s"'
    assert results.evaluate(query) == (rows / alone["rows_per_s"],)
    more = f'{query} times 2 plus "ray/local, two threads/start"'
    assert results.evaluate(more) == (2 * rows / alone["rows_per_s"] + alone["start"],)


def test_every_claim_of_the_paper_has_a_verdict_and_a_scale():
    """All other rows of the tables say that they judge nothing."""
    text = re.sub(r"<!--.*?-->", "", (results.ROOT / "docs/paper.md").read_text(encoding="utf-8"))
    tables = [values.cells(line) for line in text.splitlines() if line.startswith("|")]
    rows = [row for row in tables if len(row) == 5 and row[0] != "the paper"]
    rows = [row for row in rows if not row[0].startswith("---")]
    judged = values.verdict_cells()
    assert [row for row in rows if row not in judged and row[1] != "–"] == []
    assert {row[4] for row in judged} == {"paper's", "reduced", "–"}
    assert all((row[4] == "–") == (row[1] == "not run") for row in judged)
    counts = [values.verdicts(verdict)[0] for verdict in values.VERDICTS]
    assert sum(counts) == len(judged) > 60
    scaled = [sum(values.verdicts(v, s)[0] for v in values.VERDICTS) for s in ("paper's", "red")]
    assert sum(scaled) + values.verdicts("not run")[0] == len(judged)


# Measurements


def test_rows_are_read_as_they_were_recorded(tmp_path):
    rows = [{"name": "a, b", "ms": 1 / 3, "count": 10**9}, {"name": "c", "more": 2.0}]
    record(tmp_path / "new" / "file.csv", rows)
    first, second = recorded(tmp_path / "new" / "file.csv")
    assert first == {"name": "a, b", "ms": "0.333333", "count": "1000000000", "more": ""}
    assert second == {"name": "c", "ms": "", "count": "", "more": "2"}
    assert recorded(tmp_path / "none.csv") == []


def test_a_command_writes_every_measurement():
    """A page that reads the file is no proof that a command writes it."""
    folders = ("benchmarks", "fuzz", "examples")
    sources = [path for folder in folders for path in (results.ROOT / folder).rglob("*.py")]
    text = "".join(path.read_text("utf-8") for path in sources)
    assert [file.name for file in MEASUREMENTS.glob("*.csv") if file.name not in text] == []


# Typed numbers

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
