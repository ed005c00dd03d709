"""A search over the hyperparameters of a last layer runs the network once."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from acnml import Acnml, Classifier, Linearised, Map, tuning
from acnml.fit import fit_curvature
from acnml.tuning import sweep
from cases import normal

ALPHAS = (0.01, 0.1, 1.0)


class Counting(nn.Module):
    """Counts the batches that pass through it, whichever copy they pass."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 3)
        self.calls: list[int] = []

    def __deepcopy__(self, memo):
        copy = Counting().double()
        copy.load_state_dict(self.state_dict())
        copy.calls = self.calls
        return copy

    def forward(self, x):
        self.calls.append(len(x))
        return self.head(torch.tanh(self.body(x)))


@pytest.fixture
def setting():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Counting().double()
    x = normal(60, 4, seed=3)
    labels = model(x).argmax(-1)
    labels[::5] = 0
    loader = [(x[i : i + 20], labels[i : i + 20]) for i in (0, 20, 40)]
    classifier = Classifier(model)
    curvature = fit_curvature(classifier, loader, layers=[model.head])
    predictor = Acnml(classifier, curvature.posterior(1.0))
    predictor(x[:8])  # the model is checked when it is first seen
    model.calls.clear()
    return model, loader, predictor, curvature


def passes(model) -> float:
    return sum(model.calls) / 60


def test_the_largest_harmless_alpha(setting):
    model, loader, predictor, _ = setting
    choice = tuning.largest_harmless_alpha(predictor, loader, ALPHAS)
    assert passes(model) == 1
    at_mean = Map(predictor.classifier.at(predictor.posterior.mean))
    expected = [sweep(lambda _: at_mean, [0.0], loader)[0]]
    expected += [row_of(replace(predictor, alpha=alpha), alpha, loader) for alpha in ALPHAS]
    for row, other in zip(choice.table, expected, strict=True):
        assert row[:5] == pytest.approx(other, abs=1e-9)


def row_of(predictor, value, loader):
    """Scores from predictions for the inputs themselves."""
    from acnml import metrics

    log_probs = torch.cat([predictor(x) for x, _ in loader])
    labels = torch.cat([y for _, y in loader])
    return (value, *metrics.summary(log_probs, labels).values())


def test_within_price(setting):
    model, loader, predictor, _ = setting
    tuning.within_price(
        lambda alpha: replace(predictor, alpha=alpha),
        loader,
        price=0.05,
        reference=Map(predictor.classifier),
    )
    assert passes(model) == 1


def test_prior_precision(setting):
    model, loader, predictor, curvature = setting
    choice = tuning.least_nll(
        lambda tau: Acnml(predictor.classifier, curvature.posterior(tau)), [0.1, 1.0, 10.0], loader
    )
    assert passes(model) == 1
    for row in choice.table:
        expected = Acnml(predictor.classifier, curvature.posterior(row.value))
        assert row == pytest.approx(row_of(expected, row.value, loader), abs=1e-9)


def test_matching_cnml(setting):
    model, loader, predictor, _ = setting
    x = loader[0][0]
    target = replace(predictor, alpha=0.1).log_lik(x)
    model.calls.clear()
    choice = tuning.alpha_matching_cnml(predictor, x, target, ALPHAS)
    assert sum(model.calls) == len(x)
    assert choice.value == 0.1


def test_other_views_do_not_share_features(setting):
    """A different temperature, weights or solver give different predictions."""
    _, loader, predictor, _ = setting
    moved = {n: t + 0.1 for n, t in predictor.classifier.copy_parameters(["body.weight"]).items()}
    others = {
        1.0: predictor,
        2.0: replace(predictor, classifier=predictor.classifier.tempered(1.5)),
        3.0: replace(predictor, classifier=predictor.classifier.at(moved)),
        4.0: replace(predictor, solver=Linearised(negligible=0.0)),
    }
    table = sweep(lambda value: others[value], list(others), loader)
    for row in table:
        expected = row_of(others[row.value], row.value, loader)
        assert row == pytest.approx(expected, abs=1e-9)
