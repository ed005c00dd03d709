"""The theory study's report: claims, measured errors, and where the bounds do not apply."""

from __future__ import annotations

from pathlib import Path

from acnml.cli._shared.files import write_file
from studies.engine.report import Panels, Section, footer, short_report
from studies.engine.tables import Table
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

TITLE = "Errors of ACNML and their bounds"
MEANING = {
    MAP: "the trained weights, without adaptation.",
    INFLUENCE: "one Newton step from the trained weights, with the Hessian of the training loss "
    "alone. It equals one full step of ACNML.",
    ACNML: "the optimum of the query’s likelihood and a Gaussian around the trained weights, whose "
    "covariance is the inverse of that Hessian (Laplace), solved to convergence.",
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
        Section("Which claims hold", verdicts(findings)),
    ]
    note = (
        "Derivations: `acnml.exact.theory`, after section 3.3 of the paper and Giordano et al., "
        "*A Swiss Army Infinitesimal Jackknife*, AISTATS 2019."
    )
    foot = footer(f"theory --seed {findings.study.seed}", note)
    return short_report(TITLE, closing_sentence(findings), sections, foot)


def what_was_done(findings: Findings) -> Section:
    """Explain the setting and the estimates."""
    study = findings.study
    return Section(
        "What was done",
        [
            "CNMAP refits the model for every label of every query. With n training points, one "
            "more point changes the weights by about 1/n. Section 3.3 of the paper shows that "
            "ACNML predicts this change up to an error of order 1/n². Here the error is measured "
            f"for logistic regression with {len(study.weights)} weights and the penalty "
            f"{study.l2:g}·‖w‖², where refits are exact: {study.queries} queries, each with both "
            f"labels, and n from {study.sizes[0]:,} to {study.sizes[-1]:,}. The queries are spread "
            f"{study.spread:g} times as widely as the data, so some are far from them. Three "
            "estimates of the refitted weights are compared with the exact ones:",
            *(f"**{method}**: {text}" for method, text in MEANING.items()),
        ],
    )


def weights(findings: Findings) -> Section:
    """Show errors and bounds of the parameters."""
    drawn = figures.parameters(findings, "Largest error of the refitted weights")
    caption = (
        "Solid lines are the largest errors over all queries and labels. Dashed lines are the "
        "largest bounds, in the colour of the error they bound. The powers of n are fitted to the "
        "errors. Theorem 3.1 bounds the influence function; its line starts where its condition "
        "holds for every query. The sharper bounds are for the influence function and for ACNML."
    )
    panels = [Panels({"errors-of-the-weights": drawn}, caption, "scroll")]
    return Section("Errors of the weights", panels=panels)


def predictions(findings: Findings) -> Section:
    """Show errors and the bound of the log-probabilities."""
    drawn = figures.log_probs(findings, "Largest error of the log-probabilities")
    caption = (
        "The difference between the normalised log-probabilities and those of exact CNMAP. "
        "Proposition 3.2 turns the bound of ACNML’s weights into a bound of its predictions."
    )
    panels = [Panels({"errors-of-log-probabilities": drawn}, caption, "scroll")]
    return Section("Errors of the predictions", panels=panels)


def numbers(findings: Findings) -> Section:
    """Show the table of errors and bounds, and that of the constants."""
    errors = (
        f"Largest errors over {findings.study.queries} queries with both labels, each followed by "
        "its bound: first of the weights, then of ACNML’s log-probabilities. “none” means that a "
        "condition fails for some query."
    )
    constants = (
        "The constants: r is the radius of the ball around the trained weights on which they hold, "
        "C_op bounds the inverse Hessian, L is the Hessian’s Lipschitz constant, and s bounds the "
        "shift of a refit; L_h, C_IJ and δ are those of Theorem 3.1, and “holds” is the share of "
        "queries and labels that meet its condition."
    )
    head = ("n", "r", "C_op", "L", "s", "L_h", "C_IJ", "δ", "holds")
    tables = [Table(errors, COLUMNS, table(findings)), Table(constants, head, _constants(findings))]
    return Section("Numbers", tables=tables)


def verdicts(findings: Findings) -> list[str]:
    """Say which claims hold."""
    first = findings.measured[0]
    return [
        _rate_claim(findings),
        _bounds_claim(findings),
        _theorem_claim(findings),
        _sharper_claim(findings),
        f"The theory is about many data and few weights. At n = {first.n:,} ACNML’s "
        f"log-probabilities are still off by up to {number(first.log_prob_errors[ACNML])}. For "
        "networks, where n is not large compared with the number of weights, the bounds do not "
        "apply.",
    ]


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
        return "Theorem 3.1’s condition fails for some query at every n: it does not apply here."
    return (
        f"Theorem 3.1’s condition holds for every query from n = {start:,} on. At n = "
        f"{findings.measured[-1].n:,} its bound is at least "
        f"{findings.measured[-1].theorem_bound.tightest:,.0f} times the error."
    )


def _sharper_claim(findings: Findings) -> str:
    last = findings.measured[-1]
    where = "at every n" if _always_proven(findings) else "where a ball contains all refits"
    return (
        f"Because the loss is convex, sharper bounds hold under weaker conditions, {where}; at "
        f"n = {last.n:,} one is as close as {last.influence_bound.tightest:.1f} (influence "
        f"function) and {last.acnml_bound.tightest:.1f} (ACNML) times its error. ACNML’s bound "
        "lacks the term of the query’s own curvature, which the influence function ignores."
    )


def _always_proven(findings: Findings) -> bool:
    return all(
        bound.proven == 1 for m in findings.measured for bound in (m.influence_bound, m.acnml_bound)
    )


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
