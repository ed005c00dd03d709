"""The CIFAR-10-C study: data, networks, posteriors, and the order of the work.

Held-out images come from the test set where a network has seen all training images, and are then no
part of the evaluation. Smaller counts are the first of one random order of what is left.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from acnml import Swag
from acnml._util.structure import tracking_batch_norms
from acnml.fit import KroneckerCurvature
from studies.cifar10_c import methods as ms
from studies.cifar10_c import report
from studies.cifar10_c.claims import all_claims
from studies.cifar10_c.maddox import MaddoxKfac
from studies.cifar10_c.settings import (
    CLEAN,
    TEST_IMAGES,
    TRAIN_IMAGES,
    Cifar10CStudy,
)
from studies.corruptions import Cifar10C
from studies.data import Labelled, cifar10, shuffled
from studies.engine.choose import (
    ByLeastNll,
    LargestHarmlessAlpha,
    WithinPrice,
    nll_of,
    plain_nll,
    tempered_nll,
)
from studies.engine.grounds import Ground, KfacLaplace, Networks, SwagPosterior, last_layer
from studies.engine.method import HEAD, LINEARISED, SAMPLING, Method
from studies.engine.run import choices, sweeps
from studies.engine.study import (
    Frontier,
    Network,
    Phase,
    Plan,
    Study,
    StudyData,
    average,
    see,
)
from studies.engine.workshop import Workshop
from studies.settings import SettingError

SPLIT_SEED = 0  # one split and one order for all seeds, which differ in their networks
RENEWAL_BATCH, RENEWED = 128, Cifar10CStudy.batch_norm_images


def build(settings: Cifar10CStudy) -> Study:
    """Put the study together."""
    used = ms.methods_of(settings)
    on_gpu = settings.device == "best" and torch.cuda.is_available()
    rules, renewed = settings.choice, settings.batch_norm_images
    study = Study(
        name="cifar10-c",
        title="CIFAR-10-C",
        settings=settings,
        load=lambda out: load_data(settings, out / "corruptions"),
        networks=networks_of(settings),
        grounds=grounds_of(settings),
        methods=used,
        plain=ms.MAP_SWA,
        shifts=settings.shifts,
        share=lambda method, shift: ms.share_of(method, shift, settings),
        plan=sizes(settings),
        seeds=settings.seeds,
        looks=ms.LOOKS,
        grids=settings.frontier.grids,
        choices={
            ms.LEAST_NLL: ByLeastNll(),
            ms.BUDGET: WithinPrice(rules.tolerance, plain_nll, "price of SWA"),
            ms.NEAR: WithinPrice(rules.near, tempered_nll, "near Temp"),
            ms.MATCHED: WithinPrice(0.0, nll_of(ms.ACNML_SWAG_D_PAPERS), "price of ACNML-SWAGD"),
            ms.PAPERS: LargestHarmlessAlpha(rules.accuracy, rules.nll),
        },
        tried=lambda method: ms.tried_values(method, settings),
        scale_from=ms.BMA_KFAC,
        frontier=frontier_of(settings) if settings.sweeps else None,
        levels=(settings.images.network_wide, settings.images.beside),
        diagrams=settings.blurred_shifts,
        agreements=tuple(
            (each, replace(each, solver=LINEARISED)) for each in ms.COSTLY if each in used
        ),
        resamples=settings.resamples,
        bins=settings.bins,
        samples=settings.samples,
        device=torch.device("cuda" if on_gpu else "cpu"),
        prepare=fastest_layout,
        renewal=Drawn.by if has_batch_norm(settings) else None,
        # The default is not named, so that finished runs are found.
        renewal_settings=None if renewed == RENEWED else (renewed,),
        check=partial(require_corruptions, settings),
        claims=all_claims(settings),
        sections=report.sections,
        headline=report.headline,
        page="docs/cifar10-c.md",
    )
    return study.replaced(phases=order(study, settings))


def has_batch_norm(settings: Cifar10CStudy) -> bool:
    """Whether posterior samples need statistics of their own."""
    with torch.device("meta"):  # without memory
        network = settings.recipe.built().build()
    return bool(tracking_batch_norms(network))


def frontier_of(settings: Cifar10CStudy) -> Frontier:
    """Return the sweep of all families at one severity."""
    sweep = settings.frontier
    return Frontier(ms.FAMILIES, settings.scored_at(sweep.severity), sweep.images)


def networks_of(settings: Cifar10CStudy) -> dict[str, Network]:
    """Return plain SGD, the averaged network, and the one with dropout where it is another."""
    recipe, model = settings.recipe, settings.recipe.built()
    plain = None if recipe.start == "given" else recipe.training.without_averaging()
    networks = {ms.SWA: Network(model, recipe.training, average)}
    if not settings.only_papers:
        networks[ms.SGD] = Network(model, plain)
    dropout = settings.dropout_recipe
    if dropout is not None and dropout != recipe:
        networks[ms.DROPOUT] = Network(dropout.built(), dropout.training, average)
    return networks


def grounds_of(settings: Cifar10CStudy) -> dict[str, Ground]:
    """Return what rules stand on; the whole network's KFAC is damped, as in the paper."""
    curvature = settings.curvature
    prior = curvature.prior_precision
    masked = ms.SWA if settings.dropout_recipe == settings.recipe else ms.DROPOUT
    return {
        ms.SGD: Networks(ms.SGD),
        ms.SWA: Networks(ms.SWA),
        ms.ENSEMBLE: Networks(ms.SWA, settings.members),
        ms.DROPOUT: Networks(masked),
        ms.SWAG_D: SwagPosterior(ms.SWA, Swag.diagonal),
        ms.SWAG: SwagPosterior(ms.SWA, Swag.low_rank),
        ms.KFAC: KfacLaplace(
            ms.SWA, inputs=curvature.images, prior_precision=prior, form=KroneckerCurvature.damped
        ),
        ms.MADDOX: MaddoxKfac(ms.SWA),
        HEAD: KfacLaplace(ms.SWA, last_layer, curvature.head_images, prior),
    }


def order(study: Study, settings: Cifar10CStudy) -> tuple[Phase, ...]:
    """Return the order of the work: the most important and cheapest first."""
    cheap, wide, costly = (
        [each for each in group if each in study.methods]
        for group in (ms.CHEAP, ms.NETWORK_WIDE, ms.COSTLY)
    )
    seeds = study.seeds
    phases = (
        Phase("choices on held-out images", choices(study), seeds),
        Phase("clean images", see([*cheap, *wide], (CLEAN,)), seeds),
        Phase("corruptions, cheap methods", see(cheap, study.shifts[1:]), seeds),
        Phase("frontier", sweeps(study), seeds[:1]),
        *(
            Phase(f"severity {severity}, all weights", see(wide, settings.seen_at(severity)), seeds)
            for severity in settings.severities
        ),
        Phase("the paper's gradient steps", see(costly, settings.steps_shifts), seeds),
    )
    return tuple(phase for phase in phases if phase.jobs)


def sizes(settings: Cifar10CStudy) -> Plan:
    """Return numbers of images and costs, from the settings alone."""
    held_out, source = settings.choice.held_out, settings.choice.source
    costs = ms.costs_of(settings)
    return Plan(
        train=TRAIN_IMAGES - (held_out if source == "train" else 0),
        held_out=held_out,
        test=TEST_IMAGES - (held_out if source == "test" else 0),
        passes=lambda method: ms.passes_per_image(method, settings),
        curvature=(ms.KFAC_IMAGE, costs[ms.LAST_LAYER]),
        renewal=settings.batch_norm_images or TRAIN_IMAGES,
        milliseconds=settings.milliseconds,
        note=f"Hours assume {settings.milliseconds:g} ms for a forward pass of one image through "
        f"{settings.model}, not measured on this machine; --set milliseconds=… changes it.",
    )


# Data ------------------------------------------------------------------------------------------


def load_data(settings: Cifar10CStudy, cache: Path) -> StudyData:
    """Load CIFAR-10 and split off the held-out images; corrupted ones are made when asked for."""
    parts = {name: cifar10.load(name) for name in ("train", "test")}
    orders = {name: shuffled(len(part.labels), SPLIT_SEED) for name, part in parts.items()}
    source, count = settings.choice.source, settings.choice.held_out
    if not 0 < count < len(orders[source]):
        there = f"{len(orders[source])} images of the {source} set"
        raise SettingError(f"choice.held_out: {there} cannot spare {count}")
    rest, held_out = split_off(parts[source], count)
    train = rest if source == "train" else parts["train"]
    orders[source] = orders[source][count:]
    test = parts["test"].take(orders["test"])
    numbers = orders["test"][: max(settings.images.cheap, settings.frontier.images)].tolist()
    corrupted = Cifar10C.of_test_set(numbers, cache)
    official = f"official: {corrupted.official}"

    @lru_cache(maxsize=4)
    def shifted(shift: str) -> Labelled:
        name, severity = shift.rsplit(" ", 1)
        return corrupted.load(name, int(severity))

    def load(shift: str, images: int) -> Labelled:
        return (test if shift == CLEAN else shifted(shift)).first(images)

    note = "CIFAR-10, with the official files of CIFAR-10-C."
    if not corrupted.official:
        note = "CIFAR-10; its corruptions are made here, with the parameters of CIFAR-10-C."
    return StudyData.of(note, train, held_out, test, load, official)


def split_off(images: Labelled, held_out: int) -> tuple[Labelled, Labelled]:
    """Return images without some that are held out, in their own order, and the held-out ones."""
    order = shuffled(len(images.labels), SPLIT_SEED)
    return images.take(order[held_out:].sort().values), images.take(order[:held_out])


def require_corruptions(settings: Cifar10CStudy, data: StudyData) -> None:
    """Refuse early what could not be loaded later: try the first image of every corruption."""
    names = {shift.rsplit(" ", 1)[0] for shift in settings.shifts if shift != CLEAN}
    Cifar10C.of_test_set([0], Path()).require_available(names)


def fastest_layout(method: Method, images: Tensor) -> Tensor:
    """On a CPU, forward passes are faster with channels last, and solvers without."""
    layout = torch.channels_last if method.rule in SAMPLING else torch.contiguous_format
    return images.contiguous(memory_format=layout)


@final
@dataclass(frozen=True, eq=False)
class Drawn:
    """Augmented training images for batch norm, drawn again in every pass.

    Every sample of a posterior thus has images of its own. If all had the same few, the
    peculiarities of these would not average out over the samples.
    """

    workshop: Workshop
    generator: torch.Generator

    @staticmethod
    def by(workshop: Workshop) -> Drawn:
        """Return the draws of the workshop's seed."""
        return Drawn(workshop, torch.Generator().manual_seed(workshop.seed))

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        study, data = self.workshop.study, self.workshop.data.train
        augment = study.networks[ms.SWA].model.augmented
        count = study.settings.batch_norm_images
        drawn = torch.randperm(len(data.labels), generator=self.generator)[:count]
        for rows in drawn.split(RENEWAL_BATCH):
            yield augment(data.inputs[rows].to(study.device), self.generator), data.labels[rows]
