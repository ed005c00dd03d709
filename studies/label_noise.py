"""Finding wrong labels: complexities of the NML family against other scores, on injected noise.

A share of the labels is replaced at random. *Symmetric* noise draws any other class, *asymmetric*
noise a fixed one for each class, such as 7 for 1 or cat for dog. A network is trained on the noisy
labels, and every score ranks the labels by how suspicious they are: the labels that it was trained
on, and new ones with the same noise. No score sees which labels are wrong, and nothing is tuned
on that: temperature and α are chosen on held-out data, whose labels are as noisy.

- *MNIST*: an MLP is trained on the images.
- *CIFAR-10*: a linear layer is trained on the features of a given ResNet-20, for images of the test
  set, which the ResNet has not seen.
"""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, final

import torch
from torch import Tensor, nn

from acnml import (
    Acnml,
    Classifier,
    Diagonal,
    Map,
    calibrate,
    fit_if_comp,
    fit_pnml,
    metrics,
)
from acnml.solve.influence import self_influence
from studies.data import Labelled, cifar10, split
from studies.data.digits import load_mnist
from studies.engine.report import Section, ShortReport
from studies.engine.tables import Table, select
from studies.features import features
from studies.models.mlp import mlp
from studies.models.weights import Weights
from studies.store import Content, Stage, Store

MNIST, CIFAR10 = "MNIST", "CIFAR-10"
SYMMETRIC, ASYMMETRIC = "symmetric", "asymmetric"
TRAINED, NEW = "labels of the training data", "new labels"
CLASSES = 10
GIVEN = "resnet20"  # whose features of CIFAR-10 are taken

LOSS, MARGIN, EL2N, GRAND, SELF = "loss", "margin", "EL2N", "GraNd", "self-influence"
REGRET, ACNML, LOSS_REGRET = "ACNML regret", "ACNML complexity", "loss + ACNML regret"
IF_COMP, PNML = "IF-COMP", "pNML complexity"
SCORES = (LOSS, MARGIN, EL2N, GRAND, SELF, REGRET, ACNML, LOSS_REGRET, IF_COMP, PNML)

# What asymmetric noise turns every class into: digits and objects that look alike.
CONFUSED: Mapping[str, tuple[int, ...]] = {
    MNIST: (6, 7, 3, 8, 9, 6, 5, 1, 3, 4),
    CIFAR10: (2, 9, 0, 5, 7, 3, 8, 4, 6, 1),
}

BATCH, LEARNING_RATE = 50, 1e-3


@final
@dataclass(frozen=True)
class LabelNoiseStudy:
    """The settings.

    Args:
        data: some of `MNIST` and `CIFAR10`.
        noise: some of `SYMMETRIC` and `ASYMMETRIC`.
        rates: shares of wrong labels.
        train: labels that a network is trained on.
        held_out: for choosing temperature and α.
        new: labels that the network has not seen.
        epochs: of training.
        hidden: units of the MLP's hidden layer.
        price: of α in nats, over the best temperature.
        seeds: of splits, noise and training.
    """

    data: tuple[str, ...] = (MNIST, CIFAR10)
    noise: tuple[str, ...] = (SYMMETRIC, ASYMMETRIC)
    rates: tuple[float, ...] = (0.1, 0.3)
    train: int = 1000
    held_out: int = 500
    new: int = 500
    epochs: int = 20
    hidden: int = 64
    price: float = 0.01
    seeds: tuple[int, ...] = (0, 1, 2)


PRESETS: Mapping[str, LabelNoiseStudy] = {
    "quick": LabelNoiseStudy(
        data=(MNIST,), rates=(0.3,), train=300, held_out=200, new=200, epochs=8, seeds=(0,)
    ),
    "full": LabelNoiseStudy(),
}


class Found(NamedTuple):
    """A score on one set of labels."""

    data: str
    noise: str
    rate: float
    labels: str
    seed: int
    score: str
    auroc: float
    average_precision: float


# The work ----------------------------------------------------------------------------------------


def with_noise(labels: Tensor, data: str, noise: str, rate: float, seed: int) -> Tensor:
    """Replace a share of the labels, exactly rounded, by wrong ones."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(len(labels), generator=generator)[: round(rate * len(labels))]
    wrong = torch.tensor(CONFUSED[data])[labels[chosen]]
    if noise == SYMMETRIC:
        shift = torch.randint(1, CLASSES, (len(chosen),), generator=generator)
        wrong = (labels[chosen] + shift) % CLASSES
    return labels.clone().index_put((chosen,), wrong)


def inputs_of(data: str, study: LabelNoiseStudy, seed: int, store: Store) -> Labelled:
    """Return images of MNIST, or features of CIFAR-10, with their true labels, in random order."""
    count = study.train + study.held_out + study.new
    if data == MNIST:
        digits = load_mnist("train").first(count)
        known = Labelled(digits.inputs.flatten(1), digits.labels)
    else:
        images = cifar10.load("test").first(count)
        known = features("of CIFAR-10", Weights.given(GIVEN), images, store)
    return split(known, (count,), seed)[0]


def trained(x: Tensor, labels: Tensor, data: str, study: LabelNoiseStudy, seed: int) -> nn.Module:
    """Train a network by Adam on noisy labels."""
    width = x.shape[1]
    network = mlp(CLASSES, (study.hidden,), width) if data == MNIST else nn.Linear(width, CLASSES)
    optimizer = torch.optim.Adam(network.parameters(), LEARNING_RATE)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(study.epochs):
        for rows in torch.randperm(len(x), generator=generator).split(BATCH):
            optimizer.zero_grad()
            nn.functional.cross_entropy(network(x[rows]), labels[rows]).backward()
            optimizer.step()
    return network.eval()


def scores(
    network: nn.Module, train: Labelled, held_out: Labelled, asked: Labelled, price: float
) -> dict[str, Tensor]:
    """Return every score (n,) of the labels asked about; higher is more suspicious."""
    x, labels, classifier = asked.inputs, asked.labels, Classifier(network)
    own = labels.unsqueeze(1)
    log_probs = Map(classifier)(x)
    loss = -log_probs.gather(1, own).squeeze(1)
    others = log_probs.scatter(1, own, -math.inf).amax(1)
    targets = nn.functional.one_hot(labels, CLASSES)
    mean = classifier.copy_parameters([name for name, _ in network.named_parameters()])
    identity = Diagonal(mean, {name: torch.ones_like(t) for name, t in mean.items()})
    _, norms = self_influence(Acnml(classifier, identity).problem(x))  # ‖∇ log p_y‖²
    data = [tuple(train)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of few held-out data
        parts = data, [tuple(held_out)]
        calibrated = calibrate(network, *parts, price=price, rule="acnml", progress=False)
    answer = calibrated(x)
    if_comp = fit_if_comp(classifier, data, progress=False)
    pnml = fit_pnml(classifier, data, progress=False)
    return {
        LOSS: loss,
        MARGIN: loss + others,
        EL2N: (log_probs.exp() - targets).norm(dim=1),
        GRAND: norms.gather(1, own).squeeze(1).sqrt(),
        SELF: if_comp.influence(x).gather(1, own).squeeze(1),
        REGRET: answer.regret,
        ACNML: -answer.log_probs.gather(1, own).squeeze(1),
        LOSS_REGRET: loss + answer.regret,
        IF_COMP: if_comp.mislabel_score(x, labels),
        PNML: pnml.complexity(x, labels),
    }


def measured(
    data: str, noise: str, rate: float, study: LabelNoiseStudy, seed: int, store: Store
) -> list[Found]:
    """Train on noisy labels and measure every score."""
    known = inputs_of(data, study, seed, store)
    noisy = Labelled(known.inputs, with_noise(known.labels, data, noise, rate, seed))
    sizes = (study.train, study.held_out, study.new)
    train, held_out, new = (
        Labelled(x, y)
        for x, y in zip(noisy.inputs.split(sizes), noisy.labels.split(sizes), strict=True)
    )
    wrong = (noisy.labels != known.labels).split(sizes)
    network = trained(*train, data, study, seed)
    found = []
    for where, asked, is_wrong in ((TRAINED, train, wrong[0]), (NEW, new, wrong[2])):
        for score, values in scores(network, train, held_out, asked, study.price).items():
            values = values.double()
            parts = values[~is_wrong], values[is_wrong]
            rates = metrics.auroc(*parts), metrics.aupr(*parts)
            found.append(Found(data, noise, rate, where, seed, score, *rates))
    return found


def run(study: LabelNoiseStudy, out: Path, store: Store, command: str) -> Path:
    """Do everything that is missing and write the report."""
    rows: list[Found] = []
    for data in study.data:
        for noise in study.noise:
            for rate in study.rates:
                for seed in study.seeds:
                    rows += stored(data, noise, rate, study, seed, store)
    return write_pages(study, rows, out, command)


def stored(
    data: str, noise: str, rate: float, study: LabelNoiseStudy, seed: int, store: Store
) -> list[Found]:
    """Return the measurements, as an artefact."""
    sizes = (study.train, study.held_out, study.new, study.epochs, study.hidden, study.price)
    given = (Weights.given(GIVEN).checksum,) if data == CIFAR10 else ()
    stage = Stage(f"{data} {noise}", (rate, *sizes, *given), seed)

    def make(_: object) -> Content:
        rows = measured(data, noise, rate, study, seed, store)
        return Content({}, {"rows": [row._asdict() for row in rows]})

    return [Found(**row) for row in store.make(stage, make).facts["rows"]]


# The report --------------------------------------------------------------------------------------


def table(study: LabelNoiseStudy, rows: Sequence[Found], labels: str) -> Table:
    """Return the AUROC of every score: means over seeds, and their standard deviation."""
    cases = [(d, n, r) for d in study.data for n in study.noise for r in study.rates]
    columns = []
    for data, noise, rate in cases:
        own = select(rows, data=data, noise=noise, rate=rate, labels=labels)
        found = [[row.auroc for row in select(own, score=score)] for score in SCORES]
        means = [statistics.fmean(values) for values in found]
        texts = [
            f"{m:.3f}" + (f" ± {statistics.stdev(v):.3f}" if len(v) > 1 else "")
            for m, v in zip(means, found, strict=True)
        ]
        best = max(means)
        columns.append([f"**{t}**" if m == best else t for m, t in zip(means, texts, strict=True)])
    head = ("score", *(f"{d}, {n}, {100 * r:g} %" for d, n, r in cases))
    lines = [[score, *(column[i] for column in columns)] for i, score in enumerate(SCORES)]
    caption = f"{labels}: AUROC, mean and standard deviation over {len(study.seeds)} seeds."
    return Table(caption, head, lines)


def averages(rows: Sequence[Found]) -> dict[tuple[str, str], float]:
    """Return the mean AUROC over all cases, by labels and score."""
    return {
        (labels, score): statistics.fmean(
            row.auroc for row in select(rows, labels=labels, score=score)
        )
        for labels in (TRAINED, NEW)
        for score in SCORES
    }


def verdict(rows: Sequence[Found]) -> str:
    """Say which scores are best on average."""
    found, parts = averages(rows), []
    for labels in (TRAINED, NEW):
        order = sorted(SCORES, key=lambda score: -found[labels, score])
        words = ", ".join(f"{score} {found[labels, score]:.3f}" for score in order[:3])
        parts.append(f"{labels}: {words}; the loss has {found[labels, LOSS]:.3f}")
    return f"Highest mean AUROC over all cases. {'. '.join(parts)}."


def write_pages(study: LabelNoiseStudy, rows: Sequence[Found], out: Path, command: str) -> Path:
    """Write metrics.csv, results.md and report.html; return the path of the last."""
    text = (
        f"Networks are trained on {study.train} noisy labels for {study.epochs} epochs. All scores "
        "are of the network at the end of training; EL2N and GraNd are often averaged over "
        "networks early in training instead. GraNd and self-influence are of all weights. "
        "Temperature and α of ACNML (`calibrate`) are chosen on "
        f"{study.held_out} held-out labels with the same noise, at a price of {study.price:g} "
        "nats. IF-COMP has T = 1 and c = 1."
    )
    tables = [table(study, rows, labels) for labels in (TRAINED, NEW)]
    sections = [Section("Wrong labels", [text], [], tables)]
    numbers = {"metrics.csv": (Found._fields, rows)}
    return ShortReport("Label noise", verdict(rows), sections, command, numbers).write(out)
