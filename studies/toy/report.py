"""The toy study's report: section 2 of the paper, and methods that approximate it."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from acnml.cli._shared.files import write_file
from studies.engine.report import Panels, Section, footer, short_report
from studies.engine.tables import Table
from studies.toy import figures
from studies.toy.study import ACNML, BMA, CNMAP, MAP, METHODS, Findings
from studies.toy.summary import closing_sentence, grows_bolder, listed, penalty_name, tables

TITLE = "Exact CNML and CNMAP in the plane"
MEANING = {
    CNMAP: "exact, with two refits at every point of the map. The penalty λ‖w‖² on the weights "
    "(not on the intercept) is the prior; CNML is λ = 0.",
    ACNML: "no refits: the training data are replaced by a Gaussian around the trained weights "
    "(Laplace), and each label may move the weights within it.",
    BMA: "the average prediction of {samples} samples from the same Gaussian.",
    MAP: "the trained weights alone.",
}


def write_report(findings: Findings, folder: Path) -> Path:
    """Write report.html into a folder and return its path."""
    return write_file(folder / "report.html", report(findings).encode())


def report(findings: Findings) -> str:
    """Return the page."""
    sections = [
        question(findings),
        one_query(findings),
        everywhere(findings),
        far_away(findings),
        comparison(findings),
        Section("Conclusions", conclusions(findings)),
    ]
    foot = footer(f"toy --seed {findings.study.seed}", "After section 2 of the paper.")
    return short_report(TITLE, closing_sentence(findings), sections, foot)


def question(findings: Findings) -> Section:
    """Explain CNML."""
    return Section(
        "Conditional normalized maximum likelihood",
        [
            f"A logistic regression separates {findings.study.points} points in the plane: orange "
            "circles and blue triangles. What is the label of a new point? The trained model is "
            "very confident even far from its training data.",
            "Conditional normalized maximum likelihood (CNML) adds the new point to the training "
            "data *with each label in turn*, fits again, and measures how well the new fit "
            "explains the label. A label that no fit can explain gets a low probability. Where "
            "every label can be explained, none is preferred:",
            "p(y|x) = p_y(y|x) / C(x), where p_y is the fit to the data and (x, y), and C(x) = "
            "Σ_y p_y(y|x) is between 1 and 2.",
        ],
    )


def one_query(findings: Findings) -> Section:
    """Show the fit to the data and the two refits."""
    orange, blue = (f"{p:.0%}" for p in findings.cnml_at_query)
    first, second = findings.refits
    drawn = {
        "fit-to-the-data": figures.query_map(findings, findings.trained, None, "Fit to the data"),
        "fit-with-orange": figures.query_map(findings, first, 0, "… and a new orange circle"),
        "fit-with-blue": figures.query_map(findings, second, 1, "… and a new blue triangle"),
        "colours-of-classes": _class_bar(),
    }
    caption = (
        "The solid line separates the classes; at the dashed lines a class has 90%. The fit to the "
        f"data gives the star a probability of {_percent(findings.trained.at_query[1])} for blue. "
        "If the point is added as orange, the line rotates to explain it as well as the data "
        f"allow, and orange gets {_percent(first.at_query[0])}. Added as blue, blue gets "
        f"{_percent(second.at_query[1])}. Divided by their sum, CNML gives orange {orange} and "
        f"blue {blue}."
    )
    return Section("One new point", panels=[Panels(drawn, caption, "small panels")])


def everywhere(findings: Findings) -> Section:
    """Show CNML and its normaliser on the map, and CNML on separable data."""
    ends = ("C = 1: one label", "1.5", "C = 2: either")
    drawn = {
        "cnml-map": figures.probability_map(findings, findings.exact[0.0].probability, "CNML"),
        "normaliser-map": figures.normaliser_map(findings, "Its normaliser C(x)"),
        "cnml-map-of-separable-classes": figures.apart_map(findings, "CNML, separable classes"),
        "colours-of-the-normaliser": figures.colour_bar(figures.NORMALISER, ends),
    }
    side = findings.study.resolution
    caption = (
        f"CNML on a grid of {side}×{side} points, solved exactly, and its normaliser: where C is "
        "large, either label can be explained, and neither is preferred (white). In the third map "
        f"the classes are separable. {_limits(findings)}"
    )
    return Section("The whole plane", panels=[Panels(drawn, caption, "small panels")])


def far_away(findings: Findings) -> Section:
    """Show confidence against distance."""
    drawn = figures.fading(findings, "Mean confidence on a ring around the data")
    l2 = penalty_name(findings.study.ring_penalty)
    caption = (
        "On the maps CNML is still confident behind each class, on the side away from the other: "
        "to explain the other label there, the line would have to move far. Further away a smaller "
        "rotation suffices, until it costs almost nothing. The figure shows the larger of the two "
        "probabilities, averaged over all directions, at increasing distance from the data; "
        f"{l2} for all methods except CNML."
    )
    return Section("Far from the data", panels=[Panels({"confidence": drawn}, caption, "scroll")])


def comparison(findings: Findings) -> Section:
    """Show all methods for all penalties, and the tables."""
    samples = findings.study.samples
    text = [f"**{m}**: {meaning.format(samples=samples)}" for m, meaning in MEANING.items()]
    rows = []
    for l2 in findings.study.penalties:
        drawn = {
            f"{method.lower()}-map-{str(l2).replace('.', '-')}": figures.probability_map(
                findings, findings.maps[method][l2], f"{method}, {penalty_name(l2)}"
            )
            for method in METHODS
        }
        rows.append(Panels(drawn, f"Probability of blue for {penalty_name(l2)}.", "small panels"))
    head = ("method", *map(penalty_name, findings.study.penalties))
    points = f"{findings.study.resolution**2:,} points of the map"
    found = [
        Table(f"{heading}: average over the {points}.", head, [[m, *c] for m, c in cells.items()])
        for heading, cells in tables(findings).items()
    ]
    return Section("Priors, and approximations without refits", text, rows, found)


# Conclusions -----------------------------------------------------------------------------------


def conclusions(findings: Findings) -> list[str]:
    """Say what follows from the numbers, and what does not."""
    return [
        _prior_claim(findings),
        _approximation_claim(findings),
        _solved_claim(findings),
        f"This is one sample of {findings.study.points} points: an example, not a measurement. "
        f"`python -m studies toy --seed {findings.study.seed + 1}` draws another sample. "
        "`python -m studies theory` measures how fast ACNML approaches CNMAP as the data grow.",
    ]


def _limits(findings: Findings) -> str:
    """Say what separable data mean, if this sample is separable."""
    share = findings.apart.limits
    if share == 0:
        return "In this sample no line separates them, so every refit has a finite maximum."
    return (
        f"A line separates them, and the likelihood has no maximum: in {share:.0%} of the refits "
        "the weights diverge. The probabilities converge, and the map shows their limit. Where the "
        "line can pass on either side of the new point, both labels get exactly one half."
    )


def _prior_claim(findings: Findings) -> str:
    means = listed([f"{findings.normaliser(p):.3f} (λ = {p:g})" for p in sorted(findings.exact)])
    verdict = (
        "CNMAP is less conservative the larger λ is, as the paper says"
        if grows_bolder(findings)
        else "In this sample CNMAP is not always less conservative for a larger λ"
    )
    gaps = listed([f"{findings.distance(MAP, p):.3f}" for p in findings.study.penalties])
    return (
        f"{verdict}: the mean normaliser on the map is {means}. The trained model itself changes "
        f"with λ, so it is the reference: the mean distance between MAP and CNMAP is {gaps}."
    )


def _approximation_claim(findings: Findings) -> str:
    first, last = findings.study.penalties[0], findings.study.penalties[-1]
    near, far = (findings.distance(ACNML, l2) for l2 in (last, first))
    closest = listed([f"{_closest(findings, p)} (λ = {p:g})" for p in findings.study.penalties])
    cautious = findings.confidence(ACNML, first) < findings.confidence(CNMAP, first)
    why = " It is too cautious there: the Gaussian is wider than the data allow."
    return (
        "ACNML’s Gaussian has the curvature at the trained weights only. Its average distance to "
        f"CNMAP is {near:.3f} with λ = {last:g} and {far:.3f} with λ = {first:g}."
        f"{why if cautious else ''} Closest to CNMAP of the methods without refits: {closest}."
    )


def _closest(findings: Findings, l2: float) -> str:
    return min((ACNML, BMA, MAP), key=lambda method: findings.distance(method, l2))


def _solved_claim(findings: Findings) -> str:
    maps = [*findings.exact.values(), findings.apart]
    open_rows = sum(found.unconverged for found in maps)
    refits = 2 * findings.study.resolution**2 * len(maps)
    if open_rows:
        return f"{open_rows:,} of {refits:,} refits did not converge; the maps are not exact there."
    return f"All {refits:,} refits converged."


def _percent(probability: float) -> str:
    """Write a probability without rounding it to certainty."""
    return "more than 99.9%" if probability > 0.999 else f"{probability:.0%}"


def _class_bar() -> Figure:
    return figures.colour_bar(figures.CLASSES, ("orange 100%", "50%", "blue 100%"))
