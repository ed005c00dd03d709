"""Acnml: amortized conditional normalized maximum likelihood."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor

from acnml._engine.layers import Site, unsupported
from acnml._util import batches, checks
from acnml._util.batches import Inputs
from acnml.classifier import Classifier
from acnml.head.features import Features, all_features, features, only_linear
from acnml.head.network import AcnmlModule, network_module
from acnml.posteriors import Kronecker, Posterior
from acnml.predictors.base import Predictor, matched
from acnml.solvers import Linearised, Reference, Solution, Solver
from acnml.typicality import Density


@final
@dataclass(frozen=True, eq=False)
class Acnml(Predictor):
    """p(y|x) ∝ p_θ̂_y(y|x) with θ̂_y = argmax_θ α log p_θ(y|x) + log q(θ) (Zhou & Levine 2021).

    Args:
        classifier: the model.
        posterior: q, fitted once on the training data.
        solver: how θ̂_y is found; by default `Linearised(polish=2)`, see `default_solver`.
        alpha: α, the weight of the query. Larger is more cautious, and α → 0 is the model at the
            mean. Always choose it on validation data (`acnml.calibrate`, `acnml.tuning`): at the
            default of 1 a Laplace posterior is often so wide that every label can be explained,
            and the predictions are useless.
        typicality: scales α for every input: α(x) = α s(x), where s(x) says how atypical the
            input's features are. With a posterior over the last layer this needs no further pass.
            With other posteriors, the network runs once more, and inputs are solved one by one.
    """

    classifier: Classifier
    posterior: Posterior
    solver: Solver | None = None
    alpha: float = 1.0
    typicality: Density | None = None
    _scaled: Posterior = field(init=False, repr=False)

    @torch.inference_mode(False)
    def __post_init__(self) -> None:
        checks.require_positive(self.alpha, "alpha")
        if self.solver is not None and (isinstance(self.solver, type) or not callable(self.solver)):
            raise TypeError(f"solver must be a solver such as Linearised(), got {self.solver!r}")
        if self.typicality is not None:
            if not isinstance(self.typicality, Density):
                kind = type(self.typicality).__name__
                raise TypeError(f"typicality must come from fit_typicality, got a {kind}")
            self.typicality.require_view_of(self.classifier)
        object.__setattr__(self, "posterior", matched(self.posterior, self.classifier))
        object.__setattr__(
            self, "solver", self.solver or default_solver(self.classifier, self.posterior)
        )
        object.__setattr__(self, "_scaled", self.posterior.scaled(self.alpha))

    def __call__(self, x: Inputs) -> Tensor:
        """Return the normalised log-probabilities (B, K)."""
        return torch.log_softmax(self.log_lik(x), dim=-1)

    def regret(self, x: Inputs) -> Tensor:
        """Return log C(x) (B,): higher is more out of distribution."""
        return torch.logsumexp(self.log_lik(x), dim=-1)

    @property
    def last_layer(self) -> Site | None:
        """The layer that the posterior covers, if it is one Linear layer solved in logit space."""
        linearised = isinstance(self.solver, Linearised)
        return only_linear(self.classifier, self.posterior.mean) if linearised else None

    @torch.inference_mode(False)
    @torch.no_grad()
    def features(self, x: Inputs) -> Features | None:
        """Return what the last layer receives and returns, or None if there is no such layer."""
        layer = self.last_layer
        if layer is None:
            return None
        chunks = batches.chunks(self.classifier.prepare(x))
        return all_features(self.classifier, layer, chunks, self.posterior.mean, self.typicality)

    @torch.inference_mode(False)
    @torch.no_grad()
    def solve_features(self, features: Features) -> Solution:
        """Solve for inputs whose features are known, without running the network."""
        assert isinstance(self.solver, Linearised)
        assert self.last_layer is not None
        layer, temperature = self.last_layer.layer, self.classifier.temperature
        scale = None if self.typicality is None else features.observed
        return self.solver.solve_features(features, self._scaled, layer, temperature, scale)

    @torch.inference_mode(False)
    def as_module(self, steps: int | None = None) -> AcnmlModule:
        """Return network and solver as one `nn.Module`: inputs -> (log_probs, regret).

        It takes a fixed number of solver steps and has no data-dependent control flow, so it can
        be compiled with `torch.compile`, exported with `torch.export` or `acnml.export_onnx`, and
        used inside other modules. Its `residual` method says how far from the optimum it ends.

        Args:
            steps: of the solver; more are more exact.
        """
        layer = self.last_layer
        if layer is None:
            raise ValueError(
                "only ACNML with a posterior over the last Linear layer can become a module; "
                "fit it with parameters=[acnml.last_linear(model)], or use acnml.calibrate"
            )
        return network_module(self.classifier, layer, self._scaled, steps, self.typicality)

    @torch.inference_mode(False)
    @torch.no_grad()
    def solve(self, x: Inputs) -> Solution:
        """Return `log_probs` and `regret` in one go, and `residual` for one gradient more."""
        assert self.solver is not None  # __post_init__ has chosen one
        chunks = batches.chunks(self.classifier.prepare(x))
        if self.typicality is None:
            parts = [self.solver(self.classifier, self._scaled, chunk) for chunk in chunks]
        else:
            parts = [part for chunk in chunks for part in self._weighed(chunk, self.typicality)]
        return Solution(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))

    @torch.inference_mode(False)
    @torch.no_grad()
    def log_lik(self, x: Inputs) -> Tensor:
        """Return log p_θ̂_y(y|x) before it is normalised (B, K): how well each y is explained."""
        assert self.solver is not None  # __post_init__ has chosen one
        if self.typicality is not None:
            return self.solve(x).log_lik
        chunks = batches.chunks(self.classifier.prepare(x))
        solve = self.solver.log_lik
        return torch.cat([solve(self.classifier, self._scaled, chunk) for chunk in chunks])

    def _weighed(self, x: Inputs, typicality: Density) -> Iterator[Solution]:
        """Solve a prepared chunk with α(x) = α s(x)."""
        assert self.solver is not None
        layer = self.last_layer
        if layer is not None:
            found = features(self.classifier, layer, x, self.posterior.mean, typicality)
            if found is not None:
                yield self.solve_features(found)
                return
        for index, scale in enumerate(typicality(x).tolist()):
            one = batches.take(x, slice(index, index + 1))
            yield self.solver(self.classifier, self._scaled.scaled(scale), one)


def default_solver(classifier: Classifier, posterior: Posterior) -> Solver:
    """Return the solver to use where the user names none.

    Linearise-then-evaluate wherever the fast engine knows all layers that the posterior covers,
    with two gradient steps that bring it closer to the optimum than the paper's five or ten; a
    last layer is exact and needs none. Else the paper's iteration, 10 steps of 0.25 for Kronecker
    posteriors and 5 of 0.5 for others.
    """
    if unsupported(classifier.model, posterior.mean) is None:
        return Linearised(polish=2)
    if isinstance(posterior, Kronecker):
        return Reference(steps=10, step_size=0.25)
    return Reference(steps=5, step_size=0.5)
