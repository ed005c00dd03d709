"""Reference equals the paper's update with a dense Σ."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from acnml import Classifier
from acnml._util.batches import size, take
from acnml.solve import Reference
from cases import MODELS, POSTERIORS, normal
from dense import literal_acnml
from predicting import every_case


@every_case
@pytest.mark.parametrize(("alpha", "steps", "step_size"), [(1.0, 5, 0.5), (0.3, 10, 0.25)])
def test_equals_the_literal_update(case, build, alpha, steps, step_size):
    model, x = case.model(), case.x(2)
    posterior = build(model)
    solver = Reference(steps, step_size, rows_at_once=4)
    with torch.no_grad():
        solution = solver(Classifier(model), posterior.scaled(alpha), x)
    for i in range(size(x)):
        for label in range(3):
            log_lik, residual = literal_acnml(
                model, posterior, take(x, slice(i, i + 1)), label, alpha, steps, step_size
            )
            assert abs(solution.log_lik[i, label] - log_lik) < 1e-10
            assert abs(solution.residual[i, label] - residual) < 1e-10


@pytest.mark.parametrize("rows_at_once", [1, 2, 7, 1000])
def test_the_blocking_of_rows_does_not_matter(rows_at_once):
    case = MODELS[2]
    model, x = case.model(), case.x(5)
    posterior = POSTERIORS["diagonal"](model)
    expected = Reference()(Classifier(model), posterior, x)
    actual = Reference(rows_at_once=rows_at_once)(Classifier(model), posterior, x)
    torch.testing.assert_close(actual.log_lik, expected.log_lik, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(actual.residual, expected.residual, rtol=1e-11, atol=1e-12)


def test_residual_vanishes_at_convergence():
    case = MODELS[1]
    model, x = case.model(), case.x(2)
    posterior = POSTERIORS["kronecker_eigen"](model)
    residuals = [
        Reference(steps)(Classifier(model), posterior, x).residual.max() for steps in (0, 5, 150)
    ]
    assert residuals[0] > 10 * residuals[1] > 1e-3
    assert residuals[2] < 1e-10


def test_no_steps_is_the_model_at_the_mean():
    case = MODELS[0]
    model, x = case.model(), case.x()
    solution = Reference(steps=0)(Classifier(model), POSTERIORS["diagonal"](model), x)
    torch.testing.assert_close(solution.log_lik, model(x).log_softmax(-1), rtol=1e-14, atol=1e-14)


class Recurrent(nn.Module):
    """Data-dependent control flow, which vmap does not support."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(3, 3)

    def forward(self, x):
        state = self.cell(x)
        return self.cell(state) if bool(state.isfinite().all()) else state


def test_a_model_that_vmap_cannot_take_runs_row_by_row():
    model, x = Recurrent().double(), normal(2, 3)
    posterior = POSTERIORS["diagonal"](model)
    with pytest.raises(ValueError, match=r"Reference\(rows_at_once=1\), which runs it row by row"):
        Reference()(Classifier(model), posterior, x)
    solution = Reference(rows_at_once=1)(Classifier(model), posterior, x)
    log_lik, _ = literal_acnml(model, posterior, x[1:], 2, 1.0, 5, 0.5)
    assert abs(solution.log_lik[1, 2] - log_lik) < 1e-10
