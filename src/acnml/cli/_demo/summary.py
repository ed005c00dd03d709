"""The demo in a table and in one sentence: what the terminal and the report have in common.

Nothing here is written in advance: if ACNML does not do better, the sentence says so.
"""

from __future__ import annotations

from typing import NamedTuple

from acnml.cli._demo.measurement import Scores
from acnml.cli._demo.study import ACNML, BMA, LAST_LAYER, MAP, METHODS, Findings

COLUMNS = ("accuracy", "confidence", "NLL", "ECE", "Brier")
CLEARLY = 0.01  # a smaller difference of ECE is called none: so few images cannot tell


class Cell(NamedTuple):
    """A number as it is shown, and whether it is the best of its kind."""

    text: str
    best: bool


def table(findings: Findings, angle: int) -> dict[str, list[Cell]]:
    """Return a row of cells per method, in the order of `COLUMNS`."""
    shown = {method: _texts(findings.scores[method][angle]) for method in METHODS}
    best = [_best(column, [row[i] for row in shown.values()]) for i, column in enumerate(COLUMNS)]
    return {
        method: [Cell(text, text == top) for text, top in zip(row, best, strict=True)]
        for method, row in shown.items()
    }


def heading(angle: int) -> str:
    """Name an angle."""
    return f"turned {angle}°" if angle else "upright"


def closing_sentence(findings: Findings) -> str:
    """Say what the numbers show: the problem, who notices it, and the price."""
    return f"{_problem(findings)}; {_comparison(findings)}, {_price(findings)}."


def better_forms(findings: Findings) -> list[str]:
    """Return the forms of ACNML that are clearly better calibrated on turned digits than rivals."""
    rivals = min(findings.turned(method, "ece") for method in (MAP, BMA))
    return [m for m in (ACNML, LAST_LAYER) if findings.turned(m, "ece") < rivals - CLEARLY]


def _problem(findings: Findings) -> str:
    angle = findings.study.focus_angle
    network = findings.scores[MAP][angle]
    return (
        f"On digits turned by {angle}° the plain network is right {network.accuracy:.0%} of the "
        f"time and {network.confidence:.0%} sure of itself"
    )


def _comparison(findings: Findings) -> str:
    ece = {method: f"{findings.turned(method, 'ece'):.2f}" for method in METHODS}
    rivals = f"BMA ({ece[BMA]}) and MAP ({ece[MAP]})"
    better = better_forms(findings)
    if len(better) == 2:
        verdict = f"ACNML is better calibrated (ECE {ece[ACNML]}, last layer {ece[LAST_LAYER]})"
        return f"averaged over all turns {verdict} than {rivals}"
    if not better:
        verdict = f"ACNML (ECE {ece[ACNML]}, last layer {ece[LAST_LAYER]}) is not better calibrated"
        return f"averaged over all turns {verdict} than the better of {rivals}"
    worse = LAST_LAYER if better == [ACNML] else ACNML
    verdict = f"{better[0]} (ECE {ece[better[0]]}) is better calibrated than {rivals}"
    return f"averaged over all turns {verdict} while {worse} ({ece[worse]}) is not"


def _price(findings: Findings) -> str:
    nll = {method: findings.scores[method][0].nll for method in METHODS}
    forms = f"NLL of {nll[ACNML]:.2f} (last layer {nll[LAST_LAYER]:.2f})"
    rivals = f"MAP has {nll[MAP]:.2f} and BMA {nll[BMA]:.2f}"
    if max(nll[ACNML], nll[LAST_LAYER]) <= nll[MAP]:
        return f"at no price on upright digits, with an {forms} where {rivals}"
    return f"and pays for its caution on upright digits with an {forms} where {rivals}"


def _texts(scores: Scores) -> list[str]:
    shares = [f"{share:.1%}" for share in (scores.accuracy, scores.confidence)]
    return [*shares, *(f"{value:.3f}" for value in (scores.nll, scores.ece, scores.brier))]


def _best(column: str, texts: list[str]) -> str | None:
    """The best of a column as shown, so that what looks equal is marked alike."""
    if column == "confidence":  # neither high nor low is good in itself
        return None
    pick = max if column == "accuracy" else min
    return pick(texts, key=lambda text: float(text.rstrip("%")))
