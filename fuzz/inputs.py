"""Odd inputs of a prediction: they mean the same as a plain batch, or are refused by name."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from acnml import Acnml, Bma, Classifier, Diagonal, Glm, Gradient, Linearised, Map
from acnml.solve import Reference
from fuzz.outcome import Outcome, refused_or, require

SAME: dict[str, Callable[[Tensor], Any]] = {
    "as it is": lambda x: x,
    "strided": lambda x: torch.stack([x, x], -1)[..., 0],
    "expanded": lambda x: x[:1].expand(len(x), -1),
    "with gradients": lambda x: x.clone().requires_grad_(),
    "double": lambda x: x.double(),
    "a tuple": lambda x: (x,),
    "a list": lambda x: [x],
    "by name": lambda x: {"input": x},
    "NumPy": lambda x: x.numpy(),
    "of inference mode": lambda x: _in_inference_mode(x),
}

OTHER: dict[str, Callable[[Tensor], Any]] = {
    "NaN": lambda x: _with(x, float("nan")),
    "infinite": lambda x: _with(x, float("inf")),
    "minus infinite": lambda x: _with(x, float("-inf")),
    "huge": lambda x: x * 1e30,
    "tiny": lambda x: x * 1e-40,
    "overflowing": lambda x: x.double() * 1e300,
    "one input without a batch": lambda x: x[0],
    "a number": lambda x: x[0, 0],
    "empty": lambda x: x[:0],
    "without features": lambda x: x[:, :0],
    "too wide": lambda x: torch.cat([x, x], -1),
    "three dimensions": lambda x: x[None],
    "integers": lambda x: x.long(),
    "booleans": lambda x: x > 0,
    "complex": lambda x: x.to(torch.complex64),
    "half": lambda x: x.half(),
    "bfloat16": lambda x: x.bfloat16(),
    "an empty tuple": lambda x: (),
    "an empty mapping": lambda x: {},
    "by a wrong name": lambda x: {"output": x},
    "two tensors": lambda x: (x, x),
    "unequal sizes": lambda x: (x, x[:1]),
}


def _with(x: Tensor, value: float) -> Tensor:
    x = x.clone()
    x[len(x) // 2, 0] = value
    return x


def _in_inference_mode(x: Tensor) -> Tensor:
    with torch.inference_mode():
        return x.clone()


def odd_input(seed: int) -> tuple[str, Outcome]:
    """Give a predictor an odd input."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    width, classes = rng.choice([1, 3]), rng.choice([2, 4])
    model: nn.Module = nn.Linear(width, classes)
    if rng.random() < 0.5:
        model = nn.Sequential(nn.Linear(width, 4), nn.Tanh(), nn.Linear(4, classes))
    classifier = Classifier(model)
    mean = classifier.copy_parameters([name for name, _ in model.named_parameters()])
    q = Diagonal(mean, {n: torch.full_like(t, 0.1) for n, t in mean.items()})
    predict = rng.choice(
        [
            *(Map(classifier), Bma(classifier, q, samples=2), Glm(classifier, q)),
            *(Acnml(classifier, q, s) for s in (Linearised(), Gradient(2), Reference(2))),
            *(Acnml(classifier, q), Acnml(classifier, q)),
        ]
    )
    x = torch.randn(rng.randrange(2, 5), width)
    what = rng.choice([*SAME, *OTHER, *OTHER])
    solver = type(getattr(predict, "solver", None)).__name__
    name = f"{type(model).__name__}({width}), {type(predict).__name__} {solver}: {what}"

    def run() -> Outcome:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            given = {**SAME, **OTHER}[what](x)
            log_probs = torch.as_tensor(predict(given))  # arrays give arrays
            if what in SAME:
                plain = x[:1].expand(len(x), -1) if what == "expanded" else x
                require(torch.allclose(log_probs, predict(plain), atol=1e-5), "another answer")
        flagged = getattr(predict, "on_error", None) == "flag"
        require(flagged or torch.isfinite(log_probs).all(), "not finite")
        total = log_probs.exp().sum(-1)
        require(((total - 1).abs() < 1e-4).all(), "does not sum to one")
        return Outcome.EQUAL

    try:
        outcome = refused_or(run)
    except AssertionError as error:
        raise type(error)(f"{name}: {error}") from error
    require(outcome is Outcome.EQUAL or what not in SAME or what == "by name", f"{name}: refused")
    return name, outcome
