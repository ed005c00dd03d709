"""CNML by refitting against the exact refit of logistic regression, found by scipy."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from scipy import optimize
from scipy.special import log_softmax
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from acnml import Acnml, Classifier, Refit, cnml_log_lik, fit_laplace_diagonal, tuning
from acnml.naive_cnml import _Training
from cases import MODELS, normal

# Labels that no line separates, so that the likelihood has a maximum.
X, Y = normal(12, 2), torch.tensor([0, 1, 2, 0, 1, 2, 0, 1, 2, 2, 1, 0])
QUERIES = normal(2, 2, seed=5)


def regression() -> nn.Linear:
    model = nn.Linear(2, 3).double()
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    return model


def exact_log_lik(query: Tensor, label: int) -> float:
    """log p_θ̂(y|x) of the θ̂ that is fitted to the data and the query."""
    inputs = torch.cat([X, query[None]]).numpy()
    labels = np.append(Y.numpy(), label)

    def log_lik(flat: np.ndarray) -> np.ndarray:
        weight, bias = flat[:6].reshape(3, 2), flat[6:]
        return log_softmax(inputs @ weight.T + bias, axis=1)[np.arange(13), labels]

    fit = optimize.minimize(lambda flat: -log_lik(flat).sum(), np.zeros(9), tol=1e-10)
    return float(log_lik(fit.x)[-1])


def exact(queries: Tensor) -> Tensor:
    rows = [[exact_log_lik(query, y) for y in range(3)] for query in queries]
    return torch.tensor(rows, dtype=torch.float64)


def test_many_epochs_of_full_batches_are_the_exact_refit():
    refit = Refit(epochs=200, learning_rate=2.0)
    actual = cnml_log_lik(Classifier(regression()), [(X, Y)], QUERIES[:1], refit)
    torch.testing.assert_close(actual, exact(QUERIES[:1]), rtol=0, atol=1e-4)


def test_batches_of_different_sizes_weigh_every_datum_the_same():
    """The losses that a pass descends average to the mean over the data."""
    model, sizes = MODELS[0].model(), [7, 1, 4]
    x, y = normal(12, 4), torch.arange(12) % 3
    training = _Training([], sizes, frozenset())
    batches = zip(x.split(sizes), y.split(sizes), strict=True)
    losses = [training.share(x) * nn.functional.cross_entropy(model(x), y) for x, y in batches]
    mean = nn.functional.cross_entropy(model(x), y)
    torch.testing.assert_close(torch.stack(losses).mean(), mean, rtol=1e-12, atol=0)


def fitted(model: nn.Module, x: Tensor, y: Tensor) -> nn.Module:
    """Train to the maximum of the likelihood."""
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=200, tolerance_change=1e-14)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        return loss

    optimizer.step(closure)
    model.zero_grad()
    return model


def test_every_label_is_explained_better_than_before():
    """The query is one of the data now: from their optimum on, its likelihood rises."""
    model = fitted(regression(), X, Y)
    before = Classifier(model).log_probs(QUERIES).detach()
    after = cnml_log_lik(Classifier(model), [(X, Y)], QUERIES, Refit(50, 0.1))
    assert (after > before).all()
    assert (after.logsumexp(1) > 0).all()  # the normaliser C(x) ≥ 1


@pytest.mark.parametrize("case", MODELS, ids=lambda case: case.name)
def test_trains_any_model_without_touching_it(case):
    model, y = case.model().train(), torch.arange(3)
    before = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    actual = cnml_log_lik(Classifier(model), [(case.x(), y)], case.x(2), Refit(epochs=1))
    assert actual.shape == (2, 3)
    assert (actual < 0).all()
    assert not actual.requires_grad
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert model.training
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(state, torch.get_rng_state())


def test_starts_at_the_weights_that_the_classifier_has():
    case = MODELS[1]
    moved = {"2.bias": torch.tensor([3.0, 0.0, -3.0]).double()}
    classifier = Classifier(case.model()).at(moved).tempered(2.0)
    actual = cnml_log_lik(classifier, [(case.x(), torch.arange(3))], case.x(), Refit(1, 1e-9))
    torch.testing.assert_close(actual, classifier.log_probs(case.x()).detach(), atol=1e-7, rtol=0)


def test_trains_only_the_parameters_that_are_named():
    """A bias alone cannot tell inputs apart: all queries have the same likelihoods."""
    model, refit = regression(), Refit(epochs=2, learning_rate=0.5)
    by_bias = cnml_log_lik(Classifier(model), [(X, Y)], QUERIES, refit, ["bias"])
    torch.testing.assert_close(by_bias[0], by_bias[1])
    by_all = cnml_log_lik(Classifier(model), [(X, Y)], QUERIES, refit, [model])
    assert not torch.allclose(by_all[0], by_all[1])


def test_the_seed_decides_the_order_of_the_data():
    loader = DataLoader(TensorDataset(X, Y), batch_size=2, shuffle=True)
    first, again, other = (
        cnml_log_lik(Classifier(regression()), loader, QUERIES[:1], Refit(1, 0.5, seed))
        for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_half_of_a_posterior_that_is_twice_too_wide_matches():
    """Only the difference of two classes' weights counts.

    Its variance is 1/h where the loss has the curvature h, but a diagonal posterior, blind to how
    the two weights vary together, gives each of them 1/h and their difference 2/h.
    """
    x = normal(100, 1)
    y = (torch.rand(100, generator=torch.Generator().manual_seed(0)) < x[:, 0].sigmoid()).long()
    model = fitted(nn.Linear(1, 2, bias=False).double(), x, y)
    classifier, queries = Classifier(model), torch.tensor([[-1.0], [2.0]])
    predictor = Acnml(classifier, fit_laplace_diagonal(classifier, [(x, y)], 1e-6))
    likelihoods = cnml_log_lik(classifier, [(x, y)], queries, Refit(100, 0.3))
    choice = tuning.alpha_matching_cnml(predictor, queries, likelihoods)
    assert choice.value == 0.5
    distances = {row.value: row.distance for row in choice.table}
    assert distances.pop(0.5) < 0.1 * min(distances.values())


@pytest.mark.parametrize(
    ("loader", "x", "message"),
    [
        ([], QUERIES, "the loader gave no batch"),
        (iter([(X, Y)]), QUERIES, "an iterator used up before"),
        ([X], QUERIES, "batch 0: it has no labels"),
        ([(X, Y), (X, Y + 1)], QUERIES, "batch 1: label 3 at index 2 is outside"),
        ([(X, Y)], QUERIES[:0], "the batch is empty"),
        ([(X, Y)], QUERIES * math.nan, "input x is NaN"),
    ],
)
def test_refuses_bad_data(loader, x, message):
    with pytest.raises(ValueError, match=message):
        cnml_log_lik(Classifier(regression()), loader, x)


def test_says_so_if_training_diverges():
    with pytest.raises(ValueError, match=r"batch 0: .*lower the learning rate"):
        cnml_log_lik(Classifier(regression()), [(1e6 * X, Y)], QUERIES, Refit(9, 1e300))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"epochs": 0}, "epochs must be at least 1"),
        ({"learning_rate": 0.0}, "learning_rate must be a positive"),
    ],
)
def test_refuses_bad_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        Refit(**settings)
