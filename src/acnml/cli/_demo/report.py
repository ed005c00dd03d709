"""The demo's report: what was done, what each figure shows, what is honest to conclude."""

from __future__ import annotations

import math
from html import escape
from pathlib import Path

from matplotlib.figure import Figure

from acnml import __version__
from acnml.cli._demo import figures
from acnml.cli._demo.measurement import View
from acnml.cli._demo.study import ACNML, BMA, LAST_LAYER, MAP, METHODS, TUNED, Findings
from acnml.cli._demo.summary import (
    COLUMNS,
    Cell,
    better_forms,
    closing_sentence,
    heading,
    table,
)
from acnml.cli._shared.digits import CLASSES
from acnml.cli._shared.drawing import THEME, to_png, to_svg
from acnml.cli._shared.files import write_file
from acnml.cli._shared.page import inline_png, inline_svg, page

TITLE = "Does the network know when it does not know?"
VARIABLES = {MAP: "map", BMA: "bma", ACNML: "acnml", LAST_LAYER: "last-layer"}
SVG_COLOURS = {
    **{figures.COLOURS[method]: VARIABLES[method] for method in METHODS},
    **THEME,
}
MEANING = {
    MAP: "the network’s own probabilities, at the weights that training found.",
    BMA: "Bayes model averaging: the average prediction of {samples} networks whose weights are "
    "drawn from a Gaussian posterior (KFAC-Laplace).",
    ACNML: "for each of the ten labels in turn, the weights move to explain it as well as they can "
    "without leaving the same posterior. Where any label could be explained, none gets much.",
    LAST_LAYER: "the same, but only the last layer’s weights may move, which is much cheaper.",
}
SCORES = {
    "accuracy": "the share of digits that is read correctly.",
    "confidence": "the probability given to the label that is read, on average. It should equal "
    "the accuracy.",
    "NLL": "negative log-likelihood: how surprising the true labels were, in nats. Lower is "
    "better.",
    "ECE": "expected calibration error: the distance between confidence and accuracy, averaged "
    "over {bins} groups of digits of similar confidence. Lower is better.",
    "Brier": "the squared distance between the probabilities and the truth, from 0 to 2. Lower is "
    "better, and unlike ECE it cannot be won by saying little.",
}


def write_report(findings: Findings, folder: Path) -> Path:
    """Write report.html and overview.png into a folder and return the former's path.

    The README's picture, docs/images/demo.png, is a copy of overview.png.
    """
    write_file(folder / "overview.png", to_png(figures.overview(findings)))
    return write_file(folder / "report.html", report(findings).encode())


def report(findings: Findings) -> str:
    """Return the page."""
    sections = [
        what_was_done(findings),
        numbers(findings),
        against_rotation(findings),
        reliability(findings),
        digits(findings),
        price(findings),
        conclusions(findings),
        footer(findings),
    ]
    return page(TITLE, closing_sentence(findings), sections)


# Sections --------------------------------------------------------------------------------------


def what_was_done(findings: Findings) -> str:
    """Explain data, methods and how their one setting was chosen."""
    study = findings.study
    return f"""<h2>What was done</h2>
<p>A small network with {study.hidden} hidden units learned to read {study.train_images:,}
handwritten digits of 8×8 pixels. Then it was shown {study.test_images:,} others, upright and
turned, at {len(study.angles)} angles up to {study.angles[-1]}°. Turned digits are unlike anything
it has learned from. It may well fail to read them, but it should say so. Four ways to get
probabilities from this one network are compared:</p>
{_definitions(MEANING, findings)}
<p>Each posterior has one setting, the prior precision: the smaller, the wider the posterior and the
more cautious the prediction. One rule chose it for every method, on {study.validation_images:,}
upright validation digits alone: <em>the smallest whose NLL is at most {study.tolerance:g} nats
above MAP’s</em> ({findings.map_trial.validation_nll:.3f}). It gave {_choices(findings)}. So all
three pay about the same price on ordinary digits, and no turned or test digit had a say.</p>"""


def numbers(findings: Findings) -> str:
    """Show the table and explain its columns."""
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in COLUMNS)
    groups = "".join(_group(findings, angle) for angle in findings.study.table_angles)
    return f"""<h2>The numbers</h2>
<div class="scroll"><table>
<caption>{findings.study.test_images:,} test digits; the best of each column in bold.</caption>
<thead><tr><th scope="col">method</th>{head}</tr></thead>{groups}
</table></div>
{_definitions(SCORES, findings)}"""


def against_rotation(findings: Findings) -> str:
    """Show confidence, ECE and Brier score against the angle."""
    confidence = figures.confidence_against_angle(findings, "Mean confidence")
    ece = figures.score_against_angle(findings, "ece", "Calibration error (ECE)")
    brier = figures.score_against_angle(findings, "brier", "Brier score")
    nll = figures.score_against_angle(findings, "nll", "NLL")
    described = {
        "confidence": (confidence, "Mean confidence of each method against rotation"),
        "ece": (ece, "Expected calibration error of each method against rotation"),
        "brier": (brier, "Brier score of each method against rotation"),
        "nll": (nll, "Negative log-likelihood of each method against rotation"),
    }
    panels = "".join(_svg(name, *figure) for name, figure in described.items())
    return f"""<h2>As the digits turn</h2>
<figure><div class="panels">{panels}</div>
<figcaption>The dashed line is how often the network is right; the other methods’ accuracy differs
from it by at most {_accuracy_gap(findings):.1%}. A calibrated method’s confidence would follow it
down. The three other scores are better the lower they are: at 0° one sees the price of caution,
further right what it buys.</figcaption></figure>"""


def reliability(findings: Findings) -> str:
    """Show a reliability diagram per method."""
    angle, bins = findings.study.focus_angle, findings.study.bins
    share = "a tenth" if bins == 10 else f"one {bins}th"
    panels = "".join(
        _svg(
            f"reliability-{VARIABLES[method]}",
            figures.reliability(method, findings.diagrams[method], angle),
            f"Accuracy against confidence for {method}, upright and turned {angle}°",
        )
        for method in METHODS
    )
    return f"""<h2>Does 80% sure mean right 80% of the time?</h2>
<figure><div class="small panels">{panels}</div>
<figcaption>Each point is {share} of the digits, grouped by confidence. On the dashed diagonal
confidence and accuracy agree; below it the method is overconfident, above it too
cautious.</figcaption></figure>"""


def digits(findings: Findings) -> str:
    """Show a few digits with every method's reading and confidence."""
    angles = findings.study.table_angles
    views = "".join(
        _view(example.label, view)
        for example in findings.examples
        for view in example.views
        if view.angle in angles
    )
    return f"""<h2>A few digits</h2>
<p>The first {len(findings.examples)} different digits of the test set, not picked for effect. The
bars are what each method reads, right (✓) or wrong (✗), and how sure it is.</p>
<div class="thirds">{views}</div>"""


def price(findings: Findings) -> str:
    """Show what every prior precision costs and buys."""
    figure = figures.trade_off(findings, "What caution costs, and what it buys")
    described = "Calibration error on turned digits against the extra NLL on upright digits"
    return f"""<h2>Would another setting have told another story?</h2>
<figure><div class="scroll">{_svg("price", figure, described)}</div>
<figcaption>Each path is a method whose prior precision falls from left, where all of them are MAP,
to right. The rings are the choices made above. At any price, the lower path is the better bargain.
The vertical axis is measured on test digits, to show and not to choose.</figcaption></figure>"""


def conclusions(findings: Findings) -> str:
    """Say what follows from the numbers, and what does not."""
    claims = [_calibration_claim(findings), _price_claim(findings), _ignorance_claim(findings)]
    items = "".join(f"<li>{claim}</li>" for claim in claims)
    return f"""<h2>What is honest to conclude</h2>
<ul>{items}
<li>No method reads turned digits better than another: their accuracies are within
{_accuracy_gap(findings):.1%} of MAP’s. Caution is knowing what one does not know, not knowing
more.</li>
<li>This is one small network, one seed and {findings.study.test_images:,} tiny images, a
demonstration and not a benchmark: a difference of a few hundredths of ECE is noise.
<code>acnml demo --seed {findings.study.seed + 1}</code> trains another, on another split.</li>
</ul>"""


def footer(findings: Findings) -> str:
    """Say how the page was made."""
    seed = findings.study.seed
    return f"""<footer><p>Made by <code>acnml demo --seed {seed}</code>, acnml {__version__}, from
the digits that come with scikit-learn. Method: Zhou &amp; Levine, <em>Amortized Conditional
Normalized Maximum Likelihood</em>, ICML 2021.</p></footer>"""


# Claims ----------------------------------------------------------------------------------------


def _calibration_claim(findings: Findings) -> str:
    better = better_forms(findings)
    who = {0: "Neither form of ACNML is", 1: f"Only {better[0] if better else ''} is"}
    rivals = {m: findings.turned(m, "ece") for m in METHODS}
    means = ", ".join(f"{escape(method)} {ece:.2f}" for method, ece in rivals.items())
    start = who.get(len(better), "Both forms of ACNML are")
    return (
        f"{start} clearly better calibrated than MAP and BMA on turned digits. Mean ECE: {means}."
    )


def _price_claim(findings: Findings) -> str:
    upright = {method: findings.scores[method][0] for method in METHODS}
    means = ", ".join(f"{escape(m)} {s.nll:.2f} ({s.ece:.2f})" for m, s in upright.items())
    dearer = [m for m in TUNED if upright[m].nll > upright[MAP].nll]
    start = "This is not free" if dearer else "Here it was free"
    return f"{start}. On upright digits the NLL (and ECE) are: {means}."


def _ignorance_claim(findings: Findings) -> str:
    """Compare with a uniform guess, which scores log K and 1 - 1/K whatever the digits."""
    angle, nll, brier = findings.study.focus_angle, math.log(CLASSES), 1 - 1 / CLASSES
    scores = {method: findings.scores[method][angle] for method in METHODS}
    beaten = [m for m, s in scores.items() if s.nll < nll and s.brier < brier]
    who = f"only {' and '.join(beaten)} beat" if beaten else "none of the methods beats"
    return (
        f"At {angle}°, {escape(who)} a blind guess that gives every digit 10%, which has NLL "
        f"{nll:.2f} and Brier score {brier:.2f}: less overconfident is not yet cautious enough."
    )


# What they share -------------------------------------------------------------------------------


def _svg(name: str, figure: Figure, description: str) -> str:
    return inline_svg(to_svg(figure), name, description, SVG_COLOURS)


def _definitions(meanings: dict[str, str], findings: Findings) -> str:
    values = {"samples": findings.study.samples, "bins": findings.study.bins}
    items = "".join(
        f"<dt>{_dot(term)}{escape(term)}</dt><dd>{escape(text.format(**values))}</dd>"
        for term, text in meanings.items()
    )
    return f"<dl>{items}</dl>"


def _dot(method: str) -> str:
    """A dot in the method's colour, the legend of all figures; nothing for what is no method."""
    if method not in VARIABLES:
        return ""
    return f'<span class="dot" style="background: var(--{VARIABLES[method]})"></span>'


def _choices(findings: Findings) -> str:
    return ", ".join(
        f"{trial.prior_precision:.2g} for {escape(method)} (NLL {trial.validation_nll:.3f})"
        for method, trial in findings.chosen.items()
    )


def _group(findings: Findings, angle: int) -> str:
    """The table's rows for one angle."""
    span = len(COLUMNS) + 1
    rows = "".join(_row(method, cells) for method, cells in table(findings, angle).items())
    title = escape(heading(angle)).capitalize()
    return f'<tbody><tr><th colspan="{span}" scope="rowgroup">{title}</th></tr>{rows}</tbody>'


def _row(method: str, cells: list[Cell]) -> str:
    shown = (f"<strong>{cell.text}</strong>" if cell.best else cell.text for cell in cells)
    columns = "".join(f"<td>{text}</td>" for text in shown)
    return f'<tr><th scope="row">{_dot(method)}{escape(method)}</th>{columns}</tr>'


def _view(label: int, view: View) -> str:
    what = f"a {label}, {heading(view.angle)}"
    image = inline_png(figures.pixels_png(view.pixels), what)
    bars = "".join(_bar(method, label, *top) for method, top in view.predictions.items())
    title = f"<p>{what[0].upper()}{escape(what[1:])}</p>"
    return f'<div class="view">{title}{image}<div class="bars">{bars}</div></div>'


def _bar(method: str, label: int, predicted: int, confidence: float) -> str:
    mark = "✓" if predicted == label else "✗"
    fill = f"width: {confidence:.1%}; background: var(--{VARIABLES[method]})"
    return (
        f'<div class="bar"><span>{escape(method)}: {predicted} {mark}</span>'
        f"<span>{confidence:.0%}</span>"
        f'<span class="track"><span class="fill" style="{fill}"></span></span></div>'
    )


def _accuracy_gap(findings: Findings) -> float:
    """The largest difference in accuracy between MAP and another method, at any angle."""
    by_angle = zip(*(by.values() for by in findings.scores.values()), strict=True)
    return max(
        abs(first.accuracy - other.accuracy) for first, *others in by_angle for other in others
    )
