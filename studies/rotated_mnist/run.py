"""The order of the work: what matters most and costs least comes first."""

from __future__ import annotations

from studies.rotated_mnist.frontier import chosen, sweep_point
from studies.rotated_mnist.methods import CHEAP, COSTLY, SWEPT, Method
from studies.rotated_mnist.naive import compare_all
from studies.rotated_mnist.predict import predict_shift, shifts_of
from studies.rotated_mnist.shifts import StudyData
from studies.rotated_mnist.study import RotatedMnist
from studies.rotated_mnist.workshop import Workshop
from studies.study.artefacts import Artefacts
from studies.study.knobs import sweep_values


def run(study: RotatedMnist, data: StudyData, artefacts: Artefacts) -> None:
    """Do all of the study that is not on disk yet."""
    workshops = [Workshop(study, data, artefacts, seed) for seed in study.seeds]
    for workshop in workshops:
        for method in CHEAP:
            predict_everywhere(method, workshop)
        if workshop is workshops[0]:
            sweep_everything(workshop)
            compare_all(workshop)
    for workshop in workshops:
        for method in COSTLY:
            predict_everywhere(method, workshop)


def predict_everywhere(method: Method, workshop: Workshop) -> None:
    """Let one method see every shift."""
    ready = chosen(method, workshop)
    for shift in shifts_of(workshop):
        predict_shift(ready, shift, workshop)


def sweep_everything(workshop: Workshop) -> None:
    """Turn the knob of every family."""
    for family in SWEPT:
        for value in sweep_values(family.knob, workshop.study.frontier):
            sweep_point(family, value, workshop)
