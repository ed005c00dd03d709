"""Exact CNML and CNMAP: refit on the training set and the query, once for every label.

    θ̂_y = argmax_θ  log p_θ(y|x) + Σ_i log p_θ(y_i|x_i) - Σ_j λ_j ‖w_j‖²,    p(y|x) ∝ p_θ̂_y(y|x)

(Zhou & Levine 2021, section 2). λ = 0 is CNML and λ > 0 is CNMAP. The refits for
many queries and labels are solved as one batch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from acnml.exact.newton import Rows, maximise
from acnml.exact.problem import LogisticProblem, require_features

AT_ONCE = 2**24  # probabilities and their products with each other, of all points of a batch

# A query counts as outside the span of the data if its distance from it, relative to its length, is
# larger than this.
OUTSIDE = 1e-9


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
    and `weights` are far along the way to it. If `converged` is False, the result may be wrong.

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
    rows = Rows.of(problem, problem.labels[None])
    weights, *rest = maximise(rows)
    return Fit(*(t[0] for t in (rows.class_weights(weights), rows.log_lik(weights), *rest)))


@torch.no_grad()
def cnml(problem: LogisticProblem, queries: Tensor) -> Refits:
    """Refit the model for every label of every query.

    Args:
        problem: the training set and its penalty.
        queries: feature vectors (Q, d), with an intercept if the problem's features have one.

    >>> problem = LogisticProblem(torch.eye(2), torch.tensor([0, 1]), l2=1.0)
    >>> far = torch.tensor([[1.0, 0.0], [50.0, 0.0]])
    >>> cnml(problem, far).regret  # near the data, and far from them: at most log 2
    tensor([0.0943, 0.6862], dtype=torch.float64)
    """
    require_features(queries, "queries")
    if queries.shape[1] != problem.features.shape[1]:
        raise ValueError(
            f"queries have {queries.shape[1]} features, but the problem has "
            f"{problem.features.shape[1]}; was an intercept left out?"
        )
    rows = Rows.of(problem, problem.labels[None])
    refits_at_once = AT_ONCE // (problem.classes**2 * len(problem.features))
    blocks = queries.to(problem.features).split(max(1, refits_at_once // problem.classes))
    parts = [_refits(rows, block) for block in blocks]
    return Refits(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))


def _refits(trained: Rows, queries: Tensor) -> Refits:
    """Solve one row per query and label."""
    classes = len(trained.codes)
    rows = trained.with_queries(queries)
    weights, residual, converged, limit = maximise(rows)
    log_probs = rows.log_probs(weights)[:, -1].view(-1, classes, classes)
    # Weights along a direction without data or penalty change no probability of the training data.
    # A query with a component there can have any label, and its likelihood tends to 1.
    outside = _is_outside(trained.basis, queries).unsqueeze(-1)
    return Refits(
        log_probs.diagonal(dim1=-2, dim2=-1).masked_fill(outside, 0),
        rows.class_weights(weights).unflatten(0, (-1, classes)),
        residual.view(-1, classes).masked_fill(outside, 0),
        converged.view(-1, classes) | outside,
        limit.view(-1, classes) | outside,
    )


def _is_outside(basis: Tensor, x: Tensor) -> Tensor:
    """Return whether feature vectors (Q, d) have a component in a direction that was dropped."""
    if basis.shape[0] == basis.shape[1]:
        return torch.zeros(len(x), dtype=torch.bool, device=x.device)
    rest = x - x @ basis @ torch.linalg.pinv(basis)
    return rest.norm(dim=-1) > OUTSIDE * x.norm(dim=-1)
