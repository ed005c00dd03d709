"""The rotated-MNIST study: data, networks, posteriors, order of the work, and claims.

Smaller counts are the first of one random order of the test set. So they are fair samples of it
(MNIST's first half is easier than its second), and all methods see the same images.
"""

from __future__ import annotations

from functools import lru_cache, partial

from torch import Tensor

from acnml import Swag
from acnml.fit import KroneckerCurvature
from studies.data import Labelled, digits, shuffled, split
from studies.data.catalogue import MNIST
from studies.data.digits import SIDE, rotate
from studies.data.folder import locate
from studies.engine import claims
from studies.engine.choose import ByLeastNll, WithinPrice, plain_nll
from studies.engine.claims import Claim, Judgement
from studies.engine.grounds import KfacLaplace, MeanField, Networks, SwagPosterior, last_layer
from studies.engine.method import HEAD, Method
from studies.engine.results import Results
from studies.engine.run import choices, sweeps
from studies.engine.study import (
    Detection,
    Frontier,
    Model,
    Network,
    Phase,
    Plan,
    Study,
    StudyData,
    average,
    see,
)
from studies.models.mlp import mlp
from studies.rotated_mnist import methods as ms
from studies.rotated_mnist import report
from studies.rotated_mnist.settings import (
    LETTERS,
    RANDOM,
    UPRIGHT,
    RotatedMnist,
    degrees,
)

SPLIT_SEED = 0  # one split and one order for all seeds, which differ in their networks
CLASSES = 10
HARDLY = 0.01  # nats that a choice on validation images may be off on test images
AVERAGED = "SWAG around the network"


def build(settings: RotatedMnist) -> Study:
    """Put the study together."""
    has_mnist = any(locate(file) for file in MNIST.files)
    letters = has_mnist and digits.has_letters()
    model = mlp_model(settings.hidden, has_mnist)
    networks = {
        ms.NETWORK: Network(model, settings.training),
        ms.DROPOUT: Network(
            mlp_model(settings.hidden, has_mnist, settings.dropout), settings.training
        ),
        AVERAGED: Network(model, settings.swag.schedule, average, start=ms.NETWORK),
    }
    members, damped = settings.members, KroneckerCurvature.damped
    grounds = {
        ms.NETWORK: Networks(ms.NETWORK),
        ms.ENSEMBLE: Networks(ms.NETWORK, members),
        ms.DROPOUT: Networks(ms.DROPOUT),
        ms.BBP: MeanField(ms.NETWORK, settings.bayes_by_backprop),
        ms.SWAG: SwagPosterior(AVERAGED, Swag.diagonal),
        ms.KFAC: KfacLaplace(ms.NETWORK, form=damped),
        HEAD: KfacLaplace(ms.NETWORK, last_layer),
        ms.HEADS: KfacLaplace(ms.NETWORK, last_layer, members=members),
    }
    study = Study(
        name="rotated-mnist",
        title="Rotated MNIST",
        settings=settings,
        load=lambda _: load_data(settings.train_images, settings.choice.validation),
        networks=networks,
        grounds=grounds,
        methods=ms.METHODS,
        plain=ms.MAP,
        shifts=settings.shifts,
        share=lambda method, _: ms.share_of(method, settings),
        plan=sizes(settings.train_images, settings.choice.validation, has_mnist),
        seeds=settings.seeds,
        looks=ms.LOOKS,
        grids=settings.frontier.grids,
        choices={
            ms.BUDGET: WithinPrice(settings.choice.tolerance, plain_nll),
            ms.LEAST_NLL: ByLeastNll(),
        },
        frontier=Frontier(ms.FAMILIES, settings.frontier.shifts, settings.frontier.images),
        levels=(ms.share_of(ms.BMA_KFAC, settings).inputs, settings.images.paper_steps),
        diagrams=(UPRIGHT, RANDOM),
        agreements=ms.AGREEMENTS,
        detection=Detection(LETTERS, ms.CHEAP, {"brightness": brightness}) if letters else None,
        bins=settings.bins,
        samples=settings.samples,
        claims=all_claims(settings),
        sections=report.sections,
        headline=partial(report.headline, far=far_shifts(settings)),
        page="docs/rotated-mnist.md",
    )
    return study.replaced(phases=order(study, letters))


def mlp_model(hidden: tuple[int, ...], has_mnist: bool, dropout: float = 0.0) -> Model:
    """Return the multilayer perceptron, with dropout after every hidden layer where it is not 0."""
    pixels = 28 * 28 if has_mnist else SIDE * SIDE
    return Model(
        ("mlp", hidden, pixels, dropout), partial(mlp, CLASSES, hidden, pixels, dropout=dropout)
    )


def order(study: Study, letters: bool) -> tuple[Phase, ...]:
    """Return the order of the work: the most important and cheapest first."""
    shifts = (*study.shifts, *((LETTERS,) if letters else ()))
    first, *others = study.seeds
    return (
        Phase("choices on validation images", choices(study), study.seeds),
        Phase("cheap methods, first seed", see(ms.CHEAP, shifts), (first,)),
        Phase("frontier", sweeps(study), (first,)),
        Phase("cheap methods, other seeds", see(ms.CHEAP, shifts), tuple(others)),
        Phase("costly solvers of ACNML", see(ms.COSTLY, study.shifts), study.seeds),
    )


# Data ------------------------------------------------------------------------------------------


def load_data(train_images: int | None, validation: int) -> StudyData:
    """Return MNIST and notMNIST, or scikit-learn's digits where there is no MNIST.

    Validation images are cut from the training set; None takes all others for training.
    """
    found = digits.handwritten_digits()
    data = len(found.train.labels)
    validation = min(validation, data // 4)
    train = min(train_images or data, data - validation)
    parts = split(found.train, (train, validation, data - train - validation), SPLIT_SEED)
    same_size = found.test.inputs.shape[1:] == (1, 28, 28)
    letters = _shuffled(digits.load_letters()) if same_size and digits.has_letters() else None
    note = found.note if letters else f"{found.note} There is no notMNIST of the same size."
    test = _shuffled(found.test)

    @lru_cache(maxsize=16)  # every shift of a study: rotating ten thousand images takes seconds
    def shifted(shift: str) -> Labelled:
        if shift == LETTERS:
            assert letters is not None  # or it is not among the shifts
            return letters
        count = len(test.labels)
        angle = digits.random_angles(count, SPLIT_SEED) if shift == RANDOM else degrees(shift)
        return Labelled(rotate(test.inputs, angle), test.labels)

    more = [letters] if letters else []
    return StudyData.of(
        note, parts[0], parts[1], test, lambda shift, n: shifted(shift).first(n), *more
    )


def _shuffled(data: Labelled) -> Labelled:
    return data.take(shuffled(len(data.labels), SPLIT_SEED))


def sizes(train_images: int | None, validation: int, has_mnist: bool) -> Plan:
    """Return the numbers of images, from the settings alone."""
    whole, test = (60_000, 10_000) if has_mnist else (1397, 400)
    validation = min(validation, whole // 4)
    return Plan(min(train_images or whole, whole - validation), validation, test)


def brightness(images: Tensor) -> Tensor:
    """Return the mean of every image's pixels: letters have more ink than digits."""
    return images.flatten(1).double().mean(1)


# Claims ----------------------------------------------------------------------------------------


def far_shifts(settings: RotatedMnist) -> tuple[str, ...]:
    """Return the angles that count as rotated."""
    return tuple(f"{angle}°" for angle in settings.angles if angle >= report.FAR)


def all_claims(settings: RotatedMnist) -> tuple[Claim, ...]:
    """Return the paper's claims about MNIST, which are about a mean-field posterior, and others."""
    trios = {
        "Bayes by Backprop": (ms.MAP_BBP, ms.BMA_BBP, ms.ACNML_BBP),
        "KFAC-Laplace": (ms.MAP, ms.BMA_KFAC, ms.ACNML_KFAC),
        "SWAG-D": (ms.MAP_SWAG, ms.BMA_SWAG, ms.ACNML_SWAG),
    }
    far = {shift: (shift,) for shift in far_shifts(settings)}

    def better(name: str, score: str) -> Claim:
        *others, ours = trios[name]
        shown = claims.SHOWN[score]
        text = f"With {name}, ACNML has a lower {shown} than MAP and BMA on rotated digits."
        return claims.lower(
            text, f"lower at every angle from {report.FAR}° up", ours, others, score, far
        )

    return (
        *(better(name, "ece") for name in trios),
        better("Bayes by Backprop", "brier"),
        Claim(
            "On upright digits ACNML is the most cautious method, not the best calibrated.",
            "highest ECE at 0°",
            _ece_upright,
        ),
        Claim(
            "ACNML does not cost accuracy on upright digits.",
            "within 0.5 % of MAP at 0°",
            _accuracy,
        ),
        Claim(
            "ACNML is orders of magnitude cheaper than naive CNML.",
            "the paper's steps at least 100 times cheaper than one epoch for every label",
            _cheaper_than_naive,
        ),
        _more_than_tempering(ms.ACNML_BBP, ms.TEMPERED_BBP),
        _more_than_tempering(ms.ACNML_HEAD, ms.TEMPERED),
        claims.lower(
            "Beyond the paper: the ensemble of ACNML is better calibrated than all others on "
            "rotated digits, with a prior precision chosen on upright validation images.",
            f"lowest ECE of all at every angle from {report.FAR}° up",
            ms.ACNML_HEADS,
            [method for method in ms.MATCHED if method != ms.ACNML_HEADS],
            "ece",
            far,
        ),
        claims.comparable(
            "Beyond the paper: the ensemble of ACNML costs nothing on upright digits.",
            ms.ACNML_HEADS,
            [ms.MAP],
            "nll",
            HARDLY,
        ),
    )


def _more_than_tempering(family: Method, tempering: Method) -> Claim:
    name = f"{family.rule} {family.posterior}"
    text = f"Beyond the paper: {name} does more than lower all confidences as a temperature does."
    rule = "lower ECE than the temperature of equal validation NLL, at every shift of the sweep"
    return claims.more_than(text, rule, family, tempering)


def _ece_upright(results: Results) -> Judgement | None:
    trio = {"MAP": ms.MAP_BBP, "BMA": ms.BMA_BBP, "ACNML": ms.ACNML_BBP}
    n = results.inputs(trio.values())
    each = {name: results.mean(m, "ece", [UPRIGHT], n) for name, m in trio.items()}
    means = {name: value for name, value in each.items() if value is not None}
    if len(means) < len(trio):
        return None
    text = ", ".join(f"{name} {value:.3f}" for name, value in means.items())
    return Judgement(text, means["ACNML"] == max(means.values()))


def _accuracy(results: Results) -> Judgement | None:
    pair = (ms.ACNML_BBP, ms.MAP_BBP)
    n = results.inputs(pair)
    ours, plain = (results.mean(method, "accuracy", [UPRIGHT], n) for method in pair)
    if ours is None or plain is None:
        return None
    return Judgement(f"ACNML {ours:.2%}, MAP {plain:.2%}", ours >= plain - 0.005)


def _cheaper_than_naive(results: Results) -> Judgement | None:
    steps = results.seconds(ms.ACNML_BBP_PAPER)
    if steps is None or results.seconds_per_epoch is None:
        return None
    ratio = CLASSES * results.seconds_per_epoch / steps
    return Judgement(f"{ratio:,.0f} times cheaper", ratio >= 100)
