"""From a method, which is plain data, to the predictor that it stands for, and what is saved of it.

Of ACNML the log-likelihoods log p_θ̂_y(y|x) are saved before they are normalised, so that both the
probabilities and the regret follow. Of a plain network the energy is saved too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

import acnml
from acnml import Acnml, Bma, Map
from acnml.posteriors import Posterior
from acnml.predictors import Predictor
from acnml.solve import Solver, UnsolvedError
from studies.engine.grounds import Pair
from studies.engine.method import (
    ACNML,
    BMA,
    CONVERGED,
    DROPOUT,
    GLM,
    MAP,
    PAPER_STEPS,
    SAMPLING,
    TEMPERATURE,
    Method,
)
from studies.engine.workshop import Workshop
from studies.store import Artefact, Content, Stage, Work

# A network and its posterior, the method and the workshop -> a predictor.
Rule: TypeAlias = Callable[[Pair, Method, Workshop], Predictor]
UNSOLVED, RESIDUAL = "unsolved", "residual"


def predictor(method: Method, workshop: Workshop) -> Predictor:
    """Return the predictor that a method stands for."""
    if None in (method.value, method.likelihood, method.scale):
        raise ValueError(f"choose the {method.knob} of {method.name} first")
    rule = {**RULES, **workshop.study.rules}[method.rule]
    pairs = workshop.study.grounds[method.posterior].pairs(method, workshop)
    each = tuple(rule(pair, method, workshop) for pair in pairs)
    whole = each[0] if len(each) == 1 else acnml.Ensemble(each)
    if method.knob == TEMPERATURE and method.value is not None:
        return acnml.Tempered(whole, method.value)
    return whole


def solver_of(method: Method) -> Solver:
    """Return the solver of a method; the paper takes smaller steps for KFAC."""
    if method.solver == PAPER_STEPS:
        kfac = method.posterior.startswith("KFAC")
        return acnml.Gradient(10, 0.25) if kfac else acnml.Gradient(5, 0.5)
    if method.solver == CONVERGED:
        return acnml.Linearised("network", polish=10, step_size=0.3, polish_tolerance=1e-4)
    # The studies evaluate the network itself at the solution of the linearised problem.
    return acnml.Linearised("network")


def sampling(method: Method, workshop: Workshop) -> dict[str, object]:
    """Return what predictions depend on beside the method and the artefacts it needs."""
    study = workshop.study
    renewal = study.renewal_settings if method.rule == BMA else None
    return {
        **({"samples": study.samples} if method.rule in SAMPLING else {}),
        **({} if renewal is None else {"renewal": renewal}),
        **study.grounds[method.posterior].settings(method, workshop),
    }


# Rules -----------------------------------------------------------------------------------------


def _posterior(pair: Pair, method: Method) -> Posterior:
    if pair.posterior is None:
        raise ValueError(f"{method.name}: {method.rule} needs a posterior")
    return pair.posterior


def _map(pair: Pair, method: Method, workshop: Workshop) -> Predictor:
    return Map(pair.classifier)


def _dropout(pair: Pair, method: Method, workshop: Workshop) -> Predictor:
    return acnml.McDropout(pair.classifier, workshop.study.samples, workshop.seed)


def _glm(pair: Pair, method: Method, workshop: Workshop) -> Predictor:
    return acnml.Glm(pair.classifier, _posterior(pair, method))


def _acnml(pair: Pair, method: Method, workshop: Workshop) -> Predictor:
    # The studies compare solvers, among them the paper's few steps, as they are.
    return Acnml(pair.classifier, _posterior(pair, method), solver_of(method), on_unsolved="ignore")


def _bma(pair: Pair, method: Method, workshop: Workshop) -> Predictor:
    """Average over samples, with batch norm renewed for each where the network has it."""
    study = workshop.study
    build = partial(Bma, pair.classifier, _posterior(pair, method), study.samples, workshop.seed)
    if study.renewal is None:
        return build()
    found = load_statistics(renewed(build, method, workshop), study.samples)
    statistics = tuple({n: t.to(study.device) for n, t in each.items()} for each in found)
    return build(statistics=statistics)


RULES: Mapping[str, Rule] = {MAP: _map, BMA: _bma, GLM: _glm, DROPOUT: _dropout, ACNML: _acnml}


def renewed(build: Callable[[], Bma], method: Method, workshop: Workshop) -> Artefact:
    """Find batch-norm statistics for every sample of a posterior, on augmented inputs as in SWAG.

    `build` makes the samples; they take memory, so they are made only if needed.
    """
    study = workshop.study
    assert study.renewal is not None  # or nothing is renewed
    needs = study.grounds[method.posterior].artefacts(method, workshop)
    settings = (method.family, method.value, sampling(method, workshop))
    name = f"renew batch norm {method.posterior} {method.value:g}"
    stage = Stage(name, settings, workshop.seed, needs=tuple(each.stage for each in needs))

    def make(_: Work) -> Content:
        assert study.renewal is not None
        found = build().refreshed(study.renewal(workshop), progress=False).statistics
        return Content({f"{i}/{n}": t for i, each in enumerate(found) for n, t in each.items()})

    return workshop.make(stage, make)


def load_statistics(artefact: Artefact, samples: int) -> tuple[dict[str, Tensor], ...]:
    """Read what `renewed` has found; nothing for a network without batch norm."""
    statistics: list[dict[str, Tensor]] = [{} for _ in range(samples)]
    for path, tensor in artefact.load().items():
        number, name = path.split("/", 1)
        statistics[int(number)][name] = tensor
    return tuple(statistics)


# What is saved ---------------------------------------------------------------------------------


@torch.no_grad()
def outputs(predict: Predictor, inputs: Tensor, method: Method) -> dict[str, Tensor]:
    """Return what is saved of a batch of predictions."""
    if isinstance(predict, Acnml):
        if method.solver == CONVERGED:
            solution = predict.solve(inputs)
            unsolved = torch.zeros(len(inputs))
            return {"log_lik": solution.log_lik, RESIDUAL: solution.residual, UNSOLVED: unsolved}
        return solved_or_uniform(predict, inputs)
    if isinstance(predict, Map):
        logits = predict.classifier.logits(inputs)
        log_probs = torch.log_softmax(logits, dim=-1)
        return {"log_probs": log_probs, "energy": -torch.logsumexp(logits, dim=-1)}
    return {"log_probs": predict(inputs)}


def solved_or_uniform(predict: Acnml, inputs: Tensor) -> dict[str, Tensor]:
    """Return ACNML's likelihoods, and which inputs have no solution.

    With a wide posterior the paper's iteration can diverge, and Newton's method can stop far from
    an optimum. Any label could then be explained about as well, so all get the same likelihood. The
    study goes on and counts such inputs.
    """
    whole = _solved(predict, inputs)
    if whole is not None:
        return {"log_lik": whole, UNSOLVED: torch.zeros(len(inputs))}
    rows = [_solved(predict, one[None]) for one in inputs]
    classes = predict.classifier.logits(inputs[:1]).shape[1]
    uniform = torch.zeros(1, classes, device=inputs.device)
    log_lik = torch.cat([uniform if row is None else row for row in rows])
    return {"log_lik": log_lik, UNSOLVED: torch.tensor([float(row is None) for row in rows])}


def _solved(predict: Acnml, inputs: Tensor) -> Tensor | None:
    """Return the log-likelihoods, or None where the solver reports that it has none."""
    try:
        return predict.log_lik(inputs)
    except UnsolvedError:
        return None


def log_probs_of(tensors: Mapping[str, Tensor]) -> Tensor:
    """Return the log-probabilities of saved predictions."""
    if "log_lik" in tensors:
        return torch.log_softmax(tensors["log_lik"], dim=-1)
    return tensors["log_probs"]
