"""Choose T and c of density-aware temperature scaling, T(x) = T (1 + c s(x)²)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from acnml import metrics
from acnml._engine.trust import checked_logits
from acnml._util import checks
from acnml._util.batches import Inputs
from acnml._util.passes import in_chunks
from acnml.classifier import Classifier
from acnml.head.features import Features
from acnml.predictors import DensityTempered
from acnml.predictors.density_tempered import (
    density_tempered,
    relative_temperatures,
)
from acnml.tuning._search import golden_section
from acnml.tuning._validation import Validation, joined_features
from acnml.tuning.temperature import least_nll_temperature, why_no_temperature
from acnml.typicality import Density

# Slopes are searched between these: below, T(x) is a constant, and above it is proportional to s².
SMALLEST, LARGEST = 1e-4, 1e4

# Values of the slope that are tried before the best of them is refined.
GRID = 33

# Advice if plain temperature scaling has no best temperature.
INSTEAD = (
    "use acnml.DensityTempered(classifier, density, temperature, slope) with values of your choice"
)

# Steps of a bisection, and the precision of log c in a golden-section search.
BISECTIONS, PRECISION = 50, 1e-4


@torch.inference_mode(False)
def density_temperature(
    classifier: Classifier,
    density: Density,
    loader: Iterable[Any],
    price: float | None = None,
    progress: bool | None = None,
) -> DensityTempered:
    """Return density-aware temperature scaling, tuned on validation data in one pass.

    Without a price, T and c are those of least validation NLL. With a price, T is the best plain
    temperature, and c the largest slope whose NLL is at most `price` nats above that of T alone.

    Args:
        classifier: the model.
        density: s(x), from `fit_typicality` or `fit_neighbours`.
        loader: validation data, with labels.
        price: nats of validation NLL that caution may cost, over the best temperature.
        progress: whether to show a progress bar; by default only in a terminal.

    >>> import acnml, torch
    >>> x = torch.randn(500, 4, generator=torch.Generator().manual_seed(0))
    >>> labels = (x[:, :3] + 0.5 * x[:, 1:]).argmax(-1)
    >>> model = torch.nn.Linear(4, 3)
    >>> model.weight.data = torch.eye(3, 4)
    >>> classifier = acnml.Classifier(model)
    >>> typicality = acnml.fit_typicality(classifier, x[:250], x[250:])
    >>> predict = acnml.tuning.density_temperature(
    ...     classifier, typicality, [(x[250:], labels[250:])], price=0.02
    ... )
    >>> predict(x[:5]).shape
    torch.Size([5, 3])
    """
    plain = DensityTempered(classifier, density)

    def compute(x: Inputs) -> Features:
        taps = density.taps(classifier)

        def read(chunk: Inputs) -> Features:
            logits = checked_logits(classifier, chunk, taps.classifier)
            return Features(logits[:, :0], logits, density.read(taps.features()))

        return Features.joined([*in_chunks(classifier.prepare(x), read)])

    with torch.no_grad():
        found, labels = Validation(loader, progress).over_batches(
            "density", compute, joined_features
        )
    assert found is not None
    assert found.observed is not None
    logits, score = found.logits.cpu().double(), found.observed.cpu().double()
    if price is None:
        temperature, slope = slope_of_least_nll(logits, score, labels)
    else:
        checks.require_positive(price, "price")
        temperature, slope = slope_of_price(logits, score, labels, price)
    return DensityTempered(plain.classifier, density, temperature, slope)


def slope_of_price(
    logits: Tensor, score: Tensor, labels: Tensor, price: float
) -> tuple[float, float]:
    """Return the best temperature, and the largest slope within a price over it.

    Args:
        logits: (N, K), in double precision.
        score: s (N,).
        labels: (N,).
        price: in nats.
    """
    temperature = least_nll_temperature(torch.log_softmax(logits, -1), labels, INSTEAD)

    def nll(slope: float) -> float:
        return metrics.nll(density_tempered(logits, score, temperature, slope), labels)

    limit, low, high = nll(0.0) + price, math.log(SMALLEST), math.log(LARGEST)
    if nll(LARGEST) <= limit:
        return temperature, LARGEST
    if nll(SMALLEST) > limit:
        return temperature, 0.0
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if nll(math.exp(middle)) <= limit else (low, middle)
    return temperature, math.exp(low)


def slope_of_least_nll(logits: Tensor, score: Tensor, labels: Tensor) -> tuple[float, float]:
    """Return the temperature and the slope of least NLL together; arguments as above.

    For some slopes the NLL may be lowest in the limit T → ∞, where it is log K. They are left out:
    if plain temperature scaling has a best temperature, its NLL is lower.
    """

    @cache
    def best(slope: float) -> tuple[float, float]:
        """Return the NLL for a slope with its best temperature, and that temperature."""
        scaled = torch.log_softmax(logits, -1)
        scaled = scaled / relative_temperatures(score, slope).unsqueeze(-1)
        if slope > 0 and why_no_temperature(scaled, labels) is not None:
            return math.inf, math.inf
        temperature = least_nll_temperature(scaled, labels, INSTEAD)
        return metrics.nll(torch.log_softmax(scaled / temperature, -1), labels), temperature

    best(0.0)  # raises an error if there is no best temperature
    step = math.log(LARGEST / SMALLEST) / (GRID - 1)
    grid = [math.log(SMALLEST) + step * i for i in range(GRID)]
    start = min(grid, key=lambda at: best(math.exp(at))[0])
    refined = golden_section(
        lambda at: best(math.exp(at))[0], start - step, start + step, PRECISION
    )
    # The search may end among slopes that are left out, but `start` is not worse than the grid.
    slope = min(0.0, math.exp(refined), math.exp(start), key=lambda each: best(each)[0])
    return best(slope)[1], slope
