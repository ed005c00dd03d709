"""The protocol of IF-COMP (Ng, Grosse & Ghassemi 2024): calibration on corrupted images.

Every method is evaluated under every corruption and severity. A severity is summarised by the
median and the quartiles over corruptions of the ECE with 20 bins of equal mass. Knobs are chosen on
clean held-out images alone: the most cautious value within a price over the best temperature.

All methods act on the last layer of a given network, whose features are recorded once. The authors
take all weights: for every image and label they multiply a gradient of the whole network by the
eigenvectors of all layers, which is out of reach without an accelerator.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple, final

from torch import nn

from acnml import Acnml, Classifier, IfComp, Map, fit_pnml, last_linear, metrics
from acnml.calibration.search import least_nll_temperature
from acnml.fit import fit_curvature
from acnml.predictors import Predictor
from acnml.solve import UnsolvedError
from studies.corruptions import CORRUPTIONS, Cifar10C
from studies.data import Labelled, cifar10, shuffled
from studies.engine.report import Section, ShortReport
from studies.engine.tables import Table, select
from studies.features import RELATIVE_PRIOR, features
from studies.models.weights import Weights
from studies.search import Search
from studies.store import Store

PLAIN, TEMPERATURE, EQUAL = "network", "temperature", "temperature of equal price"
ACNML, IF_COMP, PNML = "ACNML", "IF-COMP", "pNML"
METHODS = (PLAIN, TEMPERATURE, EQUAL, ACNML, IF_COMP, PNML)
CLEAN = "clean"
TEST_IMAGES, TRAIN_IMAGES = 10_000, 50_000

EXACT = 1e-8  # of the logarithm of a knob

Score = Literal["ece", "nll"]


@final
@dataclass(frozen=True)
class IfCompStudy:
    """The settings.

    Args:
        networks: some of the given networks.
        severities: of the corruptions.
        corruptions: their names.
        held_out: clean images for choosing, cut from the test set.
        test: images of every corruption.
        train_images: for the posterior and the leverage.
        price: in nats, over the best temperature.
        seed: of the split.
    """

    networks: tuple[str, ...] = ("resnet18",)
    severities: tuple[int, ...] = (1, 2, 3, 4, 5)
    corruptions: tuple[str, ...] = tuple(CORRUPTIONS)
    held_out: int = 2000
    test: int = 8000
    train_images: int = 50_000
    price: float = 0.01
    seed: int = 0


PRESETS: Mapping[str, IfCompStudy] = {
    "quick": IfCompStudy(
        networks=("resnet20",),
        severities=(5,),
        corruptions=("gaussian_noise", "fog", "contrast"),
        held_out=500,
        test=100,
        train_images=1000,
    ),
    "small": IfCompStudy(test=500, train_images=10_000),
    "full": IfCompStudy(),
}


class Scored(NamedTuple):
    """A method under one corruption."""

    network: str
    corruption: str
    severity: int  # 0 for clean images
    method: str
    knob: float
    n: int
    accuracy: float
    nll: float
    brier: float
    ece: float


# The work ----------------------------------------------------------------------------------------


def predictors(
    head: nn.Linear, train: Labelled, held_out: Labelled, price: float
) -> dict[str, tuple[float, Predictor]]:
    """Fit all methods on features, and choose their knobs on held-out features."""
    plain = Classifier(head)
    log_probs = Map(plain)(held_out.inputs)
    temperature = least_nll_temperature(log_probs, held_out.labels)
    best = plain.tempered(temperature)
    reference = metrics.nll(Map(best)(held_out.inputs), held_out.labels)
    curvature = fit_curvature(best, [tuple(train)], structure="ekfac", progress=False)
    posterior = curvature.posterior(RELATIVE_PRIOR * curvature.mean_eigenvalue())
    acnml, if_comp = Acnml(best, posterior), IfComp(best, posterior)
    pnml = fit_pnml(best, [tuple(train)], progress=False)
    families: dict[str, Callable[[float], Predictor]] = {
        EQUAL: lambda knob: Map(best.tempered(1 + knob)),
        ACNML: lambda knob: replace(acnml, alpha=knob),
        IF_COMP: lambda knob: replace(if_comp, c=knob),
        PNML: lambda knob: replace(pnml, c=knob),
    }
    found: dict[str, tuple[float, Predictor]] = {
        PLAIN: (1.0, Map(plain)),
        TEMPERATURE: (temperature, Map(best)),
    }
    for name, family in families.items():
        knob = largest(family, held_out, reference + price)
        found[name] = (knob, family(knob))
    return found


def largest(
    family: Callable[[float], Predictor], held_out: Labelled, limit: float, exact: float = EXACT
) -> float:
    """Return the knob at which the held-out NLL first exceeds a limit; `exact` is of its logarithm.

    For a large c, the first-order estimate of IF-COMP is not cautious but confident in unlikely
    labels, so larger knobs are not tried.
    """

    def nll(knob: float) -> float:
        try:
            return metrics.nll(family(knob)(held_out.inputs), held_out.labels)
        except UnsolvedError:
            return math.inf

    return Search(nll, limit).largest(limit, exact)


def measured(study: IfCompStudy, name: str, out: Path, store: Store) -> list[Scored]:
    """Evaluate every method for a network under every corruption."""
    weights = Weights.given(name)
    order = shuffled(TEST_IMAGES, study.seed)
    held_out, test = order[: study.held_out], order[study.held_out :][: study.test]
    chosen = shuffled(TRAIN_IMAGES, study.seed)[: study.train_images]
    train = features("train", weights, cifar10.load("train").take(chosen), store)
    known = features("held out", weights, cifar10.load("test").take(held_out), store)
    methods = predictors(last_linear(weights.build()), train, known, study.price)
    corrupted = Cifar10C.of_test_set(test.tolist(), out / "corruptions")
    rows = []
    cases = [(c, severity) for severity in study.severities for c in study.corruptions]
    for corruption, severity in [(CLEAN, 0), *cases]:
        shifted = corrupted.load(corruption, severity) if severity else corrupted.clean
        x, labels = features(f"{corruption} {severity}", weights, shifted, store)
        for method, (knob, predict) in methods.items():
            scores = metrics.summary(predict(x), labels)
            rows.append(Scored(name, corruption, severity, method, knob, len(labels), **scores))
    return rows


def run(study: IfCompStudy, out: Path, store: Store, command: str) -> Path:
    """Do everything that is missing and write the report."""
    rows = [row for name in study.networks for row in measured(study, name, out, store)]
    return write_pages(study, rows, out, command)


# The report --------------------------------------------------------------------------------------


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the lower quartile, the median and the upper quartile."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def table(study: IfCompStudy, every: Sequence[Scored], network: str, score: Score) -> Table:
    """Return median and quartiles over corruptions, by method and severity."""
    rows = select(every, network=network)
    found = {
        (m, s): quartiles([getattr(r, score) for r in select(rows, method=m, severity=s)])
        for m in METHODS
        for s in (0, *study.severities)
    }
    best = {s: min(found[m, s][1] for m in METHODS) for s in (0, *study.severities)}
    lines = []
    for method in METHODS:
        cells = []
        for severity, least in best.items():
            low, middle, high = found[method, severity]
            text = f"**{middle:.3f}**" if middle == least else f"{middle:.3f}"
            cells.append(text if severity == 0 else f"{text} ({low:.3f}, {high:.3f})")
        lines.append([method, f"{select(rows, method=method)[0].knob:.4g}", *cells])
    head = ("method", "knob", CLEAN, *(f"severity {s}" for s in study.severities))
    names = {"ece": "ECE, 20 bins of equal mass", "nll": "NLL"}
    caption = f"{network}, {names[score]}: median (lower, upper quartile) over corruptions."
    return Table(caption, head, lines)


def verdict(rows: Sequence[Scored], network: str, severity: int) -> str:
    """Say how the methods compare at a severity."""
    own = select(rows, network=network, severity=severity)
    medians = {m: quartiles([r.ece for r in select(own, method=m)])[1] for m in METHODS}
    order = sorted(METHODS, key=lambda method: medians[method])
    words = ", ".join(f"{method} {medians[method]:.3f}" for method in order)
    return f"Median ECE of {network} at severity {severity}: {words}."


def write_pages(study: IfCompStudy, rows: Sequence[Scored], out: Path, command: str) -> Path:
    """Write metrics.csv, results.md and report.html; return the path of the last."""
    text = (
        f"{len(study.corruptions)} corruptions with {study.test} test images each. "
        f"Knobs are chosen on {study.held_out} clean images, at a price of {study.price:g} nats "
        f"over the best temperature; posterior and leverage are fitted on {study.train_images} "
        "training images. All methods act on the last layer, ACNML and IF-COMP with an EK-FAC "
        "posterior. The authors of IF-COMP use all weights of a ResNet-18."
    )
    worst = max(study.severities)
    finding = " ".join(verdict(rows, network, worst) for network in study.networks)
    tables = [table(study, rows, n, score) for score in ("ece", "nll") for n in study.networks]
    sections = [Section("Corruptions", [text], [], tables)]
    numbers = {"metrics.csv": (Scored._fields, rows)}
    return ShortReport("The protocol of IF-COMP", finding, sections, command, numbers).write(out)
