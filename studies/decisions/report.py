"""The study as a whole, and its pages."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, final

import matplotlib as mpl
from matplotlib.figure import Figure

from acnml.plots import BLUE, FAINT, GREEN, ORANGE, PINK, STYLE
from studies.data.folder import DataError
from studies.decisions.abstain import (
    CERTIFIED,
    EQUAL_COVERAGE,
    PLUG_IN,
    Automatic,
    Failures,
    automatic,
    failures,
)
from studies.decisions.change import KS, MARTINGALE, Alarm, FalseAlarms, Windowed, watched
from studies.decisions.change import false_alarms as count_false_alarms
from studies.decisions.digits import digits
from studies.decisions.estimate import Estimated, Sets, Widely, estimates, sets, widely
from studies.decisions.methods import (
    ACNML,
    CLOSED_FORM,
    DIFFERENCE,
    METHODS,
    TEMPERATURE,
    THRESHOLDED,
    Arrays,
    Fitted,
)
from studies.decisions.settings import CORRUPTED, DIGITS, PRESETS, TURNING, DecisionsStudy
from studies.decisions.streams import OF_NETWORK, TABLES, Stream, images
from studies.engine.report import Panels, Section, ShortReport
from studies.engine.tables import Table, mean, select
from studies.evidence import cifar
from studies.evidence.study import subjects
from studies.evidence.subjects import CLEAN, HELD_OUT, TRAIN, Subject
from studies.store import Content, Stage, Store

__all__ = ["PRESETS", "run"]

RISK = 0.02  # of the tables about shift
DRAWN = {TEMPERATURE: ORANGE, THRESHOLDED: PINK, ACNML: BLUE, CLOSED_FORM: GREEN}
ESTIMATES = (*METHODS, THRESHOLDED, DIFFERENCE)
OF_SHIFTS = ("failures", "automatic", "accuracy", "sets")
TURNED = ("15°", "30°", "45°", "60°")
KINDS: dict[str, Any] = {
    "failures": Failures,
    "automatic": Automatic,
    "accuracy": Estimated,
    "widely": Widely,
    "sets": Sets,
    "alarms": Alarm,
    "false_alarms": FalseAlarms,
    "windows": Windowed,
}


@final
@dataclass(frozen=True)
class Found:
    """All results: rows by the name of their table, and what was left out."""

    rows: dict[str, list[Any]] = field(default_factory=lambda: {name: [] for name in KINDS})
    left_out: list[str] = field(default_factory=list)

    def add(self, stored: dict[str, list[dict[str, Any]]]) -> None:
        """Add rows of an artefact."""
        for name, rows in stored.items():
            self.rows[name] += [
                KINDS[name](**{k: math.nan if v is None else v for k, v in row.items()})
                for row in rows
            ]


def run(study: DecisionsStudy, out: Path, store: Store, command: str) -> Path:
    """Do everything that is missing and write the report."""
    found = Found()
    for name in study.networks:
        try:
            for subject in _subjects(name, study, out, store):
                found.add(_stored(subject, study, store))
        except DataError as error:
            found.left_out.append(f"{name}: {error}")
    elsewhere: list[Any] = []
    for name in study.others:
        try:
            for subject in subjects(name, study.evidence(), out, store):
                elsewhere += [Estimated(**row) for row in _stored_estimates(subject, store)]
        except DataError as error:
            found.left_out.append(f"{name}: {error}")
    found.rows["widely"] = widely([*elsewhere, *found.rows["accuracy"]])
    for name in (each for each in study.streams if each in TABLES):
        try:
            found.add(_stored_table(name, study, store))
        except DataError as error:
            found.left_out.append(f"{name}: {error}")
    return write_pages(study, found, out, command)


def _subjects(name: str, study: DecisionsStudy, out: Path, store: Store) -> list[Subject]:
    """Return a network, of all seeds if it is trained here."""
    if name == DIGITS:
        return [digits(seed, store) for seed in study.seeds]
    wanted = {f"{name} {severity}" for name in study.corruptions for severity in (3, 5)}
    found = cifar.given(name, study.evidence(), out / "corruptions", store)
    return [
        replace(own, shifts={s: g for s, g in own.shifts.items() if g == CLEAN or s in wanted})
        for own in found
    ]


def _stored(subject: Subject, study: DecisionsStudy, store: Store) -> dict[str, Any]:
    """Return everything about a network, as two artefacts."""
    same = replace(study, networks=(), others=(), seeds=())
    decided = (same, subject.checksums())
    stage = Stage(f"decisions {subject.name}", decided, subject.seed)
    streams = Stage(f"streams {subject.name}", decided, subject.seed)
    shifted = _made(stage, store, lambda: _of_shifts(subject, study))
    timed = _made(streams, store, lambda: _of_time(subject, study))
    return {**{name: shifted[name] for name in OF_SHIFTS}, **timed}


def _stored_estimates(subject: Subject, store: Store) -> list[dict[str, Any]]:
    """Return estimates of the accuracy alone, as an artefact."""
    stage = Stage(f"estimates {subject.name}", subject.checksums(), subject.seed)

    def make() -> dict[str, list[Any]]:
        fitted = _fitted(subject)
        ours = {method: fitted.outcomes(method, fitted.labelled) for method in METHODS}
        rows = []
        for name, group in subject.shifts.items():
            part = _arrays(subject, name)
            if bool((part.labels >= 0).all()):  # an input of no class has no right answer
                theirs = {method: fitted.outcomes(method, part) for method in METHODS}
                rows += estimates(ours, theirs, (subject.network, subject.seed, name, group))
        return {"accuracy": rows}

    return list(_made(stage, store, make)["accuracy"])


def _stored_table(name: str, study: DecisionsStudy, store: Store) -> dict[str, Any]:
    """Return everything about a table in the order of time, as an artefact."""
    same = replace(study, networks=(), others=(), streams=(), seeds=())
    stage = Stage(f"stream {name}", same, version=2)

    def make() -> dict[str, list[Any]]:
        return _of_streams([TABLES[name]()], study)

    return _made(stage, store, make)


def _made(stage: Stage, store: Store, make: Callable[[], dict[str, list[Any]]]) -> dict[str, Any]:
    def content(_: object) -> Content:
        rows = {name: [_plain(row) for row in rows] for name, rows in make().items()}
        return Content({}, {"rows": rows})

    return dict(store.make(stage, content).facts["rows"])


def _plain(row: Any) -> dict[str, Any]:
    """Return a row as plain data; JSON has no NaN."""
    isnan = {k: isinstance(v, float) and math.isnan(v) for k, v in row._asdict().items()}
    return {k: None if isnan[k] else v for k, v in row._asdict().items()}


def _arrays(subject: Subject, part: str) -> Arrays:
    own = subject.record(part)
    return Arrays(own.logits, own.features, own.labels)


def _fitted(subject: Subject) -> Fitted:
    return Fitted.of(*(_arrays(subject, part) for part in (TRAIN, HELD_OUT)))


def _of_shifts(subject: Subject, study: DecisionsStudy) -> dict[str, list[Any]]:
    """Measure decisions on the data of a network, clean and shifted."""
    fitted = _fitted(subject)
    parts = {name: _arrays(subject, name) for name in subject.shifts}
    rows: dict[str, list[Any]] = {name: [] for name in OF_SHIFTS}
    ours = {method: fitted.outcomes(method, fitted.labelled) for method in METHODS}
    for name, part in parts.items():
        place = (subject.network, subject.seed, name, subject.shifts[name])
        theirs = {method: fitted.outcomes(method, part) for method in METHODS}
        rows["automatic"] += automatic(ours, theirs, place, RISK)
        rows["accuracy"] += estimates(ours, theirs, place)
        rows["sets"] += sets(fitted, part, place)
    clean = parts[subject.clean]
    rows["failures"] = failures(subject.network, subject.seed, fitted, clean, study)
    return rows


def _of_time(subject: Subject, study: DecisionsStudy) -> dict[str, list[Any]]:
    """Watch the streams that are made of a network's data."""
    order: dict[str, dict[str, tuple[str, ...]]] = {
        TURNING: {"by 15° every 1,000": TURNED},
        CORRUPTED: {
            name[:-2]: (name, f"{name[:-2]} 5") for name in subject.shifts if name.endswith(" 3")
        },
    }
    fitted = _fitted(subject)
    streams = [
        stream
        for name in study.streams
        if OF_NETWORK.get(name) == subject.network and subject.seed == 0
        for stream in images(name, fitted, lambda shift: _arrays(subject, shift), order[name])
    ]
    return _of_streams(streams, study)


def _of_streams(streams: Sequence[Stream], study: DecisionsStudy) -> dict[str, list[Any]]:
    """Watch streams, and count false alarms on data like those of the first."""
    rows: dict[str, list[Any]] = {"alarms": [], "windows": [], "false_alarms": []}
    for stream in streams:
        alarms, windows = watched(stream, study)
        rows["alarms"] += alarms
        rows["windows"] += windows
    if streams:
        rows["false_alarms"] = count_false_alarms(streams[0], study)
    return rows


# The pages ---------------------------------------------------------------------------------------


def write_pages(study: DecisionsStudy, found: Found, out: Path, command: str) -> Path:
    """Write the CSV files, results.md and report.html; return the path of the last."""
    rows = found.rows
    sections = [
        Section(
            "Abstaining with a guarantee", _about_abstaining(study), (), _abstaining(rows, study)
        ),
        Section(
            "Accuracy without labels",
            ["A point is a network under a shift. On the line, the estimate is the truth."],
            [Panels(_scatter(rows["accuracy"]), "Estimated and true accuracy.")],
            [_errors(rows["accuracy"]), _widely(rows["widely"])] if rows["accuracy"] else [],
        ),
        Section("Conformal sets", ["The target coverage is 0.90."], (), [_sets(rows["sets"])]),
        Section("Noticing a change", _about_change(study), (), _changes(rows)),
    ]
    if found.left_out:
        sections.append(Section("Left out", found.left_out))
    numbers = {f"{name}.csv": (kind._fields, rows[name]) for name, kind in KINDS.items()}
    return ShortReport("Decisions", verdict(rows), sections, command, numbers).write(out)


def verdict(rows: dict[str, list[Any]]) -> str:
    """Say what was found."""
    shifted = [row for row in rows["accuracy"] if not row.shift.startswith("clean")]
    if not shifted:
        return "All networks were left out."
    errors = {m: mean(select(shifted, method=m), "error") for m in (TEMPERATURE, ACNML)}
    certified = [row.above for row in select(rows["failures"], threshold=CERTIFIED)]
    return (
        f"Certified thresholds fail in at most {100 * max(certified):.1f} % of the resamples. "
        f"Under shift, the mean error of the estimated accuracy is {errors[ACNML]:.3f} with ACNML "
        f"and {errors[TEMPERATURE]:.3f} with a temperature."
    )


def _about_abstaining(study: DecisionsStudy) -> list[str]:
    return [
        f"{study.resamples:,} times, {study.labelled:,} labelled examples are drawn from all clean "
        f"data, which are the truth. Certified thresholds should fail in at most "
        f"{100 * (1 - study.confidence):.0f} %. A plug-in threshold is the lowest whose error "
        "rate on the labelled examples is at most the limit.",
        f"The second table has the certified threshold of a temperature for a risk of {RISK:g}, "
        "and thresholds of the other methods that accept as many clean examples.",
    ]


def _abstaining(rows: dict[str, list[Any]], study: DecisionsStudy) -> list[Table]:
    networks = dict.fromkeys(row.network for row in rows["failures"])
    lines = [
        [
            f"{network}, {method}, risk {risk:g}",
            *(
                text
                for threshold in (CERTIFIED, PLUG_IN)
                for own in [
                    select(
                        rows["failures"],
                        network=network,
                        method=method,
                        risk=risk,
                        threshold=threshold,
                    )
                ]
                for text in (f"{mean(own, 'above'):.3f}", f"{mean(own, 'coverage'):.3f}")
            ),
        ]
        for network in networks
        for method in (TEMPERATURE, ACNML)
        for risk in study.risks
    ]
    head = ("", "certified: fails", "coverage", "plug-in: fails", "coverage")
    shares = Table("Share of resamples in which the true risk is above the limit.", head, lines)
    own = select(rows["automatic"], threshold=EQUAL_COVERAGE)
    groups = list(dict.fromkeys((row.network, row.group) for row in own))
    wrong = [
        [
            f"{network}, {group}",
            *(
                f"{mean(select(own, network=network, group=group, method=m), 'wrong'):.4f}"
                for m in METHODS
            ),
        ]
        for network, group in groups
    ]
    caption = "Accepted and wrong, as a share of all inputs, at equal clean coverage."
    return [shares, Table(caption, ("", *METHODS), wrong)]


def _scatter(rows: Sequence[Estimated]) -> dict[str, Figure]:
    """Draw estimated against true accuracy for some methods."""
    if not rows:
        return {}
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(7.4, 7.2), layout="constrained")
        grid = figure.subplots(2, 2, sharex=True, sharey=True)
        for axes, (method, colour) in zip(grid.flat, DRAWN.items(), strict=True):
            own = select(rows, method=method)
            axes.plot([0, 1], [0, 1], color=FAINT, linewidth=1, zorder=0)
            points = zip(*((row.accuracy, row.estimate) for row in own), strict=True)
            axes.scatter(*points, s=16, color=colour)
            axes.set_title(f"{method}:\noff by {mean(own, 'error'):.3f}")
            axes.set(xlim=(0, 1), ylim=(0, 1))
        for axes in grid[1]:
            axes.set_xlabel("true accuracy")
        for axes in grid[:, 0]:
            axes.set_ylabel("estimated accuracy")
    return {"expected-accuracy": figure}


def _errors(rows: Sequence[Estimated]) -> Table:
    """Return the mean absolute error of every estimate, and how often its interval holds."""
    groups = list(dict.fromkeys((row.network, row.group) for row in rows))
    lines = []
    for method in ESTIMATES:
        own = select(rows, method=method)
        parts = [select(own, network=network, group=group) for network, group in groups]
        held = statistics.fmean(row.low <= row.accuracy <= row.high for row in own)
        interval = "–" if method in (THRESHOLDED, DIFFERENCE) else f"{held:.2f}"
        cells = [f"{mean(part, 'error'):.3f}" for part in parts]
        lines.append([method, *cells, f"{mean(own, 'error'):.3f}", interval])
    head = ("", *(f"{network}, {group}" for network, group in groups), "all", "in the interval")
    return Table("Mean absolute error of the estimated accuracy.", head, lines)


def _widely(rows: Sequence[Widely]) -> Table:
    """Return the mean absolute errors on all networks and groups of shifts."""
    lines = []
    for network, group in dict.fromkeys((row.network, row.group) for row in rows):
        own = select(rows, network=network, group=group)
        by_method = {row.method: row.error for row in own}
        cells = [f"{by_method[method]:.3f}" for method in ESTIMATES]
        lines.append([network, group, str(own[0].shifts), *cells])
    head = ("network", "shifts", "number", *ESTIMATES)
    caption = "Mean absolute error of the estimated accuracy, networks of the study evidence too."
    return Table(caption, head, lines)


def _sets(rows: Sequence[Sets]) -> Table:
    """Return coverage and size of the sets."""
    groups = list(dict.fromkeys((row.network, row.group) for row in rows))
    kinds = list(dict.fromkeys((row.method, row.thresholds) for row in rows))
    lines = []
    for method, thresholds in kinds:
        cells = []
        for network, group in groups:
            own = select(rows, method=method, thresholds=thresholds, network=network, group=group)
            cells.append(f"{mean(own, 'coverage'):.3f}, {mean(own, 'size'):.2f}")
        lines.append([f"{method}, {thresholds}", *cells])
    head = ("", *(f"{network}, {group}" for network, group in groups))
    return Table("Coverage and mean size of the sets.", head, lines)


def _about_change(study: DecisionsStudy) -> list[str]:
    return [
        f"Monitor and test look at windows of {study.window} inputs at a level of {study.level:g}. "
        f"False alarms are counted on {study.quiet_streams:,} streams of inputs drawn from those "
        "before the change."
    ]


def _changes(rows: dict[str, list[Any]]) -> list[Table]:
    false = [
        [
            row.stream,
            *(f"{one.alarms:.3f}" for one in select(rows["false_alarms"], stream=row.stream)),
        ]
        for row in select(rows["false_alarms"], test=MARTINGALE)
    ]
    alarms = [
        [
            row.stream,
            f"{row.quiet:,}",
            *(_when(one) for one in select(rows["alarms"], stream=row.stream)),
        ]
        for row in select(rows["alarms"], test=MARTINGALE)
    ]
    return [
        Table("Share of quiet streams with an alarm.", ("", MARTINGALE, KS), false),
        Table("Inputs from the change to the alarm.", ("", "quiet inputs", MARTINGALE, KS), alarms),
    ]


def _when(row: Alarm) -> str:
    if row.is_false:
        return f"false alarm at {row.alarm_at:,.0f}"
    return "no alarm" if math.isnan(row.delay) else f"{row.delay:,.0f}"
