"""Glm: its two links compared with formulas and integrals."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from acnml import Bma, Classifier, Glm
from acnml.predictors import LogitSampling
from acnml.problem import Problem
from cases import LINEAR, diagonal, normal, spd
from predicting import FINE, each_case, moments_of


@each_case
def test_probit_is_its_formula(case, build):
    model = case.model()
    moments = moments_of(Classifier(model), build(model), case.x())
    var = torch.stack([kernel.diag() for kernel in moments.kernel])
    expected = (moments.logits / torch.sqrt(1 + math.pi / 8 * var)).log_softmax(-1)
    torch.testing.assert_close(Glm(Classifier(model), build(model))(case.x()), expected, **FINE)


def two_class_moments(n: int = 6) -> Problem:
    """Means and kernels of two classes, the last kernels singular."""
    kernel = 3 * spd(n, 2, seed=5)
    kernel[-1] = torch.tensor([[4.0, -2.0], [-2.0, 1.0]])
    return Problem(2 * normal(n, 2, seed=6), kernel)


def sigmoid_moments(mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
    """E σ(d) and Var σ(d) for d ~ N(mean, var), by Gauss-Hermite quadrature."""
    nodes, weights = (torch.from_numpy(v) for v in np.polynomial.hermite.hermgauss(100))
    values = (mean[:, None] + (2 * var[:, None]).sqrt() * nodes).sigmoid()
    weights = weights / weights.sum()
    first, second = values @ weights, values**2 @ weights
    return first, second - first**2


def test_logit_sampling_converges_to_the_integral():
    moments, n = two_class_moments(), 20_000
    kernel = moments.kernel
    var = kernel[:, 0, 0] + kernel[:, 1, 1] - 2 * kernel[:, 0, 1]
    expected, spread = sigmoid_moments(moments.logits[:, 0] - moments.logits[:, 1], var)
    actual = LogitSampling(samples=n)(moments).exp()
    assert ((actual[:, 0] - expected).abs() < 4.5 * (spread / n).sqrt()).all()


def test_logit_sampling_draws_have_the_kernel_as_covariance():
    """The log-ratios of a sample are its logit differences, whose moments are known."""
    mean, kernel, n = normal(1, 3), 2 * spd(1, 3, seed=1), 4000
    problem = Problem(mean, kernel)
    draws = [LogitSampling(1, seed)(problem)[0] for seed in range(n)]
    gaps = torch.stack(draws)[:, :2] - torch.stack(draws)[:, 2:]
    contrast = torch.tensor([[1.0, 0, -1], [0, 1, -1]]).double()
    expected = contrast @ kernel[0] @ contrast.T
    errors = gaps.mean(0) - contrast @ mean[0]
    assert (errors.abs() < 4.5 * (expected.diag() / n).sqrt()).all()
    torch.testing.assert_close(gaps.T.cov(), expected, rtol=0.1, atol=0.1)


@pytest.mark.parametrize("kernel", [torch.zeros(3, 3), torch.ones(3, 3)])
def test_logits_that_only_move_together_are_certain(kernel):
    """Such kernels are singular, and softmax is invariant to the common shift."""
    logits = normal(2, 3)
    actual = LogitSampling(samples=7)(Problem(logits, kernel.double().expand(2, 3, 3)))
    torch.testing.assert_close(actual, logits.log_softmax(-1), rtol=1e-6, atol=1e-6)


def test_the_linearised_average_of_a_linear_model_is_the_average():
    """For a model that is linear in θ, Glm and Bma agree up to sampling error."""
    model, x = LINEAR.model(), LINEAR.x()
    glm = Glm(Classifier(model), diagonal(model), LogitSampling(samples=4000))(x)
    bma = Bma(Classifier(model), diagonal(model), samples=2000)(x)
    torch.testing.assert_close(glm.exp(), bma.exp(), rtol=0, atol=0.04)


def test_glm_says_when_a_model_cannot_be_vectorised():
    class Branching(nn.Module):
        def __init__(self):
            super().__init__()
            self.matrix = nn.Parameter(normal(4, 3))

        def forward(self, x):
            return (x if x.sum().item() > 0 else -x) @ self.matrix

    model = Branching()
    with pytest.raises(ValueError, match=r"torch\.func\.vmap cannot vectorise this model"):
        Glm(Classifier(model), diagonal(model))(normal(2, 4))
