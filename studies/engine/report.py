"""The report of a study: report.html, results.md, figures (PNG and SVG) and CSV files.

A report is made from what is finished, and says what is missing. The page and results.md show the
same sections; results.md leaves out the figures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias, final

from matplotlib.figure import Figure

from studies.drawing import to_svg
from studies.engine.claims import Verdict, verdicts
from studies.engine.figures import svg, write_figures
from studies.engine.results import Results
from studies.engine.study import Study
from studies.engine.tables import Table, write_csv, write_tables
from studies.files import write_file
from studies.page import inline, page
from studies.store.store import versions

OUTCOME = {True: "yes", False: "no", None: "–"}
SHOWN_MISSING = 12
PAPER = "*Amortized Conditional Normalized Maximum Likelihood*"


# The columns and the rows of a CSV file.
Numbers: TypeAlias = tuple[Sequence[str], Sequence[Sequence[object]]]


class Panels(NamedTuple):
    """Figures that are shown together, with one caption."""

    figures: Mapping[str, Figure]
    caption: str
    layout: Literal["panels", "small panels", "scroll"] = "panels"


@final
@dataclass(frozen=True, eq=False)
class Section:
    """A section of the report: paragraphs, figures and tables, in this order.

    In paragraphs and captions `*…*` is emphasis and `**…**` is strong. `numbers` are CSV files that
    are written beside the report: columns and rows by file name. `more` is further HTML, which
    results.md leaves out.
    """

    heading: str
    text: Sequence[str] = ()
    panels: Sequence[Panels] = ()
    tables: Sequence[Table] = field(default_factory=tuple)
    numbers: Mapping[str, Numbers] = field(default_factory=dict)
    more: str = ""

    def html(self, documents: Mapping[str, str]) -> str:
        """Return the section of the page; `documents` are the figures as SVG."""
        parts = [f"<h2>{escape(self.heading)}</h2>"]
        parts += [f"<p>{inline(paragraph)}</p>" for paragraph in self.text]
        for some in (each for each in self.panels if each.figures):
            figures = "".join(svg(name, documents[name]) for name in some.figures)
            caption = f"<figcaption>{inline(some.caption)}</figcaption>"
            parts.append(f'<figure><div class="{some.layout}">{figures}</div>\n{caption}</figure>')
        parts += [table.html() for table in self.tables if table.rows]
        parts += [self.more] if self.more else []
        return "\n".join(parts) if len(parts) > 1 else ""

    def markdown(self) -> str:
        """Return the section of results.md."""
        tables = [table.markdown() for table in self.tables if table.rows]
        if not (self.text or tables):
            return ""
        return "\n\n".join([f"## {self.heading}", *self.text, *tables])


def write_report(results: Results, folder: Path) -> Path:
    """Write all files of the report and return the path of the page."""
    sections = sections_of(results)
    write_tables(results, folder)
    for name, table in (pair for section in sections for pair in section.numbers.items()):
        write_csv(folder / name, *table)
    documents = write_figures(drawn(sections), folder)
    write_file(folder / "results.md", markdown(results, sections).encode())
    html = page(
        results.study.title,
        headline(results),
        [
            f"<p>{escape(results.data.note)}</p>",
            unfinished(results.missing),
            *(section.html(documents) for section in sections),
            verdicts_html(verdicts(results)),
            footer(command_of(results.study), f"Seeds {', '.join(map(str, results.study.seeds))}."),
        ],
    )
    return write_file(folder / "report.html", html.encode())


def sections_of(results: Results) -> list[Section]:
    """Return the study's sections, or the standard ones; none while nothing is finished."""
    from studies.engine.sections import standard

    if not (results.rows or results.extras):
        return []
    return (results.study.sections or standard)(results)


def headline(results: Results) -> str:
    """Return the study's sentence about its results, or say that it is not finished."""
    study = results.study
    found = study.headline(results) if study.headline else ""
    if found:
        return found
    if results.missing:
        return f"{results.data.note} The study is not finished; the results so far are below."
    judged = [verdict.holds for verdict in verdicts(results)]
    return f"{judged.count(True)} of {len(judged)} claims hold." if judged else results.data.note


def command_of(study: Study) -> str:
    """Return the command that runs a study."""
    return study.command or f"python -m studies {study.name}"


def written_by(command: str) -> str:
    """Say which command, without its folder, and which version of the code wrote a report."""
    code = versions()
    commit = f", commit {code['commit']}" if "commit" in code else ""
    return f"`{command}`, acnml {code['acnml']}{commit}"


def markdown(results: Results, sections: Sequence[Section]) -> str:
    """Return results.md."""
    page = f" {results.study.page} explains the results." if results.study.page else ""
    parts = [
        f"# {results.study.title}: results",
        f"Written by {written_by(command_of(results.study))}.{page}",
        f"{results.data.note} Seeds: {len(results.study.seeds)}.",
        *([f"**{len(results.missing)} stages are not finished.**"] if results.missing else []),
        "## Claims",
        verdicts_table(verdicts(results)).markdown(),
        *(section.markdown() for section in sections),
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


# Parts of the page -----------------------------------------------------------------------------


def unfinished(names: Sequence[str]) -> str:
    """Say on a page what is not finished, if anything."""
    if not names:
        return ""
    listed = ", ".join(escape(name) for name in names[:SHOWN_MISSING])
    rest = len(names) - SHOWN_MISSING
    more = f" and {rest} more, with everything that depends on them" if rest > 0 else ""
    return (
        f"<p><strong>Not finished:</strong> {listed}{more}. Run the same command again to "
        "continue; the numbers and figures below leave them out.</p>"
    )


def verdicts_table(found: Sequence[Verdict]) -> Table:
    """Return all claims as a table."""
    rows = [[OUTCOME[v.holds], v.claim, v.measured, v.rule] for v in found]
    return Table("", ("holds", "claim", "measured", "holds if"), rows)


def verdicts_html(found: Sequence[Verdict]) -> str:
    """Show every claim with its outcome on a page."""
    if not found:
        return ""
    wrapped = 'style="white-space: normal; text-align: left; vertical-align: top"'
    body = "".join(
        f'<tr><th scope="row" {wrapped}>{OUTCOME[v.holds]}</th><td {wrapped}>{escape(v.claim)}</td>'
        f"<td {wrapped}>{escape(v.measured)}. <em>Holds if: {escape(v.rule)}.</em></td></tr>"
        for v in found
    )
    head = f'<th scope="col">holds</th><th {wrapped}>claim</th><th {wrapped}>measured</th>'
    return f"""<h2>Claims</h2>
<div class="scroll"><table><caption>Each claim is judged by the rule that it states.</caption>
<thead><tr>{head}</tr></thead>
<tbody>{body}</tbody></table></div>"""


def footer(command: str, note: str = "") -> str:
    """Say on a page how it was made."""
    text = f"Written by {written_by(command)}. {note} Method: Zhou & Levine, {PAPER}, ICML 2021."
    return f"<footer><p>{inline(text)}</p></footer>"


@final
@dataclass(frozen=True, eq=False)
class ShortReport:
    """The report of a study that runs in one go.

    Attributes:
        title: of the page.
        finding: in one sentence or a few.
        sections: in their order. Their figures are written beside the report.
        command: that wrote it.
        numbers: CSV files that are written beside the report: columns and rows by file name.
        claims: judged, if there are some.
        note: for the foot of the page.
        appendix: further paragraphs of results.md, which the page leaves out.
    """

    title: str
    finding: str
    sections: Sequence[Section]
    command: str
    numbers: Mapping[str, Numbers]
    claims: Sequence[Verdict] = ()
    note: str = ""
    appendix: Sequence[str] = ()

    def html(self) -> str:
        """Return the page."""
        return self._page(_documents(self.sections))

    def write(self, folder: Path) -> Path:
        """Write all files and return the path of the page."""
        documents = write_figures(drawn(self.sections), folder)
        for name, table in self.numbers.items():
            write_csv(folder / name, *table)
        write_file(folder / "results.md", self.markdown().encode())
        return write_file(folder / "report.html", self._page(documents).encode())

    def markdown(self) -> str:
        """Return results.md."""
        claims = ["## Claims", verdicts_table(self.claims).markdown()] if self.claims else []
        parts = [
            f"# {self.title}: results",
            f"Written by {written_by(self.command)}.",
            self.finding,
            *claims,
            *(section.markdown() for section in self.sections),
            *self.appendix,
        ]
        return "\n\n".join(filter(None, parts)) + "\n"

    def _page(self, documents: Mapping[str, str]) -> str:
        sections = [section.html(documents) for section in self.sections]
        foot = footer(self.command, self.note)
        return page(self.title, self.finding, [*sections, verdicts_html(self.claims), foot])


def _documents(sections: Sequence[Section]) -> dict[str, str]:
    return {name: to_svg(figure) for name, figure in drawn(sections).items()}


def drawn(sections: Sequence[Section]) -> dict[str, Figure]:
    """Return all figures of some sections, by name."""
    return {
        n: f for section in sections for some in section.panels for n, f in some.figures.items()
    }
