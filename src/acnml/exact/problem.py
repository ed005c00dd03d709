"""LogisticProblem: the data and the penalty of a logistic regression, binary or multinomial."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor
from torch.nn import functional

from acnml._util import checks


@final
@dataclass(frozen=True, eq=False)
class LogisticProblem:
    """Maximise over θ: Σ_i log p_θ(y_i|x_i) - Σ_j λ_j ‖w_j‖², with p_θ(y|x) ∝ exp(w_yᵀx).

    Here w_y is the weight vector of class y, and w_j are the weights of feature j. With two
    classes, class 1 has the only weight vector and class 0 has logit 0. With more classes, each
    class has its own weight vector. (Two classes with two vectors and penalty λ would be equivalent
    to one vector with penalty λ/2.) All computations are in double precision.

    Args:
        features: x (n, d). They are not standardised. For an intercept, append a feature of ones
            with `with_intercept`. It has the same penalty as the others unless `l2` is a vector.
        labels: y (n,), integers from 0 to classes - 1. Not every class needs to occur.
        l2: λ ≥ 0, one number for all features or one per feature (d,). λ = 0 gives maximum
            likelihood (CNML), and λ > 0 gives the MAP with the prior N(0, 1/2λ) (CNMAP).
        classes: the number of classes K.

    >>> features = with_intercept(torch.tensor([[0.0], [1.0], [2.0]]))
    >>> LogisticProblem(features, torch.tensor([0, 1, 1]), l2=torch.tensor([0.1, 0.0]))
    LogisticProblem(3 points, 2 features, 2 classes)
    """

    features: Tensor
    labels: Tensor
    l2: float | Tensor = 0.0
    classes: int = 2

    def __post_init__(self) -> None:
        require_features(self.features, "features")
        if self.labels.shape != (points := len(self.features),):
            raise ValueError(f"labels must have shape ({points},), got {tuple(self.labels.shape)}")
        if not ((self.labels >= 0) & (self.labels < self.classes)).all():
            raise ValueError(f"labels must lie between 0 and {self.classes - 1}")
        penalty = torch.as_tensor(self.l2, dtype=torch.float64, device=self.features.device)
        if not (torch.isfinite(penalty) & (penalty >= 0)).all():
            raise ValueError("l2 must be finite and not negative")
        object.__setattr__(self, "features", self.features.detach().double())
        object.__setattr__(self, "l2", penalty.expand(self.features.shape[1]))

    @property
    def penalty(self) -> Tensor:
        """λ_j of every feature (d,)."""
        assert isinstance(self.l2, Tensor)  # converted in __post_init__
        return self.l2

    def __repr__(self) -> str:
        n, d = self.features.shape
        return f"LogisticProblem({n} points, {d} features, {self.classes} classes)"


def with_intercept(features: Tensor) -> Tensor:
    """Append a feature of ones: (..., d) to (..., d + 1).

    >>> with_intercept(torch.tensor([[2.0], [3.0]]))
    tensor([[2., 1.],
            [3., 1.]])
    """
    return functional.pad(features, (0, 1), value=1.0)


def require_features(features: Tensor, what: str) -> None:
    """Raise an error unless `features` is a finite, non-empty matrix."""
    if features.ndim != 2 or 0 in features.shape:
        raise ValueError(f"{what} must be (points, features), got shape {tuple(features.shape)}")
    checks.require_finite(features, f"{what} are", "clean the data first")
