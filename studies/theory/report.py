"""The theory study's report: what is claimed, what was measured, where nothing is proven."""

from __future__ import annotations

from html import escape
from pathlib import Path

from matplotlib.figure import Figure

from acnml import __version__
from acnml.cli._shared.drawing import THEME, to_svg
from acnml.cli._shared.files import write_file
from acnml.cli._shared.page import inline_svg, page
from studies.theory import figures
from studies.theory.study import ACNML, INFLUENCE, MAP, METHODS, Findings
from studies.theory.summary import (
    COLUMNS,
    STEEP,
    bounds_verdict,
    closing_sentence,
    number,
    power,
    table,
)

TITLE = "How close does ACNML come to refitting?"
VARIABLES = {MAP: "map", INFLUENCE: "bma", ACNML: "acnml"}
SVG_COLOURS = {
    **{figures.COLOURS[method]: variable for method, variable in VARIABLES.items()},
    **THEME,
}
MEANING = {
    MAP: "the trained weights, not adapted at all.",
    INFLUENCE: "one Newton step from the trained weights, with the Hessian of the training loss "
    "alone. It is what one full step of ACNML gives.",
    ACNML: "the optimum of the query’s likelihood and a Gaussian around the trained weights, whose "
    "covariance is the inverse of that Hessian (Laplace), solved to the end.",
}


def write_report(findings: Findings, folder: Path) -> Path:
    """Write report.html into a folder and return its path."""
    return write_file(folder / "report.html", report(findings).encode())


def report(findings: Findings) -> str:
    """Return the page."""
    sections = [
        what_was_done(findings),
        weights(findings),
        predictions(findings),
        numbers(findings),
        verdicts(findings),
        footer(findings),
    ]
    return page(TITLE, closing_sentence(findings), sections)


# Sections --------------------------------------------------------------------------------------


def what_was_done(findings: Findings) -> str:
    """Explain the setting and the estimates."""
    study = findings.study
    return f"""<h2>What was done</h2>
<p>CNMAP refits the model for every label of every query. With n training points one more changes
the weights by about 1/n, and the paper’s section 3.3 says that ACNML gets this change right up to
something of the order 1/n². Here that is measured, for logistic regression with
{len(study.weights)} weights and the penalty {study.l2:g}·‖w‖², where refits are exact:
{study.queries} queries, each with both labels, and n from {study.sizes[0]:,} to
{study.sizes[-1]:,}. The queries are spread {study.spread:g} times as wide as the data, so some are
far out. Three estimates of the refitted weights are compared with the truth:</p>
{_definitions()}"""


def weights(findings: Findings) -> str:
    """Show errors and bounds of the parameters."""
    figure = figures.parameters(findings, "Largest error of the refitted weights")
    described = "Errors of the weights and their bounds against the number of training points"
    return f"""<h2>The weights</h2>
<figure><div class="scroll">{_svg("weights", figure, described)}</div>
<figcaption>Solid lines are the largest errors over all queries and labels, dashed lines the largest
bounds, in the colour of what they bound; the powers of n are fitted to the errors. Theorem 3.1
bounds the influence function, and is drawn where its condition holds for every query. The sharper
bounds are derived beside it, for the influence function and for ACNML.</figcaption></figure>"""


def predictions(findings: Findings) -> str:
    """Show errors and the bound of the log-probabilities."""
    figure = figures.log_probs(findings, "Largest error of the log-probabilities")
    described = "Errors of log-probabilities and their bound against the number of training points"
    return f"""<h2>The predictions</h2>
<figure><div class="scroll">{_svg("predictions", figure, described)}</div>
<figcaption>What a user sees: the difference between the normalised log-probabilities and those of
exact CNMAP. Proposition 3.2 turns the bound of ACNML’s weights into one of its
predictions.</figcaption></figure>"""


def numbers(findings: Findings) -> str:
    """Show the table of errors and bounds, and that of the constants."""
    return f"""<h2>The numbers</h2>
<p>Largest errors over {findings.study.queries} queries with both labels, each followed by its
bound: of the weights first, then of ACNML’s log-probabilities. “none” is where a condition fails
for some query.</p>
{_table(COLUMNS, table(findings))}
<p>The constants: r is the radius of the ball around the trained weights on which they
hold, C<sub>op</sub> bounds the inverse Hessian, L is the Hessian’s Lipschitz constant, s bounds the
shift of a refit; L<sub>h</sub>, C<sub>IJ</sub> and δ are those of Theorem 3.1, and “holds” is the
share of queries and labels that meet its condition.</p>
{_table(("n", "r", "C_op", "L", "s", "L_h", "C_IJ", "δ", "holds"), _constants(findings))}"""


def verdicts(findings: Findings) -> str:
    """Say which claims hold."""
    claims = [
        _rate_claim(findings),
        _bounds_claim(findings),
        _theorem_claim(findings),
        _sharper_claim(findings),
    ]
    items = "".join(f"<li>{claim}</li>" for claim in claims)
    return f"""<h2>What holds</h2>
<ul>{items}
<li>This is a theory of many data and few weights. At n = {findings.measured[0].n:,} ACNML’s
log-probabilities are still off by up to
{number(findings.measured[0].log_prob_errors[ACNML])}, and for networks, where n is not large
beside the number of weights, it promises nothing.</li></ul>"""


def footer(findings: Findings) -> str:
    """Say how the page was made."""
    command = f"python -m studies theory --seed {findings.study.seed}"
    return f"""<footer><p>Made by <code>{command}</code>, acnml {__version__}. Derivations:
<code>acnml.exact.theory</code>, after section 3.3 of Zhou &amp; Levine, <em>Amortized Conditional
Normalized Maximum Likelihood</em>, ICML 2021, and Giordano et al., <em>A Swiss Army Infinitesimal
Jackknife</em>, AISTATS 2019.</p></footer>"""


# Claims ----------------------------------------------------------------------------------------


def _rate_claim(findings: Findings) -> str:
    weights, log_probs = (
        ", ".join(f"{method} {power(slope(method))}" for method in METHODS)
        for slope in (findings.parameter_slope, findings.log_prob_slope)
    )
    steep = all(findings.parameter_slope(m) <= STEEP for m in (INFLUENCE, ACNML))
    start = "Errors fall like n⁻²" if steep else "Errors do not fall like n⁻² everywhere"
    return f"{start}. Of the weights: {weights}. Of the log-probabilities: {log_probs}."


def _bounds_claim(findings: Findings) -> str:
    exact = all(m.converged for m in findings.measured)
    refits = 2 * findings.study.queries * len(findings.measured)
    solved = f"All {refits:,} refits converged" if exact else "Not all refits converged"
    return f"{solved}, and {bounds_verdict(findings)}."


def _theorem_claim(findings: Findings) -> str:
    start = findings.theorem_from
    if start is None:
        return "Theorem 3.1’s condition fails for some query at every n: it proves too little here."
    return (
        f"Theorem 3.1’s condition holds for every query from n = {start:,} on. At n = "
        f"{findings.measured[-1].n:,} its bound is at least "
        f"{findings.measured[-1].theorem_bound.tightest:,.0f} times the error."
    )


def _sharper_claim(findings: Findings) -> str:
    last = findings.measured[-1]
    where = "at every n" if _always_proven(findings) else "where a ball was found to contain refits"
    return (
        f"As the loss is convex, more can be proven with less: sharper bounds hold {where}, and at "
        f"n = {last.n:,} one is only {last.influence_bound.tightest:.1f} (influence function) and "
        f"{last.acnml_bound.tightest:.1f} (ACNML) times its error. ACNML’s lacks the term that the "
        "query’s own curvature costs the influence function."
    )


def _always_proven(findings: Findings) -> bool:
    return all(
        bound.proven == 1 for m in findings.measured for bound in (m.influence_bound, m.acnml_bound)
    )


# What they share -------------------------------------------------------------------------------


def _constants(findings: Findings) -> list[list[str]]:
    return [
        [
            f"{m.n:,}",
            number(m.convex.radius),
            number(m.convex.inverse_hessian),
            number(m.convex.mean_lipschitz),
            number(m.convex.shift.max().item()),
            number(m.theorem.rms_lipschitz),
            number(m.theorem.complexity),
            number(m.theorem.delta.max().item()),
            f"{m.theorem_bound.proven:.0%}",
        ]
        for m in findings.measured
    ]


def _svg(name: str, figure: Figure, description: str) -> str:
    return inline_svg(to_svg(figure), name, description, SVG_COLOURS)


def _table(columns: tuple[str, ...], rows: list[list[str]]) -> str:
    head = "".join(f'<th scope="col">{_subscript(column)}</th>' for column in columns)
    body = "".join(_row(row) for row in rows)
    whole = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="scroll">{whole}</div>'


def _subscript(name: str) -> str:
    """Write C_op with its index below the line."""
    base, _, index = name.partition("_")
    return f"{base}<sub>{index}</sub>" if index else base


def _row(cells: list[str]) -> str:
    first, *others = cells
    columns = "".join(f"<td>{text}</td>" for text in others)
    return f'<tr><th scope="row">{first}</th>{columns}</tr>'


def _definitions() -> str:
    items = "".join(
        f"<dt>{_dot(term)}{escape(term)}</dt><dd>{escape(text)}</dd>"
        for term, text in MEANING.items()
    )
    return f"<dl>{items}</dl>"


def _dot(method: str) -> str:
    """A dot in the method's colour, the legend of all figures."""
    return f'<span class="dot" style="background: var(--{VARIABLES[method]})"></span>'
