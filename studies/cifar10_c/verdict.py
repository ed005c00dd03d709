"""What the paper says of CIFAR-10 and CIFAR-10-C, what was measured, and whether the two agree.

A verdict is computed from the numbers alone, by the rule that it states. Methods are compared on
the same images only.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from studies.cifar10_c import methods
from studies.cifar10_c.figures import path_of
from studies.cifar10_c.looks import LOOKS
from studies.cifar10_c.methods import Method, images_of
from studies.cifar10_c.results import Results
from studies.cifar10_c.study import BLUR, shift
from studies.study.choices import interpolated, up_to_least
from studies.study.verdict import Verdict

HARD = (4, 5)  # the severities of the paper's claim
COMPARABLE = {"accuracy": 0.005, "nll": 0.05}
CLOSE = 0.05  # total variation
WHOLE_NETWORK = {
    "SWAG-D": (methods.MAP_SWA, methods.BMA_SWAG_D, methods.ACNML_SWAG_D_PAPERS),
    "KFAC-Laplace": (methods.MAP_SWA, methods.BMA_KFAC, methods.ACNML_KFAC_PAPERS),
}
BEYOND = "Beyond the paper: "
LAST_LAYER = (methods.MAP_SWA, methods.BMA_SWAG_D, methods.ACNML_HEAD)


def verdicts(results: Results) -> list[Verdict]:
    """Judge every claim."""
    posteriors = {**WHOLE_NETWORK, "KFAC on the last layer": LAST_LAYER}
    return [
        *(_comparable(results, name, trio, "accuracy") for name, trio in posteriors.items()),
        *(_comparable(results, name, trio, "nll") for name, trio in posteriors.items()),
        *(_calibrated(results, name, trio) for name, trio in posteriors.items()),
        *(_steps(results, method) for method in methods.COSTLY),
        *(_beats_temperature(results, trio[-1], methods.TEMPERED) for trio in posteriors.values()),
        _beats_temperature(results, methods.ACNML_HEAD_TEMPERED, methods.TEMPERED_NEAR),
        _beats_temperature(results, methods.ACNML_HEAD_ALPHA_TEMPERED, methods.TEMPERED_NEAR),
        _beats_temperature(results, methods.ACNML_SWAG_D_TEMPERED, methods.TEMPERED_NEAR),
        *(
            _beats_temperature(results, ours, methods.TEMPERED_BUDGET)
            for ours in (methods.ACNML_HEAD_ALPHA, methods.ACNML_SWAG_D, methods.ACNML_KFAC)
        ),
        *(_more_than_tempering(results, family) for family in methods.SWEPT if _is_acnml(family)),
    ]


def common_images(results: Results, chosen: Sequence[Method]) -> int:
    """Return the number of images that all of these methods have seen at every corruption."""
    anywhere = shift(BLUR, 1)
    counts = (images_of(method, anywhere, results.study) for method in chosen)
    return results.level(min(counts))


def mean_at(results: Results, method: Method, score: str, severity: int, n: int) -> float | None:
    """Return the mean of a score over all corruptions, None where some are missing."""
    values = results.at_severity(method, score, severity, n)
    return fmean(values) if values else None


def hard_means(results: Results, chosen: Sequence[Method], n: int) -> list[list[float]] | None:
    """Return the methods' mean ECEs at the claims' severities, None if some are missing."""
    means = [[mean_at(results, m, "ece", s, n) for s in HARD] for m in chosen]
    found = [[mean for mean in each if mean is not None] for each in means]
    return found if all(len(each) == len(HARD) for each in found) else None


# Claims of the paper ---------------------------------------------------------------------------


def _comparable(results: Results, name: str, trio: Sequence[Method], score: str) -> Verdict:
    shown = {"accuracy": "accuracy", "nll": "NLL"}[score]
    claim = (
        f"In distribution, ACNML with {name} has an {shown} comparable to that of {_both(trio)}."
    )
    claim = _attributed(claim, trio)
    allowed = COMPARABLE[score]
    rule = f"at most {allowed:g} worse than the better of the two, on the same images"
    n = common_images(results, trio)
    each = [results.at_severity(method, score, 0, n) for method in trio]
    if not all(each):
        return Verdict(claim, rule, "not finished", None)
    plain, bma, ours = (values[0] for values in each)
    worse = max(plain, bma) - ours if score == "accuracy" else ours - min(plain, bma)
    text = ", ".join(f"{LOOKS[m].label} {v[0]:.3f}" for m, v in zip(trio, each, strict=True))
    return Verdict(claim, rule, f"{text}, {n:,} images", worse <= allowed + 1e-9)


def _calibrated(results: Results, name: str, trio: Sequence[Method]) -> Verdict:
    claim = f"Under strong corruption, ACNML with {name} has a lower ECE than {_both(trio)}."
    claim = _attributed(claim, trio)
    rule = "lower mean ECE over corruptions than both, at each of the severities 4 and 5"
    n = common_images(results, trio)
    means = hard_means(results, trio, n)
    if means is None:
        return Verdict(claim, rule, "not finished", None)
    plain, bma, ours = means
    holds = all(o < min(p, b) for p, b, o in zip(plain, bma, ours, strict=True))
    return Verdict(claim, rule, _means_text(trio, means, n), holds)


def _steps(results: Results, method: Method) -> Verdict:
    claim = f"{BEYOND}with {method.posterior}, the fast solution stands for the gradient steps."
    rule = f"mean total variation of the probabilities below {CLOSE:g}"
    found = [a for a in results.agreements if a.method.name == method.name]
    if not found:
        return Verdict(claim, rule, "not finished", None)
    distance = found[0].total_variation
    text = f"{distance:.4f} over {found[0].images:,} images, same class for {found[0].same:.1%}"
    return Verdict(claim, rule, text, distance < CLOSE)


def _both(trio: Sequence[Method]) -> str:
    return " and ".join(LOOKS[method].label for method in trio[:2])


def _attributed(claim: str, trio: Sequence[Method]) -> str:
    """Say that a claim about a last layer is not the paper's."""
    return BEYOND + claim[0].lower() + claim[1:] if trio == LAST_LAYER else claim


# Beyond the paper ------------------------------------------------------------------------------


def _beats_temperature(results: Results, ours: Method, tempered: Method) -> Verdict:
    names = (LOOKS[method].label for method in (ours, tempered))
    claim = BEYOND + "{} has a lower ECE under strong corruption than {}.".format(*names)
    rule = "lower mean ECE over corruptions, at each of the severities 4 and 5"
    n = common_images(results, (ours, tempered))
    means = hard_means(results, (ours, tempered), n)
    if means is None:
        return Verdict(claim, rule, "not finished", None)
    text = f"{_means_text((ours, tempered), means, n)}, {_wins_text(results, (ours, tempered), n)}"
    return Verdict(claim, rule, text, all(o < t for o, t in zip(*means, strict=True)))


def _more_than_tempering(results: Results, family: Method) -> Verdict:
    name = LOOKS[family].label
    claim = f"{BEYOND}{name} does more than lower all confidences as a temperature does."
    rule = "on average lower ECE than the temperature of equal held-out NLL, over the sweep"
    gaps = matched_gaps(results, family)
    if not gaps:
        return Verdict(claim, rule, "not finished, or no common NLL", None)
    text = f"mean difference of ECE {fmean(gaps):+.3f}, from {min(gaps):+.3f} to {max(gaps):+.3f}"
    return Verdict(claim, rule, text, fmean(gaps) < 0)


def matched_gaps(results: Results, family: Method) -> list[float]:
    """Return the differences of ECE to the temperature of equal held-out NLL.

    Every value of the family that costs an NLL within the temperature's range counts; between
    temperatures ECE is interpolated linearly. Both are compared on their cautious branches.
    """
    ours, theirs = (
        path[: up_to_least([point.held_out_nll for point in path])]
        for path in (path_of(results, each) for each in (family, methods.TEMPERED))
    )
    tempered = sorted((point.held_out_nll, point.ece) for point in theirs)
    pairs = ((point.ece, interpolated(tempered, point.held_out_nll)) for point in ours)
    return [ece - expected for ece, expected in pairs if expected is not None]


def _is_acnml(method: Method) -> bool:
    return method.rule == "ACNML"


def _means_text(chosen: Sequence[Method], means: list[list[float]], n: int) -> str:
    each = (
        f"{LOOKS[method].label} {' / '.join(f'{mean:.3f}' for mean in some)}"
        for method, some in zip(chosen, means, strict=True)
    )
    severities = " / ".join(map(str, HARD))
    return f"at severities {severities}: {', '.join(each)}; {n:,} images of each corruption"


def _wins_text(results: Results, pair: tuple[Method, Method], n: int) -> str:
    """Say for how many corruptions the first of two methods is better: a mean may hide many."""
    wins = []
    for severity in HARD:
        ours, theirs = (results.at_severity(method, "ece", severity, n) for method in pair)
        wins.append(sum(o < t for o, t in zip(ours, theirs, strict=True)))
    return f"lower for {' / '.join(map(str, wins))} of {len(results.study.corruptions)}"
