"""The toy study's report: section 2 of the paper, and what approximates it."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from pathlib import Path

from matplotlib.figure import Figure

from acnml import __version__
from acnml.cli._shared.drawing import THEME, to_svg
from acnml.cli._shared.files import write_file
from acnml.cli._shared.page import inline_svg, page
from studies.toy import figures
from studies.toy.study import ACNML, BMA, CNMAP, CNML, MAP, METHODS, Findings
from studies.toy.summary import (
    closing_sentence,
    grows_bolder,
    listed,
    penalty_name,
    tables,
)

TITLE = "Could it have been the other label?"
VARIABLES = {CNML: "ink", CNMAP: "last-layer", ACNML: "acnml", BMA: "bma", MAP: "map"}
SVG_COLOURS = {
    **{figures.METHOD_COLOURS[method]: variable for method, variable in VARIABLES.items()},
    **THEME,
}
MEANING = {
    CNMAP: "exact, two refits at every point of the map. The penalty λ‖w‖² on the weights (not on "
    "the intercept) is the prior; CNML is λ = 0.",
    ACNML: "no refits: the training data are replaced by a Gaussian around the trained weights "
    "(Laplace), and each label may move the weights within it.",
    BMA: "the average prediction of {samples} draws from the same Gaussian.",
    MAP: "the trained weights alone.",
}
# As many columns as fit, but always two on a phone.
COLUMNS = "grid-template-columns: repeat(auto-fit, minmax(min(46%, 12rem), 1fr))"


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
        conclusions(findings),
        footer(findings),
    ]
    return page(TITLE, closing_sentence(findings), sections)


# Sections --------------------------------------------------------------------------------------


def question(findings: Findings) -> str:
    """Explain CNML."""
    return f"""<h2>The question</h2>
<p>{findings.study.points} points in the plane, orange circles and blue triangles, and a logistic
regression that tells them apart. What is the label of a new point? The usual answer is to ask the
trained model, which will be very sure of itself even where it has seen nothing.</p>
<p>Conditional normalized maximum likelihood (CNML) asks something else. It takes the labels in
turn, adds the new point <em>with that label</em> to the training data, fits again, and looks how
well the new fit explains it. A label that any honest fit must reject gets little; where every label
could be explained, none is preferred:</p>
<p>p(y|x) = p<sub>y</sub>(y|x) / C(x), where p<sub>y</sub> is the fit that has seen (x, y), and
C(x) = Σ<sub>y</sub> p<sub>y</sub>(y|x) lies between 1 and 2.</p>"""


def one_query(findings: Findings) -> str:
    """Show the fit to the data and the two refits."""
    orange, blue = (f"{p:.0%}" for p in findings.cnml_at_query)
    first, second = findings.refits
    shown = {
        "trained": figures.query_map(findings, findings.trained, None, "Fitted to the data"),
        "orange": figures.query_map(findings, first, 0, "… and a new orange circle"),
        "blue": figures.query_map(findings, second, 1, "… and a new blue triangle"),
    }
    described = "Probability of blue, with the training points and the new point: the fit "
    panels = _panels({name: (figure, described + name) for name, figure in shown.items()})
    return f"""<h2>One new point, two stories</h2>
<figure><div class="panels" style="{COLUMNS}">{panels}</div>{_class_bar("bar-query")}
<figcaption>The solid line parts the classes, at the dashed lines a class has 90%. Fitted to the
data alone, the model gives the star {_percent(findings.trained.at_query[1])} for blue. But if it is
told that the point is orange, the line turns to explain it as well as the data allow, and orange
gets {_percent(first.at_query[0])}. Told that it is blue, blue gets {_percent(second.at_query[1])}.
Divided by their sum, CNML gives orange {orange} and blue {blue}.</figcaption></figure>"""


def everywhere(findings: Findings) -> str:
    """Show CNML and its normaliser on the map, and CNML on separable data."""
    cnml = findings.exact[0.0]
    described = {
        "cnml": (
            figures.probability_map(findings, cnml.probability, "CNML"),
            "CNML's probability of blue around two overlapping classes",
        ),
        "normaliser": (
            figures.normaliser_map(findings, "Its normaliser C(x)"),
            "The normaliser: large beside the data, to both sides of the line that parts them",
        ),
        "apart": (
            figures.apart_map(findings, "CNML, classes apart"),
            "CNML's probability of blue around two classes that a line separates",
        ),
    }
    ends = ("C = 1: one label", "1.5", "C = 2: either")
    bar = _bar("bar-normaliser", figures.colour_bar(figures.NORMALISER, ends), "Colours of C(x)")
    return f"""<h2>Everywhere at once</h2>
<figure><div class="panels" style="{COLUMNS}">{_panels(described)}</div>
<div class="panels">{_class_bar("bar-everywhere")}{bar}</div>
<figcaption>CNML on a grid of {findings.study.resolution}×{findings.study.resolution} points, solved
exactly, and its normaliser: where C is large, either label could be true, and white is the honest
answer. In the third map the classes stand apart. {_limits(findings)}</figcaption></figure>"""


def far_away(findings: Findings) -> str:
    """Show confidence against distance."""
    figure = figures.fading(findings, "Mean confidence on a ring around the data")
    described = "Mean confidence of CNML, CNMAP, ACNML, BMA and MAP against distance"
    l2 = penalty_name(findings.study.ring_penalty)
    return f"""<h2>How far is far?</h2>
<figure><div class="scroll">{_svg("fading", figure, described)}</div>
<figcaption>On the maps CNML is still sure behind each class, on the side away from the other. That
is not yet far: to explain the other label there, the line would have to leave its place. Further
out a smaller turn will do, until it costs next to nothing. Here is the larger of the two
probabilities, averaged over all directions, ever further away from the data; {l2} for all but
CNML.</figcaption></figure>"""


def comparison(findings: Findings) -> str:
    """Show all methods for all penalties, and the table."""
    rows = "".join(_row_of_maps(findings, l2) for l2 in findings.study.penalties)
    return f"""<h2>A prior makes it bolder, a Gaussian makes it cheap</h2>
{_definitions(findings)}
{rows}
{_class_bar("bar-comparison")}
<div class="scroll">{_table(findings)}</div>"""


def conclusions(findings: Findings) -> str:
    """Say what follows from the numbers, and what does not."""
    claims = [_prior_claim(findings), _approximation_claim(findings), _solved_claim(findings)]
    items = "".join(f"<li>{claim}</li>" for claim in claims)
    return f"""<h2>What is honest to conclude</h2>
<ul>{items}
<li>This is one sample of {findings.study.points} points, to see and not to measure.
<code>python -m studies toy --seed {findings.study.seed + 1}</code> draws another. How fast ACNML
comes close to CNMAP as data grow is measured by <code>python -m studies theory</code>.</li>
</ul>"""


def footer(findings: Findings) -> str:
    """Say how the page was made."""
    command = f"python -m studies toy --seed {findings.study.seed}"
    return f"""<footer><p>Made by <code>{command}</code>, acnml {__version__}. After section 2 of
Zhou &amp; Levine, <em>Amortized Conditional Normalized Maximum Likelihood</em>, ICML
2021.</p></footer>"""


# Claims ----------------------------------------------------------------------------------------


def _limits(findings: Findings) -> str:
    """Say what separable data mean, if this sample is separable."""
    share = findings.apart.limits
    if share == 0:
        return "In this sample no line separates them, so every refit has a finite maximum."
    return (
        "A line separates them, and then the likelihood has no maximum: in "
        f"{share:.0%} of the refits the weights run off to infinity. The probabilities do not; "
        "what is drawn is their limit. Where the line can be laid on either side of the new point, "
        "both labels get exactly one half."
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
        f"with λ, so one should compare with it: MAP’s mean distance to CNMAP is {gaps}."
    )


def _approximation_claim(findings: Findings) -> str:
    first, last = findings.study.penalties[0], findings.study.penalties[-1]
    near, far = (findings.distance(ACNML, l2) for l2 in (last, first))
    closest = listed([f"{_closest(findings, p)} (λ = {p:g})" for p in findings.study.penalties])
    cautious = findings.confidence(ACNML, first) < findings.confidence(CNMAP, first)
    why = " It is too cautious there: the Gaussian is wider than what the data allow."
    return (
        f"ACNML’s Gaussian knows the curvature at the trained weights and nowhere else. On average "
        f"it is {near:.3f} from CNMAP with λ = {last:g} and {far:.3f} with λ = {first:g}."
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


# What they share -------------------------------------------------------------------------------


def _svg(name: str, figure: Figure, description: str) -> str:
    return inline_svg(to_svg(figure), name, description, SVG_COLOURS)


def _panels(described: Mapping[str, tuple[Figure, str]]) -> str:
    return "".join(f"<div>{_svg(name, *figure)}</div>" for name, figure in described.items())


def _class_bar(name: str) -> str:
    figure = figures.colour_bar(figures.CLASSES, ("orange 100%", "50%", "blue 100%"))
    return _bar(name, figure, "Colours of the maps, from orange over white to blue")


def _bar(name: str, figure: Figure, description: str) -> str:
    svg = _svg(name, figure, description)
    return f'<div style="max-width: 20rem; margin: 0.6rem 0 1rem">{svg}</div>'


def _row_of_maps(findings: Findings, l2: float) -> str:
    described = {
        f"{method.lower()}-{str(l2).replace('.', '-')}": (
            figures.probability_map(
                findings, findings.maps[method][l2], f"{method}, {penalty_name(l2)}"
            ),
            f"Probability of blue by {method} for {penalty_name(l2)}",
        )
        for method in METHODS
    }
    return f'<figure><div class="panels" style="{COLUMNS}">{_panels(described)}</div></figure>'


def _table(findings: Findings) -> str:
    penalties = findings.study.penalties
    head = "".join(f'<th scope="col">{penalty_name(l2)}</th>' for l2 in penalties)
    groups = "".join(
        f'<tbody><tr><th colspan="{len(penalties) + 1}" scope="rowgroup">{heading}</th></tr>'
        + "".join(_row(method, cells) for method, cells in rows.items())
        + "</tbody>"
        for heading, rows in tables(findings).items()
    )
    return f"""<table>
<caption>Averages over the {findings.study.resolution**2:,} points of the map.</caption>
<thead><tr><th scope="col">method</th>{head}</tr></thead>{groups}</table>"""


def _row(method: str, cells: list[str]) -> str:
    columns = "".join(f"<td>{text}</td>" for text in cells)
    return f'<tr><th scope="row">{method}</th>{columns}</tr>'


def _definitions(findings: Findings) -> str:
    items = "".join(
        f"<dt>{term}</dt><dd>{escape(text.format(samples=findings.study.samples))}</dd>"
        for term, text in MEANING.items()
    )
    return f"<dl>{items}</dl>"
