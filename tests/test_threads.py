"""A predictor gives bitwise equal results in one and in many threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
from torch import nn

from acnml import Acnml, Bma, Classifier, Glm, Gradient, Linearised, Map, McDropout
from acnml.solve import Reference
from cases import CONV, MLP, eigen_kronecker, last_layer, normal

THREADS, CALLS = 8, 8


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
    model = case.model()
    predict = MAKERS[name](Classifier(model), model)
    inputs = [case.x(1 + i % 4) for i in range(CALLS)]
    expected = [predict(x) for x in inputs]
    with ThreadPoolExecutor(THREADS) as pool:
        found = list(pool.map(lambda _: [predict(x) for x in inputs], range(THREADS)))
    assert all(torch.equal(a, b) for each in found for a, b in zip(each, expected, strict=True))


@pytest.mark.parametrize("case", [MLP, CONV], ids=lambda case: case.name)
@pytest.mark.parametrize("name", MAKERS)
def test_threads_may_start_with_a_new_classifier(name, case):
    """Several threads check a model for the first time, and cache facts about it, at once."""
    model, x = case.model(), case.x()
    expected = MAKERS[name](Classifier(model), model)(x)
    predict = MAKERS[name](Classifier(model), model)
    barrier = Barrier(THREADS)

    def together(_: int) -> torch.Tensor:
        barrier.wait()
        return predict(x)

    with ThreadPoolExecutor(THREADS) as pool:
        found = list(pool.map(together, range(THREADS)))
    assert all(torch.equal(each, expected) for each in found)


def test_dropout_masks_do_not_mix():
    model = nn.Sequential(nn.Linear(4, 30), nn.Dropout(0.5), nn.Linear(30, 3)).double()
    predict = McDropout(Classifier(model), samples=5, seed=1)
    expected = predict(normal(3, 4))
    with ThreadPoolExecutor(THREADS) as pool:
        found = list(pool.map(lambda _: predict(normal(3, 4)), range(5 * THREADS)))
    assert all(torch.equal(each, expected) for each in found)
