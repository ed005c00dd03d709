"""Newton's method in logit space on difficult problems."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from acnml import Acnml, Classifier, Linearised, LowRank
from acnml._algebra.convex import solve_logits
from acnml._algebra.kernels import DenseKernel
from cases import normal


@pytest.mark.parametrize("scale", [1e4, 1e6])
def test_newton_solves_large_low_rank_kernels(scale):
    root = normal(20, 10, 3)
    logits, kernel = normal(20, 10, seed=1), scale * root @ root.mT
    solved = solve_logits(logits, DenseKernel(kernel), torch.arange(10), 1e-5, 50)
    assert solved.residual.max() < 1e-2


def test_newton_solves_far_inputs_or_says_so():
    model = nn.Linear(3, 10, bias=False)
    classifier = Classifier(model)
    mean = classifier.copy_parameters(["weight"])
    directions = {"weight": normal(3, 10, 3).float()}
    wide = LowRank(mean, {"weight": torch.full_like(mean["weight"], 1e-6)}, directions)
    solution = Acnml(classifier, wide).solve(100 * normal(6, 3).float())
    assert solution.residual.max() < 0.1
    with pytest.raises(ValueError, match="not solved after 1 Newton steps: a residual of"):
        Acnml(classifier, wide, Linearised(newton_steps=1))(100 * normal(6, 3).float())
