"""False alarms and the delay to detection, beside a Kolmogorov-Smirnov test of every window."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from scipy import stats

from acnml.decisions import Monitor, Observed, Outcomes
from studies.decisions.settings import DecisionsStudy
from studies.decisions.streams import Stream

MARTINGALE, KS = "monitor", "KS test of every window"
REFERENCE, LENGTH = 1000, 2000  # answers of simulated references and streams


class Alarm(NamedTuple):
    """The first alarm on a stream."""

    stream: str
    test: str
    quiet: int  # inputs before the change
    n: int  # inputs in all
    alarm_at: float  # the input, NaN without an alarm
    is_false: bool
    delay: float  # inputs from the change to the alarm; NaN without one, or if it is false


class FalseAlarms(NamedTuple):
    """Alarms on simulated streams without a change."""

    stream: str
    test: str
    level: float
    streams: int
    alarms: float  # share of the streams


class Windowed(NamedTuple):
    """A window of a stream: estimated and true accuracy."""

    stream: str
    window: int
    accuracy: float
    estimate: float
    low: float
    high: float
    temperature: float  # estimated from the confidence of a temperature
    evidence: float


def observed(stream: Stream) -> Observed:
    """Return the answers of a stream."""
    answer = stream.calibrator(stream.data.logits, stream.data.features)
    return Observed(answer.label, answer.confidence, answer.regret, answer.score, answer.abstain)


def some(answers: Observed, rows: slice | torch.Tensor) -> Observed:
    """Return some of the answers."""
    return Observed(*(column[rows] for column in answers))


def watched(stream: Stream, study: DecisionsStudy) -> tuple[list[Alarm], list[Windowed]]:
    """Watch a stream in windows, in two ways."""
    answers, outcomes = observed(stream), stream.calibrator.outcomes
    monitor, windows, ks_at = Monitor.of(outcomes, study.level), [], math.nan
    right = answers.label == stream.data.labels
    for number, start in enumerate(range(0, len(right) - study.window + 1, study.window)):
        rows = slice(start, start + study.window)
        found = monitor.update(some(answers, rows))
        warm = float(stream.temperature[rows].double().mean())
        if math.isnan(ks_at) and ks(answers.score[rows], outcomes.score) < study.level:
            ks_at = start + study.window
        own = found.accuracy
        truth = float(right[rows].double().mean())
        windows.append(
            Windowed(
                *(stream.name, number, truth, own.accuracy, own.low, own.high),
                *(warm, found.evidence),
            )
        )
    at = {MARTINGALE: float(monitor.changed_at or math.nan), KS: ks_at}
    return [alarm(stream, test, float(when)) for test, when in at.items()], windows


def alarm(stream: Stream, test: str, at: float) -> Alarm:
    """Say whether an alarm is a false one, and how late it is otherwise."""
    is_false = at <= stream.quiet
    delay = math.nan if is_false else at - stream.quiet
    return Alarm(stream.name, test, stream.quiet, len(stream.data.labels), at, is_false, delay)


def ks(values: torch.Tensor, reference: torch.Tensor) -> float:
    """Return the p-value of a two-sample test."""
    own, others = (np.asarray(part.double()) for part in (values, reference))
    return float(stats.ks_2samp(own, others, method="asymp").pvalue)


def false_alarms(stream: Stream, study: DecisionsStudy) -> list[FalseAlarms]:
    """Draw references and streams from the answers before the change, and count alarms."""
    quiet = some(observed(stream), slice(0, stream.quiet))
    outcomes, generator = stream.calibrator.outcomes, torch.Generator().manual_seed(0)
    alarms = dict.fromkeys((MARTINGALE, KS), 0)
    for _ in range(study.quiet_streams):

        def drawn(count: int) -> Observed:
            return some(quiet, torch.randint(len(quiet.label), (count,), generator=generator))

        known, new = drawn(REFERENCE), drawn(LENGTH)
        reference = replace(
            outcomes,
            label=known.label,
            predicted=known.label,
            confidence=known.confidence,
            regret=known.regret,
            score=known.score,
        )
        alarms[MARTINGALE] += raises_alarm(reference, new, study)
        parts = new.score.split(study.window)
        alarms[KS] += any(ks(part, reference.score) < study.level for part in parts)
    count = study.quiet_streams
    return [FalseAlarms(stream.name, t, study.level, count, n / count) for t, n in alarms.items()]


def raises_alarm(reference: Outcomes, new: Observed, study: DecisionsStudy) -> bool:
    """Whether a monitor raises an alarm on a stream."""
    monitor = Monitor.of(reference, study.level)
    return monitor.update(new).changed
