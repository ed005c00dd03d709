"""Networks × posteriors × solvers × inputs: predictions against oracles, and their properties."""

from __future__ import annotations

import copy
import math
import random
import warnings
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from acnml import Acnml, Classifier, Gradient, Linearised, Posterior, Reference, Solution
from acnml._util import batches
from acnml._util.params import Params, flatten
from fuzz.networks import Network, network
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
    described, q = posterior(rng, net.model)
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
            None,
            Linearised(memory=memory),
            Linearised(polish=rng.randrange(4), step_size=size, memory=memory),
            Gradient(steps, size, memory),
            Reference(steps, size, rng.choice([1, 3, 64])),
        ]
    )


def _tolerance(net: Network) -> float:
    return 1e-6 if net.dtype is torch.float64 else 2e-3


def _check_properties(net: Network, predict: Acnml, solution: Solution) -> Tensor:
    """Check what must hold for every answer; return which rows (B, K) are flagged."""
    flagged = _flagged(solution)
    sound = ~flagged.any(-1)
    tolerance = _tolerance(net)
    for name in ("log_lik", "log_probs", "regret"):
        values = getattr(solution, name)[sound]
        require(torch.isfinite(values).all(), f"{name} is not finite and not flagged")
    total = solution.log_probs[sound].exp().sum(-1)
    require(((total - 1).abs() < 1e-4).all(), f"probabilities sum to {total}")
    literal = isinstance(predict.solver, (Gradient, Reference))  # the paper's iteration overshoots
    regret = solution.regret[sound]
    require((regret <= math.log(net.classes) + tolerance).all(), f"regret above log K: {regret}")
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
        unsolved = ~(solution.residual <= UNSOLVED) & (solution.omitted == 0) & ~flagged
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
    allowed = 20 * _tolerance(net) * (1 + steep)
    require(difference <= allowed, f"alone and in its batch differ by {difference:.2g}")


# Oracles -----------------------------------------------------------------------------------------


def _check_against_oracle(
    net: Network, predict: Acnml, scaled: Posterior, solution: Solution, flagged: Tensor
) -> None:
    """Compare one row with dense mathematics in double precision."""
    model = copy.deepcopy(net.model).double()
    one = batches.map_inputs(
        batches.take(net.inputs, slice(0, 1)), lambda t: t.double() if t.is_floating_point() else t
    )
    label = int(solution.log_lik[0].argmin())
    if bool(flagged[0, label]) or bool(solution.omitted[0, label] > 0):
        return
    logits, jacobian = _linearised(model, scaled.mean, one)
    kernel = jacobian @ _covariance_times(scaled, jacobian)
    found = float(solution.log_lik[0, label])
    if isinstance(predict.solver, (Gradient, Reference)):
        steps, size = predict.solver.steps, predict.solver.step_size
        oracle, amplified = _iterated(model, scaled, one, label, steps, size)
        allowed = _tolerance(net) * (1 + abs(oracle)) * (1 + amplified) ** 2
    elif _is_linear(model, scaled, one, label):
        oracle = _convex(logits, kernel, label)
        allowed = 10 * _tolerance(net) * (1 + abs(oracle) + float(kernel.diagonal().max()) ** 0.5)
    elif float(kernel.trace()) < NARROW:
        oracle, rest = _iterated(model, scaled, one, label, 200, 0.5)
        if not rest < 1e-4:
            return
        residual = float(solution.residual[0, label])
        allowed = 3 * residual + 10 * _tolerance(net) * (1 + abs(oracle))
    else:
        return
    if math.isfinite(oracle) and math.isfinite(allowed):
        require(
            abs(found - oracle) <= allowed,
            f"log-likelihood {found:.6g} instead of {oracle:.6g} (within {allowed:.1g})",
        )


def _logits(model: torch.nn.Module, params: Params, one: Any) -> Tensor:
    args, kwargs = batches.as_arguments(one)
    return functional_call(model, params, args, kwargs)[0]


def _linearised(model: torch.nn.Module, mean: Params, one: Any) -> tuple[Tensor, Tensor]:
    """Return logits (K,) and their Jacobian (K, P) at the mean."""
    jacobian = torch.func.jacrev(lambda params: _logits(model, params, one))(mean)
    return _logits(model, mean, one).detach(), flatten(jacobian, mean).detach()


def _covariance_times(scaled: Posterior, jacobian: Tensor) -> Tensor:
    """Return Σ Jᵀ (P, K)."""
    from acnml._util.params import unflatten

    moved = scaled.cov_mv(unflatten(jacobian, scaled.mean))
    return flatten(moved, scaled.mean).mT


def _is_linear(model: torch.nn.Module, scaled: Posterior, one: Any, label: int) -> bool:
    """Return whether the logits are linear in the covered parameters along a random direction."""
    generator = torch.Generator().manual_seed(label)
    step = {
        n: torch.randn(t.shape, generator=generator, dtype=t.dtype) for n, t in scaled.mean.items()
    }
    at = [
        _logits(model, {n: t + k * step[n] for n, t in scaled.mean.items()}, one) for k in (0, 1, 2)
    ]
    bend = (at[2] - 2 * at[1] + at[0]).abs().max()
    return bool(bend <= 1e-9 * (1 + at[2].abs().max()))


def _iterated(
    model: torch.nn.Module, scaled: Posterior, one: Any, label: int, steps: int, size: float
) -> tuple[float, float]:
    """Return log p_θ(y|x) and the residual after the paper's iteration, for one row."""

    def log_lik(params: Params) -> Tensor:
        return _logits(model, params, one).log_softmax(-1)[label]

    gradient = torch.func.grad_and_value(log_lik)
    v = {n: torch.zeros_like(t) for n, t in scaled.mean.items()}
    theta, largest = dict(scaled.mean), 0.0
    grad, value = gradient(theta)
    rest = grad
    for _ in range(steps):
        v = {n: v[n] + size * rest[n] for n in v}
        moved = scaled.cov_mv(v)
        theta = {n: scaled.mean[n] + moved[n] for n in v}
        grad, value = gradient(theta)
        rest = {n: grad[n] - v[n] for n in v}
        largest = max(largest, _norm(scaled, rest))
    final = _norm(scaled, rest)
    return float(value), final if steps == 200 else max(largest, final)


def _norm(scaled: Posterior, vector: Params) -> float:
    moved = scaled.cov_mv(vector)
    squared = float(sum((moved[n] * vector[n]).sum() for n in vector))
    return math.sqrt(max(squared, 0.0)) if math.isfinite(squared) else math.inf


def _convex(logits: Tensor, kernel: Tensor, label: int) -> float:
    """Return log p at the solution of z_y = z + V(e_y - softmax z_y), by Newton with halving.

    With z = z₀ + V u the problem is to maximise log p_y(z₀ + V u) - ½ uᵀVu.
    """
    u = torch.zeros_like(logits)

    def objective(u: Tensor) -> Tensor:
        return (logits + kernel @ u).log_softmax(-1)[label] - u @ kernel @ u / 2

    eye = torch.eye(len(logits), dtype=logits.dtype)
    for _ in range(200):
        p = (logits + kernel @ u).softmax(-1)
        slope = eye[label] - p - u
        step = torch.linalg.solve(eye + (torch.diag(p) - torch.outer(p, p)) @ kernel, slope)
        size = 1.0
        while size > 1e-10 and not objective(u + size * step) >= objective(u):
            size /= 2
        u = u + size * step
        if float(slope @ kernel @ slope) < 1e-24:
            break
    return float((logits + kernel @ u).log_softmax(-1)[label])
