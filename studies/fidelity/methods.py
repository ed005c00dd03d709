"""Every approximation, as a function from α to a predictor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple, TypeAlias, final

import torch
from torch import Tensor, nn

from acnml import (
    Acnml,
    Classifier,
    Diagonal,
    Full,
    Glm,
    Gradient,
    Linearised,
    Map,
    fit_if_comp,
    fit_laplace,
    fit_pnml,
)
from acnml.calibration.search import least_nll_temperature
from acnml.fit import ExactFisher, Structure
from acnml.posteriors import Posterior
from acnml.predictors import Predictor
from acnml.solve import Influence, Solver, UnsolvedError
from studies.fidelity.problems import Trained

NETWORK, TEMPERATURE = "network", "temperature"
STEPS, LINEARISED, SOLVED = "ACNML, 10 steps", "ACNML, linearised", "ACNML, solved"
CONVEX = "ACNML, linearised network"
INFLUENCE, IF_COMP, PNML, GLM = "influence", "IF-COMP", "pNML", "GLM"
FULL, EKFAC, KFAC, DIAGONAL = "full", "EK-FAC", "KFAC", "diagonal"
LAST = "last layer, "
STRUCTURES: Mapping[str, Structure] = {
    FULL: "full",
    EKFAC: "ekfac",
    KFAC: "kron",
    DIAGONAL: "diag",
}

# The paper's steps for KFAC posteriors; the network at the maximum of the linear model, and that
# model itself, which is the library's default; and the network at its own maximum.
SOLVERS: Mapping[str, Solver] = {
    STEPS: Gradient(10, 0.25),
    LINEARISED: Linearised("network"),
    CONVEX: Linearised(),
    SOLVED: Linearised("network", polish=20),
    INFLUENCE: Influence(),
}


class Answer(NamedTuple):
    """What a method says about all queries."""

    log_probs: Tensor  # (Q, K)
    log_lik: Tensor | None  # (Q, K), of methods that normalise likelihoods
    solved: float  # share of labels whose maximum was found; NaN where there is none to find


Answers: TypeAlias = Callable[[], Answer]


@final
@dataclass(frozen=True, eq=False)
class Methods:
    """All methods for a trained network."""

    own: Trained

    @cached_property
    def classifier(self) -> Classifier:
        """The network."""
        return Classifier(self.own.network)

    @cached_property
    def temperature(self) -> float:
        """The temperature of least NLL on held-out data."""
        log_probs = Map(self.classifier)(self.own.held_out.inputs)
        return least_nll_temperature(log_probs, self.own.held_out.labels)

    @cached_property
    def posteriors(self) -> Mapping[str, Posterior]:
        """Laplace posteriors over all weights, and over the last layer of a network."""
        data, tau = [tuple(self.own.train)], self.own.problem.prior_precision
        mean = self.classifier.copy_parameters([n for n, _ in self.own.network.named_parameters()])
        cov = torch.cholesky_inverse(torch.linalg.cholesky(self.own.curvature))
        found: dict[str, Posterior] = {FULL: Full(mean, (cov + cov.T) / 2)}
        for name in (EKFAC, KFAC, DIAGONAL):
            found[name] = fit_laplace(
                self.classifier, data, structure=STRUCTURES[name], prior_precision=tau
            )
        if not isinstance(self.own.network, nn.Linear):
            for name in (FULL, EKFAC, KFAC):
                found[LAST + name] = fit_laplace(
                    self.classifier,
                    data,
                    structure=STRUCTURES[name],
                    layers="last",
                    prior_precision=tau,
                )
        assert isinstance(found[DIAGONAL], Diagonal)
        return found

    def all(self, alpha: float) -> Iterator[tuple[str, str, Answers]]:
        """Yield every method that depends on α: its name, its posterior, and its answer."""
        for name, posterior in self.posteriors.items():
            solvers = [LINEARISED, INFLUENCE] if name.startswith(LAST) else list(SOLVERS)
            if isinstance(self.own.network, nn.Linear):  # the linearised problem is the problem
                solvers = [name for name in solvers if name not in (SOLVED, CONVEX)]
            for solver in solvers:
                acnml = Acnml(
                    self.classifier, posterior, SOLVERS[solver], alpha, on_unsolved="ignore"
                )
                yield solver, name, partial(self._solved, acnml)
            glm = Glm(self.classifier, posterior.scaled(alpha))
            yield GLM, name, partial(self._predicted, glm)
        data, tau = [tuple(self.own.train)], self.own.problem.prior_precision
        if_comp = fit_if_comp(
            self.classifier,
            data,
            temperature=self.temperature,
            c=alpha * self.temperature,
            damping=tau,
            fisher=ExactFisher(),
        )
        posterior, first = if_comp.posterior, SOLVERS[INFLUENCE]
        acnml = Acnml(if_comp.classifier, posterior, first, if_comp.alpha, on_unsolved="ignore")
        yield IF_COMP, EKFAC, partial(self._solved, acnml)
        pnml = fit_pnml(self.classifier, data, ridge=tau, c=alpha)
        yield PNML, "", lambda: self._explained(pnml.log_lik(self.own.queries.inputs))

    def plain(self) -> Iterator[tuple[str, str, Answers]]:
        """Yield the network itself, and with a temperature."""
        yield NETWORK, "", partial(self._predicted, Map(self.classifier))
        tempered = Map(self.classifier.tempered(self.temperature))
        yield TEMPERATURE, "", partial(self._predicted, tempered)

    def _solved(self, predictor: Acnml) -> Answer:
        try:
            found = predictor.solve(self.own.queries.inputs)
        except UnsolvedError:  # the paper's steps can diverge
            nothing = torch.full((len(self.own.queries.labels), 10), torch.nan).double()
            return Answer(nothing, nothing, 0.0)
        return Answer(found.log_probs, found.log_lik, found.solved.double().mean().item())

    def _explained(self, log_lik: Tensor) -> Answer:
        return Answer(log_lik.log_softmax(-1), log_lik, torch.nan)

    def _predicted(self, predictor: Predictor) -> Answer:
        return Answer(predictor(self.own.queries.inputs), None, torch.nan)
