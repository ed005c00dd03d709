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
from acnml.exact.newton import Rows
from acnml.exact.problem import LogisticProblem
from acnml.exact.refit import Fit, fit
from acnml.posteriors import Full


class Laplace(NamedTuple):
    """A logistic regression in the form that the predictors take; inputs are feature vectors.

    >>> problem = LogisticProblem(torch.eye(2), torch.tensor([0, 1]), l2=1.0)
    >>> laplace(problem).posterior
    Full(2 parameters: 0.weight)
    """

    classifier: Classifier
    posterior: Full
    fit: Fit


@torch.no_grad()
def laplace(problem: LogisticProblem) -> Laplace:
    """Return N(θ̂, H⁻¹), with θ̂ the MAP and H the Hessian of the negative log-posterior there.

    H = Σ_i ∇²loss_i + 2λI sums over the training set and is not divided by n. The covariance is
    exact.

    >>> problem = LogisticProblem(torch.eye(2), torch.tensor([0, 1]), l2=1.0)
    >>> classifier, posterior, _ = laplace(problem)
    >>> acnml.Acnml(classifier, posterior)(torch.eye(2)).shape
    torch.Size([2, 2])
    """
    rows, found = Rows.of(problem, problem.labels[None]), fit(problem)
    features, directions = rows.basis.shape
    if found.limit or not found.converged or directions < features:
        raise ValueError(
            "the likelihood of the training set has no unique finite maximum, so there is no "
            "Laplace approximation; pass a penalty l2 > 0 to LogisticProblem"
        )
    weights = torch.linalg.lstsq(rows.codes, found.weights)[0]  # (m, d), θ = C weights
    own = torch.linalg.solve(rows.basis, weights.mT).mT  # V, weights = V Bᵀ
    _, hessian = rows.derivatives(own.unsqueeze(0))
    basis = torch.block_diag(*[rows.basis] * len(weights))
    cov = basis @ torch.cholesky_inverse(torch.linalg.cholesky(hessian[0])) @ basis.mT
    posterior = Full({"0.weight": weights}, (cov + cov.mT) / 2)
    return Laplace(Classifier(_network(weights, rows.codes)), posterior, found)


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
