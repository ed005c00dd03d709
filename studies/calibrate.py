"""`acnml.calibrate` under shift: is it better than the temperature of equal price?

Four networks: three for CIFAR-10 with given weights, under the corruptions of CIFAR-10-C, and a
small one for MNIST that is trained here, under rotation. For each, temperature and α are chosen on
clean held-out images. Nothing is chosen on shifted images.

ACNML on the last layer needs only the features of an image. They are computed once, as resumable
artefacts; calibrating the last layer on them is the same as calibrating the network on the images.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias, final

import torch
from torch import Tensor, nn

from acnml import Calibrated, Classifier, calibrate, last_linear, metrics
from acnml._util.seeding import seeded
from acnml.cli._shared.digits import Labelled, rotate, split
from acnml.cli._shared.drawing import panel
from acnml.cli._shared.files import write_file
from studies.corruptions import BENCHMARK, Cifar10C
from studies.data import cifar10
from studies.data.digits import load_mnist
from studies.data.folder import data_folder
from studies.engine.report import Panels, Section, footer, short_report, written_by
from studies.engine.tables import Table, write_csv
from studies.models import MODELS
from studies.models.mlp import mlp
from studies.store import Content, Stage, Store, Work

NETWORKS = ("mnist", "resnet20", "resnet56", "resnet18")
TEST_IMAGES, TRAIN_IMAGES = 10_000, 50_000
BLOCK = 250
PLAIN, TEMPERATURE, EQUAL, ACNML = "network", "temperature", "temperature of equal price", "ACNML"
UNIT_PRIOR = "ACNML, prior precision 1"
Score: TypeAlias = Literal["accuracy", "nll", "brier", "ece"]
SCORES = ("accuracy", "nll", "brier", "ece")
SHOWN: tuple[Score, ...] = ("accuracy", "ece", "nll", "brier")
COLUMNS = ("network", "shift", "group", "price", "method", "n", *SCORES)


@final
@dataclass(frozen=True)
class CalibrateStudy:
    """The settings.

    Args:
        networks: some of `NETWORKS`.
        held_out: images for choosing, cut from the test set of CIFAR-10 (its networks have seen all
            training images) and from the training set of MNIST.
        test: images of every shift.
        severities: of the corruptions.
        angles: of the digits.
        prices: in nats, over the best temperature.
        train_images: for the posterior; None takes all. α makes up for the scale of a posterior
            of fewer images.
        epochs: of the MNIST network.
        seed: of splits and training.
    """

    networks: tuple[str, ...] = NETWORKS
    held_out: int = 2000
    test: int = 1000
    severities: tuple[int, ...] = (3, 5)
    angles: tuple[int, ...] = (15, 30, 45, 60, 75, 90, 105, 120, 135, 150, 165, 180)
    prices: tuple[float, ...] = (0.003, 0.01, 0.03)
    train_images: int | None = None
    epochs: int = 8
    seed: int = 0


PRESETS: Mapping[str, CalibrateStudy] = {
    "quick": CalibrateStudy(
        networks=("mnist", "resnet20"),
        held_out=1000,
        test=200,
        severities=(5,),
        angles=(30, 60, 90, 180),
        train_images=5000,
        epochs=3,
    ),
    "full": CalibrateStudy(),
}


class Scored(NamedTuple):
    """A method at a shift."""

    network: str
    shift: str
    group: str  # shifts of one kind and strength
    price: float
    method: str
    n: int
    accuracy: float
    nll: float
    brier: float
    ece: float


# Networks and their shifts -----------------------------------------------------------------------


@final
@dataclass(frozen=True, eq=False)
class Subject:
    """A network with its data."""

    name: str
    build: Callable[[], nn.Module]  # trained
    prepare: Callable[[Tensor], Tensor]  # stored images -> inputs
    train: Labelled
    held_out: Labelled
    shifts: Mapping[str, str]  # shift -> its group
    load: Callable[[str], Labelled]  # a shift's images

    @cached_property
    def network(self) -> nn.Module:
        """The trained network, in the memory layout that is fastest for convolutions."""
        network: nn.Module = self.build().eval()
        for parameter in network.parameters():
            if parameter.ndim == 4:
                parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
        return network


def cifar_subject(name: str, study: CalibrateStudy, cache: Path) -> Subject:
    """Return a CIFAR-10 network with given weights."""
    order = torch.randperm(TEST_IMAGES, generator=torch.Generator().manual_seed(study.seed))
    held_out, test = order[: study.held_out], order[study.held_out :][: study.test]
    all_test, images = cifar10.load("test"), Cifar10C.of_test_set(test.tolist(), cache)
    chosen = torch.randperm(TRAIN_IMAGES, generator=torch.Generator().manual_seed(study.seed))
    train, some = cifar10.load("train"), chosen[: study.train_images]
    groups = {f"{c} {s}": f"severity {s}" for s in study.severities for c in BENCHMARK}
    model = MODELS[name]

    def load(shift: str) -> Labelled:
        if shift == "clean":
            return images.clean
        corruption, severity = shift.rsplit(" ", 1)
        return images.load(corruption, int(severity))

    return Subject(
        name,
        lambda: model.trained(data_folder() / "weights"),
        lambda x: model.normalise(cifar10.to_unit(x)),
        Labelled(train.inputs[some], train.labels[some]),
        Labelled(all_test.inputs[held_out], all_test.labels[held_out]),
        {"clean": "clean", **groups},
        load,
    )


def mnist_subject(study: CalibrateStudy, store: Store) -> Subject:
    """Return a network with two hidden layers, trained on MNIST."""
    everything = load_mnist("train")
    sizes = [len(everything.labels) - study.held_out, study.held_out]
    train, held_out = split(everything, sizes, study.seed)
    test = load_mnist("test").first(study.test)

    def build() -> nn.Module:
        with seeded(study.seed):
            network = mlp(10)
        stage = Stage("train mnist", (study.epochs, study.held_out), study.seed)
        trained = store.make(stage, lambda work: train_digits(network, train, study, work))
        network.load_state_dict(trained.load())
        return network

    def load(shift: str) -> Labelled:
        angle = 0 if shift == "clean" else int(shift.rstrip("°"))
        return Labelled(rotate(test.inputs, angle), test.labels)

    groups = {
        f"{a}°": "rotated by 45° or more" if a >= 45 else "rotated by less" for a in study.angles
    }
    shifts = {"clean": "clean", **groups}
    some = train.first(study.train_images)
    return Subject("mnist", build, lambda x: x, some, held_out, shifts, load)


def train_digits(network: nn.Module, data: Labelled, study: CalibrateStudy, work: Work) -> Content:
    """Train by SGD with momentum and a learning rate that falls along a cosine."""
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, study.epochs)
    generator = torch.Generator().manual_seed(study.seed)
    for epoch in range(study.epochs):
        work.progress(epoch, study.epochs)
        for batch in torch.randperm(len(data.labels), generator=generator).split(500):
            optimizer.zero_grad()
            logits = network(data.inputs[batch])
            nn.functional.cross_entropy(logits, data.labels[batch]).backward()
            optimizer.step()
        schedule.step()
    return Content(network.state_dict())


# The work ----------------------------------------------------------------------------------------


def features(subject: Subject, study: CalibrateStudy, split_name: str, store: Store) -> Labelled:
    """Return the last layer's inputs for the images of a split or shift, as an artefact."""
    load = {"train": lambda: subject.train, "held out": lambda: subject.held_out}
    data = load.get(split_name, lambda: subject.load(split_name))()
    decided = (study.held_out, study.test, study.train_images, study.epochs)
    stage = Stage(f"features {subject.name} {split_name}", decided, study.seed)

    @torch.no_grad()
    def compute(rows: slice) -> dict[str, Tensor]:
        kept: list[Tensor] = []
        layer = last_linear(subject.network)
        handle = layer.register_forward_pre_hook(lambda _, args: kept.append(args[0]))
        x = subject.prepare(data.inputs[rows])
        subject.network(x.contiguous(memory_format=torch.channels_last))
        handle.remove()
        return {"features": kept[0].clone()}

    found = store.predict(stage, len(data.labels), BLOCK, compute)
    return Labelled(found.load()["features"], data.labels)


def scores(
    subject: Subject, study: CalibrateStudy, store: Store
) -> tuple[list[Scored], Calibrated]:
    """Calibrate a network and measure all methods at all shifts."""
    layer = last_linear(subject.network)
    train, held_out = (features(subject, study, part, store) for part in ("train", "held out"))
    shifted = {shift: features(subject, study, shift, store) for shift in subject.shifts}
    rows: list[Scored] = []
    shown: Calibrated | None = None
    for price in study.prices:
        result = calibrate(layer, [train], [held_out], price=price, progress=False)
        unit = calibrate(
            layer, [train], [held_out], price=price, prior_precision=1.0, progress=False
        )
        shown = result if price == study.prices[len(study.prices) // 2] else shown
        for shift, group in subject.shifts.items():
            data = shifted[shift]
            found = predictions(result, layer, data.inputs)
            found[UNIT_PRIOR] = unit(data.inputs).double()
            for method, log_probs in found.items():
                own, n = metrics.summary(log_probs, data.labels), len(data.labels)
                rows.append(Scored(subject.name, shift, group, price, method, n, **own))
    assert shown is not None
    return rows, shown


@torch.no_grad()
def predictions(result: Calibrated, layer: nn.Linear, inputs: Tensor) -> dict[str, Tensor]:
    """Return the log-probabilities of all methods."""
    logits = Classifier(layer).logits(inputs).double()
    equal = result.temperature_of_equal_price
    temperatures = {PLAIN: 1.0, TEMPERATURE: result.temperature, EQUAL: equal}
    plain = {name: torch.log_softmax(logits / t, -1) for name, t in temperatures.items()}
    return {**plain, ACNML: result(inputs).double()}


def run(study: CalibrateStudy, out: Path, store: Store) -> Path:
    """Do everything that is missing and write the report."""
    rows: list[Scored] = []
    tables: dict[str, str] = {}
    for name in study.networks:
        is_digits = name == "mnist"
        subject = (
            mnist_subject(study, store)
            if is_digits
            else cifar_subject(name, study, out / "corruptions")
        )
        found, result = scores(subject, study, store)
        rows += found
        tables[name] = str(result)
    write_csv(out / "metrics.csv", COLUMNS, rows)
    return write_pages(study, rows, tables, out)


# The report --------------------------------------------------------------------------------------


def mean(rows: Sequence[Scored], score: Score) -> float:
    """Return the mean over shifts."""
    return sum(getattr(row, score) for row in rows) / len(rows)


def select(rows: Sequence[Scored], **wanted: object) -> list[Scored]:
    """Return the rows with these values."""
    return [row for row in rows if all(getattr(row, k) == v for k, v in wanted.items())]


def wins(rows: Sequence[Scored], score: Score) -> tuple[int, int]:
    """Count the shifts at which ACNML is better than the temperature of equal price, and all."""
    own = {row.shift: getattr(row, score) for row in select(rows, method=ACNML)}
    other = {row.shift: getattr(row, score) for row in select(rows, method=EQUAL)}
    return sum(own[shift] < other[shift] for shift in own), len(own)


def comparison(study: CalibrateStudy, rows: Sequence[Scored]) -> Table:
    """Return ACNML beside the temperature of equal price, by network, group and price."""
    lines = []
    groups = dict.fromkeys((row.network, row.group) for row in rows)
    for network, group in groups:
        for price in study.prices:
            own = select(rows, network=network, group=group, price=price)
            a, t = (select(own, method=method) for method in (ACNML, EQUAL))
            pairs = [f"{mean(a, s):.3f} / {mean(t, s):.3f}" for s in ("ece", "nll", "brier")]
            counts = [wins(own, s) for s in ("ece", "nll", "brier")]
            won = ", ".join(str(n) for n, _ in counts) + f" of {counts[0][1]}"
            lines.append([network, group, f"+{price:g}", *pairs, won])
    return Table(
        "ACNML / the temperature of equal price: means over shifts, and the number of shifts at "
        "which ACNML is better (ECE, NLL, Brier).",
        ("network", "shifts", "price", "ECE", "NLL", "Brier", "won"),
        lines,
    )


def baselines(study: CalibrateStudy, rows: Sequence[Scored]) -> Table:
    """Return the plain network and its best temperature."""
    lines = []
    for network, group in dict.fromkeys((row.network, row.group) for row in rows):
        own = select(rows, network=network, group=group, price=study.prices[0])
        p, t = (select(own, method=method) for method in (PLAIN, TEMPERATURE))
        pairs = [
            f"{mean(p, s):.3f} / {mean(t, s):.3f}" for s in ("accuracy", "ece", "nll", "brier")
        ]
        lines.append([network, group, *pairs])
    head = ("network", "shifts", "accuracy", "ECE", "NLL", "Brier")
    return Table("The network / its best temperature: means over shifts.", head, lines)


def priors(study: CalibrateStudy, rows: Sequence[Scored]) -> Table:
    """Return ACNML with the default prior and with a prior precision of 1."""
    price = study.prices[len(study.prices) // 2]
    lines = []
    for network, group in dict.fromkeys((row.network, row.group) for row in rows):
        own = select(rows, network=network, group=group, price=price)
        a, u, t = (select(own, method=method) for method in (ACNML, UNIT_PRIOR, EQUAL))
        cells = [f"{mean(a, s):.3f} / {mean(u, s):.3f} / {mean(t, s):.3f}" for s in ("ece", "nll")]
        lines.append([network, group, *cells])
    caption = (
        "ACNML with the default prior / with a prior precision of 1 / the temperature of equal "
        f"price, at +{price:g} nats."
    )
    return Table(caption, ("network", "shifts", "ECE", "NLL"), lines)


def figures(study: CalibrateStudy, rows: Sequence[Scored]) -> Panels:
    """Draw ECE at every shift: ACNML against the temperature of equal price."""
    price = study.prices[len(study.prices) // 2]
    drawn = {}
    for network in study.networks:
        figure, axes = panel(network, (3.4, 3.2))
        own = [row for row in select(rows, network=network, price=price) if row.shift != "clean"]
        ece = {m: {r.shift: r.ece for r in select(own, method=m)} for m in (EQUAL, ACNML)}
        points = [(ece[EQUAL][shift], ece[ACNML][shift]) for shift in ece[ACNML]]
        end = 1.05 * max(max(point) for point in points)
        axes.plot([0, end], [0, end], color="#8a9099", linewidth=1)
        axes.scatter([x for x, _ in points], [y for _, y in points], s=16, color="#1f77b4")
        axes.set(xlim=(0, end), ylim=(0, end), xlabel="ECE, temperature", ylabel="ECE, ACNML")
        drawn[f"ece-{network}"] = figure
    caption = (
        f"Every point is a shift. Below the line ACNML is better calibrated than the temperature "
        f"of equal price (+{price:g} nats)."
    )
    return Panels(drawn, caption, "small panels")


def verdict(study: CalibrateStudy, rows: Sequence[Scored]) -> str:
    """Say in one sentence how often ACNML is better."""
    price = study.prices[len(study.prices) // 2]
    shifted = [row for row in select(rows, price=price) if row.shift != "clean"]
    parts = []
    for network in study.networks:
        (won, total), (nll, _) = (wins(select(shifted, network=network), s) for s in ("ece", "nll"))
        parts.append(f"{network} {won} of {total} by ECE and {nll} by NLL")
    return (
        f"At a price of {price:g} nats, ACNML is better than the temperature of equal price at "
        f"these numbers of shifts: {'; '.join(parts)}."
    )


def write_pages(
    study: CalibrateStudy, rows: Sequence[Scored], tables: Mapping[str, str], out: Path
) -> Path:
    """Write results.md and report.html; return the path of the latter."""
    about = (
        f"Temperature and α are chosen on {study.held_out} clean held-out images, at prices over "
        f"the NLL of the best temperature. The posterior is fitted on "
        f"{study.train_images or 'all'} training images. Every shift has {study.test} test images. "
        "CIFAR-10-C's corruptions are applied to the test images with the published parameters."
    )
    sections = [
        Section("Comparison", [about], [figures(study, rows)], [comparison(study, rows)]),
        Section("Without a price", [], [], [baselines(study, rows)]),
        Section("The prior", [], [], [priors(study, rows)]),
    ]
    text = "\n\n".join(
        [
            "# calibrate under shift: results",
            f"Written by {written_by('calibrate')}.",
            verdict(study, rows),
            *(section.markdown() for section in sections),
            "## What calibrate printed",
            *(f"### {name}\n\n```\n{table}\n```" for name, table in tables.items()),
        ]
    )
    write_file(out / "results.md", (text + "\n").encode())
    page = short_report(
        "calibrate under shift", verdict(study, rows), sections, footer("calibrate")
    )
    return write_file(out / "report.html", page.encode())
