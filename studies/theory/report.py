"""The theory study's report: claims, measured errors, and where the bounds do not apply."""

from __future__ import annotations

from pathlib import Path

from studies.engine.report import Panels, Section, ShortReport
from studies.engine.tables import Table
from studies.theory import figures
from studies.theory.study import ACNML, INFLUENCE, MAP, Findings
from studies.theory.summary import COLUMNS, claims, closing_text, number, table, values

TITLE = "Errors of ACNML and their bounds"
CSV_COLUMNS = (
    "n",
    "map_error",
    "influence_error",
    "theorem_3_1_bound",
    "influence_sharper_bound",
    "acnml_error",
    "acnml_sharper_bound",
    "influence_log_prob_error",
    "proposition_3_2_bound",
    "acnml_log_prob_error",
    "acnml_log_prob_sharper_bound",
)
MEANING = {
    MAP: "the trained weights, without adaptation.",
    INFLUENCE: "one Newton step from the trained weights, with the Hessian of the training loss "
    "alone. It equals one full step of ACNML.",
    ACNML: "the optimum of the query’s likelihood and a Gaussian around the trained weights, whose "
    "covariance is the inverse of that Hessian (Laplace), solved to convergence.",
}


def write_report(findings: Findings, folder: Path) -> Path:
    """Write the report into a folder and return the path of its page."""
    return report(findings).write(folder)


def report(findings: Findings) -> ShortReport:
    """Put the report together."""
    sections = [
        what_was_done(findings),
        weights(findings),
        predictions(findings),
        numbers(findings),
        Section("Where the theory ends", [limits(findings)]),
    ]
    note = (
        "Derivations: `studies.theory.bounds`, after section 3.2 and appendix E of the paper and "
        "Giordano et al., *A Swiss Army Infinitesimal Jackknife*, AISTATS 2019."
    )
    command = f"python -m studies theory --seed {findings.study.seed}"
    rows = [[m.n, *values(m)] for m in findings.measured]
    claimed = claims(findings)
    sentence = closing_text(findings)
    files = {"results.csv": (CSV_COLUMNS, rows)}
    return ShortReport(TITLE, sentence, sections, command, files, claimed, note)


def what_was_done(findings: Findings) -> Section:
    """Explain the setting and the estimates."""
    study = findings.study
    return Section(
        "What was done",
        [
            "CNMAP refits the model for every label of every query. With n training points, one "
            "more point changes the weights by about 1/n. Section 3.2 of the paper shows that "
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
        "errors. Theorem 3.1, in the paper’s form, bounds the influence function; its line starts "
        "where its condition holds for every query. The sharper bounds are for the influence "
        "function and for ACNML."
    )
    panels = [Panels({"errors-of-the-weights": drawn}, caption, "scroll")]
    return Section("Errors of the weights", panels=panels)


def predictions(findings: Findings) -> Section:
    """Show errors and the bound of the log-probabilities."""
    drawn = figures.log_probs(findings, "Largest error of the log-probabilities")
    caption = (
        "The difference between the normalised log-probabilities and those of exact CNMAP. "
        "Proposition 3.2 turns bounds of the weights into bounds of the predictions: Theorem 3.1’s "
        "for the influence function, as in the paper, and the sharper one for ACNML."
    )
    panels = [Panels({"errors-of-log-probabilities": drawn}, caption, "scroll")]
    return Section("Errors of the predictions", panels=panels)


def numbers(findings: Findings) -> Section:
    """Show the table of errors and bounds, and that of the constants."""
    errors = (
        f"Largest errors over {findings.study.queries} queries with both labels, each followed by "
        "its bounds: first of the weights, then of the log-probabilities, ACNML’s last. “none” "
        "means that a condition fails for some query."
    )
    constants = (
        "The constants: r is the radius of the ball around the trained weights on which they hold, "
        "C_op bounds the inverse Hessian, L is the Hessian’s Lipschitz constant, and s bounds the "
        "shift of a refit; L_h, C_w, C_IJ and δ are those of Theorem 3.1 with N = n + 2, the "
        "largest over queries. “holds” is the share of queries and labels that meet its condition, "
        "“as printed” with 1/n instead of ½ in Δ_δ."
    )
    head = ("n", "r", "C_op", "L", "s", "L_h", "C_w", "C_IJ", "δ", "holds", "as printed")
    tables = [Table(errors, COLUMNS, table(findings)), Table(constants, head, _constants(findings))]
    return Section("Numbers", tables=tables)


def limits(findings: Findings) -> str:
    """Say where the bounds are of no use."""
    first = findings.measured[0]
    exact = all(m.converged for m in findings.measured)
    refits = 2 * findings.study.queries * len(findings.measured)
    solved = f"All {refits:,} refits converged." if exact else "Not all refits converged."
    return (
        f"{solved} The theory is about many data and few weights. At n = {first.n:,} ACNML’s "
        f"log-probabilities are still off by up to {number(first.log_prob_errors[ACNML])}. For "
        "networks, where n is not large compared with the number of weights, the bounds do not "
        "apply. ACNML’s sharper bound lacks the term of the query’s own curvature, which the "
        "influence function ignores."
    )


def _constants(findings: Findings) -> list[list[str]]:
    return [
        [
            f"{m.n:,}",
            number(m.convex.radius),
            number(m.convex.inverse_hessian),
            number(m.convex.mean_lipschitz),
            number(m.convex.shift.max().item()),
            number(m.theorem.rms_lipschitz.max().item()),
            f"{m.theorem.weight_norm:.4f}",
            number(m.theorem.complexity.max().item()),
            number(m.theorem.delta.max().item()),
            f"{m.theorem_bound.proven:.0%}",
            f"{m.printed_bound.proven:.0%}",
        ]
        for m in findings.measured
    ]
