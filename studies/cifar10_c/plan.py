"""What a run would do and what it would cost, from the settings alone: for `--dry-run`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from rich import box
from rich.table import Table

from studies.cifar10_c.jobs import FRONTIER, HELD_OUT, Job, Phase, phases
from studies.cifar10_c.methods import (
    ENSEMBLE,
    HEAD,
    KFAC,
    STEPS,
    SWAG_D,
    SWEPT,
    Method,
    cuts,
    images_of,
    methods_of,
)
from studies.cifar10_c.study import TEST_IMAGES, TRAIN_IMAGES, Cifar10CStudy
from studies.study.knobs import SCALE, sweep_values

# What one image costs in forward passes, in docs/performance.md: for a residual network, for VGG.
# Not measured there: the paper's ten steps with KFAC (taken as twice five), and GLM over the whole
# network (taken as half of the linearised solution, whose Jacobian it needs).
TRAINING_STEP, KFAC_IMAGE = 3.5, 40.0  # by count: forward and backward; one backward for a label
SAMPLE, LAST_LAYER = "sample", "last layer"
RESIDUAL = {SWAG_D: 82.0, KFAC: 73.0, STEPS: 287.0, SAMPLE: 1.1, LAST_LAYER: 1.2}
VGG = {SWAG_D: 89.0, KFAC: 74.0, STEPS: 846.0, SAMPLE: 1.2, LAST_LAYER: 1.4}


class Line(NamedTuple):
    """Stages of one kind: how many, the images they go over, and the forward passes that takes."""

    kind: str
    stages: int
    images: int
    passes: float


def plan(study: Cifar10CStudy) -> list[Line]:
    """Return all stages of a run by kind, in the order of work."""
    return [*_training(study), *_fitting(study), *(_phase(each, study) for each in phases(study))]


def plan_table(study: Cifar10CStudy) -> Table:
    """Return the plan for people, with the hours it takes on one device."""
    table = Table(box=box.SIMPLE_HEAD, header_style="dim", title_justify="left")
    for column in ("", "stages", "images", "forward passes", "hours"):
        table.add_column(column, justify="left" if not column else "right")
    lines = plan(study)
    total = Line("all", *(sum(values) for values in list(zip(*lines, strict=True))[1:]))
    for line in (*lines, total):
        hours = line.passes * study.milliseconds / 3.6e6
        cells = (f"{line.stages:,}", f"{line.images:,}", f"{line.passes:,.0f}", f"{hours:,.1f}")
        table.add_row(line.kind, *cells)
    return table


def passes_per_image(method: Method, study: Cifar10CStudy) -> float:
    """Return about how many forward passes a method takes for an image."""
    costs = _costs(study)
    if method.rule in ("BMA", "MC dropout"):
        return study.samples * costs[SAMPLE]
    if method.posterior == HEAD:
        return costs[LAST_LAYER]
    if method.rule == "MAP":
        return study.members if method.posterior == ENSEMBLE else 1
    if method.rule == "GLM":
        return costs[KFAC] / 2
    if method.solver == STEPS:
        return (2 if method.posterior == KFAC else 1) * costs[STEPS]
    return costs[method.posterior]


def _training(study: Cifar10CStudy) -> list[Line]:
    """Count the networks: averaged ones with all members, plain SGD, and the one with dropout."""
    from_train = study.choice.held_out if study.choice.source == "train" else 0
    images, seeds = TRAIN_IMAGES - from_train, len(study.seeds)
    plain = 1 if study.recipe.start == "random" else 0
    epochs = {f"training {study.model}": (study.recipe.training.epochs, study.members + plain)}
    if study.dropout_recipe:
        training = study.dropout_recipe.training
        epochs[f"training {study.dropout_recipe.model}"] = (training.epochs, 1)
    return [
        Line(name, seeds * count, n := seeds * count * each * images, TRAINING_STEP * n)
        for name, (each, count) in epochs.items()
    ]


def _fitting(study: Cifar10CStudy) -> list[Line]:
    """Count the curvatures, and the posteriors whose samples get batch-norm statistics."""
    costs, seeds = _costs(study), len(study.seeds)
    whole = study.curvature.images or TRAIN_IMAGES
    heads = 2 * (study.curvature.head_images or TRAIN_IMAGES)  # plain and tempered
    kfac = whole * KFAC_IMAGE + heads * costs[LAST_LAYER]
    fixed = {(m.posterior, m.value) for m in methods_of(study) if m.knob == SCALE and m.value}
    swept = {
        (m.posterior, v)
        for m in SWEPT
        if m.rule == "BMA"
        for v in sweep_values(m.knob, study.frontier)
    }
    posteriors = len(fixed | swept)
    each = study.samples * (study.batch_norm_images or TRAIN_IMAGES)
    return [
        Line("fitting KFAC", 3 * seeds, seeds * (whole + heads), seeds * kfac),
        Line("renewing batch norm", seeds * posteriors, n := seeds * posteriors * each, float(n)),
    ]


def _phase(phase: Phase, study: Cifar10CStudy) -> Line:
    seeds, images = len(phase.seeds), [_images(job, study) for job in phase.jobs]
    costs = (passes_per_image(job.method, study) for job in phase.jobs)
    passes = sum(count * cost for count, cost in zip(images, costs, strict=True))
    stages = sum(_stages(job, count) for job, count in zip(phase.jobs, images, strict=True))
    return Line(phase.title, seeds * stages, seeds * sum(images), seeds * passes)


def _stages(job: Job, images: int) -> int:
    """Count the stages of a job: predictions of one shift may be cut."""
    return 1 if job.where in (HELD_OUT, FRONTIER) else len(cuts(job.method, images))


def _images(job: Job, study: Cifar10CStudy) -> int:
    """Count the images of a job, of as many as the test set has left."""
    if job.where == HELD_OUT:
        return study.choice.held_out
    there = TEST_IMAGES - (study.choice.held_out if study.choice.source == "test" else 0)
    if job.where == FRONTIER:
        return min(study.frontier.images, there) * len(study.corruptions)
    return min(images_of(job.method, job.where, study), there)


def _costs(study: Cifar10CStudy) -> Mapping[str, float]:
    return VGG if study.model.startswith("vgg") else RESIDUAL
