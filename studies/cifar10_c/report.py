"""The study's page, figures and tables, from what is finished; it says what is missing."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from matplotlib.figure import Figure

from acnml.cli._shared.page import page
from studies.cifar10_c import figures, methods, sections
from studies.cifar10_c.looks import (
    BUDGET_GROUP,
    NEAR_GROUP,
    PAPER_GROUP,
    paper_group,
    sees_enough,
)
from studies.cifar10_c.results import STUDY, Results
from studies.cifar10_c.tables import (
    agreement_table,
    all_clean_table,
    choice_table,
    clean_table,
    severity_table,
    timing_table,
    write_tables,
)
from studies.cifar10_c.verdict import common_images, hard_means, verdicts
from studies.study.report import footer, write_pages
from studies.study.tables import TITLES, markdown_table, unfinished_html
from studies.study.verdict import verdicts_html, verdicts_markdown

TITLE = "Photographs that fade away"
# What is drawn against severity: methods, and the scores that say something about them.
GROUPS = {
    "paper": (PAPER_GROUP, tuple(TITLES)),
    "budget": (BUDGET_GROUP, ("ece", "nll")),
    "near": (NEAR_GROUP, ("ece", "nll")),
}
CAPTION = (
    "What the paper’s CIFAR experiments say, and what was measured here; a claim is judged by the "
    "rule it states."
)


def write_report(results: Results, folder: Path) -> Path:
    """Write report.html, figures (PNG and SVG), tables and results.md; return the page's path."""
    write_tables(results, folder)
    return write_pages(folder, all_figures(results), markdown(results), partial(report, results))


def all_figures(results: Results) -> dict[str, Figure]:
    """Draw all that there are numbers for."""
    if not results.rows:
        return {}
    drawn: dict[str, Figure] = {}
    for group, (members, scores) in GROUPS.items():
        there = paper_group(results.study) if group == "paper" else members
        n = common_images(results, there)
        for score in scores:
            title = TITLES[score]
            drawn[f"{group}-lines-{score}"] = figures.lines(results, there, score, title, n)
            if group == "paper":
                drawn[f"boxes-{score}"] = figures.boxes(results, there, score, title, n)
    diagrams = {method.name: method for method in (*PAPER_GROUP[1:], *NEAR_GROUP[2:])}
    for name, method in diagrams.items():
        known = any(drawn_for == name for drawn_for, _ in results.diagrams)
        if known and sees_enough(method, results.study):
            word = "-".join(name.lower().replace("'", "").replace(",", "").split())
            drawn[f"reliability-{word}"] = figures.reliability(results, method)
    if results.sweep:
        drawn["frontier"] = figures.frontier(results)
    return drawn


def report(results: Results, drawn: dict[str, str]) -> str:
    """Return the page."""
    parts = [
        unfinished_html(results.missing),
        sections.what_was_done(results),
        sections.in_distribution(results),
        sections.corrupted(results, drawn),
        sections.at_the_same_price(results, drawn),
        sections.frontier(results, drawn),
        sections.reliability(drawn),
        sections.knobs(results),
        sections.steps(results),
        sections.timing(results),
        verdicts_html(verdicts(results), CAPTION),
        footer(STUDY, results.study.seeds),
    ]
    return page(TITLE, headline(results), parts)


def headline(results: Results) -> str:
    """Say in one sentence what the numbers show."""
    shown = {
        "SWA": methods.MAP_SWA,
        "SWA-Temp": methods.TEMPERED,
        "SWAG-D": methods.BMA_SWAG_D,
        "ACNML-SWAGD": methods.ACNML_SWAG_D_PAPERS,
        "ACNML-KFAC": methods.ACNML_KFAC_PAPERS,
        "ACNML on the last layer": methods.ACNML_HEAD,
    }
    n = common_images(results, list(shown.values()))
    means = hard_means(results, list(shown.values()), n)
    if means is None:
        return f"{results.data.note} The study is not finished: what follows is what there is."
    each = (f"{name} {sum(m) / len(m):.3f}" for name, m in zip(shown, means, strict=True))
    return f"Under strong corruption (4 and 5) the mean calibration error is: {', '.join(each)}."


def markdown(results: Results) -> str:
    """Return the main numbers as a Markdown page, small enough to keep beside the code."""
    parts = [
        "# CIFAR-10-C: results",
        "Written by `acnml reproduce cifar10-c`; its story is docs/cifar10-c.md.",
        sections.plainly(results),
        *([f"**{len(results.missing)} pieces are not finished.**"] if results.missing else []),
        "## Does it hold?",
        verdicts_markdown(verdicts(results)),
        "## Clean images",
        sections.spread(results),
        markdown_table(*clean_table(results)),
        "The cheap methods, on all clean images:",
        markdown_table(*all_clean_table(results)),
        "## Mean ECE over corruptions, by severity",
        markdown_table(*severity_table(results, "ece")),
        "## Mean NLL over corruptions, by severity",
        markdown_table(*severity_table(results, "nll")),
        "## Knobs of the first seed",
        markdown_table(*choice_table(results)),
        "## The paper's gradient steps against the fast solution",
        markdown_table(*agreement_table(results)),
        sections.unsolved(results),
        "## Time for an image",
        markdown_table(*timing_table(results)),
    ]
    return "\n\n".join(parts) + "\n"
