"""Results are bitwise equal in one and in many threads, and small fits use one."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import ClassVar

import pytest
import torch
from torch import nn

import acnml
from acnml import (
    Acnml,
    Bma,
    Classifier,
    Glm,
    Gradient,
    Linearised,
    Map,
    McDropout,
    calibrate,
    fit_bayes_by_backprop,
    fit_laplace,
    fit_swag,
)
from acnml import classifier as classifier_module
from acnml._util import torch_state
from acnml.fit import BayesByBackprop
from acnml.solve import Reference
from cases import CONV, MLP, eigen_kronecker, last_layer, normal

THREADS = 8


MAKERS = {
    "map": lambda c, m: Map(c),
    "bma": lambda c, m: Bma(c, eigen_kronecker(m), samples=3),
    "glm": lambda c, m: Glm(c, eigen_kronecker(m)),
    "last layer": lambda c, m: Acnml(c.tempered(1.3), last_layer(m), alpha=0.3),
    "linearised": lambda c, m: Acnml(
        c, eigen_kronecker(m), Linearised("network", polish=3, polish_tolerance=1e-9), alpha=0.2
    ),
    "gradient": lambda c, m: Acnml(c, eigen_kronecker(m), Gradient(2, 0.3), 0.2, "ignore"),
    "reference": lambda c, m: Acnml(c, eigen_kronecker(m), Reference(2, 0.3), 0.2, "ignore"),
}


@pytest.mark.parametrize("case", [MLP, CONV], ids=lambda case: case.name)
@pytest.mark.parametrize("name", MAKERS)
def test_threads_get_the_numbers_of_one_thread(name, case):
    """They check the model for the first time, and cache facts about it, at once."""
    model, inputs = case.model(), [case.x(1 + i) for i in range(3)]
    expected = [MAKERS[name](Classifier(model), model)(x) for x in inputs]
    predict, barrier = MAKERS[name](Classifier(model), model), Barrier(THREADS)

    def together(_: int) -> list[torch.Tensor]:
        barrier.wait()
        return [predict(x) for x in inputs]

    with ThreadPoolExecutor(THREADS) as pool:
        found = list(pool.map(together, range(THREADS)))
    assert all(torch.equal(a, b) for each in found for a, b in zip(each, expected, strict=True))


@pytest.mark.filterwarnings("ignore")  # of few validation data
@pytest.mark.parametrize("rule", ["closed-form", "acnml"])
def test_calibrated_answers_are_bit_equal_in_threads(rule):
    model, x = MLP.model(), MLP.x(600)
    labels = model(x).detach().add(normal(600, 3, seed=1)).argmax(-1)
    data = (x[:300], labels[:300]), (x[300:], labels[300:])
    calibrated = acnml.calibrate(model, *data, rule=rule, price=0.1, progress=False)
    expected = [calibrated(x[i : i + 3]).probs for i in range(100)]

    def all_equal(_: int) -> bool:
        found = (calibrated(x[i : i + 3]).probs for i in range(100))
        return all(map(torch.equal, found, expected))

    with ThreadPoolExecutor(THREADS) as pool:
        assert all(pool.map(all_equal, range(THREADS)))


def test_dropout_masks_do_not_mix():
    model = nn.Sequential(nn.Linear(4, 30), nn.Dropout(0.5), nn.Linear(30, 3)).double()
    predict = McDropout(Classifier(model), samples=5, seed=1)
    expected = predict(normal(3, 4))
    with ThreadPoolExecutor(THREADS) as pool:
        found = list(pool.map(lambda _: predict(normal(3, 4)), range(5 * THREADS)))
    assert all(torch.equal(each, expected) for each in found)


class Noting(nn.Module):
    """Notes how many threads torch has in every forward pass."""

    noted: ClassVar[list[int]] = []  # of all copies

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3).double()
        self.noted.clear()

    def forward(self, x):
        self.noted.append(torch.get_num_threads())
        return self.inner(x)


X, Y = normal(12, 4), torch.arange(12) % 3
FITS = {
    "laplace": lambda model, data: fit_laplace(model, data),
    "swag": lambda model, data: fit_swag(model, data, epochs=2, learning_rate=0.5).diagonal(),
    "by backprop": lambda model, data: fit_bayes_by_backprop(model, data, epochs=2),
}


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("fit", FITS.values(), ids=FITS)
def test_fits_of_small_networks_use_one_thread_and_restore_the_number(fit, two_threads):
    model = Noting()
    found = fit(model, [(X, Y)])
    assert set(Noting.noted) == {1}
    with pytest.raises(ValueError, match="label 7 is outside"):
        fit(model, [(X, torch.full_like(Y, 7))])
    assert torch.get_num_threads() == 2
    torch.set_num_threads(1)
    again = fit(model, [(X, Y)])
    v = {name: torch.ones_like(tensor) for name, tensor in found.mean.items()}
    both = (torch.cat([t.flatten() for t in p.cov_mv(v).values()]) for p in (found, again))
    assert torch.equal(*both)


@pytest.mark.parametrize("fit", FITS.values(), ids=FITS)
def test_fits_of_large_networks_use_all_threads(fit, two_threads, monkeypatch):
    monkeypatch.setattr(torch_state, "SMALL", 0)
    fit(Noting(), [(X, Y)])
    assert set(Noting.noted) - {1} == {2}  # 1 where the products are counted


PREDICTORS = {
    "all layers": lambda c, q: Acnml(c, q, alpha=0.1),
    "network": lambda c, q: Acnml(c, q, Linearised("network"), 0.1, "ignore"),
    "bma": lambda c, q: Bma(c, q, samples=3),
    "glm": Glm,
}


@pytest.mark.parametrize("make", PREDICTORS.values(), ids=PREDICTORS)
def test_predictions_of_small_networks_use_one_thread_and_restore_the_number(make, two_threads):
    classifier = Classifier(Noting())
    predict = make(classifier, fit_laplace(classifier, X))
    predict(X)  # the first call also checks the model
    Noting.noted.clear()
    predict(X)
    assert set(Noting.noted) == {1}
    with pytest.raises(ValueError, match="NaN"):
        predict(X * torch.nan)
    assert torch.get_num_threads() == 2


@pytest.mark.filterwarnings("ignore")  # of few validation data
def test_a_calibration_of_a_small_network_uses_one_thread_and_restores_the_number(two_threads):
    model, x = Noting(), normal(60, 4)
    labels = model(x).argmax(-1)
    labels[::5] = (labels[::5] + 1) % 3
    model.noted.clear()
    calibrated = calibrate(model, (x, labels), (x + 0.1, labels))
    Noting.noted[:1] = []  # the first run asks for the shape of the outputs
    calibrated.probs(X)
    assert set(Noting.noted) == {1}
    with pytest.raises(ValueError, match="NaN"):
        calibrate(model, (x, labels), (x * torch.nan, labels))
    assert torch.get_num_threads() == 2


def test_a_step_of_a_loop_of_ones_own_uses_one_thread(two_threads):
    BayesByBackprop(Noting(), data=12).step(X, Y)
    assert set(Noting.noted) == {1}
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize(
    ("model", "x", "products"),
    [
        (nn.Sequential(nn.Flatten(), nn.Linear(4, 5), nn.Linear(5, 3)), (1, 2, 2), 35),
        (nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(16, 3)), (2, 4, 4), 4 * 72 + 48),
        (nn.Sequential(nn.Bilinear(4, 4, 3)), None, math.inf),  # nobody counts its products
    ],
    ids=["mlp", "conv", "unknown"],
)
def test_the_products_of_a_forward_pass_are_counted(model, x, products):
    one = None if x is None else normal(1, *x)
    assert classifier_module._products(Classifier(model.double()), one) == products
