"""Doing the work: everything that is not on disk yet."""

from __future__ import annotations

from studies.cifar10_c.choices import chosen, held_out, prepared, sweep_point
from studies.cifar10_c.data import StudyData
from studies.cifar10_c.jobs import FRONTIER, HELD_OUT, Job, phases
from studies.cifar10_c.methods import methods_of
from studies.cifar10_c.predict import predict_shift
from studies.cifar10_c.predictors import artefacts_of
from studies.cifar10_c.study import CLEAN, Cifar10CStudy
from studies.cifar10_c.workshop import Workshop
from studies.study.artefacts import Artefacts


def run(study: Cifar10CStudy, data: StudyData, artefacts: Artefacts) -> None:
    """Do all of the study that is not on disk yet: networks and posteriors, then predictions."""
    corrupted = (shift for shift in study.shifts if shift != CLEAN)
    data.corrupted.require_available({shift.rsplit(" ", 1)[0] for shift in corrupted})
    workshops = {seed: Workshop(study, data, artefacts, seed) for seed in study.seeds}
    for workshop in workshops.values():
        for method in methods_of(study):
            if method.likelihood == 1:  # others wait for a temperature
                artefacts_of(method, workshop)
    for phase in phases(study):
        for seed in phase.seeds:
            for job in phase.jobs:
                do(job, workshops[seed])


def do(job: Job, workshop: Workshop) -> None:
    """Do one job."""
    if job.where == FRONTIER and job.value is not None:
        sweep_point(job.method, job.value, workshop)
    elif job.where == HELD_OUT and job.value is not None:
        held_out(prepared(job.method.at(job.value), workshop), workshop)
    else:
        predict_shift(chosen(job.method, workshop), job.where, workshop)
