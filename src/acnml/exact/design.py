"""Coordinates for logistic regression in which the Hessian is not singular.

The Hessian of a multinomial logistic regression can be singular for two reasons. This module
removes both, once for all regressions that share the data:

- Adding the same vector to the weights of all classes does not change the probabilities. The
  weights are therefore written as θ = C V with a fixed code matrix C (K, m). For two classes,
  C = (0, 1)ᵀ and V is the only weight vector. For more classes, the columns of C are an orthonormal
  basis of the vectors that sum to zero. This loses nothing, because the penalised maximum lies in
  that subspace, and ‖θ‖ = ‖V‖.
- Without a penalty, the data may not determine the weights in some directions of feature space
  (constant or duplicate features, or more features than points). These directions are dropped, and
  the others are whitened: features become x B, where B maps (XᵀX + diag λ)/n to the identity.

The Hessian can then be nearly singular only where probabilities saturate, whatever the units of the
features.

As in every exponential family, labels enter only through a sufficient statistic. It is
T = Σ_i Cᵀe_{y_i} x_iᵀ, and the log-likelihood is ⟨V, T⟩ - Σ_i logsumexp(C V x_i).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from acnml.exact.problem import LogisticProblem

# A query counts as outside the span of the data if its distance from it, relative to its length, is
# larger than this.
OUTSIDE = 1e-9


@final
@dataclass(frozen=True, eq=False)
class Design:
    """The data and the penalty in the coordinates of the module docstring, shared by all rows.

    Attributes:
        features: the data in the basis, X (n, r).
        products: x_i x_iᵀ, flattened to (n, r²). Every Hessian is a weighted sum of them.
        penalty: Λ (r, r). The objective contains - tr(V Λ Vᵀ).
        free: the orthogonal projector (r, r) onto the directions without a penalty.
        codes: C (K, m), the code matrix.
        basis: B (d, r), the whitening matrix.
    """

    features: Tensor
    products: Tensor
    penalty: Tensor
    free: Tensor
    codes: Tensor
    basis: Tensor

    @staticmethod
    def of(problem: LogisticProblem) -> Design:
        """Transform a problem's features and penalty into these coordinates."""
        basis = whitening(problem.features, problem.penalty)
        features = problem.features @ basis
        penalty = basis.mT @ (problem.penalty.unsqueeze(-1) * basis)
        codes = class_codes(problem.classes).to(features.device)
        return Design(features, outer(features), penalty, null_projector(penalty), codes, basis)

    @property
    def classes(self) -> int:
        """The number of classes K."""
        return len(self.codes)

    @property
    def has_free_directions(self) -> bool:
        """Whether some direction has no penalty, so that a finite maximum may not exist."""
        return bool(self.free.any())

    def statistic(self, features: Tensor, labels: Tensor) -> Tensor:
        """Return T = Σ_i Cᵀe_{y_i} x_iᵀ (..., m, r) for features (n, r) and labels (..., n)."""
        return self.codes[labels].mT @ features

    @property
    def knows_all_directions(self) -> bool:
        """Whether the data or the penalty determine the weights in all feature directions."""
        return self.basis.shape[0] == self.basis.shape[1]

    def is_outside(self, x: Tensor) -> Tensor:
        """Return whether feature vectors (Q, d) have a component in a dropped direction."""
        rest = x - x @ self.basis @ torch.linalg.pinv(self.basis)
        return (rest.norm(dim=-1) > OUTSIDE * x.norm(dim=-1)) & (not self.knows_all_directions)

    def class_weights(self, weights: Tensor) -> Tensor:
        """Convert V (..., m, r) to one weight vector per class (..., K, d)."""
        return self.codes @ weights @ self.basis.mT


def class_codes(classes: int) -> Tensor:
    """Return the code matrix C (K, m), defined in the module docstring."""
    if classes == 2:
        return torch.tensor([[0.0], [1.0]], dtype=torch.float64)
    vectors = torch.eye(classes, dtype=torch.float64)
    vectors[:, 0] = 1
    return torch.linalg.qr(vectors)[0][:, 1:]


def whitening(features: Tensor, penalty: Tensor) -> Tensor:
    """Return B (d, r) with Bᵀ(XᵀX + diag λ)B/n = I, without directions where this is singular."""
    stacked = torch.cat([features, penalty.sqrt().diag()])
    _, sizes, directions = torch.linalg.svd(stacked, full_matrices=False)
    known = sizes > torch.finfo(features.dtype).eps * max(stacked.shape) * sizes[0]
    return directions[known].mT / sizes[known] * len(features) ** 0.5


def null_projector(penalty: Tensor) -> Tensor:
    """Return the orthogonal projector onto the null space of a positive semidefinite matrix."""
    values, vectors = torch.linalg.eigh(penalty)
    rounding = torch.finfo(penalty.dtype).eps * len(values)
    null = vectors * (values <= rounding * values.abs().amax()) if len(values) else vectors
    return null @ null.mT


def outer(features: Tensor) -> Tensor:
    """Return x xᵀ of every feature vector, flattened: (..., r) to (..., r²)."""
    return (features.unsqueeze(-1) * features.unsqueeze(-2)).flatten(-2)
