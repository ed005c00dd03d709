"""The demo's report: the verdict, the numbers, how they were made, and their limits."""

from __future__ import annotations

import math
import re
from html import escape
from pathlib import Path

from matplotlib.figure import Figure

from acnml import __version__
from acnml.cli._demo import figures
from acnml.cli._demo.measurement import View
from acnml.cli._demo.study import (
    ACNML,
    BEST,
    BMA,
    EQUAL,
    METHODS,
    NETWORK,
    PRICE,
    Findings,
    Summary,
)
from acnml.cli._demo.summary import (
    COLUMNS,
    Cell,
    cost_sentence,
    nll_sentence,
    price_text,
    table,
    verdict,
)
from acnml.cli._shared.digits import CLASSES
from acnml.cli._shared.drawing import THEME, to_png, to_svg
from acnml.cli._shared.files import write_file
from acnml.cli._shared.page import inline_png, inline_svg, page

NUMBER = r"-?\d+\.\d+"
TITLE = "Calibration on rotated digits"
VARIABLES = {
    NETWORK: "map",
    BEST: "temperature",
    EQUAL: "equal-price",
    BMA: "bma",
    ACNML: "acnml",
}
SVG_COLOURS = {
    **{figures.COLOURS[method]: VARIABLES[method] for method in METHODS},
    **THEME,
}
DIAGRAMS = (NETWORK, EQUAL, BMA, ACNML)
EXAMPLES = (NETWORK, EQUAL, ACNML)
MEANING = {
    NETWORK: "the probabilities of the network as it was trained.",
    BEST: "temperature scaling: the logits are divided by the number that gives the least NLL on "
    "the validation digits.",
    EQUAL: "a higher temperature, which costs {price:g} nats of validation NLL over the best one. "
    "It is the simplest way to be more cautious.",
    BMA: "Bayesian model averaging: the mean prediction of {samples} networks whose last layers "
    "are drawn from the posterior that ACNML uses, the Laplace posterior of the tempered network. "
    "Its covariance is scaled to cost {price:g} nats as well.",
    ACNML: "what acnml.calibrate returns. For each of the ten labels, the last layer moves to "
    "explain this label as well as the posterior allows. If several labels can be explained well, "
    "none of them gets a high probability. The weight alpha is the largest that costs {price:g} "
    "nats.",
}
SCORES = {
    "price": "NLL on upright validation digits, above that of the best temperature, in nats.",
    "accuracy": "the share of digits that are classified correctly.",
    "NLL": "negative log-likelihood of the true labels, in nats. Lower is better.",
    "ECE": "expected calibration error: the distance between confidence and accuracy, averaged "
    "over {bins} groups of digits with similar confidence. Lower is better.",
}


def write_report(findings: Findings, folder: Path) -> Path:
    """Write report.html and overview.png into a folder and return the path of the report.

    The picture in the README, docs/images/demo.png, is a copy of overview.png.
    """
    write_file(folder / "overview.png", to_png(figures.overview(findings)))
    return write_file(folder / "report.html", report(findings).encode())


def report(findings: Findings) -> str:
    """Return the page."""
    sections = [
        numbers(findings),
        against_rotation(findings),
        what_was_done(findings),
        calibration_table(findings),
        reliability(findings),
        digits(findings),
        limits(findings),
        footer(findings),
    ]
    return page(TITLE, verdict(findings), sections)


# Sections --------------------------------------------------------------------------------------


def numbers(findings: Findings) -> str:
    """Show the table and explain its columns."""
    study = findings.study
    names = ("price", *COLUMNS)
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in names)
    groups = "".join(_group(findings, i) for i in range(len(table(findings))))
    sentences = (nll_sentence(findings), cost_sentence(findings))
    items = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
    return f"""<ul>{items}</ul>
<h2>Cost and gain</h2>
<div class="scroll"><table>
<caption>{_networks(findings)}, {study.test_images:,} test digits each; the best number of each
column is in bold.<span class="spread"> ± is the standard deviation between networks.</span>
</caption>
<thead><tr><th scope="col">method</th>{head}</tr></thead>{groups}
</table></div>
{_definitions(SCORES, findings)}"""


def against_rotation(findings: Findings) -> str:
    """Show ECE, confidence, NLL and Brier score against the angle."""
    described = {
        "ece": (
            figures.score_against_angle(findings, "ece", "Calibration error (ECE)"),
            "Expected calibration error of each method against rotation",
        ),
        "confidence": (
            figures.confidence_against_angle(findings, "Mean confidence"),
            "Mean confidence of each method against rotation",
        ),
        "nll": (
            figures.score_against_angle(findings, "nll", "NLL"),
            "Negative log-likelihood of each method against rotation",
        ),
        "brier": (
            figures.score_against_angle(findings, "brier", "Brier score"),
            "Brier score of each method against rotation",
        ),
    }
    panels = "".join(_svg(name, *figure) for name, figure in described.items())
    return f"""<h2>Scores against rotation</h2>
<figure><div class="panels">{panels}</div>
<figcaption>Means over {_networks(findings)}. The dashed line is the accuracy of the network; that
of the other methods differs from it by at most {_accuracy_gap(findings):.1%}. The confidence of a
calibrated method would follow the dashed line. The Brier score is the squared distance between the
probabilities and the true label. ECE, NLL and Brier score are better if
lower.</figcaption></figure>"""


def what_was_done(findings: Findings) -> str:
    """Explain the data, the methods and how their settings were chosen."""
    study = findings.study
    return f"""<h2>What was done</h2>
<p>{_networks(findings).capitalize()} with {study.hidden} hidden units learned to classify
{study.train_images:,} handwritten digits of 8×8 pixels, each with another random seed and another
split of the data. They were tested on {study.test_images:,} other digits at {len(study.angles)}
angles up to {study.angles[-1]}°. The networks saw no rotated digits in training. They cannot be
expected to classify them, but their confidence should be low. Five ways to get probabilities from
the same network are compared:</p>
{_definitions(MEANING, findings)}
<p>Temperatures, BMA’s scale and alpha were chosen on {study.validation_images:,} <em>upright</em>
validation digits. The last three methods cost the same there, so their results on rotated digits
can be compared. The same scale of the posterior costs BMA and ACNML different amounts, so BMA has a
scale of its own. The means of the chosen settings are: {_choices(findings)}.</p>"""


def calibration_table(findings: Findings) -> str:
    """Show what `print(calibrated)` shows."""
    first = findings.runs[0]
    rows, _, notes = first.chosen.table.partition("\n\n")
    sentences = "".join(f"<p>{escape(note)}</p>" for note in notes.splitlines())
    return f"""<h2>What acnml.calibrate prints</h2>
<p>For the first network, <code>print(acnml.calibrate(network, train, validation))</code> shows
these numbers, all of them on the upright validation digits:</p>
<pre>{escape(rows)}</pre>
{sentences}"""


def reliability(findings: Findings) -> str:
    """Show reliability diagrams."""
    angle, bins = findings.study.focus_angle, findings.study.bins
    share = "a tenth" if bins == 10 else f"one {bins}th"
    panels = "".join(
        _svg(
            f"reliability-{VARIABLES[method]}",
            figures.reliability(method, findings.diagrams[method], angle),
            f"Accuracy against confidence for {method}, upright and rotated {angle}°",
        )
        for method in DIAGRAMS
    )
    return f"""<h2>Reliability diagrams</h2>
<figure><div class="small panels">{panels}</div>
<figcaption>Each point is {share} of the digits, grouped by confidence. On the dashed diagonal
confidence and accuracy agree. Below it the method is overconfident, above it
underconfident.</figcaption></figure>"""


def digits(findings: Findings) -> str:
    """Show a few digits with the predictions of some methods."""
    angles = findings.study.example_angles
    views = "".join(
        _view(example.label, view)
        for example in findings.examples
        for view in example.views
        if view.angle in angles
    )
    return f"""<h2>Examples</h2>
<p>The first {len(findings.examples)} different digits of the first network’s test set. The bars
show the predicted digit, right (✓) or wrong (✗), and its probability. The temperature is that of
equal price.</p>
<div class="thirds">{views}</div>"""


def limits(findings: Findings) -> str:
    """Say what does not follow from the numbers."""
    study = findings.study
    following = study.seed + study.networks
    return f"""<h2>Limits</h2>
<ul>
<li>{_ignorance_claim(findings)}</li>
<li>Calibration is about confidence, not accuracy: at every angle the accuracies of all methods are
within {_accuracy_gap(findings):.1%} of the network’s.</li>
<li>The price is measured on {study.validation_images:,} digits and is therefore uncertain; the
table above gives its standard error.</li>
<li>The demo itself was designed with rotated digits in sight: seven networks and several prior
precisions were tried on seeds 0 to 4. The prior is the default of <code>acnml.calibrate</code>,
which was set by another argument; smaller ones gave a lower ECE in these trials.</li>
<li>These are small networks and tiny images: a demonstration, not a benchmark.
<code>acnml demo --seed {following}</code> trains other networks on other splits.</li>
</ul>"""


def footer(findings: Findings) -> str:
    """Say how the page was made."""
    seed = findings.study.seed
    return f"""<footer><p>Made by <code>acnml demo --seed {seed}</code>, acnml {__version__}, from
the digits that come with scikit-learn. Method: Zhou &amp; Levine, <em>Amortized Conditional
Normalized Maximum Likelihood</em>, ICML 2021.</p></footer>"""


# Helpers ---------------------------------------------------------------------------------------


def _ignorance_claim(findings: Findings) -> str:
    """Compare with a uniform guess, whose NLL is log K for any digits."""
    uniform = math.log(CLASSES)
    nll = {method: findings.shifted(method, "nll").mean for method in METHODS}
    better = [method for method in METHODS if nll[method] < uniform]
    who = f"only {'; '.join(better)} did better than" if better else "no method did better than"
    return (
        f"On digits rotated {findings.study.shifted_from}° or more, {escape(who)} a uniform guess, "
        f"which gives every digit 10% and has an NLL of {uniform:.2f}. The mean confidence of "
        f"ACNML is {findings.shifted(ACNML, 'confidence').mean:.0%} there, its accuracy "
        f"{findings.shifted(ACNML, 'accuracy').mean:.0%}."
    )


def _networks(findings: Findings) -> str:
    count = findings.study.networks
    return "one network" if count == 1 else f"{count} networks"


def _svg(name: str, figure: Figure, description: str) -> str:
    return inline_svg(_compact(to_svg(figure)), name, description, SVG_COLOURS)


def _compact(svg: str) -> str:
    """Shorten an SVG document to about half: coordinates to 0.01 points, no indentation."""

    def shorter(path: re.Match[str]) -> str:
        joined = " ".join(path[1].split())
        return (
            f' d="{re.sub(NUMBER, lambda n: f"{float(n[0]):.2f}".rstrip("0").rstrip("."), joined)}"'
        )

    svg = re.sub(r' d="([^"]*)"', shorter, re.sub(r"<!--.*?-->", "", svg))
    return re.sub(r">\s+<", "><", svg)


def _definitions(meanings: dict[str, str], findings: Findings) -> str:
    values = {"samples": findings.study.samples, "bins": findings.study.bins, "price": PRICE}
    items = "".join(
        f"<dt>{_dot(term)}{escape(term)}</dt><dd>{escape(text.format(**values))}</dd>"
        for term, text in meanings.items()
    )
    return f"<dl>{items}</dl>"


def _dot(method: str) -> str:
    """A dot in the method's colour, which is the legend of all figures; empty for other terms."""
    if method not in VARIABLES:
        return ""
    return f'<span class="dot" style="background: var(--{VARIABLES[method]})"></span>'


def _choices(findings: Findings) -> str:
    meaning = {
        "temperature": "best temperature",
        "equal_temperature": "temperature of equal price",
        "bma_scale": "scale of BMA’s covariance",
        "alpha": "alpha",
    }
    values = {
        name: Summary.of([getattr(run.chosen, name) for run in findings.runs]) for name in meaning
    }
    return ", ".join(f"{meaning[name]} {value.mean:.2g}" for name, value in values.items())


def _group(findings: Findings, index: int) -> str:
    """The rows of the table's upright or shifted part; prices are shown in the first."""
    group = table(findings)[index]
    rows = "".join(
        _row(method, "" if index else price_text(findings, method), cells)
        for method, cells in group.rows.items()
    )
    span = len(COLUMNS) + 2
    title = escape(group.title)
    return f'<tbody><tr><th colspan="{span}" scope="rowgroup">{title}</th></tr>{rows}</tbody>'


def _row(method: str, price: str, cells: list[Cell]) -> str:
    columns = "".join(
        f"<td>{f'<strong>{cell.text}</strong>' if cell.best else cell.text}"
        f'<span class="spread"> ± {cell.spread}</span></td>'
        for cell in cells
    )
    return f'<tr><th scope="row">{_dot(method)}{escape(method)}</th><td>{price}</td>{columns}</tr>'


def _view(label: int, view: View) -> str:
    what = f"a {label}, {f'rotated {view.angle}°' if view.angle else 'upright'}"
    image = inline_png(figures.pixels_png(view.pixels), what)
    bars = "".join(_bar(method, label, *view.predictions[method]) for method in EXAMPLES)
    title = f"<p>{what[0].upper()}{escape(what[1:])}</p>"
    return f'<div class="view">{title}{image}<div class="bars">{bars}</div></div>'


def _bar(method: str, label: int, predicted: int, confidence: float) -> str:
    mark = "✓" if predicted == label else "✗"
    fill = f"width: {confidence:.1%}; background: var(--{VARIABLES[method]})"
    return (
        f'<div class="bar"><span>{method.split(",")[0]}: {predicted} {mark}</span>'
        f"<span>{confidence:.0%}</span>"
        f'<span class="track"><span class="fill" style="{fill}"></span></span></div>'
    )


def _accuracy_gap(findings: Findings) -> float:
    """The largest difference in mean accuracy between the network and a method, at any angle."""
    curves = [findings.curve(method, "accuracy") for method in METHODS]
    return max(
        abs(other - first) for first, *others in zip(*curves, strict=True) for other in others
    )
