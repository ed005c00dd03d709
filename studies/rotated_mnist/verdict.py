"""What the paper says of MNIST, what was measured, and whether the two agree.

A verdict is computed from the numbers alone, by the rule that it states, when all seeds are there.
Methods are compared on the same images. The paper's claims are about a mean-field posterior; the
last ones go beyond it.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch
from torch import Tensor

from studies.rotated_mnist import methods
from studies.rotated_mnist.frontier import SweepPoint
from studies.rotated_mnist.looks import LOOKS, MATCHED
from studies.rotated_mnist.methods import Method
from studies.rotated_mnist.results import Results
from studies.study.choices import interpolated, up_to_least
from studies.study.verdict import Verdict

FAR = 45  # degrees from which digits count as turned
CLASSES = 10
HARDLY = 0.01  # nats that validation images may have misjudged


def verdicts(results: Results) -> list[Verdict]:
    """Judge every claim."""
    posteriors = {
        "Bayes by Backprop": (methods.MAP_BBP, methods.BMA_BBP, methods.ACNML_BBP),
        "KFAC-Laplace": (methods.MAP, methods.BMA_KFAC, methods.ACNML_KFAC),
        "SWAG-D": (methods.MAP_SWAG, methods.BMA_SWAG, methods.ACNML_SWAG),
    }
    return [
        *(_better(results, name, trio, "ece") for name, trio in posteriors.items()),
        _better(results, "Bayes by Backprop", posteriors["Bayes by Backprop"], "brier"),
        _ece_upright(results),
        _accuracy(results),
        _agreement_with_naive(results),
        _cheaper_than_naive(results),
        _more_than_tempering(results, methods.ACNML_BBP, methods.TEMPERED_BBP),
        _more_than_tempering(results, methods.ACNML_HEAD, methods.TEMPERED),
        _best_everywhere(results),
    ]


def far_shifts(results: Results) -> list[str]:
    """Return the angles that count as turned."""
    return [f"{angle}°" for angle in results.study.angles if angle >= FAR]


def mean(results: Results, method: Method, score: str, shift: str, n: int) -> float | None:
    """Return a score of a shift's first n images averaged over seeds, None if one is missing."""
    values = results.values(method, score, shift, n)
    return statistics.fmean(values) if len(values) == len(results.study.seeds) else None


def mean_far(results: Results, method: Method, score: str, n: int) -> float | None:
    """Return a score averaged over all turned images and seeds, None where some are missing."""
    each = [mean(results, method, score, shift, n) for shift in far_shifts(results)]
    found = [value for value in each if value is not None]
    return statistics.fmean(found) if each and len(found) == len(each) else None


def wins(results: Results, method: Method, other: Method, score: str, n: int) -> list[str]:
    """Return the turned angles at which a method's mean score is below another's."""
    pairs = {
        s: [mean(results, m, score, s, n) for m in (method, other)] for s in far_shifts(results)
    }
    return [
        shift
        for shift, (ours, theirs) in pairs.items()
        if ours is not None and theirs is not None and ours < theirs
    ]


# Claims of the paper ---------------------------------------------------------------------------


def _better(results: Results, name: str, trio: Sequence[Method], score: str) -> Verdict:
    labels, shown = ("MAP", "BMA", "ACNML"), {"ece": "ECE", "brier": "Brier score"}[score]
    far = far_shifts(results)
    ours, n = trio[-1], results.images(trio)
    claim = f"With {name}, ACNML has a lower {shown} than BMA and MAP on turned digits."
    rule = f"lower at every angle from {FAR}° up"
    means = [mean_far(results, method, score, n) for method in trio]
    if not far or None in means:
        return Verdict(claim, rule, "not finished", None)
    won = [len(wins(results, ours, other, score, n)) for other in trio[:-1]]
    text = ", ".join(f"{n} {m:.3f}" for n, m in zip(labels, means, strict=True))
    angles = f"below MAP at {won[0]} and below BMA at {won[1]} of {len(far)} angles"
    return Verdict(claim, rule, f"mean {text}; {angles}, {n:,} images", min(won) == len(far))


def _ece_upright(results: Results) -> Verdict:
    trio = (methods.MAP_BBP, methods.BMA_BBP, methods.ACNML_BBP)
    claim = "On upright digits ACNML pays for it: it is the most cautious, not the best calibrated."
    n = results.images(trio)
    each = [mean(results, method, "ece", "0°", n) for method in trio]
    means = [value for value in each if value is not None]
    if len(means) < len(trio):
        return Verdict(claim, "highest ECE at 0°", "not finished", None)
    text = ", ".join(f"{n} {m:.3f}" for n, m in zip(("MAP", "BMA", "ACNML"), means, strict=True))
    return Verdict(claim, "highest ECE at 0°", text, means[2] == max(means))


def _accuracy(results: Results) -> Verdict:
    claim, rule = "ACNML does not cost accuracy on upright digits.", "within 0.5 % of MAP at 0°"
    pair = (methods.ACNML_BBP, methods.MAP_BBP)
    ours, plain = (mean(results, m, "accuracy", "0°", results.images(pair)) for m in pair)
    if ours is None or plain is None:
        return Verdict(claim, rule, "not finished", None)
    return Verdict(claim, rule, f"ACNML {ours:.2%}, MAP {plain:.2%}", ours >= plain - 0.005)


def _agreement_with_naive(results: Results) -> Verdict:
    claim = "ACNML is close to naive CNML, of which it is the approximation."
    rule = "rank correlation of the normalisers above 0.5, upright and shifted together"
    if len(results.comparisons) < 2:
        return Verdict(claim, rule, "not finished", None)
    ours = torch.cat([c.acnml.double().exp().sum(1) for c in results.comparisons])
    naive = torch.cat([c.naive.double().exp().sum(1) for c in results.comparisons])
    correlation = rank_correlation(ours, naive)
    text = f"rank correlation {correlation:.2f}; mean normaliser {ours.mean():.2f} by ACNML"
    return Verdict(claim, rule, f"{text}, {naive.mean():.2f} by naive CNML", correlation > 0.5)


def _cheaper_than_naive(results: Results) -> Verdict:
    claim = "ACNML is orders of magnitude cheaper than naive CNML."
    rule = "its paper's steps at least 100 times cheaper than one epoch for every label"
    steps = results.fastest(methods.ACNML_BBP_PAPER)
    if steps is None or results.epoch_seconds is None:
        return Verdict(claim, rule, "not finished", None)
    ratio = CLASSES * results.epoch_seconds / steps
    return Verdict(claim, rule, f"{ratio:,.0f} times cheaper", ratio >= 100)


# Beyond the paper ------------------------------------------------------------------------------


def _more_than_tempering(results: Results, family: Method, tempering: Method) -> Verdict:
    name = f"{family.rule} {family.posterior}"
    claim = f"Beyond the paper: {name} does more than lower all confidences as a temperature does."
    rule = "lower ECE than the temperature of equal validation NLL, at every shift of the sweep"
    gaps = matched_gaps(results, family, tempering)
    if not gaps:
        return Verdict(claim, rule, "not finished, or no common NLL", None)
    text = ", ".join(f"{shift} {gap:+.3f}" for shift, gap in gaps.items())
    return Verdict(claim, rule, f"mean difference of ECE: {text}", max(gaps.values()) < 0)


def matched_gaps(results: Results, family: Method, other: Method) -> dict[str, float]:
    """Return the mean difference of ECE to another family at equal validation NLL, by shift.

    Every value of the family that costs an NLL within the other's range counts; between the other's
    values ECE is interpolated linearly. Both are compared on their cautious branches.
    """
    ours, theirs = (
        cautious_branch([p for p in results.sweep if p.family.family == f.family])
        for f in (family, other)
    )
    gaps: dict[str, list[float]] = {}
    for point in ours:
        for shift, ece in point.ece.items():
            path = sorted((p.validation_nll, p.ece[shift]) for p in theirs)
            expected = interpolated(path, point.validation_nll)
            if shift != "0°" and expected is not None:
                gaps.setdefault(shift, []).append(ece - expected)
    return {shift: statistics.fmean(values) for shift, values in gaps.items()}


def cautious_branch(path: Sequence[SweepPoint]) -> Sequence[SweepPoint]:
    """Return a sweep, the most cautious first, up to its least NLL."""
    return path[: up_to_least([point.validation_nll for point in path])]


def _best_everywhere(results: Results) -> Verdict:
    claim = (
        "Beyond the paper: a configuration chosen on upright validation images is best at every "
        "rotation and costs nothing upright, ensembles included."
    )
    price = f"test NLL at 0° at most {HARDLY:g} above MAP’s"
    rule, n = f"lowest ECE of all at every angle from {FAR}° up, {price}", results.images(MATCHED)
    means = {m: v for m in MATCHED if (v := mean_far(results, m, "ece", n)) is not None}
    if len(means) < len(MATCHED):
        return Verdict(claim, rule, "not finished", None)
    best, far = min(means, key=lambda method: means[method]), far_shifts(results)
    others = [method for method in means if method != best]
    everywhere = all(len(wins(results, best, other, "ece", n)) == len(far) for other in others)
    nll, plain = (statistics.fmean(results.values(m, "nll", "0°", n)) for m in (best, methods.MAP))
    text = f"{LOOKS[best].label}: mean ECE {means[best]:.3f} from {FAR}° up, test NLL {nll:.3f}"
    compared = f"{text} (MAP {means[methods.MAP]:.3f}, {plain:.3f}), {n:,} images"
    return Verdict(claim, rule, compared, everywhere and nll <= plain + HARDLY)


def rank_correlation(x: Tensor, y: Tensor) -> float:
    """Return Spearman's correlation; ties get their mean rank."""
    ranks = torch.stack([_ranks(x), _ranks(y)])
    return torch.corrcoef(ranks)[0, 1].item()


def _ranks(x: Tensor) -> Tensor:
    below = (x[:, None] > x).double().sum(1)
    equal = (x[:, None] == x).double().sum(1)
    return below + (equal - 1) / 2
