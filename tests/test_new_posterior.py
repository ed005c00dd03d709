"""A new posterior needs only four methods, thanks to the defaults of the base class."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from acnml import Acnml, Classifier, Glm, Gradient
from acnml._util.params import Params, scale
from acnml.posteriors import Posterior
from acnml.solve import Reference
from cases import MODELS, Case, diagonal
from test_solvers import MORE


@dataclass(frozen=True, eq=False)
class Isotropic(Posterior):
    """N(μ, s I) with only the four required methods."""

    mean: Params
    var: float

    def cov_mv(self, v: Params) -> Params:
        return scale(v, self.var)

    def sample(self, n: int, generator: torch.Generator) -> Params:
        raise AssertionError("the solvers do not sample")

    def log_prob(self, params: Params) -> Tensor:
        raise AssertionError("the solvers do not evaluate the density")

    def scaled(self, alpha: float) -> Isotropic:
        return Isotropic(self.mean, alpha * self.var)


def isotropic(model: nn.Module) -> Isotropic:
    return Isotropic(diagonal(model).mean, 0.4)


@pytest.mark.parametrize("case", [*MODELS, *MORE], ids=lambda case: case.name)
def test_fast_solvers_take_it(case: Case):
    model, x = case.model(), case.x(3)
    posterior, classifier = isotropic(model), Classifier(model)
    expected = Reference(4, 0.3)(classifier, posterior, x)
    found = Gradient(4, 0.3)(classifier, posterior, x)
    torch.testing.assert_close(found.log_lik, expected.log_lik, rtol=0, atol=1e-9)
    torch.testing.assert_close(found.residual, expected.residual, rtol=0, atol=1e-9)


@pytest.mark.parametrize("case", MODELS, ids=lambda case: case.name)
def test_predictors_take_it(case: Case):
    """It equals a diagonal posterior with the same variances."""
    model, x = case.model(), case.x(3)
    posterior, base = isotropic(model), diagonal(model)
    same = type(base)(base.mean, {n: torch.full_like(t, 0.4) for n, t in base.mean.items()})
    classifier = Classifier(model)
    for make in (
        lambda q: Acnml(classifier, q, on_unsolved="ignore"),
        lambda q: Glm(classifier, q),
    ):
        torch.testing.assert_close(make(posterior)(x), make(same)(x), rtol=0, atol=1e-8)
