"""Running a study: the order of the work, the work itself, and the plan of a dry run."""

from __future__ import annotations

from typing import NamedTuple

from rich import box
from rich.table import Table

from studies.engine.choose import chosen, held_out, prepared, sweep_point
from studies.engine.grounds import KfacLaplace, last_layer
from studies.engine.method import BMA, FIXED, SCALE, SWEPT, Method, cautious_first
from studies.engine.predict import predict_shift, tranches
from studies.engine.study import FRONTIER, HELD_OUT, Job, Phase, Study, StudyData, see
from studies.engine.workshop import Artefacts, Workshop

TRAINING_STEP = 3.5  # forward passes: forward, backward and update


def phases(study: Study) -> tuple[Phase, ...]:
    """Return all predictions of a study, in their order."""
    if study.phases:
        return study.phases
    first = study.seeds[:1]
    shifts = study.shifts if study.detection is None else (*study.shifts, study.detection.outside)
    return (
        Phase("choices on held-out data", choices(study), study.seeds),
        Phase("predictions", see(study.methods, shifts), study.seeds),
        Phase("frontier", sweeps(study), first),
        Phase("extras", (), first, tuple(study.extras)),
    )


def choices(study: Study) -> tuple[Job, ...]:
    """Try all values that a knob is chosen from, of families that have to choose."""
    swept = () if study.frontier is None else study.frontier.families
    families = dict.fromkeys(
        method.family for method in (*swept, *study.methods) if method in swept or _chooses(method)
    )
    tried = (Job(family, HELD_OUT, value) for family in families for value in study.values(family))
    return (Job(study.plain, HELD_OUT, study.plain.value), *tried)


def _chooses(method: Method) -> bool:
    return method.choice not in (FIXED, SWEPT)


def sweeps(study: Study) -> tuple[Job, ...]:
    """Sweep the knob of every family."""
    families = () if study.frontier is None else study.frontier.families
    return tuple(
        Job(family.family, FRONTIER, value)
        for family in families
        for value in cautious_first(family.knob, study.grids)
    )


def run(study: Study, data: StudyData, artefacts: Artefacts) -> None:
    """Do all of the study that is not on disk yet: networks and posteriors, then predictions."""
    if study.check is not None:
        study.check(data)
    workshops = {seed: Workshop(study, data, artefacts, seed) for seed in study.seeds}
    for workshop in workshops.values():
        for method in study.methods:
            if method.likelihood == 1:  # others wait for a temperature
                study.grounds[method.posterior].artefacts(method, workshop)
    for phase in phases(study):
        for seed in phase.seeds:
            for job in phase.jobs:
                do(job, workshops[seed])
        for name in phase.extras:
            study.extras[name](workshops[study.seeds[0]])


def do(job: Job, workshop: Workshop) -> None:
    """Do one job."""
    if job.where == FRONTIER and job.value is not None:
        sweep_point(job.method, job.value, workshop)
    elif job.where == HELD_OUT and job.value is not None:
        held_out(prepared(job.method.at(job.value), workshop), workshop)
    else:
        predict_shift(chosen(job.method, workshop), job.where, workshop)


# The plan of a dry run -------------------------------------------------------------------------


class Line(NamedTuple):
    """Stages of one kind: how many, the inputs they go over, and the forward passes that takes."""

    kind: str
    stages: int
    inputs: int
    passes: float


def plan(study: Study) -> list[Line]:
    """Return all stages of a run by kind, in the order of work; no data are touched."""
    return [*_training(study), *_fitting(study), *(_phase(each, study) for each in phases(study))]


def plan_table(study: Study) -> Table:
    """Return the plan as a table, with hours on one device where forward passes were measured."""
    measured = study.plan.passes is not None
    columns = ("", "stages", "inputs", *(("forward passes", "hours") if measured else ()))
    table = Table(box=box.SIMPLE_HEAD, header_style="dim", title_justify="left")
    for column in columns:
        table.add_column(column, justify="left" if not column else "right")
    lines = [line for line in plan(study) if line.stages]
    total = Line("all", *(sum(values) for values in list(zip(*lines, strict=True))[1:]))
    for line in (*lines, total):
        hours = line.passes * study.plan.milliseconds / 3.6e6
        cells = [f"{line.stages:,}", f"{line.inputs:,}"]
        cells += [f"{line.passes:,.0f}", f"{hours:,.1f}"] if measured else []
        table.add_row(line.kind, *cells)
    return table


def _members(study: Study, network: str) -> int:
    grounds = (g for g in study.grounds.values() if g.network == network)
    return max((getattr(ground, "members", 1) or 1 for ground in grounds), default=1)


def _training(study: Study) -> list[Line]:
    found = []
    for name, network in study.networks.items():
        if network.training is not None:
            count = len(study.seeds) * _members(study, name)
            inputs = min(network.inputs or study.plan.train, study.plan.train)
            total = count * network.training.epochs * inputs
            found.append(Line(f"training {name}", count, total, TRAINING_STEP * total))
    return found


def _fitting(study: Study) -> list[Line]:
    """Count curvatures, and the posteriors whose samples get batch-norm statistics."""
    seeds, stages, inputs, passes = len(study.seeds), 0, 0, 0.0
    used = {(m.posterior, m.likelihood) for m in study.methods}
    for posterior, _ in used:
        ground = study.grounds[posterior]
        if isinstance(ground, KfacLaplace):
            count = ground.members * min(ground.inputs or study.plan.train, study.plan.train)
            stages, inputs = stages + ground.members, inputs + count
            passes += count * study.plan.curvature[int(ground.cover is last_layer)]
    lines = [Line("fitting KFAC", seeds * stages, seeds * inputs, seeds * passes)]
    if study.renewal is not None:
        scaled = {(m.posterior, m.value) for m in study.methods if m.knob == SCALE and m.value}
        swept = {
            (job.method.posterior, job.value) for job in sweeps(study) if job.method.rule == BMA
        }
        count = len(scaled | swept)
        total = seeds * count * study.samples * study.plan.renewal
        lines.append(Line("renewing batch norm", seeds * count, total, float(total)))
    return lines


def _phase(phase: Phase, study: Study) -> Line:
    stages, total, passes = len(phase.extras), 0, 0.0
    for job in phase.jobs:
        inputs = _inputs(job, study)
        share = study.share(job.method, study.base)
        cut = share.in_tranches and job.where not in (HELD_OUT, FRONTIER)
        stages += len(tranches(inputs)) if cut else 1
        total += inputs
        passes += inputs * (study.plan.passes(job.method) if study.plan.passes else 0.0)
    seeds = len(phase.seeds)
    return Line(phase.title, seeds * stages, seeds * total, seeds * passes)


def _inputs(job: Job, study: Study) -> int:
    """Count the inputs of a job, of as many as the test set has."""
    if job.where == HELD_OUT:
        return study.plan.held_out
    if job.where == FRONTIER:
        assert study.frontier is not None  # or there is no such job
        return min(study.frontier.inputs, study.plan.test) * len(study.frontier.shifts)
    return min(study.share(job.method, job.where).inputs, study.plan.test)
