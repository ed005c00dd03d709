"""Ready-made sections of reports. A study takes `standard`, or puts together its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from studies.engine.figures import Axis, frontier, lines, reliability
from studies.engine.method import Method
from studies.engine.report import Panels, Section
from studies.engine.results import ENOUGH, Results
from studies.engine.tables import (
    TITLES,
    agreement_table,
    choice_table,
    detection_table,
    scored,
    scores_table,
    timing_table,
)


def standard(results: Results) -> list[Section]:
    """Return the sections of a study that has none of its own."""
    study = results.study
    axis = Axis({float(i): (shift,) for i, shift in enumerate(study.shifts)})
    names = {shift: shift for shift in study.diagrams}
    return [
        compared(results, "Scores by shift", "scores", study.methods, axis, tuple(TITLES)),
        trade_off(results, "Held-out NLL against calibration under shift"),
        diagrams(results, scored(results), names, "Reliability diagrams."),
        all_methods(results, study.shifts),
        knobs(results),
        solvers(results, "Predictions of one method compared with those of another."),
        detection(results, "Out-of-distribution inputs: AUROC and FPR95."),
        timing(results),
    ]


def compared(
    results: Results,
    heading: str,
    prefix: str,
    methods: Sequence[Method],
    axis: Axis,
    scores: Iterable[str],
    caption: str = "",
) -> Section:
    """Draw scores of some methods against shifts."""
    counts = dict.fromkeys(methods, results.inputs(methods))
    drawn = {f"{prefix}-{s}": lines(results, counts, s, TITLES[s], axis) for s in scores}
    names = ", ".join(study_shifts(axis))
    seen = f"The first {results.inputs(methods):,} inputs of every shift: {names}."
    return Section(heading, panels=[Panels(drawn, caption or seen)])


def study_shifts(axis: Axis) -> list[str]:
    """Return the shifts of an axis by place."""
    return [" and ".join(shifts) for shifts in axis.places.values()]


def trade_off(results: Results, heading: str) -> Section:
    """Draw the sweep of every family, a figure for each shift."""
    sweep = results.study.frontier
    if sweep is None or not results.sweep:
        return Section(heading)
    drawn = {
        f"frontier-{shift.rstrip('°')}": frontier(
            results, sweep.families, [shift], f"ECE, shift: {shift}", span=3.5
        )
        for shift in sweep.shifts
        if shift != results.study.base
    }
    caption = (
        "Each path is a family whose knob is swept. Lower is better under shift, further left is "
        "better without shift. The dashed line is the NLL of the plain network."
    )
    return Section(heading, panels=[Panels(drawn, caption)])


def diagrams(
    results: Results, methods: Sequence[Method], names: Mapping[str, str], caption: str
) -> Section:
    """Draw reliability diagrams at shifts, which come with their names; all methods in each."""
    drawn = {
        "reliability-" + name.replace(" ", "-"): reliability(results, methods, shift, name)
        for shift, name in names.items()
        if any((method.name, shift) in results.diagrams for method in methods)
    }
    text = f"{caption} Points below the diagonal are overconfident."
    return Section("Reliability diagrams", panels=[Panels(drawn, text, "small panels")])


def all_methods(results: Results, shifts: Sequence[str]) -> Section:
    """Show scores of all methods at some shifts."""
    caption = (
        "The NLL of unshifted test inputs, and the ECE at some shifts, of all methods that see at "
        f"least {ENOUGH * results.study.bins} inputs. metrics.csv has all scores at all shifts."
    )
    return Section("All methods", tables=[scores_table(results, caption, shifts)])


def knobs(results: Results) -> Section:
    """Show the chosen values of knobs."""
    caption = f"Chosen on held-out data, for seed {results.study.seeds[0]}."
    return Section("Chosen knobs", tables=[choice_table(results, caption)])


def solvers(results: Results, caption: str) -> Section:
    """Show how close the predictions of compared methods are, and which have no solution."""
    if not results.agreements:
        return Section("Agreement of solvers")
    return Section(
        "Agreement of solvers", [unsolved(results)], tables=[agreement_table(results, caption)]
    )


def unsolved(results: Results) -> str:
    """Say where ACNML has diverged, so that there is no prediction."""
    each = ", ".join(
        f"{results.study.label(u.method)} {u.inputs:,} of {u.of:,}" for u in results.unsolved
    )
    if not each:
        return "No prediction of ACNML diverged."
    return f"Inputs for which ACNML diverged count as uniform predictions: {each}."


def detection(results: Results, caption: str) -> Section:
    """Show how well out-of-distribution inputs are detected."""
    tables = [detection_table(results, caption)] if results.detections else []
    return Section("Out-of-distribution detection", tables=tables)


def timing(results: Results, more: Iterable[tuple[str, float]] = (), note: str = "") -> Section:
    """Show what predictions cost."""
    caption = (
        "Time of one prediction, in batches, measured while the study ran: the fastest of all "
        f"seeds and shifts. {note}"
    ).strip()
    return Section("Cost", tables=[timing_table(results, caption, more)])
