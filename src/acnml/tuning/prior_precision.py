"""Choose the precision τ of the prior by the evidence or on validation data."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from acnml.fitting import Curvature
from acnml.tuning.choice import Choice, table_text
from acnml.tuning.sweep import MakePredictor, Scores, increasing, least_nll, sweep

PRIOR_PRECISIONS = tuple(10.0**exponent for exponent in range(-4, 7))


class Evidence(NamedTuple):
    """A prior precision and its log marginal likelihood, up to a constant.

    >>> from acnml.tuning import Evidence
    >>> Evidence(value=0.1, log_evidence=-12.0).value
    0.1
    """

    value: float
    log_evidence: float


def prior_precision_by_evidence(
    curvature: Curvature, grid: Sequence[float] = PRIOR_PRECISIONS
) -> Choice[Evidence]:
    """Return the τ that maximises the Laplace approximation of the marginal likelihood.

    This needs no data, and τ is accurate to 0.01 %. With the eigenvalues h_i of the curvature, the
    derivative of the log evidence with respect to log τ is ½ (Σ_i h_i / (h_i + τ) - τ‖θ̂‖²). It
    decreases in τ, so there is only one maximum. The grid brackets it, and a golden-section search
    finds it.

    Args:
        curvature: e.g. from `diagonal_curvature` or `kronecker_curvature`.
        grid: values of τ. The maximum must lie between the smallest and the largest.

    >>> import acnml, torch
    >>> x = torch.randn(500, 4, generator=torch.Generator().manual_seed(0))
    >>> labels = (x[:, :3] + 0.5 * x[:, 1:]).argmax(-1)
    >>> model = torch.nn.Linear(4, 3)
    >>> model.weight.data = torch.eye(3, 4)
    >>> classifier = acnml.Classifier(model)
    >>> curvature = acnml.kronecker_curvature(classifier, x)
    >>> choice = acnml.tuning.prior_precision_by_evidence(curvature)
    >>> posterior = curvature.posterior(choice.value)
    """
    taus = increasing(grid)
    found = {tau: curvature.log_evidence(tau) for tau in taus}
    best = taus.index(max(taus, key=found.__getitem__))
    if best in (0, len(taus) - 1):
        text = table_text(_evidence_table(found))
        raise ValueError(f"the evidence is largest at an end of the grid: widen it\n{text}")
    found |= _golden_section(curvature.log_evidence, taus[best - 1], taus[best + 1])
    chosen = max(found, key=found.__getitem__)
    return Choice(chosen, _evidence_table(found), "the prior precision of largest evidence")


def prior_precision_by_nll(
    make_predictor: MakePredictor,
    loader: Iterable[Any],
    grid: Sequence[float] = PRIOR_PRECISIONS,
    progress: bool | None = None,
) -> Choice[Scores]:
    """Return the τ in the grid with the lowest validation NLL.

    Args:
        make_predictor: e.g. `lambda tau: Acnml(classifier, curvature.posterior(tau))`, with a
            curvature that is computed only once.
        loader: validation data, with labels; see `sweep` for the number of passes.
        grid: the values to try.
        progress: whether to show progress bars; by default only in a terminal.

    >>> import acnml, torch
    >>> x = torch.randn(500, 4, generator=torch.Generator().manual_seed(0))
    >>> labels = (x[:, :3] + 0.5 * x[:, 1:]).argmax(-1)
    >>> model = torch.nn.Linear(4, 3)
    >>> model.weight.data = torch.eye(3, 4)
    >>> classifier = acnml.Classifier(model)
    >>> curvature = acnml.kronecker_curvature(classifier, x[:250])
    >>> choice = acnml.tuning.prior_precision_by_nll(
    ...     lambda tau: acnml.Glm(classifier, curvature.posterior(tau)),
    ...     [(x[250:], labels[250:])],
    ...     grid=(0.1, 1.0, 10.0),
    ... )
    >>> choice.value in (0.1, 1.0, 10.0)
    True
    """
    table = sweep(make_predictor, increasing(grid), loader, progress)
    return Choice(least_nll(table), table, "the prior precision of least validation NLL")


def _evidence_table(found: dict[float, float]) -> tuple[Evidence, ...]:
    return tuple(Evidence(*pair) for pair in sorted(found.items()))


def _golden_section(
    function: Callable[[float], float], low: float, high: float, precision: float = 1e-4
) -> dict[float, float]:
    """Search for the maximum between low and high, and return all points tried with their values.

    The function must have only one maximum. The search runs in log x until the interval is no
    longer than `precision`.
    """
    found: dict[float, float] = {}

    def value(log_x: float) -> float:
        x = math.exp(log_x)
        found[x] = function(x)
        return found[x]

    ratio = (math.sqrt(5) - 1) / 2
    a, b = math.log(low), math.log(high)
    c, d = b - ratio * (b - a), a + ratio * (b - a)
    at_c, at_d = value(c), value(d)
    while b - a > precision:
        if at_c > at_d:
            b, d, at_d = d, c, at_c
            c = b - ratio * (b - a)
            at_c = value(c)
        else:
            a, c, at_c = c, d, at_d
            d = a + ratio * (b - a)
            at_d = value(d)
    return found
