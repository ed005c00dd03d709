"""The demo's report: the verdict, the numbers, how they were made, and their limits."""

from __future__ import annotations

import math
from html import escape
from pathlib import Path
from statistics import fmean

from studies.data.digits import CLASSES
from studies.demo import figures
from studies.demo.examples import View
from studies.demo.study import ACNML, BEST, BMA, EQUAL, METHODS, NETWORK, PRICE, Findings
from studies.demo.summary import (
    COLUMNS,
    Group,
    cost_sentence,
    nll_sentence,
    price_text,
    table,
    verdict,
)
from studies.drawing import to_png
from studies.engine.figures import METHOD_COLOURS
from studies.engine.report import Panels, Section, ShortReport
from studies.engine.tables import Table, counted
from studies.files import write_file
from studies.page import inline_png

TITLE = "Calibration on rotated digits"
DIAGRAMS = (NETWORK, EQUAL, BMA, ACNML)
EXAMPLES = (NETWORK, EQUAL, ACNML)
MEANING = {
    NETWORK: "the probabilities of the network as it was trained.",
    BEST: "temperature scaling: the logits are divided by the number that gives the least NLL on "
    "the validation digits.",
    EQUAL: "a higher temperature, which costs {price:g} nats of validation NLL over the best one. "
    "It is the simplest way to be more cautious.",
    BMA: "Bayesian model averaging: the mean prediction of {samples} networks whose last layers "
    "are drawn from the Laplace posterior of the tempered network. Its covariance is scaled to "
    "cost {price:g} nats as well.",
    ACNML: "what acnml.calibrate returns for rule='acnml'. It asks for each of the ten labels how "
    "probable the network could make this label without losing its fit to the training data. The "
    "less a digit’s features resemble those of the training digits, the more the network may "
    "change for it. If several labels can be explained well, none of them gets a high "
    "probability. The weight alpha is the largest that costs {price:g} nats.",
}
SCORES = {
    "price": "NLL on upright validation digits, above that of the best temperature, in nats.",
    "accuracy": "the share of digits that are classified correctly.",
    "NLL": "negative log-likelihood of the true labels, in nats. Lower is better.",
    "ECE": "expected calibration error: the distance between confidence and accuracy, averaged "
    "over {bins} groups of digits with similar confidence. Lower is better.",
}
SETTINGS = {
    "temperature": "best temperature",
    "equal_temperature": "temperature of equal price",
    "bma_scale": "scale of BMA’s covariance",
    "alpha": "alpha, the variance of logits for a typical digit",
}


def write_report(findings: Findings, folder: Path) -> Path:
    """Write report.html and two pictures into a folder and return the path of the report.

    The picture in the README, docs/images/demo.png, is a copy of overview.png, and demo-narrow.png,
    which the first page shows on phones, one of overview-narrow.png.
    """
    write_file(folder / "overview.png", to_png(figures.overview(findings)))
    write_file(folder / "overview-narrow.png", to_png(figures.narrow_overview(findings), 150))
    return write_file(folder / "report.html", report(findings).html().encode())


def report(findings: Findings) -> ShortReport:
    """Put the report together."""
    sections = [
        numbers(findings),
        against_rotation(findings),
        what_was_done(findings),
        calibration_table(findings),
        reliability(findings),
        digits(findings),
        Section("Limits", limits(findings)),
    ]
    return ShortReport(
        TITLE,
        verdict(findings),
        sections,
        f"python -m studies demo --seed {findings.study.seed}",
        {},
        note="The digits come with scikit-learn.",
    )


# Sections --------------------------------------------------------------------------------------


def numbers(findings: Findings) -> Section:
    """Show the tables."""
    caption = (
        f"{_networks(findings)}, {findings.study.test_images:,} test digits each, ± the standard "
        "deviation between networks; the best number of each column is in bold."
    )
    upright, shifted = table(findings)
    tables = [
        _table(findings, upright, f"{upright.title}. {caption}"),
        _table(findings, shifted, shifted.title),
    ]
    sentences = [nll_sentence(findings), cost_sentence(findings)]
    return Section("Cost and gain", sentences, tables=tables)


def against_rotation(findings: Findings) -> Section:
    """Show ECE, confidence, NLL and Brier score against the angle."""
    drawn = {
        "ece-by-angle": figures.score_against_angle(findings, "ece", "Calibration error (ECE)"),
        "confidence-by-angle": figures.confidence_against_angle(findings, "Mean confidence"),
        "nll-by-angle": figures.score_against_angle(findings, "nll", "NLL"),
        "brier-by-angle": figures.score_against_angle(findings, "brier", "Brier score"),
    }
    caption = (
        f"Means over {_networks(findings)}. The dashed line is the accuracy of the network; that "
        f"of the other methods differs from it by at most {_accuracy_gap(findings):.1%}. The "
        "confidence of a calibrated method would follow the dashed line. The Brier score is the "
        "squared distance between the probabilities and the true label. ECE, NLL and Brier score "
        "are better if lower."
    )
    return Section("Scores against rotation", panels=[Panels(drawn, caption)])


def what_was_done(findings: Findings) -> Section:
    """Explain the data, the methods, how their settings were chosen, and the scores."""
    study = findings.study
    chosen = ", ".join(
        f"{meaning} {fmean(getattr(run.chosen, name) for run in findings.runs):.2g}"
        for name, meaning in SETTINGS.items()
    )
    return Section(
        "What was done",
        [
            f"{_networks(findings)} with {study.hidden} hidden units learned to classify "
            f"{study.train_images:,} handwritten digits of 8×8 pixels, each with another random "
            f"seed and another split of the data. They were tested on {study.test_images:,} other "
            f"digits at {len(study.angles)} angles up to {study.angles[-1]}°. The networks saw no "
            "rotated digits in training. They cannot be expected to classify them, but their "
            "confidence should be low. Five ways to get probabilities from the same network are "
            "compared:",
            *_defined(MEANING, findings),
            f"Temperatures, BMA’s scale and alpha were chosen on {study.validation_images:,} "
            "*upright* validation digits. The last three methods cost the same there, so their "
            f"results on rotated digits can be compared. The means of the settings are: {chosen}.",
            *_defined(SCORES, findings),
        ],
    )


def calibration_table(findings: Findings) -> Section:
    """Show what `print(calibrated)` shows."""
    rows, _, notes = findings.runs[0].chosen.table.partition("\n\n")
    sentences = "".join(f"<p>{escape(note)}</p>" for note in notes.splitlines())
    return Section(
        "What acnml.calibrate prints",
        [
            "For the first network, `print(acnml.calibrate(network, train, validation, "
            'rule="acnml"))` shows these numbers, all of them on the upright validation digits:'
        ],
        more=f"<pre>{escape(rows)}</pre>\n{sentences}",
    )


def reliability(findings: Findings) -> Section:
    """Show reliability diagrams."""
    angle = findings.study.focus_angle
    drawn = {
        f"reliability-{_variable(method)}": figures.reliability(
            method, findings.diagrams[method], angle
        )
        for method in DIAGRAMS
    }
    caption = (
        f"Each point is one of {findings.study.bins} groups of digits with similar confidence. On "
        "the dashed diagonal confidence and accuracy agree. Below it the method is overconfident, "
        "above it underconfident."
    )
    return Section("Reliability diagrams", panels=[Panels(drawn, caption, "small panels")])


def digits(findings: Findings) -> Section:
    """Show a few digits with the predictions of some methods."""
    views = "".join(
        _view(example.label, view)
        for example in findings.examples
        for view in example.views
        if view.angle in findings.study.example_angles
    )
    return Section(
        "Examples",
        [
            f"The first {len(findings.examples)} different digits of the first network’s test "
            "set. The bars show the predicted digit, right (✓) or wrong (✗), and its probability. "
            "The temperature is that of equal price."
        ],
        more=f'<div class="thirds">{views}</div>',
    )


def limits(findings: Findings) -> list[str]:
    """Say what does not follow from the numbers."""
    study, uniform = findings.study, math.log(CLASSES)  # a uniform guess has this NLL for any digit
    better = [m for m in METHODS if findings.shifted(m, "nll").mean < uniform]
    who = f"only {'; '.join(better)} did better than" if better else "no method did better than"
    return [
        f"On digits rotated {study.shifted_from}° or more, {who} a uniform guess, which gives "
        f"every digit 10% and has an NLL of {uniform:.2f}. The mean confidence of ACNML is "
        f"{findings.shifted(ACNML, 'confidence').mean:.0%} there, its accuracy "
        f"{findings.shifted(ACNML, 'accuracy').mean:.0%}.",
        "Calibration is about confidence, not accuracy: at every angle the accuracies of all "
        f"methods are within {_accuracy_gap(findings):.1%} of the network’s.",
        f"The price is measured on {study.validation_images:,} digits and is therefore uncertain; "
        "what acnml.calibrate prints gives its standard error.",
        "The demo itself was designed with rotated digits in sight: seven networks and several "
        "prior precisions of BMA’s posterior were tried on seeds 0 to 4.",
        "These are small networks and tiny images: a demonstration, not a benchmark. "
        f"`python -m studies demo --seed {study.seed + study.networks}` trains other networks on "
        "other splits.",
    ]


# Helpers ---------------------------------------------------------------------------------------


def _networks(findings: Findings) -> str:
    return counted(findings.study.networks, "network")


def _variable(method: str) -> str:
    """Return the page's variable with the colour of a method."""
    return METHOD_COLOURS[figures.COLOURS[method]]


def _defined(meanings: dict[str, str], findings: Findings) -> list[str]:
    values = {"samples": findings.study.samples, "bins": findings.study.bins, "price": PRICE}
    return [f"**{term}**: {text.format(**values)}" for term, text in meanings.items()]


def _table(findings: Findings, group: Group, caption: str) -> Table:
    rows = [
        [
            method,
            *([price_text(findings, method)] if group.has_prices else []),
            *(f"**{c.text}** ± {c.spread}" if c.best else f"{c.text} ± {c.spread}" for c in cells),
        ]
        for method, cells in group.rows.items()
    ]
    return Table(caption, ("method", *(["price"] if group.has_prices else []), *COLUMNS), rows)


def _view(label: int, view: View) -> str:
    what = f"a {label}, {f'rotated {view.angle}°' if view.angle else 'upright'}"
    image = inline_png(figures.pixels_png(view.pixels), what)
    bars = "".join(_bar(method, label, *view.predictions[method]) for method in EXAMPLES)
    title = f"<p>{what[0].upper()}{escape(what[1:])}</p>"
    return f'<div class="view">{title}{image}<div class="bars">{bars}</div></div>'


def _bar(method: str, label: int, predicted: int, confidence: float) -> str:
    mark = "✓" if predicted == label else "✗"
    fill = f"width: {confidence:.1%}; background: var(--{_variable(method)})"
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
