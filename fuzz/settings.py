"""Odd settings at every public constructor: refused by name, or they work."""

from __future__ import annotations

import random
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import acnml
from acnml import (
    Acnml,
    Bma,
    Classifier,
    Diagonal,
    Ensemble,
    Full,
    Glm,
    Gradient,
    IfComp,
    Linearised,
    LowRank,
    Map,
    Modes,
    Swag,
    Tempered,
)
from acnml.predictors import LogitSampling
from acnml.solvers import Reference
from fuzz.outcome import Outcome, refused_or, require


def _constant(value: Any) -> Callable[[], Any]:
    return lambda: value


VALUES: dict[str, Callable[[], Any]] = {
    **{repr(v): _constant(v) for v in (None, "1", "", b"x", True, False, 1j, -1, 0, 1, 2, 7)},
    **{repr(v): _constant(v) for v in (0.5, -0.5, 1e-30, 1e30, -(2**40))},
    **{repr(v): _constant(v) for v in (float("nan"), float("inf"), float("-inf"))},
    "[]": list,
    "{}": dict,
    "object()": object,
    "int": lambda: int,
    "np.int64(3)": lambda: np.int64(3),
    "np.float32(0.5)": lambda: np.float32(0.5),
    "np.array([1, 2])": lambda: np.array([1, 2]),
    "tensor(0.5)": lambda: torch.tensor(0.5),
    "tensor([1., 2.])": lambda: torch.tensor([1.0, 2.0]),
    "tensor(nan)": lambda: torch.tensor(float("nan")),
    "Linear(2, 3)": lambda: nn.Linear(2, 3),
}


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 3))


def _x() -> torch.Tensor:
    return torch.linspace(-1, 1, 6).view(3, 2)


def _posterior(classifier: Classifier) -> Diagonal:
    mean = classifier.copy_parameters([name for name, _ in classifier.model.named_parameters()])
    return Diagonal(mean, {n: torch.full_like(t, 0.1) for n, t in mean.items()})


def _network_and_posterior() -> dict[str, Any]:
    classifier = Classifier(_model())
    return {"classifier": classifier, "posterior": _posterior(classifier)}


def _acnml(**settings: Any) -> Acnml:
    return Acnml(**{**_network_and_posterior(), **settings})


def _solving(solver: Callable[..., Any]) -> Callable[..., Any]:
    return lambda **settings: _acnml(solver=solver(**settings))(_x())


def _of_network(build: Callable[..., Any]) -> Callable[..., Any]:
    """Build a predictor from a classifier and a posterior, with one setting of its own."""

    def run(**settings: Any) -> Any:
        classifier = Classifier(_model())
        return build(classifier, _posterior(classifier), **settings)(_x())

    return run


def _fitted(
    fit: Callable[..., Any], network: str = "classifier", loader: str = "loader"
) -> Callable[..., Any]:
    data = [(_x(), torch.tensor([0, 1, 2]))]
    return lambda **settings: fit(**{network: Classifier(_model()), loader: data, **settings})


def _saved(**settings: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        value = _posterior(Classifier(_model()))
        acnml.save(**{"value": value, "path": Path(folder) / "file", **settings})


def _loaded(**settings: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        acnml.save(Map(Classifier(_model())), path)
        return acnml.load(path, **{"classifier": Classifier(_model()), **settings})


def _posterior_of(build: Callable[..., Any], fields: dict[str, Any]) -> Callable[..., Any]:
    def run(**settings: Any) -> Any:
        return build(**{**fields, **settings}).scaled(2.0).sample(1, torch.Generator())

    return run


_MEAN = {"w": torch.ones(2)}
_DIRECTIONS = {"w": torch.ones(1, 2)}

# What is called, and the settings of it that are replaced one at a time.
CALLS: dict[str, tuple[Callable[..., Any], list[str]]] = {
    "Linearised": (
        _solving(Linearised),
        ["polish", "step_size", "tolerance", "newton_steps", "negligible", "memory"],
    ),
    "Gradient": (_solving(Gradient), ["steps", "step_size", "memory"]),
    "Reference": (_solving(Reference), ["steps", "step_size", "rows_at_once"]),
    "Acnml": (
        lambda **s: _acnml(**s)(_x()),
        ["alpha", "solver", "posterior", "classifier"],
    ),
    "Tempered": (lambda **s: Tempered(Map(Classifier(_model())), **s)(_x()), ["temperature"]),
    "tempered": (
        lambda **s: Map(Classifier(_model()).tempered(**s))(_x()),
        ["temperature"],
    ),
    "Bma": (_of_network(Bma), ["samples", "seed", "statistics"]),
    "Glm": (_of_network(Glm), ["link"]),
    "LogitSampling": (
        lambda **s: _of_network(Glm)(link=LogitSampling(**s)),
        ["samples", "seed"],
    ),
    "Ensemble": (lambda **s: Ensemble(**s)(_x()), ["predictors"]),
    "Map": (lambda **s: Map(**s)(_x()), ["classifier"]),
    "Classifier": (
        lambda **s: Map(Classifier(**{"model": _model(), **s}))(_x()),
        ["model", "get_logits"],
    ),
    "Diagonal": (
        _posterior_of(Diagonal, {"mean": _MEAN, "var": _MEAN}),
        ["mean", "var"],
    ),
    "LowRank": (
        _posterior_of(LowRank, {"mean": _MEAN, "var": _MEAN, "directions": _DIRECTIONS}),
        ["mean", "var", "directions"],
    ),
    "Full": (_posterior_of(Full, {"mean": _MEAN, "cov": torch.eye(2)}), ["mean", "cov"]),
    **{
        f"fit_laplace {structure}": (
            _fitted(partial(acnml.fit_laplace, structure=structure), "model", "data"),
            ["model", "data", "prior_precision"],
        )
        for structure in ("kron", "diag", "ekfac", "full")
    },
    "fit_if_comp": (
        _fitted(acnml.fit_if_comp),
        ["classifier", "loader", "temperature", "c", "damping"],
    ),
    "fit_pnml": (
        _fitted(acnml.fit_pnml),
        ["classifier", "loader", "ridge", "c"],
    ),
    "IfComp": (
        lambda **s: IfComp(**{**_network_and_posterior(), **s})(_x()),
        ["classifier", "posterior", "c"],
    ),
    "Pnml": (
        lambda **s: replace(acnml.fit_pnml(Classifier(_model()), [_x()]), **s)(_x()),
        ["classifier", "parameters", "input_cov", "c"],
    ),
    "Modes": (
        lambda **s: Modes(**{"predictors": (_acnml(), _acnml()), **s})(_x()),
        ["predictors", "log_weights"],
    ),
    "Swag": (lambda **s: Swag(**s).update(_model()), ["rank"]),
    "save": (_saved, ["value"]),
    "load": (_loaded, ["classifier", "weights"]),
}


# Functions of the user: what they raise is theirs.
OF_THE_USER = {("get_logits", "int"), ("get_logits", "Linear(2, 3)"), ("link", "Linear(2, 3)")}


def odd_setting(seed: int) -> tuple[str, Outcome]:
    """Call something with one odd setting."""
    rng = random.Random(seed)
    called = rng.choice(list(CALLS))
    call, settings = CALLS[called]
    setting, value = rng.choice(settings), rng.choice(list(VALUES))
    if (setting, value) in OF_THE_USER:
        value = "None"
    name = f"{called}({setting}={value})"

    def run() -> Outcome:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = call(**{setting: VALUES[value]()})
        if isinstance(result, torch.Tensor):
            require(torch.isfinite(result).all(), "not finite")
            require(((result.exp().sum(-1) - 1).abs() < 1e-4).all(), "does not sum to one")
        return Outcome.EQUAL

    try:
        return name, refused_or(run)
    except AssertionError as error:
        raise type(error)(f"{name}: {error}") from error
