"""The data and networks that CNML is computed for."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import final

import torch
from torch import Tensor, nn

from acnml.exact import LogisticProblem, cnml, with_intercept
from studies.data import Labelled, split
from studies.data.digits import CLASSES, all_digits, load_mnist, rotate
from studies.fidelity.retraining import gauss_newton, retrained, root_of_inverse, train
from studies.fidelity.settings import DIGITS, LOGISTIC, MNIST, FidelityStudy, Problem
from studies.store import Content, Stage, Store

TRAINING_STEPS = 3000
BLOCK = 10  # queries that are retrained together


@final
@dataclass(frozen=True, eq=False)
class Trained:
    """A trained network with all that it is compared on, in double precision."""

    problem: Problem
    network: nn.Module
    train: Labelled
    held_out: Labelled
    queries: Labelled  # one half as they are, the other half rotated

    @cached_property
    def curvature(self) -> Tensor:
        """The curvature of the training objective over all parameters, its prior included."""
        H = gauss_newton(self.network, self.train.inputs)
        eye = torch.eye(len(H), dtype=H.dtype)
        return H + self.problem.prior_precision * eye

    @cached_property
    def root(self) -> Tensor:
        """L with LLᵀ = H⁻¹."""
        return root_of_inverse(self.curvature)


def images_of(problem: Problem) -> Labelled:
    """Return all images of a problem."""
    if problem.name == DIGITS:
        return all_digits()
    images, labels = load_mnist("train").first(4000) if problem.name == MNIST else all_digits()
    return Labelled(nn.functional.avg_pool2d(images, 2), labels)


def network_of(problem: Problem, inputs: int) -> nn.Module:
    """Return an untrained network."""
    if problem.hidden == 0:
        return nn.Linear(inputs, CLASSES).double()
    hidden = problem.hidden
    return nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, CLASSES)).double()


def trained(problem: Problem, study: FidelityStudy, store: Store) -> tuple[Stage, Trained]:
    """Train the network of a problem, or load it."""
    parts = _split(problem, study)
    inputs = parts[0].inputs[0].numel()
    settings = (problem, study.queries, study.held_out, study.angle)
    stage = Stage(f"trained {problem.name}", settings, study.seed)

    def make(_: object) -> Content:
        network = network_of(problem, inputs)  # from the random state of the stage
        data, precision = parts[0], problem.prior_precision
        train(network, data.inputs, data.labels, precision, TRAINING_STEPS)
        return Content({n: p.detach() for n, p in network.named_parameters()})

    network = network_of(problem, inputs)
    network.load_state_dict(store.make(stage, make).load())
    return stage, Trained(problem, network, *parts)


def _split(problem: Problem, study: FidelityStudy) -> tuple[Labelled, Labelled, Labelled]:
    data = images_of(problem)
    sizes = (problem.train, study.held_out, study.queries)
    rest = len(data.labels) - sum(sizes)
    first, held_out, queries, _ = split(data, (*sizes, rest), study.seed)
    half = study.queries // 2
    turned = rotate(queries.inputs[half:], study.angle)
    queries = Labelled(torch.cat([queries.inputs[:half], turned]), queries.labels)
    flat = [Labelled(p.inputs.flatten(1).double(), p.labels) for p in (first, held_out, queries)]
    return flat[0], flat[1], flat[2]


def cnml_of(own: Trained, needs: Stage, study: FidelityStudy, store: Store) -> dict[str, Tensor]:
    """Return the log-likelihoods of CNML and what is left of the gradient, (Q, K) each.

    Logistic regression has one solution for every label, which `acnml.exact` finds. Networks are
    retrained from the trained weights.
    """
    problem, queries = own.problem, own.queries.inputs
    stage = Stage(f"CNML {problem.name}", study.steps, study.seed, needs=(needs,))

    def compute(rows: slice) -> dict[str, Tensor]:
        if problem.name == LOGISTIC:
            return _exactly(own, queries[rows])
        data, precision = own.train, problem.prior_precision
        found = retrained(
            own.network, data.inputs, data.labels, queries[rows], precision, own.root, study.steps
        )
        return {"log_lik": found.log_lik, "residual": found.residual}

    return store.predict(stage, len(queries), BLOCK, compute).load()


def _exactly(own: Trained, queries: Tensor) -> dict[str, Tensor]:
    features = with_intercept(own.train.inputs)
    penalty = own.problem.prior_precision / 2  # λ‖w‖² = ½ τ ‖w‖²
    found = cnml(
        LogisticProblem(features, own.train.labels, penalty, CLASSES), with_intercept(queries)
    )
    residual = torch.where(found.converged & ~found.limit, found.residual, math.inf)
    return {"log_lik": found.log_lik, "residual": residual}
