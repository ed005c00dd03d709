"""Detecting other data: scores, and how well they tell, against scikit-learn."""

from __future__ import annotations

import math

import pytest
import torch
from sklearn.metrics import roc_auc_score, roc_curve

from studies.engine.results import detected, entropy, log_confidence, scores
from studies.rotated_mnist import methods


def test_detection_agrees_with_scikit_learn():
    generator = torch.Generator().manual_seed(0)
    inside, outside = (
        {"log_lik": -scale * torch.rand(50, 4, generator=generator, dtype=torch.float64)}
        for scale in (5, 2)
    )
    truth = [0] * 50 + [1] * 50
    for name in ("regret", "entropy", "max-probability"):
        pair = scores(inside)[name], scores(outside)[name]
        found, both = detected(methods.ACNML_HEAD, 0, name, *pair), torch.cat(pair)
        assert found.auroc == pytest.approx(roc_auc_score(truth, both))
        false, true, _ = roc_curve(truth, both, drop_intermediate=False)
        assert found.fpr95 == pytest.approx(false[true >= 0.95][0])


def test_scores_of_known_distributions():
    uniform = torch.full((1, 4), math.log(0.25), dtype=torch.float64)
    certain = torch.tensor([[0.0, -math.inf]], dtype=torch.float64)
    assert entropy(uniform).item() == pytest.approx(math.log(4))
    assert entropy(certain).item() == 0
    assert log_confidence(uniform).item() == pytest.approx(math.log(0.25))
    regret = scores({"log_lik": torch.zeros(1, 4)})["regret"]
    assert regret.item() == pytest.approx(math.log(4))
