"""Claims: what is said, the rule that decides, and what was measured.

A claim is judged from the numbers alone, by the rule that it states, when all seeds are finished.
Methods are compared on the same inputs only. Shifts come in groups: a group counts by its mean.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import NamedTuple, TypeAlias

from studies.engine.choose import SweepPoint, interpolated, up_to_least
from studies.engine.method import Method
from studies.engine.results import Results

Groups: TypeAlias = Mapping[str, Sequence[str]]  # a name -> shifts
SHOWN = {"ece": "ECE", "nll": "NLL", "brier": "Brier score", "accuracy": "accuracy"}
FEW = 3  # groups whose means are all shown


class Judgement(NamedTuple):
    """What was measured, and whether the claim holds."""

    measured: str
    holds: bool


class Claim(NamedTuple):
    """A statement, the rule by which it is judged, and the judge: None while unfinished."""

    text: str
    rule: str
    judge: Callable[[Results], Judgement | None]
    caveat: str = ""  # what weakens the verdict, such as a choice made on shifted data


class Verdict(NamedTuple):
    """A judged claim; `holds` is None while it is unfinished."""

    claim: str
    rule: str
    measured: str
    holds: bool | None


def verdicts(results: Results) -> list[Verdict]:
    """Judge every claim of the study."""
    found = []
    for claim in results.study.claims:
        judged = claim.judge(results)
        measured, holds = ("not finished", None) if judged is None else judged
        if claim.caveat:
            measured += f". But {claim.caveat}"
        found.append(Verdict(claim.text, claim.rule, measured, holds))
    return found


# Ready-made claims -----------------------------------------------------------------------------


def lower(
    text: str, rule: str, ours: Method, others: Sequence[Method], score: str, groups: Groups
) -> Claim:
    """Claim that a method's mean score is below those of others, in every group of shifts."""

    def judge(results: Results) -> Judgement | None:
        compared = [*others, ours]
        n = results.inputs(compared)
        found = {m: [results.mean(m, score, g, n) for g in groups.values()] for m in compared}
        means = {m: [v for v in values if v is not None] for m, values in found.items()}
        if not groups or any(len(values) < len(groups) for values in means.values()):
            return None
        won = {o: [a < b for a, b in zip(means[ours], means[o], strict=True)] for o in others}
        holds = all(all(each) for each in won.values())
        return Judgement(_measured(results, means, won, ours, groups, n, score), holds)

    return Claim(text, rule, judge)


def _measured(
    results: Results,
    means: Mapping[Method, list[float]],
    won: Mapping[Method, list[bool]],
    ours: Method,
    groups: Groups,
    n: int,
    score: str,
) -> str:
    """Say what the means are, and how often the method is better: a mean may hide many shifts."""

    def label(method: Method) -> str:
        return results.study.look(method).label

    if len(groups) > FEW:
        text = ", ".join(f"{label(m)} {fmean(values):.3f}" for m, values in means.items())
        below = " and ".join(f"below {label(o)} at {sum(each)}" for o, each in won.items())
        return f"mean {text}; {below} of {len(groups)} shifts, {n:,} inputs"
    text = ", ".join(
        f"{label(m)} {' / '.join(f'{v:.3f}' for v in values)}" for m, values in means.items()
    )
    text = f"{' / '.join(groups)}: {text}; {n:,} inputs of each shift"
    sizes = " / ".join(str(size) for size in sorted({len(shifts) for shifts in groups.values()}))
    for other in won:
        wins = []
        for shifts in groups.values():
            a, b = (results.each(method, score, shifts, n) for method in (ours, other))
            wins.append(sum(x < y for x, y in zip(a, b, strict=True)))
        text += f", lower than {label(other)} for {' / '.join(map(str, wins))} of {sizes}"
    return text


def comparable(
    text: str, ours: Method, others: Sequence[Method], score: str, allowed: float
) -> Claim:
    """Claim that a method's score without shift is hardly worse than the best of others."""
    rule = f"at most {allowed:g} worse than the best of the others, on the same inputs"

    def judge(results: Results) -> Judgement | None:
        base, compared = results.study.base, [*others, ours]
        n = results.inputs(compared)
        means = {m: results.mean(m, score, [base], n) for m in compared}
        known = {m: value for m, value in means.items() if value is not None}
        if len(known) < len(compared):
            return None
        rivals = [known[other] for other in others]
        higher_is_better = score == "accuracy"
        worse = max(rivals) - known[ours] if higher_is_better else known[ours] - min(rivals)
        shown = ", ".join(f"{results.study.look(m).label} {v:.3f}" for m, v in known.items())
        return Judgement(f"{shown}, {n:,} inputs", worse <= allowed + 1e-9)

    return Claim(text, rule, judge)


def close(text: str, method: Method, allowed: float) -> Claim:
    """Claim that a method's predictions are close to those it is compared with."""
    rule = f"mean total variation of the probabilities below {allowed:g}"

    def judge(results: Results) -> Judgement | None:
        found = [a for a in results.agreements if a.method.name == method.name]
        if not found:
            return None
        a = found[0]
        text = f"{a.total_variation:.4f} over {a.inputs:,} inputs, same class for {a.same:.1%}"
        return Judgement(text, a.total_variation < allowed)

    return Claim(text, rule, judge)


def more_than(text: str, rule: str, family: Method, other: Method) -> Claim:
    """Claim that a family has a lower mean ECE than another at equal held-out NLL, at any shift."""

    def judge(results: Results) -> Judgement | None:
        gaps = {s: fmean(g) for s, g in matched_gaps(results, family, other).items()}
        if not gaps:
            return None
        text = ", ".join(f"{shift} {gap:+.3f}" for shift, gap in gaps.items())
        return Judgement(f"mean difference of ECE: {text}", max(gaps.values()) < 0)

    return Claim(text, rule, judge)


def more_than_on_average(text: str, rule: str, family: Method, other: Method) -> Claim:
    """Claim the same of the mean over all shifts of the sweep."""

    def judge(results: Results) -> Judgement | None:
        gaps = matched_gaps(results, family, other, average=True).get("", [])
        if not gaps:
            return None
        span = f"from {min(gaps):+.3f} to {max(gaps):+.3f}"
        return Judgement(f"mean difference of ECE {fmean(gaps):+.3f}, {span}", fmean(gaps) < 0)

    return Claim(text, rule, judge)


def matched_gaps(
    results: Results, family: Method, other: Method, average: bool = False
) -> dict[str, list[float]]:
    """Return the differences of ECE to another family at equal held-out NLL, by shift.

    Every value of the family whose NLL is within the other's range counts. Between the other's
    values ECE is interpolated linearly. Both are compared on their cautious branches. With
    `average`, the mean over all shifts is compared, under an empty name.
    """
    ours, theirs = (cautious_branch(results.path(each)) for each in (family, other))

    def heights(point: SweepPoint) -> dict[str, float]:
        return {"": fmean(point.ece.values())} if average else point.ece

    gaps: dict[str, list[float]] = {}
    for point in ours:
        for shift, ece in heights(point).items():
            path = sorted((p.held_out_nll, heights(p)[shift]) for p in theirs)
            expected = interpolated(path, point.held_out_nll)
            if shift != results.study.base and expected is not None:
                gaps.setdefault(shift, []).append(ece - expected)
    return gaps


def cautious_branch(path: Sequence[SweepPoint]) -> Sequence[SweepPoint]:
    """Return a sweep, the most cautious first, up to its least NLL."""
    return path[: up_to_least([point.held_out_nll for point in path])]
