"""The toy study's report: section 2 of the paper, and methods that approximate it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from studies.engine.report import Panels, Section, ShortReport
from studies.engine.tables import Table
from studies.toy import figures
from studies.toy.study import (
    ACNML,
    BMA,
    CNMAP,
    CNML,
    MAP,
    METHODS,
    VANISHING,
    WHITE,
    ExactMaps,
    Findings,
    Sample,
    confidence,
)
from studies.toy.summary import claims, closing_text, listed, penalty_name, tables

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
    """Write the report into a folder and return the path of its page."""
    return report(findings).write(folder)


def report(findings: Findings) -> ShortReport:
    """Put the report together."""
    sections = [
        question(findings),
        one_query(findings),
        everywhere(findings),
        regularised(findings),
        overlapping(findings),
        far_away(findings),
        comparison(findings),
        Section("Conclusions", conclusions(findings)),
    ]
    return ShortReport(
        TITLE,
        closing_text(findings),
        sections,
        f"python -m studies toy --seed {findings.study.seed}",
        {"results.csv": numbers(findings)},
        claims(findings),
        "After section 2 of the paper.",
    )


def numbers(findings: Findings) -> tuple[Sequence[str], list[Sequence[object]]]:
    """Return columns and rows: every method on every sample, with every penalty."""
    columns = ("sample", "method", "lambda", "confidence", "white_share", "normaliser")
    rows: list[Sequence[object]] = []
    for sample, maps in (("separable", findings.exact), ("overlapping", findings.overlapping)):
        for l2, found in maps.items():
            scores = (found.confidence, found.white, found.mean_normaliser)
            rows.append((sample, CNMAP if l2 else CNML, l2, *scores))
    for method in METHODS[1:]:
        for l2, probability in findings.maps[method].items():
            sure = confidence(probability)
            white = (sure < WHITE).double().mean().item()
            rows.append(("separable", method, l2, sure.mean().item(), white, ""))
    return columns, rows


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
    """Show the fit to the data and the two refits: the paper's figure 2."""
    orange, blue = (f"{p:.0%}" for p in findings.cnml_at_query)
    first, second = findings.refits
    drawn = {
        "fit-to-the-data": figures.query_map(findings, findings.trained, None, "Fit to the data"),
        "fit-with-orange": figures.query_map(findings, first, 0, "… and a new orange circle"),
        "fit-with-blue": figures.query_map(findings, second, 1, "… and a new blue triangle"),
        "colours-of-classes": _class_bar(),
    }
    caption = (
        "The paper’s figure 2. The solid line separates the classes; at the dashed lines a class "
        f"has 90%. The fit to the data gives the star {_percent(findings.trained.at_query[1])} for "
        "blue. If the point is added as orange, the line rotates and passes on its other side; "
        "added as blue, it stays. Either fit explains the query and all the data, so that CNML "
        f"gives orange {orange} and blue {blue}. (A line that separates all points has no "
        "likeliest slope: the maps show fits with the small penalty "
        f"λ = {VANISHING:g}; CNML has none.)"
    )
    return Section("One new point", panels=[Panels(drawn, caption, "small panels")])


def everywhere(findings: Findings) -> Section:
    """Show CNML and its normaliser on the map: the paper's figure 1."""
    ends = ("C = 1: one label", "1.5", "C = 2: either")
    exact, sample = findings.exact[0.0], findings.sample
    drawn = {
        "cnml-map": figures.cnml_map(findings, exact.probability, sample, "CNML"),
        "normaliser-map": figures.normaliser_map(findings, "Its normaliser C(x)"),
        "colours-of-the-normaliser": figures.colour_bar(figures.NORMALISER, ends),
    }
    side = findings.study.resolution
    caption = (
        f"The paper’s figure 1: CNML on a grid of {side}×{side} points, solved exactly, and its "
        "normaliser: where C is large, either label can be explained, and neither is preferred "
        f"(white). {_limits(findings)}"
    )
    return Section("The whole plane", panels=[Panels(drawn, caption, "small panels")])


def regularised(findings: Findings) -> Section:
    """Show CNMAP for every penalty: the paper's figure 3."""
    drawn = _cnmap_maps("cnmap", findings, findings.exact, findings.sample)
    caption = (
        "The paper’s figure 3: CNMAP with the penalty λ‖w‖². With a larger λ fewer models can "
        f"explain both labels: {_trend(findings.exact)}."
    )
    return Section("A prior", panels=[Panels(drawn, caption, "small panels")])


def overlapping(findings: Findings) -> Section:
    """Show the same for classes that overlap."""
    found, sample = findings.overlapping, findings.overlapping_sample
    cnml = figures.cnml_map(findings, found[0.0].probability, sample, "CNML")
    maps = _cnmap_maps("overlapping-cnmap", findings, found, sample)
    drawn = {"overlapping-cnml-map": cnml, **maps}
    caption = (
        "The same points moved together until no line separates them, which the paper does not "
        "show. Every refit now has a finite maximum, and fewer points of the map are white. A "
        f"larger λ acts in two ways here: {_trend(found)}. The normaliser falls, because labels "
        "can be explained less well. The trained model becomes less confident too, because the "
        "prior makes its weights smaller; where this effect is the larger one, CNMAP’s confidence "
        "falls as well."
    )
    return Section("Classes that overlap", panels=[Panels(drawn, caption, "small panels")])


def _cnmap_maps(
    prefix: str, findings: Findings, maps: ExactMaps, sample: Sample
) -> dict[str, Figure]:
    return {
        f"{prefix}-{str(l2).replace('.', '-')}": figures.cnml_map(
            findings, maps[l2].probability, sample, f"CNMAP, {penalty_name(l2)}"
        )
        for l2 in findings.study.penalties
    }


def _trend(maps: ExactMaps) -> str:
    """Say what happens from the least to the largest penalty, CNML first."""
    each = [maps[l2] for l2 in sorted(maps)]

    def path(values: list[float]) -> str:
        return ", ".join(f"{value:.3f}" for value in values)

    return (
        f"from λ = 0 to {max(maps):g} the mean normaliser is "
        f"{path([found.mean_normaliser for found in each])}, the mean confidence "
        f"{path([found.confidence for found in each])}, and the white share (confidence below "
        f"{WHITE:.0%}) {path([found.white for found in each])}"
    )


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
        _approximation_claim(findings),
        _solved_claim(findings),
        f"This is one sample of {findings.study.points} points: an example, not a measurement. "
        f"`python -m studies toy --seed {findings.study.seed + 1}` draws another sample. "
        "`python -m studies theory` measures how fast ACNML approaches CNMAP as the data grow.",
    ]


def _limits(findings: Findings) -> str:
    """Say what separable data mean, if this sample is separable."""
    share = findings.exact[0.0].limits
    if share == 0:
        return "In this sample no line separates the classes: every refit has a finite maximum."
    return (
        f"A line separates the classes, and the likelihood has no maximum: in {share:.0%} of the "
        "refits the weights diverge. The probabilities converge, and the map shows their limit. "
        "Where the line can pass on either side of the new point, both labels get exactly one half."
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
    maps = [*findings.exact.values(), *findings.overlapping.values()]
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
