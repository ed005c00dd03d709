"""A claim, and whether the numbers bear it out: computed by the rule that it states."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from studies.study.tables import markdown_table

OUTCOME = {True: "yes", False: "no", None: "–"}


class Verdict(NamedTuple):
    """A claim, the rule by which it is judged, the numbers, and the outcome: None if unknown."""

    claim: str
    rule: str
    measured: str
    holds: bool | None


def verdicts_html(found: Sequence[Verdict], caption: str) -> str:
    """Show every claim with its outcome on a page."""
    wrapped = 'style="white-space: normal; text-align: left; vertical-align: top"'
    body = "".join(
        f'<tr><th scope="row" {wrapped}>{OUTCOME[v.holds]}</th><td {wrapped}>{escape(v.claim)}</td>'
        f"<td {wrapped}>{escape(v.measured)}. <em>Holds if: {escape(v.rule)}.</em></td></tr>"
        for v in found
    )
    return f"""<h2>Does it hold?</h2>
<div class="scroll"><table><caption>{escape(caption)}</caption>
<thead><tr><th scope="col"></th><th {wrapped}>claim</th><th {wrapped}>measured</th></tr></thead>
<tbody>{body}</tbody></table></div>"""


def verdicts_markdown(found: Sequence[Verdict]) -> str:
    """Return all claims as a Markdown table."""
    rows = ([OUTCOME[v.holds], v.claim, v.measured, v.rule] for v in found)
    return markdown_table(("", "claim", "measured", "holds if"), rows)
