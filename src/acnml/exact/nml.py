"""Normalized maximum likelihood (NML) and its form with a prior (NMAP), over label sequences.

    p_NML(y_1 … y_n) = p_θ̂(y)(y_1 … y_n) / Σ_y' p_θ̂(y')(y'_1 … y'_n)

Here θ̂(y) is the best model for the sequence y. NML minimises the worst-case regret against the best
model in hindsight (Shtarkov 1987), because its regret is the same for every sequence. There are Kⁿ
sequences, so this is only feasible for tiny problems.

**NMAP** (normalized maximum a posteriori, Kakade et al. 2006; also "luckiness NML") takes the model
that maximises log p_θ(y) + log p(θ) instead, with a regulariser log p(θ), and then the same formula
(appendix D of the paper). CNML is NMAP on one new point: its regulariser is the log-likelihood of
the training data,

    θ̂_y = argmax_θ  log p_θ(y|x) + log p(θ),    log p(θ) = Σ_i log p_θ(y_i|x_i) [+ log prior].

With a prior it is CNMAP. ACNML is NMAP on one new point too: it replaces this regulariser by
log q(θ) of an approximate posterior.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from acnml.exact.newton import Rows, maximise
from acnml.exact.problem import LogisticProblem

MOST_SEQUENCES = 2**20
AT_ONCE = 2**14  # sequences per batch


class Nml(NamedTuple):
    """The NML distribution over all S = Kⁿ label sequences of n points.

    >>> nml(torch.tensor([[0.5], [1.0]])).sequences.shape  # of two labels
    torch.Size([4, 2])
    """

    sequences: Tensor  # (S, n) labels, in lexicographic order
    log_lik: Tensor  # (S,) log p_θ̂(y)(y), the log-likelihood of the best model for each sequence
    converged: Tensor  # (S,) bool
    limit: Tensor  # (S,) bool, whether there is no finite maximum and `log_lik` is the supremum

    @property
    def log_probs(self) -> Tensor:
        """log p_NML (S,)."""
        return self.log_lik - self.complexity

    @property
    def complexity(self) -> Tensor:
        """The log of the normaliser, which is the regret of NML for every sequence."""
        return torch.logsumexp(self.log_lik, dim=0)

    def regret(self, log_probs: Tensor) -> Tensor:
        """Return the regret (S,) of a distribution over the sequences, given as `log_probs`."""
        return self.log_lik - log_probs


@torch.no_grad()
def nml(features: Tensor, l2: float | Tensor = 0.0, classes: int = 2) -> Nml:
    """Return NML for points with these features (n, d), or NMAP with a penalty l2 > 0.

    The arguments are those of `LogisticProblem`. The regret of NMAP is against the MAP of every
    sequence, so that a penalty leaves less to choose from:

    >>> points = torch.tensor([[0.5], [1.0]])
    >>> bool(nml(points, l2=10.0).complexity < nml(points).complexity)
    True
    """
    n = len(features)
    if classes**n > MOST_SEQUENCES:
        raise ValueError(
            f"{n} points with {classes} classes have {classes}^{n} label sequences, more than "
            f"{MOST_SEQUENCES:,}; use fewer points"
        )
    sequences = torch.tensor(list(itertools.product(range(classes), repeat=n)))
    sequences = sequences.to(features.device)
    problem = LogisticProblem(features, sequences[0], l2, classes)
    parts = [_solve(problem, labels) for labels in sequences.split(AT_ONCE)]
    return Nml(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))


def _solve(problem: LogisticProblem, labels: Tensor) -> Nml:
    rows = Rows.of(problem, labels)
    weights, _, converged, limit = maximise(rows)
    return Nml(labels, rows.log_lik(weights), converged, limit)
