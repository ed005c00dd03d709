"""The NML family and EK-FAC: IfComp, Pnml, Modes and curvatures against dense mathematics."""

from __future__ import annotations

import copy
import math
import random
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from acnml import Acnml, Classifier, IfComp, Modes, UnsolvedWarning, fit_pnml, last_linear
from acnml._util import batches
from acnml.fit import fit_curvature
from acnml.predictors import Predictor
from fuzz.answers import tolerance_of
from fuzz.networks import Network, network
from fuzz.oracles import covariance_times, in_double, influence, linearised
from fuzz.outcome import Outcome, refused_or, require
from fuzz.posteriors import affine_layers, posterior

Run = Callable[[], Outcome]


def member_of_family(seed: int) -> tuple[str, Outcome]:
    """Build one predictor or curvature, and compare it with its formula."""
    rng = random.Random(seed)
    net = network(rng, rng.randrange(2, 6))
    kind = rng.choice(list(KINDS))
    described, run = KINDS[kind](rng, net)
    name, before = f"{kind}; {net.name}; {described}", copy.deepcopy(net.model.state_dict())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            outcome = refused_or(run)
    except AssertionError as error:
        raise type(error)(f"{name}: {error}") from error
    after = net.model.state_dict()
    require(all(torch.equal(before[n], after[n]) for n in before), f"{name}: the model changed")
    return name, outcome


def _if_comp(rng: random.Random, net: Network) -> tuple[str, Run]:
    described, q = posterior(rng, net)
    temperature, c = 10 ** rng.uniform(-1, 3), _weight(rng)
    label = rng.randrange(net.classes)

    def run() -> Outcome:
        predict = IfComp(Classifier(net.model).tempered(temperature), q, c)
        model, inputs = in_double(net)
        logits, jacobian = linearised(model, q.mean, batches.take(inputs, slice(0, 1)))
        kernel = jacobian @ covariance_times(q, jacobian) / temperature**2
        z, weight = logits / temperature, c / temperature
        n, p = influence(z, kernel), z.softmax(-1)
        # Terms of V cancel in n, and rounding of the logits changes p.
        terms = float(kernel.diagonal().max()) * (1 + float(z.abs().max()))
        require(c > 0, "a negative weight was accepted")
        found, labels = predict.log_lik(net.inputs), [label] * len(predict(net.inputs))
        _require_close("log_lik", found[0], z.log_softmax(-1) + weight * n, net, weight * terms)
        _require_close("influence", predict.influence(net.inputs)[0], n, net, terms)
        _require_close("ood_score", predict.ood_score(net.inputs)[0], p @ n, net, terms)
        expected = weight * (p @ n) - z.log_softmax(-1)[label]
        score = predict.mislabel_score(net.inputs, labels)[0]
        _require_close("mislabel_score", score, expected, net, weight * terms)
        _require_alone(net, predict, weight * terms)
        return Outcome.EQUAL

    return f"{described}; T={temperature:.2g} c={c:.2g}", run


def _weight(rng: random.Random) -> float:
    """Return a weight of what is added to a prediction; a negative one must be refused."""
    return float(10 ** rng.uniform(-3, 2)) * rng.choice([1] * 9 + [-1])


def _pnml(rng: random.Random, net: Network) -> tuple[str, Run]:
    ridge = rng.choice([None, 10 ** rng.uniform(-3, 2)])
    c = _weight(rng)

    def run() -> Outcome:
        predict = fit_pnml(Classifier(net.model), _data(net), ridge=ridge, c=c, progress=False)
        require(c > 0, "a negative weight was accepted")
        a, logits = _last_inputs(*in_double(net))
        total = a.mT @ a
        added = 1e-6 * float(total.diagonal().mean()) if ridge is None else ridge
        inverse = torch.linalg.inv(total + added * torch.eye(len(total), dtype=total.dtype))
        leverage = ((a @ inverse) * a).sum(-1)
        condition = float(torch.linalg.cond(inverse))
        if condition > 1e10:  # rounding is all that is left
            leverage = predict.leverage(net.inputs).double()
        else:
            _require_close("leverage", predict.leverage(net.inputs), leverage, net, 1.0)
        log_p, h = logits.log_softmax(-1), (c * leverage / (1 + c * leverage))[:, None]
        expected = log_p - torch.logaddexp(log_p, h * log_p + torch.log1p(-log_p.exp()))
        usual = (log_p > -30) & (log_p < -1e-9)  # elsewhere the formula cancels
        found, size = predict.log_lik(net.inputs), float(logits.abs().max())
        _require_close("log_lik", found[usual], expected[usual], net, size)
        _require_regret(net, predict.regret(net.inputs))
        _require_alone(net, predict, 1 + size)
        return Outcome.EQUAL

    return f"ridge={ridge} c={c:.2g}", run


def _modes(rng: random.Random, net: Network) -> tuple[str, Run]:
    alpha, members = 10 ** rng.uniform(-3, 1), []
    for i in range(rng.randrange(1, 4)):
        model = copy.deepcopy(net.model)
        torch.manual_seed(rng.randrange(2**31))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + 0.3 * i * torch.randn_like(parameter))
        own = Network(net.name, model, net.inputs, net.classes, net.dtype)
        members.append((model, posterior(rng, own)[1]))
    weights = rng.choice([None, tuple(rng.uniform(-3, 3) for _ in members)])

    def run() -> Outcome:
        each = [Acnml(Classifier(model), q, alpha=alpha) for model, q in members]
        predict = Modes(tuple(each), weights)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = predict.log_lik(net.inputs)
        solutions = [one.solve(net.inputs) for one in each]
        shifts = [0.0] * len(each) if weights is None else [w - max(weights) for w in weights]
        parts = [s.log_lik + shift for s, shift in zip(solutions, shifts, strict=True)]
        expected = torch.stack(parts).amax(0)
        _require_close("log_lik", found, expected, net, 1.0)
        unsolved = any(not bool(s.solved.all()) for s in solutions)
        warned = any(issubclass(w.category, UnsolvedWarning) for w in caught)
        require(warned == unsolved, f"warned: {warned}, unsolved: {unsolved}")
        if unsolved:
            return Outcome.FLAGGED
        regret = predict.regret(net.inputs)
        require((regret >= solutions[_heaviest(shifts)].regret - 1e-3).all(), "a member has more")
        _require_regret(net, regret)
        return Outcome.EQUAL

    return f"{len(members)} members, α={alpha:.2g}, weights {weights}", run


def _heaviest(shifts: list[float]) -> int:
    return max(range(len(shifts)), key=shifts.__getitem__)


def _ekfac(rng: random.Random, net: Network) -> tuple[str, Run]:
    """The trace of EK-FAC is that of the Fisher matrix, and Σ is at most I / τ."""
    names = [name for layer in affine_layers(net.model) for name in layer.names]
    precision = 10 ** rng.uniform(-3, 3)

    def run() -> Outcome:
        curvature = fit_curvature(
            net.model, _data(net), structure="ekfac", layers=names, progress=False
        )
        model, inputs = in_double(net)
        mean = {name: dict(model.named_parameters())[name].detach() for name in names}
        trace = 0.0
        for i in range(batches.size(inputs)):
            logits, jacobian = linearised(model, mean, batches.take(inputs, slice(i, i + 1)))
            trace += float(logits.softmax(-1) @ influence(logits, jacobian @ jacobian.mT))
        found = torch.tensor(curvature.mean_eigenvalue() * sum(t.numel() for t in mean.values()))
        size = float(logits.abs().max())
        _require_close("trace", found, torch.tensor(trace), net, size * trace)
        q = curvature.posterior(precision)
        direction = {n: torch.randn_like(t) for n, t in q.mean.items()}
        moved = q.cov_mv(direction)
        spread = sum(float((moved[n] * direction[n]).sum()) for n in moved)
        most = sum(float((t * t).sum()) for t in direction.values()) / precision
        require(0 <= spread <= most * (1 + 1e-4), f"vᵀΣv = {spread:.3g}, vᵀv/τ = {most:.3g}")
        return Outcome.EQUAL

    return f"τ={precision:.2g}", run


KINDS: dict[str, Callable[[random.Random, Network], tuple[str, Run]]] = {
    "IfComp": _if_comp,
    "Pnml": _pnml,
    "Modes": _modes,
    "EK-FAC": _ekfac,
}


def _data(net: Network) -> list[tuple[Any, Tensor]]:
    """Return the inputs as training data. Labels tell two inputs from an input and its label."""
    return [(net.inputs, torch.zeros(batches.size(net.inputs), dtype=torch.long))]


def _last_inputs(model: nn.Module, inputs: Any) -> tuple[Tensor, Tensor]:
    """Return what the last layer receives (N, d), with a 1 if it has a bias, and the logits."""
    received: list[Tensor] = []
    layer = last_linear(model)
    assert isinstance(layer, nn.Linear)
    handle = layer.register_forward_hook(lambda _, args, __: received.append(args[0].detach()))
    args, kwargs = batches.as_arguments(inputs)
    with torch.no_grad():
        logits = model(*args, **kwargs)
    handle.remove()
    a = received[-1]
    return a if layer.bias is None else nn.functional.pad(a, (0, 1), value=1.0), logits


def _require_close(what: str, found: Tensor, expected: Tensor, net: Network, terms: float) -> None:
    """Compare with an oracle; `terms` is the size of what is summed in it."""
    if not (bool(torch.isfinite(expected).all()) and math.isfinite(terms)):
        return
    difference = (found.double() - expected.double()).abs()
    allowed = 10 * tolerance_of(net) * (1 + expected.double().abs() + terms)
    require((difference <= allowed).all(), f"{what} is {found} instead of {expected}")


def _require_regret(net: Network, regret: Tensor) -> None:
    limit, tolerance = math.log(net.classes), tolerance_of(net)
    require((regret >= -tolerance).all(), f"negative regret: {regret}")
    require((regret <= limit + tolerance).all(), f"regret above log K: {regret}")


def _require_alone(net: Network, predict: Predictor, terms: float) -> None:
    """An input alone gives the same as in its batch."""
    alone = predict(batches.take(net.inputs, slice(1, 2)))[0].exp()
    together = predict(net.inputs)[1].exp()
    _require_close("an input alone", alone, together, net, terms)
