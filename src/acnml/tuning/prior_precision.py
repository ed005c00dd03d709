"""Choose the precision τ of the prior by the evidence or on validation data."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from acnml.fit import Curvature
from acnml.tuning._search import golden_section
from acnml.tuning.choice import Choice, table_text
from acnml.tuning.sweep import MakePredictor, Scores, increasing, least_nll, sweep

PRIOR_PRECISIONS = tuple(10.0**exponent for exponent in range(-4, 7))

# Of log τ in the search for the largest evidence.
PRECISION = 1e-4


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
        curvature: from `fit_curvature`.
        grid: values of τ. The maximum must lie between the smallest and the largest.

    >>> import acnml, torch
    >>> x = torch.randn(500, 4, generator=torch.Generator().manual_seed(0))
    >>> labels = (x[:, :3] + 0.5 * x[:, 1:]).argmax(-1)
    >>> model = torch.nn.Linear(4, 3)
    >>> model.weight.data = torch.eye(3, 4)
    >>> classifier = acnml.Classifier(model)
    >>> curvature = acnml.fit.fit_curvature(classifier, x)
    >>> choice = acnml.tuning.prior_precision_by_evidence(curvature)
    >>> posterior = curvature.posterior(choice.value)
    """
    taus = increasing(grid)
    found = {tau: curvature.log_evidence(tau) for tau in taus}
    best = taus.index(max(taus, key=found.__getitem__))
    if best in (0, len(taus) - 1):
        text = table_text(_evidence_table(found))
        raise ValueError(f"the evidence is largest at an end of the grid: widen it\n{text}")

    def loss(log_tau: float) -> float:
        tau = math.exp(log_tau)
        found[tau] = curvature.log_evidence(tau)
        return -found[tau]

    golden_section(loss, math.log(taus[best - 1]), math.log(taus[best + 1]), PRECISION)
    chosen = max(found, key=found.__getitem__)
    return Choice(chosen, _evidence_table(found), "the prior precision of largest evidence")


def prior_precision_by_nll(
    make_predictor: MakePredictor,
    grid: Sequence[float],
    loader: Iterable[Any],
    progress: bool | None = None,
) -> Choice[Scores]:
    """Return the τ in the grid with the lowest validation NLL.

    Args:
        make_predictor: e.g. `lambda tau: Acnml(classifier, curvature.posterior(tau))`, with a
            curvature that is computed only once.
        grid: the values to try, e.g. `acnml.tuning.PRIOR_PRECISIONS`.
        loader: validation data, with labels; see `sweep` for the number of passes.
        progress: whether to show progress bars; by default only in a terminal.

    >>> import acnml, torch
    >>> x = torch.randn(500, 4, generator=torch.Generator().manual_seed(0))
    >>> labels = (x[:, :3] + 0.5 * x[:, 1:]).argmax(-1)
    >>> model = torch.nn.Linear(4, 3)
    >>> model.weight.data = torch.eye(3, 4)
    >>> classifier = acnml.Classifier(model)
    >>> curvature = acnml.fit.fit_curvature(classifier, x[:250])
    >>> choice = acnml.tuning.prior_precision_by_nll(
    ...     lambda tau: acnml.Glm(classifier, curvature.posterior(tau)),
    ...     grid=(0.1, 1.0, 10.0),
    ...     loader=[(x[250:], labels[250:])],
    ... )
    >>> choice.value in (0.1, 1.0, 10.0)
    True
    """
    table = sweep(make_predictor, increasing(grid), loader, progress)
    return Choice(least_nll(table), table, "the prior precision of least validation NLL")


def _evidence_table(found: dict[float, float]) -> tuple[Evidence, ...]:
    return tuple(Evidence(*pair) for pair in sorted(found.items()))
