"""Models in half precision, and fits under autocast, against the same weights in float64."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional

import acnml
from acnml import Acnml, Classifier, Glm, Gradient, Linearised, Map
from acnml.solve import Reference
from cases import MODELS, POSTERIORS, Case, diagonal, normal

HALVES = [torch.float16, torch.bfloat16]


class Way:
    """A way to run a model at low precision: in a dtype, or in float32 under autocast."""

    def __init__(self, dtype: torch.dtype, autocast: bool = False) -> None:
        self.dtype, self.autocast = dtype, autocast

    def context(self):
        return torch.autocast("cpu", torch.bfloat16) if self.autocast else nullcontext()

    def __repr__(self) -> str:
        return "autocast" if self.autocast else str(self.dtype)


WAYS = [*(Way(dtype) for dtype in HALVES), Way(torch.float32, autocast=True)]
each_way = pytest.mark.parametrize("way", WAYS, ids=repr)


def rounded(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The model in float64, with weights that the dtype holds exactly."""
    return copy.deepcopy(model).to(dtype).double()


@each_way
def test_factors_and_squares_are_those_of_what_the_model_computes(way):
    """For a last layer: its inputs, and √p (e - p), rounded to the precision of the logits."""
    model = rounded(MODELS[0].model(), torch.float16).to(way.dtype)
    x, classifier = (3 * normal(500, 4)).to(way.dtype), Classifier(model)
    data = [(x, torch.zeros(500, dtype=int))]
    with way.context():
        kronecker = acnml.fit.fit_curvature(classifier, data)
        squares = acnml.fit.fit_curvature(classifier, data, structure="diag").diagonal
        logits = model(x).detach()
    p = logits.double().softmax(-1)
    cotangents = p.sqrt()[:, :, None] * (torch.eye(3) - p[:, None])
    s, a = cotangents.to(logits.dtype).double(), functional.pad(x.double(), (0, 1), value=1)
    (_, A, G), close = kronecker.factors[0].normalised, {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(A.double(), a.T @ a / 500**0.5, **close)
    torch.testing.assert_close(G.double(), torch.einsum("nco,ncp->op", s, s) / 500**0.5, **close)
    expected = torch.einsum("nco,ni->oi", s**2, a**2)
    torch.testing.assert_close(squares["weight"].double(), expected[:, :-1], **close)
    torch.testing.assert_close(squares["bias"].double(), expected[:, -1], **close)
    assert {A.dtype, G.dtype, squares["weight"].dtype} == {torch.float32}


def trained() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """A confident network, its training data and their labels."""
    x = 3 * normal(1500, 4)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 1.5).long()
    with torch.random.fork_rng():
        torch.manual_seed(5)
        layers = nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3)
    model = nn.Sequential(*layers)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for _ in range(60):
        optimizer.zero_grad()
        functional.cross_entropy(model(x.float()), y).backward()
        optimizer.step()
    return model, x, y


@pytest.mark.parametrize(
    ("layers", "prior_precision", "alpha", "added"),
    [(["4.weight", "4.bias"], 0.01, 0.1, 2e-3), (None, 1.0, 0.01, 3e-4)],
)
def test_kfac_adds_little_to_the_errors_of_the_model_itself(layers, prior_precision, alpha, added):
    model, x, y = trained()
    queries = 3 * normal(60, 4, seed=1)

    def predicted(way: Way) -> tuple[torch.Tensor, torch.Tensor]:
        classifier = Classifier(rounded(model, torch.bfloat16).to(way.dtype))
        with way.context():
            fitted = acnml.fit_laplace(
                classifier, [(x, y)], prior_precision=prior_precision, layers=layers
            )
        # Half precision has too few digits for small residuals.
        both = Acnml(classifier, fitted, alpha=alpha, on_unsolved="ignore"), Map(classifier)
        return tuple(predict(queries).double().exp() for predict in both)

    exact = predicted(Way(torch.float64))
    for way in WAYS:
        pairs = zip(predicted(way), exact, strict=True)
        acnml_error, map_error = ((actual - wanted).abs().mean() for actual, wanted in pairs)
        assert acnml_error < map_error + added, way


@pytest.mark.parametrize("case", MODELS, ids=lambda case: case.name)
@pytest.mark.parametrize("structure", ["kron", "diag"])
def test_autocast_is_no_reason_to_refuse_a_model(case, structure):
    model = case.model()
    data = [(case.x(20), torch.arange(20) % 3)]
    expected = acnml.fit_laplace(model, data, structure=structure)
    with torch.autocast("cpu", torch.bfloat16):
        fitted = acnml.fit_laplace(copy.deepcopy(model).float(), data, structure=structure)
    v = {name: normal(*tensor.shape) for name, tensor in expected.mean.items()}
    moved, exactly = fitted.to("cpu", torch.float64).cov_mv(v), expected.cov_mv(v)
    for name in v:
        torch.testing.assert_close(moved[name], exactly[name], rtol=0.02, atol=0.02)


def rules(classifier: Classifier, posterior: acnml.posteriors.Posterior, alpha: float) -> list:
    solvers = Linearised(), Gradient(2, 0.25), Reference(2, 0.25)
    return [
        *(Acnml(classifier, posterior, solver, alpha, "ignore") for solver in solvers),
        Glm(classifier, posterior.scaled(alpha)),
    ]


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", POSTERIORS)
@pytest.mark.parametrize("case", MODELS[1:4], ids=lambda case: case.name)
@pytest.mark.parametrize("size", [1e-12, 1e6])
def test_covariances_of_any_size_keep_their_meaning_in_half_precision(
    case: Case, name, size, dtype
):
    """As float16, variances of 1e-12 are 0 and those of 1e6 infinite; alpha makes them usual."""
    exact = rounded(case.model(), dtype)
    posterior = POSTERIORS[name](exact).scaled(size)
    low = Classifier(copy.deepcopy(exact).to(dtype))
    expected = rules(Classifier(exact), posterior, alpha=1 / size)
    for actual, wanted in zip(rules(low, posterior, alpha=1 / size), expected, strict=True):
        p, q = (predict(case.x()).double().exp() for predict in (actual, wanted))
        torch.testing.assert_close(p, q, rtol=0, atol=0.02)


def test_a_model_in_two_precisions_takes_a_posterior_over_both():
    class Mixed(nn.Module):
        def __init__(self, narrow: torch.dtype, wide: torch.dtype) -> None:
            super().__init__()
            self.trunk, self.narrow = nn.Linear(4, 5, dtype=narrow), narrow
            self.head, self.wide = nn.Linear(5, 3, dtype=wide), wide

        def forward(self, x):
            return self.head(torch.tanh(self.trunk(x.to(self.narrow))).to(self.wide))

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, exact = Mixed(torch.bfloat16, torch.float32), Mixed(torch.float64, torch.float64)
    exact.load_state_dict(model.state_dict())
    posterior = diagonal(exact)
    expected = rules(Classifier(exact), posterior, alpha=0.1)
    for actual, wanted in zip(rules(Classifier(model), posterior, 0.1), expected, strict=True):
        p, q = (predict(normal(5, 4).float()).double().exp() for predict in (actual, wanted))
        torch.testing.assert_close(p, q, rtol=0, atol=0.02)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_bayes_by_backprop_moves_weights_by_less_than_half_precision_can_hold(dtype):
    """The length of Adam's first step is the learning rate."""
    model, data = MODELS[0].model().to(dtype), [(normal(30, 4, seed=1), torch.arange(30) % 3)]
    posterior = acnml.fit_bayes_by_backprop(Classifier(model), data, epochs=1, learning_rate=1e-5)
    for name, start in model.named_parameters():
        moved = (posterior.mean[name].double() - start.detach().double()).abs()
        torch.testing.assert_close(moved, torch.full_like(moved, 1e-5), rtol=0.02, atol=0)
