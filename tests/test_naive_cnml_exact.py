"""Naive CNML against exact refits found by scipy, and against ACNML."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import optimize
from scipy.special import log_softmax
from torch import Tensor, nn

from acnml import Classifier
from acnml.fit import Refit
from acnml.predictors import NaiveCnml
from cases import MODELS, normal
from refitting import QUERIES, Batches, X, Y, regression


def exact_log_lik(query: Tensor, label: int, weight_decay: float) -> float:
    """log p_θ̂(y|x) of the θ̂ that is fitted to the data and the query, found by scipy."""
    inputs = torch.cat([X, query[None]]).numpy()
    labels = np.append(Y.numpy(), label)

    def log_lik(flat: np.ndarray) -> np.ndarray:
        weight, bias = flat[:6].reshape(3, 2), flat[6:]
        return log_softmax(inputs @ weight.T + bias, axis=1)[np.arange(13), labels]

    def objective(flat: np.ndarray) -> float:
        return -log_lik(flat).sum() / len(X) + weight_decay / 2 * (flat @ flat)

    fit = optimize.minimize(objective, np.zeros(9), tol=1e-10)
    return float(log_lik(fit.x)[-1])


@pytest.mark.parametrize("weight_decay", [0.0, 0.2], ids=["CNML", "CNMAP"])
def test_many_epochs_of_full_batches_are_the_exact_refit(weight_decay):
    refit = Refit(epochs=400, learning_rate=2.0, weight_decay=weight_decay)
    actual = NaiveCnml(Classifier(regression()), [(X, Y)], refit).log_lik(QUERIES)
    rows = [[exact_log_lik(query, y, weight_decay) for y in range(3)] for query in QUERIES]
    torch.testing.assert_close(actual, torch.tensor(rows).double(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("sizes", [(12,), (4, 4, 4), (7, 1, 4), (11, 1)])
def test_the_steps_of_a_pass_average_to_a_step_down_the_whole_objective(sizes):
    """To first order in the learning rate ε, a pass moves the weights by -ε · steps · ∇F."""
    model, epsilon, weight_decay, label = MODELS[1].model(), 1e-7, 0.5, 1
    x, y, query = normal(12, 4), torch.arange(12) % 3, normal(1, 4, seed=3)
    refit = Refit(1, epsilon, momentum=0, weight_decay=weight_decay)
    after = NaiveCnml(Classifier(model), Batches(x, y, *sizes), refit).log_lik(query)[0, label]

    weights = list(model.parameters())
    log_lik = model(query).log_softmax(-1)[0, label]
    loss = nn.functional.cross_entropy(model(x), y, reduction="sum")
    penalty = sum(w.square().sum() for w in weights)
    objective = (loss - log_lik) / 12 + weight_decay / 2 * penalty
    gradients = (torch.autograd.grad(f, weights, retain_graph=True) for f in (log_lik, objective))
    slope = -sum((a * b).sum() for a, b in zip(*gradients, strict=True))
    moved = (after - log_lik.detach()) / (epsilon * len(sizes))
    torch.testing.assert_close(moved, slope, rtol=1e-5, atol=0)
