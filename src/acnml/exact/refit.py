"""Exact CNML and CNMAP: refit on the training set and the query, once for every label.

    θ̂_y = argmax_θ  log p_θ(y|x) + Σ_i log p_θ(y_i|x_i) - Σ_j λ_j ‖w_j‖²,    p(y|x) ∝ p_θ̂_y(y|x)

(Zhou & Levine 2021, section 2). λ = 0 is CNML and λ > 0 is CNMAP. Every refit starts at the
solution for the training set, and the refits for all queries and labels are solved as one batch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from acnml._util.memory import budget, require_memory
from acnml.exact.newton import fitted, maximise
from acnml.exact.problem import LogisticProblem, require_features
from acnml.exact.regressions import Design, Rows

COPIES = 6  # intermediate results of the size of a row's logits that are in memory together


class Fit(NamedTuple):
    """The solution for the training set without a query; see `Refits` for the fields.

    >>> problem = LogisticProblem(torch.eye(2), torch.tensor([0, 1]), l2=1.0)
    >>> bool(fit(problem).converged.all())
    True
    """

    weights: Tensor  # (K, d)
    log_lik: Tensor  # () Σ_i log p_θ̂(y_i|x_i), without the penalty
    residual: Tensor  # ()
    converged: Tensor  # () bool
    limit: Tensor  # () bool

    def log_probs(self, features: Tensor) -> Tensor:
        """Return log p_θ̂(y|x) (Q, K)."""
        return torch.log_softmax(features.to(self.weights) @ self.weights.mT, dim=-1)


class Refits(NamedTuple):
    """The refitted model of every query x and label y, and its likelihood of y.

    If a refit has no finite maximum, `limit` is True, `log_lik` is the limit of the log-likelihood,
    and `weights` are the last iterate. If `converged` is False, the result may be wrong.

    >>> problem = LogisticProblem(torch.eye(2), torch.tensor([0, 1]), l2=1.0)
    >>> refits = cnml(problem, torch.eye(2))
    >>> refits.log_lik.shape, bool(refits.converged.all())
    (torch.Size([2, 2]), True)
    """

    log_lik: Tensor  # (Q, K) log p_θ̂_y(y|x), not normalised
    weights: Tensor  # (Q, K, K, d) θ̂_y of every query and label; logits are weights @ x
    residual: Tensor  # (Q, K) last Newton step in logits; for limits, the estimated error of p
    converged: Tensor  # (Q, K) bool
    limit: Tensor  # (Q, K) bool

    @property
    def log_probs(self) -> Tensor:
        """The CNML or CNMAP distribution: log p_θ̂_y(y|x) - log C(x), (Q, K)."""
        return torch.log_softmax(self.log_lik, dim=-1)

    @property
    def regret(self) -> Tensor:
        """log C(x) = log Σ_y p_θ̂_y(y|x), (Q,), between 0 and log K."""
        return torch.logsumexp(self.log_lik, dim=-1)


@torch.no_grad()
def fit(problem: LogisticProblem) -> Fit:
    """Fit the training set.

    Without a penalty and with linearly dependent features, several weights are equally good. The
    ones with the smallest norm are returned.

    >>> problem = LogisticProblem(torch.eye(2), torch.tensor([0, 1]), l2=1.0)
    >>> fit(problem).weights.shape  # (classes, features)
    torch.Size([2, 2])
    """
    design = Design.of(problem)
    optimum, log_lik = fitted(design, problem.labels[None])
    tensors = (design.class_weights(optimum.weights), log_lik, optimum.residual)
    return Fit(*(t[0] for t in (*tensors, optimum.converged, optimum.limit)))


@torch.no_grad()
def cnml(problem: LogisticProblem, queries: Tensor, memory: int | None = None) -> Refits:
    """Refit the model for every label of every query.

    Args:
        problem: the training set and its penalty.
        queries: feature vectors (Q, d), with an intercept if the problem's features have one.
        memory: maximum memory in bytes for one batch of refits; by default a fraction of the free
            memory.

    >>> problem = LogisticProblem(torch.eye(2), torch.tensor([0, 1]), l2=1.0)
    >>> far = torch.tensor([[1.0, 0.0], [50.0, 0.0]])
    >>> cnml(problem, far).regret  # near the data, and far from them: at most log 2
    tensor([0.0943, 0.6862], dtype=torch.float64)
    """
    require_memory(memory)
    require_features(queries, "queries")
    if queries.shape[1] != problem.features.shape[1]:
        raise ValueError(
            f"queries have {queries.shape[1]} features, but the problem has "
            f"{problem.features.shape[1]}; was an intercept left out?"
        )
    design = Design.of(problem)
    trained, _ = fitted(design, problem.labels[None])
    # A diverging training solution is a poor starting point, so start from 0 instead.
    start = trained.weights.masked_fill(trained.limit, 0)
    blocks = queries.to(problem.features).split(_queries_at_once(design, memory))
    parts = [_refits(design, block, problem.labels, start) for block in blocks]
    return Refits(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))


def _refits(design: Design, queries: Tensor, labels: Tensor, start: Tensor) -> Refits:
    """Solve one row per query and label."""
    Q, K = len(queries), len(design.codes)
    own = (queries @ design.basis).repeat_interleave(K, dim=0).unsqueeze(1)
    targets = torch.arange(K, device=queries.device).repeat(Q).unsqueeze(-1)
    statistic = design.statistic(own, targets) + design.statistic(design.features, labels)
    rows = Rows(design, own, statistic)
    optimum = maximise(rows, start.expand_as(statistic))
    log_lik = rows.log_probs(optimum.weights)[:, -1].gather(-1, targets).squeeze(-1)
    log_lik = log_lik.masked_fill(optimum.separated, 0)
    # Weights along a direction without data or penalty change no probability of the training data.
    # A query with a component there can have any label, and its likelihood tends to 1.
    outside = design.is_outside(queries).repeat_interleave(K)
    tensors = (
        log_lik.masked_fill(outside, 0),
        design.class_weights(optimum.weights),
        optimum.residual.masked_fill(outside, 0),
        optimum.converged | outside,
        optimum.limit | outside,
    )
    return Refits(*(tensor.unflatten(0, (Q, K)) for tensor in tensors))


def _queries_at_once(design: Design, memory: int | None) -> int:
    n, (K, m) = len(design.features), design.codes.shape
    row = design.features.element_size() * n * (COPIES * K + 3 * m * m)
    return max(1, budget(design.features.device, memory) // (row * K))
