"""Solution: what every solver returns, and the errors of those that do not succeed.

ACNML asks for each label y how well the model can fit y at the input x without moving far from its
trained weights. The posterior q(θ) = N(μ, Σ) over the weights defines "far". For every label, a
solver finds the adapted weights

    θ̂_y = argmax_θ log p_θ(y|x) + log q(θ).

The prediction is p(y|x) = p_θ̂_y(y|x) / C(x), with the normaliser C(x) = Σ_y p_θ̂_y(y|x). Its
logarithm is called the regret. In the code, B is the number of inputs and K the number of classes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, final

import torch
from torch import Tensor

from acnml._util.checks import RowsError

# Largest residual of a label that counts as solved, in posterior standard deviations.
UNSOLVED = 0.1

# What to do about a posterior that is too wide to solve for.
REMEDY = "lower alpha, or use a narrower posterior"


class Solution(NamedTuple):
    """The likelihood of every label y under the weights θ̂_y that are adapted to it.

    `log_lik` is log p_θ̂_y(y|x), not normalised.

    `residual` measures how far θ̂_y is from the optimum. It is √(gᵀΣg), where g is the gradient of
    log p_θ(y|x) + log q(θ) at θ̂_y. It is zero at an optimum and dimensionless: a value of 0.1 means
    about a tenth of a posterior standard deviation. At a kink, as ReLU networks have them, no
    gradient vanishes, so such a label does not count as solved.

    `solved` is True where the residual is at most 0.1 (`UNSOLVED`). Elsewhere the answer is a rough
    one. Rows of `failed` inputs are NaN.

    >>> solution = acnml.Acnml(classifier, posterior).solve(torch.randn(5, 4))
    >>> solution.log_probs.shape, solution.regret.shape, bool(solution.solved.all())
    (torch.Size([5, 3]), torch.Size([5]), True)
    """

    log_lik: Tensor  # (B, K)
    residual: Tensor  # (B, K)

    @staticmethod
    def joined(parts: Iterable[Solution]) -> Solution:
        """Return the solutions of several parts of a batch as one."""
        return Solution(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))

    @property
    def solved(self) -> Tensor:
        """Whether each label is close enough to an optimum, (B, K)."""
        return self.residual <= UNSOLVED

    @property
    def failed(self) -> Tensor:
        """The inputs without an answer, (B,): see `Acnml`'s `on_error`."""
        return self.log_lik.isnan().any(-1)

    @property
    def log_probs(self) -> Tensor:
        """The ACNML distribution: log p_θ̂_y(y|x) - log C(x), (B, K)."""
        return torch.log_softmax(self.log_lik, dim=-1)

    @property
    def regret(self) -> Tensor:
        """log C(x) = log Σ_y p_θ̂_y(y|x), (B,): from 0 (one label fits) to log K (all fit)."""
        return torch.logsumexp(self.log_lik, dim=-1)


@final
class UnsolvedError(RowsError):
    """Raised when a solver diverges or stops far from an optimum. The message says what to do.

    >>> raise acnml.solve.UnsolvedError("too wide")
    Traceback (most recent call last):
    acnml.solution.UnsolvedError: too wide
    """


@final
class UnsolvedWarning(UserWarning):
    """Some answers are inaccurate: the solver stopped far from an optimum. See `Solution.solved`.

    >>> import warnings
    >>> warnings.simplefilter("ignore", acnml.solve.UnsolvedWarning)
    """
