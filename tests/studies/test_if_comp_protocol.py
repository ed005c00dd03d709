"""The protocol of IF-COMP: knobs at equal price, medians and quartiles."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from acnml import metrics
from cases import normal
from studies.data import Labelled
from studies.if_comp import (
    CLEAN,
    EQUAL,
    METHODS,
    PLAIN,
    TEMPERATURE,
    IfCompStudy,
    Scored,
    largest,
    predictors,
    table,
    write_pages,
)


@pytest.fixture(scope="module")
def head():
    """An overconfident last layer with training and held-out features."""
    x = normal(900, 6)
    labels = (2 * x[:, :3] + normal(900, 3, seed=1)).argmax(-1)
    layer = nn.Linear(6, 3).double()
    with torch.no_grad():
        layer.weight.copy_(6 * torch.eye(3, 6))
        layer.bias.zero_()
    return layer, Labelled(x[:400], labels[:400]), Labelled(x[400:], labels[400:])


def test_all_methods_cost_the_same_on_held_out_data(head):
    layer, train, held_out = head
    methods = predictors(layer, train, held_out, price=0.02)
    assert tuple(methods) == METHODS
    nlls = {
        name: metrics.nll(predict(held_out.inputs), held_out.labels)
        for name, (_, predict) in methods.items()
    }
    assert nlls[TEMPERATURE] < nlls[PLAIN]
    for name in METHODS[2:]:
        assert nlls[name] == pytest.approx(nlls[TEMPERATURE] + 0.02, abs=1e-4)
    far = 20 * normal(50, 6, seed=3)
    for name in METHODS[2:]:  # and all are less confident than the best temperature
        confidence = methods[name][1](far).exp().amax(-1).mean()
        assert confidence <= methods[TEMPERATURE][1](far).exp().amax(-1).mean() + 1e-9


def test_the_first_knob_at_which_the_nll_exceeds_the_limit_is_taken():
    """Where the NLL falls again for large knobs, the estimate is no longer cautious."""
    held_out = Labelled(torch.zeros(1, 1), torch.zeros(1, dtype=torch.long))

    def family(knob: float) -> Callable[[Tensor], Tensor]:
        nll = np.interp(math.log(knob), [-4, -2, 0, 2, 4], [0.1, 0.5, 0.1, 0.1, 0.6])
        return lambda _: torch.tensor([[-nll, math.log(-math.expm1(-nll))]])

    assert math.log(largest(family, held_out, 0.3)) == pytest.approx(-3, abs=1e-6)


def test_the_table_has_medians_over_corruptions(tmp_path):
    eces = {CLEAN: 0.02, "fog": 0.1, "snow": 0.3, "frost": 0.5}
    study = IfCompStudy(
        networks=("resnet20",), corruptions=("fog", "snow", "frost"), severities=(5,)
    )

    def row(method: str, name: str) -> Scored:
        score = eces[name] + 0.01 * (method != EQUAL)
        return Scored("resnet20", name, 5 * (name != CLEAN), method, 1.0, 10, 0.5, 1.0, 0.5, score)

    rows = [row(method, name) for method in METHODS for name in eces]
    (line,) = [line for line in table(study, rows, "resnet20", "ece").rows if line[0] == EQUAL]
    assert line[2:] == ["**0.020**", "**0.300** (0.200, 0.400)"]
    assert write_pages(study, rows, tmp_path, "command").exists()
    told = "Median ECE of resnet20 at severity 5: temperature of equal price 0.300"
    assert told in (tmp_path / "results.md").read_text()
