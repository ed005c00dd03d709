"""Networks × posteriors × solvers × inputs: predictions against oracles, and their properties."""

from __future__ import annotations

import copy
import math
import random
import warnings
from typing import Any

import torch
from torch import Tensor

from acnml import Acnml, Classifier, Gradient, Linearised
from acnml._util import batches
from acnml.posteriors import Posterior
from acnml.solve import Influence, Reference, Solution
from fuzz.networks import Network, network
from fuzz.oracles import (
    convex,
    covariance_times,
    in_double,
    influence,
    is_linear,
    iterated,
    linearised,
)
from fuzz.outcome import Outcome, refused_or, require
from fuzz.posteriors import posterior

# A row whose residual is above this is not solved, and must be flagged (see `Solution.residual`).
UNSOLVED = 0.1
# Solutions with a unique optimum: the trace of the logits' covariance is at most this.
NARROW = 0.3


def answer(seed: int) -> tuple[str, Outcome]:
    """Solve a generated problem, and compare the solution with what is known about it."""
    rng = random.Random(seed)
    net = network(rng)
    described, q = posterior(rng, net)
    alpha = 10 ** rng.uniform(-3, 1) if rng.random() < 0.8 else 10 ** rng.uniform(-6, 6)
    solver = _solver(rng)
    name = f"{net.name}; {described}; α={alpha:.2g}; {solver}"
    before = copy.deepcopy(net.model.state_dict())

    def run() -> Outcome:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings are one way to flag; `solved` is looked at
            predict = Acnml(Classifier(net.model), q, solver, alpha)
            solution = predict.solve(net.inputs)
            flagged = _check_properties(net, predict, solution)
            _check_single(net, predict, solution, flagged)
            _check_against_oracle(net, predict, q.scaled(alpha), solution, flagged)
        return Outcome.FLAGGED if flagged.any() else Outcome.EQUAL

    try:
        outcome = refused_or(run)
    except AssertionError as error:
        raise type(error)(f"{name}: {error}") from error
    after = net.model.state_dict()
    require(all(torch.equal(before[n], after[n]) for n in before), f"{name}: the model changed")
    return name, outcome


def _solver(rng: random.Random) -> Any:
    steps, size = rng.randrange(0, 6), rng.choice([0.1, 0.25, 0.5])
    memory = rng.choice([None, 1, 10_000])
    return rng.choice(
        [
            Linearised(memory=memory),
            Linearised("network", polish=rng.randrange(4), step_size=size, memory=memory),
            Gradient(steps, size, memory),
            Reference(steps, size, rng.choice([1, 3, 64])),
            Influence(),
        ]
    )


def tolerance_of(net: Network) -> float:
    """Return the largest error relative to the size of what is compared."""
    return 1e-6 if net.dtype is torch.float64 else 2e-3


def _check_properties(net: Network, predict: Acnml, solution: Solution) -> Tensor:
    """Check what must hold for every answer; return which rows (B, K) are flagged."""
    flagged = _flagged(solution)
    sound = ~flagged.any(-1)
    tolerance = tolerance_of(net)
    for name in ("log_lik", "log_probs", "regret"):
        values = getattr(solution, name)[sound]
        require(torch.isfinite(values).all(), f"{name} is not finite and not flagged")
    total = solution.log_probs[sound].exp().sum(-1)
    require(((total - 1).abs() < 1e-4).all(), f"probabilities sum to {total}")
    literal = isinstance(predict.solver, (Gradient, Reference))  # the paper's iteration overshoots
    regret = solution.regret[sound]
    if not isinstance(predict.solver, Influence):  # an estimate that knows no limit
        limit = math.log(net.classes) + tolerance
        require((regret <= limit).all(), f"regret above log K: {regret}")
    if not literal:
        require((regret >= -tolerance).all(), f"negative regret: {regret}")
        mean = Classifier(net.model).log_probs(
            predict.classifier.prepare(net.inputs), predict.posterior.mean
        )
        below = (mean - solution.log_lik)[sound]
        require(
            (below <= tolerance * (1 + mean[sound].abs())).all(),
            f"a label is explained worse than at the mean, by {below} nats",
        )
    if not literal:  # of these the residual is what they promise; the others take so many steps
        unsolved = ~(solution.residual <= UNSOLVED) & ~flagged
        require(not unsolved.any(), f"unsolved and not flagged: {solution.residual[unsolved]}")
    return flagged


def _flagged(solution: Solution) -> Tensor:
    """Return the rows (B, K) that the solution says are not solved."""
    solved = getattr(solution, "solved", None)
    return torch.zeros_like(solution.log_lik).bool() if solved is None else ~solved


def _check_single(net: Network, predict: Acnml, solution: Solution, flagged: Tensor) -> None:
    """An input alone gives the same as in its batch."""
    if batches.size(net.inputs) == 1 or flagged.any():
        return
    alone = predict.solve(batches.take(net.inputs, slice(1, 2)))
    difference = (alone.log_probs[0].exp() - solution.log_probs[1].exp()).abs().max()
    steep = float(solution.residual[1].max())  # an iteration far from an optimum amplifies rounding
    allowed = 20 * tolerance_of(net) * (1 + steep)
    require(difference <= allowed, f"alone and in its batch differ by {difference:.2g}")


# Oracles -----------------------------------------------------------------------------------------


def _check_against_oracle(
    net: Network, predict: Acnml, scaled: Posterior, solution: Solution, flagged: Tensor
) -> None:
    """Compare one row with dense mathematics in double precision."""
    model, inputs = in_double(net)
    one = batches.take(inputs, slice(0, 1))
    label = int(solution.log_lik[0].argmin())
    if bool(flagged[0, label]):
        return
    logits, jacobian = linearised(model, scaled.mean, one)
    kernel = jacobian @ covariance_times(scaled, jacobian)
    found = float(solution.log_lik[0, label])
    if isinstance(predict.solver, (Gradient, Reference)):
        steps, size = predict.solver.steps, predict.solver.step_size
        oracle, _, amplified = iterated(model, scaled, one, label, steps, size)
        allowed = tolerance_of(net) * (1 + abs(oracle)) * (1 + amplified) ** 2
    elif isinstance(predict.solver, Influence):
        gain = float(influence(logits, kernel)[label])
        oracle = float(logits.log_softmax(-1)[label]) + gain
        # Terms of V cancel in the gain, and rounding of the logits changes p.
        terms = float(kernel.diagonal().max()) * (1 + float(logits.abs().max()))
        allowed = 10 * tolerance_of(net) * (1 + abs(oracle) + terms)
    elif predict.logit_solver is not None or is_linear(model, scaled, one, label):
        oracle = convex(logits, kernel, label)
        allowed = 10 * tolerance_of(net) * (1 + abs(oracle) + float(kernel.diagonal().max()) ** 0.5)
    elif float(kernel.trace()) < NARROW:
        oracle, rest, _ = iterated(model, scaled, one, label, 200, 0.5)
        if not rest < 1e-4:
            return
        residual = float(solution.residual[0, label])
        allowed = 3 * residual + 10 * tolerance_of(net) * (1 + abs(oracle))
    else:
        return
    if math.isfinite(oracle) and math.isfinite(allowed):
        require(
            abs(found - oracle) <= allowed,
            f"log-likelihood {found:.6g} instead of {oracle:.6g} (within {allowed:.1g})",
        )
