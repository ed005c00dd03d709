"""The exact Laplace posterior of a logistic problem."""

from __future__ import annotations

import pytest
import torch

import acnml
from acnml.exact import LogisticProblem, fit, laplace, with_intercept
from logistic import grid_problem, make_problem


@pytest.mark.parametrize("classes", [2, 3])
def test_the_laplace_covariance_is_the_inverse_hessian(classes):
    problem = make_problem(60, 2, classes, 0.3)
    fitted = laplace(problem)
    mean = fitted.posterior.mean["0.weight"]
    codes = dict(fitted.classifier.parameters)["1.weight"]

    def loss(flat):
        logits = problem.features @ (codes @ flat.view_as(mean)).mT
        nll = torch.nn.functional.cross_entropy(logits, problem.labels, reduction="sum")
        return nll + 0.3 * flat.square().sum()

    hessian = torch.autograd.functional.hessian(loss, mean.flatten())
    torch.testing.assert_close(fitted.posterior.cov, torch.linalg.inv(hessian))
    torch.testing.assert_close(
        acnml.Map(fitted.classifier)(problem.features), fit(problem).log_probs(problem.features)
    )


def test_the_laplace_posterior_leaves_the_random_state_alone():
    state = torch.get_rng_state()
    laplace(make_problem(40, 2, 3, 0.3))
    assert torch.equal(torch.get_rng_state(), state)


def test_without_a_unique_maximum_there_is_no_laplace_posterior():
    with pytest.raises(ValueError, match="l2 > 0"):
        laplace(grid_problem([0, 0, 1, 1]))
    dependent = LogisticProblem(
        with_intercept(make_problem(40, 2, 2, 0.0).features), torch.arange(40) % 2
    )
    with pytest.raises(ValueError, match="l2 > 0"):
        laplace(dependent)
