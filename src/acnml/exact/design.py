"""Logistic regression in coordinates in which its Hessian is never singular.

Two things would make it so, and both are removed here once, for all rows that share the data:

- Adding one vector to the weights of all classes changes no probability. Weights are written
  θ = C V with fixed codes C (K, m): for two classes C = (0, 1)ᵀ and V is the one weight vector; for
  more, the columns of C are an orthonormal basis of the vectors that sum to zero. The penalised
  maximum lies in that subspace anyway, and ‖θ‖ = ‖V‖.
- Directions of feature space that no data point and no penalty knows (constant, duplicate or too
  many features without a penalty) are left out: features are written x B, where B whitens the
  others, (XᵀX + diag λ)/n → I. So the Hessian can only come near to singular where probabilities
  saturate, whatever the units of the features.

Labels enter only through the sufficient statistic T = Σ_i Cᵀe_{y_i} x_iᵀ, as in every exponential
family: the log-likelihood is ⟨V, T⟩ - Σ_i logsumexp(C V x_i).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from acnml.exact.problem import LogisticProblem

# A query this far, relative to its length, from what the data span is taken to lie outside.
OUTSIDE = 1e-9


@final
@dataclass(frozen=True, eq=False)
class Design:
    """What all rows of a problem share.

    Attributes:
        features: the data in the basis, X (n, r).
        products: x_i x_iᵀ, flattened (n, r²): every row's Hessian is a weighted sum of them.
        penalty: Λ (r, r); the objective has - tr(V Λ Vᵀ).
        free: the orthogonal projector (r, r) onto the directions without penalty.
        codes: C (K, m).
        basis: B (d, r).
    """

    features: Tensor
    products: Tensor
    penalty: Tensor
    free: Tensor
    codes: Tensor
    basis: Tensor

    @staticmethod
    def of(problem: LogisticProblem) -> Design:
        """Bring a problem's features and penalty into the coordinates described above."""
        basis = whitening(problem.features, problem.penalty)
        features = problem.features @ basis
        penalty = basis.mT @ (problem.penalty.unsqueeze(-1) * basis)
        codes = class_codes(problem.classes).to(features.device)
        return Design(features, outer(features), penalty, null_projector(penalty), codes, basis)

    @property
    def classes(self) -> int:
        """K."""
        return len(self.codes)

    @property
    def has_free_directions(self) -> bool:
        """Whether some direction is not penalised, so that there may be no finite maximum."""
        return bool(self.free.any())

    def statistic(self, features: Tensor, labels: Tensor) -> Tensor:
        """Return T = Σ_i Cᵀe_{y_i} x_iᵀ (..., m, r) for features (n, r) and labels (..., n)."""
        return self.codes[labels].mT @ features

    @property
    def knows_all_directions(self) -> bool:
        """Whether data or penalty know every direction of feature space."""
        return self.basis.shape[0] == self.basis.shape[1]

    def is_outside(self, x: Tensor) -> Tensor:
        """Whether feature vectors (Q, d) leave the directions that data or penalty know."""
        rest = x - x @ self.basis @ torch.linalg.pinv(self.basis)
        return (rest.norm(dim=-1) > OUTSIDE * x.norm(dim=-1)) & (not self.knows_all_directions)

    def class_weights(self, weights: Tensor) -> Tensor:
        """Turn V (..., m, r) into a weight vector per class (..., K, d)."""
        return self.codes @ weights @ self.basis.mT


def class_codes(classes: int) -> Tensor:
    """Return C (K, m), see the head of this file."""
    if classes == 2:
        return torch.tensor([[0.0], [1.0]], dtype=torch.float64)
    vectors = torch.eye(classes, dtype=torch.float64)
    vectors[:, 0] = 1
    return torch.linalg.qr(vectors)[0][:, 1:]


def whitening(features: Tensor, penalty: Tensor) -> Tensor:
    """Return B (d, r) with Bᵀ(XᵀX + diag λ)B/n = I, of the directions that are known at all."""
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
