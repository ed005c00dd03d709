"""Tables of the pages about the paper's experiments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean, stdev
from typing import NamedTuple

from results import Row, markdown, read
from studies.cifar10_c import methods as cifar10_c
from studies.cifar10_c.settings import CLEAN
from studies.engine.method import Method
from values import TIMED, cifar, cifar_rows, epoch, measured, mnist, report_rows, seconds

SCORES = {"ece": "ECE", "brier": "Brier score", "nll": "NLL", "accuracy": "accuracy"}


def cifar_ece() -> str:
    """CIFAR-10-C: mean ECE over the corruptions by severity, and the NLL of clean images."""
    shown = {
        "SWA": "SWA",
        "SWAG-D": "SWAG-D (BMA)",
        "KFAC-Laplace": "KFAC-Laplace (BMA)",
        "ACNML-SWAGD": "ACNML-SWAGD, α by the paper's rule",
        "ACNML-KFAC": "ACNML-KFAC, α by the paper's rule",
        "last layer": "last-layer ACNML, knob: prior precision",
        "SWA-Temp": "SWA-Temp, the temperature of least held-out NLL",
        "SWA-Temp, SWA's price": "*at most SWA's held-out NLL:* a temperature",
        "last layer, SWA's price": "*at most SWA's held-out NLL:* last-layer ACNML, knob: α",
        "SWA-Temp, near": "*0.01 nats above SWA-Temp's:* a temperature",
        "last layer, near": "*0.01 nats above SWA-Temp's:* last-layer ACNML, knob: α, "
        "tempered likelihood",
    }
    lines = []
    for method, name in shown.items():
        values = [*cifar("ece", method, *"12345"), *cifar("nll", method, "clean")]
        lines.append([name, *(f"{value:.3f}" for value in values)])
    return markdown(["", *"12345", "clean NLL"], lines)


def papers_table_2() -> Sequence[Row]:
    """Return the paper's own Table 2."""
    return read("zhou-levine-2021/table-2.csv")


# Methods of the paper that three networks were trained for.
PAPERS_METHODS = {
    "SWA": cifar10_c.MAP_SWA,
    "SWA-Temp": cifar10_c.TEMPERED,
    "SWA-Temp, ACNML-SWAGD's price": cifar10_c.TEMPERED_MATCHED,
    "SWA-Ensemble": cifar10_c.SWA_ENSEMBLE,
    "SWA-Dropout": cifar10_c.SWA_DROPOUT,
    "SWAG-D": cifar10_c.BMA_SWAG_D,
    "SWAG": cifar10_c.BMA_SWAG,
    "KFAC-Laplace, best scale": cifar10_c.BMA_KFAC,
    "ACNML-SWAGD, α by the paper's rule": cifar10_c.ACNML_SWAG_D_PAPERS,
    "ACNML-KFAC, best scale, α by the paper's rule": cifar10_c.ACNML_KFAC_PAPERS,
}


# Methods whose networks were trained in a run of their own.
RUNS = {cifar10_c.SWA_DROPOUT: "cifar10-c-dropout"}

# VGG16 on a short schedule: the name in the paper's Table 2 -> the method.
VGG16_METHODS = {
    "SWA": cifar10_c.MAP_SWA,
    "SWA-Temp": cifar10_c.TEMPERED,
    "SWAG-D": cifar10_c.BMA_SWAG_D,
    "ACNML-SWAGD": cifar10_c.ACNML_SWAG_D_PAPERS,
}
# Another VGG16, with KFAC.
FEW, ALL = 100, 10_000  # images


class Column(NamedTuple):
    """A column of a table of corruptions."""

    severity: str
    score: str
    images: int = FEW

    @property
    def title(self) -> str:
        """The severity and the score; clean images also have a number."""
        clean = f"{CLEAN}, {self.images:,} images"
        return (
            f"{clean if self.severity == CLEAN else f'severity {self.severity}'}: "
            + (SCORES[self.score])
        )


ALL_CLEAN = (Column(CLEAN, "nll", ALL), Column(CLEAN, "ece", ALL))
FEW_CLEAN = (Column(CLEAN, "nll"), Column(CLEAN, "ece"))
AT_FIVE = (Column("5", "nll"), Column("5", "brier"), Column("5", "ece"))


def three_networks() -> str:
    """CIFAR-10-C: mean and standard deviation over three networks that were trained here."""
    columns = (*FEW_CLEAN, *AT_FIVE)
    lines = [
        [name, *_of_corruptions(RUNS.get(method, "cifar10-c-scratch"), method, columns)]
        for name, method in PAPERS_METHODS.items()
    ]
    return markdown(["", *(column.title for column in columns)], lines)


def vgg16() -> str:
    """CIFAR-10-C: VGG16 on a short schedule, with the paper's scores of clean images."""
    columns = (*ALL_CLEAN, Column("3", "ece"), Column("5", "nll"), Column("5", "ece"))
    return _beside_the_papers("cifar10-c-vgg16", VGG16_METHODS, columns)


def _beside_the_papers(run: str, methods: Mapping[str, Method], columns: Sequence[Column]) -> str:
    """Return scores of a VGG16 beside those of the paper's, where it has the method."""
    theirs = {row["method"]: row for row in papers_table_2() if row["network"] == "VGG16"}
    lines = []
    for name, method in methods.items():
        papers = [theirs[name][s] if name in theirs else "–" for s in ("nll", "ece")]
        lines.append([name, *papers, *_of_corruptions(run, method, columns)])
    titles = (column.title for column in columns)
    return markdown(["", "theirs, clean: NLL", "theirs, clean: ECE", *titles], lines)


def _of_corruptions(run: str, method: Method, columns: Iterable[Column]) -> list[str]:
    """Return scores of clean images and by severity, over seeds where there are several.

    Costly methods have not seen all clean images.
    """
    cells = []
    for column in columns:
        try:
            rows = cifar_rows(run, method, column.severity, column.images)
        except ValueError:
            if column.images != ALL:
                raise
            cells.append("–")
        else:
            cells.append(_over_seeds(rows, column.score))
    return cells


def _over_seeds(rows: Sequence[Row], score: str) -> str:
    """Return mean ± standard deviation over seeds of a score's mean over shifts."""
    seeds = sorted({row["seed"] for row in rows})
    means = [fmean(float(row[score]) for row in rows if row["seed"] == seed) for seed in seeds]
    varies = len(set(means)) > 1  # there is only one ensemble
    return f"{fmean(means):.3f}" + (f" ± {stdev(means):.3f}" if varies else "")


NETWORKS = {"mlp": "MNIST MLP", "vgg16": "VGG16", "wide_resnet28x10": "WideResNet-28-10"}


def table_1() -> str:
    """The paper's Table 1: seconds of one prediction; ours for single inputs and of a batch."""
    networks = tuple(TIMED)
    theirs = {row["method"]: row for row in read("zhou-levine-2021/table-1.csv")}
    single = measured("single_input.json")

    def ours(name: str, alone: str, batch: Callable[[str], float | None]) -> list[str]:
        line = [name]
        for network in networks:
            times = [single[network][alone], batch(network)]
            shown = " / ".join(significant(time) for time in times if time is not None)
            line.append(f"{shown} s" if shown else "–")
        return line

    def batch(method: str) -> Callable[[str], float | None]:
        def found(network: str) -> float | None:
            try:
                return seconds(TIMED[network], method)
            except ValueError:  # not measured in batches
                return None

        return found

    def paper(name: str, method: str) -> list[str]:
        return [name, *(f"{theirs[method][network]} s" for network in networks)]

    return markdown(
        ["", *(NETWORKS[network] for network in networks)],
        [
            paper("ACNML, theirs", "ACNML"),
            ours(
                "ACNML, five exact steps, ours",
                "five exact steps",
                batch("diagonal: 5 exact steps"),
            ),
            ours("ACNML, linearised, ours", "linearised", batch("diagonal: linearised")),
            paper("naive CNML, one epoch, theirs", "naive CNML"),
            ours("naive CNML, one epoch, ours (computed)", "naive CNML, an epoch", epoch),
            paper("forward pass, theirs", "forward pass"),
            ours("forward pass, ours", "forward pass", batch("forward pass")),
        ],
    )


def significant(value: float) -> str:
    """Return a number with two significant digits; large ones with three, and separators."""
    if value >= 100:
        return f"{float(f'{value:.3g}'):,.0f}"
    return f"{float(f'{value:.2g}'):.8f}".rstrip("0").rstrip(".")


def bayes_by_backprop() -> str:
    """The paper's network under rotation: means over the angles from 45° up."""
    methods = {
        "MAP": "MAP",
        "BMA": "BMA",
        "ACNML": "ACNML, five steps",
        "linearised": "ACNML, linearised",
    }
    lines = [
        [name, *(f"{v:.3f}" for v in mnist("paper-mnist", "10000", score, "45+", *methods))]
        for score, name in SCORES.items()
    ]
    return markdown(["mean over the ten angles from 45° up", *methods.values()], lines)


def one_rate() -> str:
    """The smaller network with fast variances, and with one rate for means and variances."""
    methods = ("MAP", "BMA", "ACNML")
    lines = []
    shown = [(name, score, "60+") for score, name in SCORES.items() if score != "accuracy"]
    for name, score, angles in [*shown, ("ECE upright", "ece", "0")]:
        for suffix, rate in (("", "variances ten times faster"), (", one rate", "one rate")):
            own = [method + suffix for method in methods]
            values = mnist("paper-mnist-small", "1000", score, angles, *own)
            lines.append([f"{name}, {rate}", *(f"{value:.3f}" for value in values)])
    return markdown(["", "MAP", "BMA", "ACNML, five steps"], lines)


def naive_cnml() -> str:
    """Naive CNML and its rivals, upright and rotated."""
    found = report_rows(
        "paper-mnist-small/results.md", "method", "shift", "accuracy", "NLL", "Brier score"
    )
    scores = {(row[0], row[1]): row[3:] for row in found}
    lines = [[method, *scores[method, "0°"], *scores[method, "random"]] for method, _ in scores]
    head = ["Brier", "ECE", "mean confidence"]
    return markdown(["", "NLL upright", *head, "NLL rotated", *head], _unique(lines))


def _unique(lines: Sequence[list[str]]) -> list[list[str]]:
    return list({line[0]: line for line in lines}.values())


TABLES: dict[str, Callable[[], str]] = {
    "cifar-ece": cifar_ece,
    "table-one": table_1,
    "three-networks": three_networks,
    "vgg16": vgg16,
    "bayes-by-backprop": bayes_by_backprop,
    "one-rate": one_rate,
    "naive-cnml": naive_cnml,
}
