"""The Laplace posterior of a logistic regression, with its full covariance.

It allows comparing the library's predictors with exact CNMAP: `Acnml` with this posterior is the
version of ACNML that section 3.2 of the paper analyses.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import skip_init

from acnml.classifier import Classifier
from acnml.exact.problem import LogisticProblem
from acnml.exact.refit import Fit, fit
from acnml.exact.regressions import Design, Rows
from acnml.posteriors import LowRank


class Laplace(NamedTuple):
    """A logistic regression in the form that the predictors take; inputs are feature vectors.

    >>> problem = LogisticProblem(torch.eye(2), torch.tensor([0, 1]), l2=1.0)
    >>> laplace(problem).posterior
    LowRank(2 parameters: 0.weight)
    """

    classifier: Classifier
    posterior: LowRank
    fit: Fit


@torch.no_grad()
def laplace(problem: LogisticProblem) -> Laplace:
    """Return N(θ̂, H⁻¹), with θ̂ the MAP and H the Hessian of the negative log-posterior there.

    H = Σ_i ∇²loss_i + 2λI sums over the training set and is not divided by n. The covariance is
    exact. It is stored as Σ = F Fᵀ in a `LowRank` posterior without a diagonal part.

    >>> problem = LogisticProblem(torch.eye(2), torch.tensor([0, 1]), l2=1.0)
    >>> import acnml
    >>> classifier, posterior, _ = laplace(problem)
    >>> acnml.Acnml(classifier, posterior)(torch.eye(2)).shape
    torch.Size([2, 2])
    """
    design, found = Design.of(problem), fit(problem)
    if bool(found.limit) or not bool(found.converged) or not design.knows_all_directions:
        raise ValueError(
            "the likelihood of the training set has no unique finite maximum, so there is no "
            "Laplace approximation; pass a penalty l2 > 0 to LogisticProblem"
        )
    weights = torch.linalg.lstsq(design.codes, found.weights)[0]  # (m, d), θ = C weights
    posterior = LowRank(
        mean={"0.weight": weights},
        var={"0.weight": torch.zeros_like(weights)},
        directions={"0.weight": _directions(design, weights)},
    )
    return Laplace(Classifier(_network(weights, design.codes)), posterior, found)


def _directions(design: Design, weights: Tensor) -> Tensor:
    """Return F (m·d, m, d) with Σ = F Fᵀ = H⁻¹ at weights (m, d).

    In the design's coordinates H = L Lᵀ, and the rows of L⁻¹ are these directions.
    """
    own = torch.linalg.solve(design.basis, weights.mT).mT.unsqueeze(0)  # V, weights = V Bᵀ
    _, hessians = Rows.without_own(design, torch.zeros_like(own)).derivatives(own)
    factor = torch.linalg.cholesky(hessians[0])
    inverse = torch.linalg.solve_triangular(factor, torch.ones_like(factor[0]).diag(), upper=False)
    return inverse.unflatten(-1, weights.shape) @ design.basis.mT


def _network(weights: Tensor, codes: Tensor) -> nn.Sequential:
    """Return the logits C V x as two Linear layers; the posterior covers the first."""
    like = {"bias": False, "device": weights.device, "dtype": weights.dtype}
    # Skip the initialisation, because it would change the global random state.
    layers = nn.Sequential(
        skip_init(nn.Linear, weights.shape[1], weights.shape[0], **like),
        skip_init(nn.Linear, codes.shape[1], codes.shape[0], **like),
    )
    layers.load_state_dict({"0.weight": weights, "1.weight": codes})
    return layers
