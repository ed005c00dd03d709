"""Run the study: CNML of every query, and how far every approximation is from it."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from scipy import stats
from torch import Tensor

from acnml import metrics
from studies.fidelity.methods import Answer, Methods
from studies.fidelity.problems import Trained, cnml_of, trained
from studies.fidelity.settings import FidelityStudy, Problem
from studies.store import Content, Stage, Store

# Raise it when the methods change: they are compared again, and nothing is retrained.
VERSION = 3

ALL, INSIDE, ROTATED = "all", "in distribution", "rotated"

# A row of CNML counts as converged if less than this is left, in posterior standard deviations.
CONVERGED = 1e-3


class Compared(NamedTuple):
    """A method against CNML, on some of the queries."""

    problem: str
    queries: str
    method: str
    posterior: str
    alpha: float  # NaN for methods without one
    n: int
    variation: float  # mean total variation distance
    variation_error: float  # its standard error, over queries
    log_lik_error: float  # mean |log p_θ̂_y(y|x) - CNML's| over all labels
    regret_error: float  # mean |log C(x) - CNML's|
    regret_rank: float  # Spearman's correlation of log C(x) with CNML's
    confidence_rank: float  # the same of the largest probability
    nll: float
    nll_difference: float  # minus CNML's
    solved: float  # share of labels


DISTANCES = Compared._fields[6:-1]


class Facts(NamedTuple):
    """What is known of a problem's CNML."""

    problem: str
    parameters: int
    train: int
    accuracy: float  # of the network on the held-out data
    temperature: float
    regret: float  # CNML's mean log C(x) in distribution
    rotated_regret: float
    network_nll: float
    cnml_nll: float
    converged: float  # share of labels


def collect(study: FidelityStudy, store: Store) -> tuple[list[Compared], list[Facts]]:
    """Do everything that is missing."""
    found = [_of_problem(problem, study, store) for problem in study.problems]
    return [row for rows, _ in found for row in rows], [facts for _, facts in found]


def _of_problem(
    problem: Problem, study: FidelityStudy, store: Store
) -> tuple[list[Compared], Facts]:
    needs, own = trained(problem, study, store)
    cnml = cnml_of(own, needs, study, store)
    stage = Stage(
        f"compared {problem.name}", (study.alphas, study.steps), study.seed, VERSION, (needs,)
    )

    def make(_: object) -> Content:
        rows = _compared(own, cnml["log_lik"], study)
        facts = _facts(own, cnml)
        return Content({}, {"rows": [row._asdict() for row in rows], "facts": facts._asdict()})

    kept = store.make(stage, make).facts
    return [Compared(**row) for row in kept["rows"]], Facts(**kept["facts"])


def _compared(own: Trained, cnml: Tensor, study: FidelityStudy) -> list[Compared]:
    methods, rows = Methods(own), []
    for method, posterior, answer in methods.plain():
        rows += _rows(own, method, posterior, math.nan, answer(), cnml)
    for alpha in study.alphas:
        for method, posterior, answer in methods.all(alpha):
            rows += _rows(own, method, posterior, alpha, answer(), cnml)
    return rows


def _rows(
    own: Trained, method: str, posterior: str, alpha: float, answer: Answer, cnml: Tensor
) -> list[Compared]:
    half = len(cnml) // 2
    parts = {ALL: slice(None), INSIDE: slice(0, half), ROTATED: slice(half, None)}
    found = []
    for name, part in parts.items():
        log_probs, target = answer.log_probs[part].double(), cnml[part]
        log_lik = None if answer.log_lik is None else answer.log_lik[part].double()
        labels = own.queries.labels[part]
        place = (own.problem.name, name, method, posterior, alpha, len(target))
        scores = distances(log_probs, log_lik, target, labels)
        found.append(Compared._make([*place, *scores.values(), answer.solved]))
    return found


def distances(
    log_probs: Tensor, log_lik: Tensor | None, cnml: Tensor, labels: Tensor
) -> dict[str, float]:
    """Return the distances of `Compared` between a method and CNML's log-likelihoods (n, K)."""
    if not bool(log_probs.isfinite().all()):
        return dict.fromkeys(DISTANCES, math.nan)
    target, regret = cnml.log_softmax(-1), cnml.logsumexp(-1)
    variation = (log_probs.exp() - target.exp()).abs().sum(-1) / 2
    far, error = variation.mean().item(), variation.std().item() / math.sqrt(len(variation))
    nll, goal = metrics.nll(log_probs, labels), metrics.nll(target, labels)
    confidence = rank(log_probs.amax(-1), target.amax(-1))
    lik_error = regret_error = regret_rank = math.nan
    if log_lik is not None:
        own = log_lik.logsumexp(-1)
        lik_error = (log_lik - cnml).abs().mean().item()
        regret_error, regret_rank = (own - regret).abs().mean().item(), rank(own, regret)
    values = far, error, lik_error, regret_error, regret_rank, confidence, nll, nll - goal
    return dict(zip(DISTANCES, values, strict=True))


def rank(a: Tensor, b: Tensor) -> float:
    """Return Spearman's rank correlation; NaN if one of them is constant."""
    if len(a.unique()) < 2 or len(b.unique()) < 2:
        return math.nan
    return float(stats.spearmanr(a.numpy(), b.numpy()).statistic)


def _facts(own: Trained, cnml: dict[str, Tensor]) -> Facts:
    methods, log_lik = Methods(own), cnml["log_lik"]
    regret, half = log_lik.logsumexp(-1), len(log_lik) // 2
    with torch.no_grad():
        held_out = own.network(own.held_out.inputs).log_softmax(-1)
        plain = own.network(own.queries.inputs).log_softmax(-1)
    return Facts(
        problem=own.problem.name,
        parameters=sum(p.numel() for p in own.network.parameters()),
        train=own.problem.train,
        accuracy=metrics.accuracy(held_out, own.held_out.labels),
        temperature=methods.temperature,
        regret=regret[:half].mean().item(),
        rotated_regret=regret[half:].mean().item(),
        network_nll=metrics.nll(plain, own.queries.labels),
        cnml_nll=metrics.nll(log_lik.log_softmax(-1), own.queries.labels),
        converged=(cnml["residual"] <= CONVERGED).double().mean().item(),
    )
