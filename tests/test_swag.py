"""SWAG: moments compared with those computed from all visited weights."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

import acnml
from acnml import Bma, Classifier, Swag, batch_norm_statistics, collect_swag, fit_swag
from acnml._util.params import flatten
from cases import MODELS, normal
from dense import covariance, vector

X, Y = normal(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])


def visited(model: nn.Module, n: int) -> torch.Tensor:
    """The n weight vectors (n, P) that a fake training run visits."""
    return torch.stack(
        [normal(sum(p.numel() for p in model.parameters()), seed=s) for s in range(n)]
    )


def collected(model: nn.Module, weights: torch.Tensor, swag: Swag) -> Swag:
    for point in weights:
        torch.nn.utils.vector_to_parameters(point, model.parameters())
        swag.update(model)
    return swag


def test_mean_and_variance_are_those_of_the_visited_weights():
    model = MODELS[1].model()
    weights = visited(model, 9)
    posterior = collected(model, weights, Swag()).diagonal()
    torch.testing.assert_close(vector(posterior.mean), weights.mean(0), rtol=1e-12, atol=1e-12)
    var = weights.var(0, correction=0)
    torch.testing.assert_close(vector(posterior.var), var, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("rank", [3, 20])
def test_low_rank_covariance_is_half_and_half(rank):
    """½ diag(var) + ½ D Dᵀ/(r - 1), D the deviations from the running mean at their time."""
    model = MODELS[1].model()
    weights = visited(model, 7)
    posterior = collected(model, weights, Swag(rank)).low_rank()
    running = torch.stack([weights[: i + 1].mean(0) for i in range(7)])
    D = (weights - running)[-rank:]
    expected = torch.diag(weights.var(0, correction=0)) / 2 + D.T @ D / (2 * (len(D) - 1))
    torch.testing.assert_close(covariance(posterior), expected, rtol=1e-11, atol=1e-12)


def test_variance_does_not_cancel():
    """For weights far from zero that vary little, a difference of squares would lose all digits."""
    model = nn.Linear(4, 3).float()
    swag = Swag()
    for shift in (0.0, 1e-3, 2e-3):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(100.0 + shift)
        swag.update(model)
    expected = torch.tensor([0.0, 1e-3, 2e-3]).var(correction=0)
    assert (vector(swag.diagonal().var) / expected - 1).abs().max() < 0.01


def test_covers_a_subset_and_half_precision_is_widened():
    model = MODELS[1].model().to(torch.bfloat16)
    swag = Swag(parameters=[model[2]])
    swag.update(model)
    swag.update(model)
    assert list(swag.mean) == ["2.weight", "2.bias"]
    assert swag.mean["2.bias"].dtype == torch.float32


# Of tests that are about something else; see test_stale_batch_norm_statistics_are_warned_of.
fits_batch_norm = pytest.mark.filterwarnings("ignore:the stored statistics of batch norm")


@fits_batch_norm
def test_collect_is_plain_sgd():
    """The same weights as a hand-written loop visits, batch norm and order included."""
    case = MODELS[2]
    model, data = case.model(), [(case.x(6), Y)] * 2
    swag = collect_swag(Classifier(model), data, epochs=3, learning_rate=0.05)
    trained, visited_weights = copy.deepcopy(model).train(), []
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.05, momentum=0.9)
    for _ in range(3):
        for x, y in data:
            optimizer.zero_grad()
            nn.functional.cross_entropy(trained(x), y).backward()
            optimizer.step()
        visited_weights.append(torch.nn.utils.parameters_to_vector(trained.parameters()).detach())
    expected = torch.stack(visited_weights).mean(0)
    torch.testing.assert_close(flatten(swag.mean, swag.mean), expected, rtol=1e-11, atol=1e-12)


@fits_batch_norm
def test_leaves_the_model_and_the_global_random_state_alone():
    model = nn.Sequential(
        nn.Linear(4, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, 3)
    ).double()
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    fits = [fit_swag(Classifier(model), [(X, Y)], epochs=3, seed=seed) for seed in (1, 1, 2)]
    assert torch.equal(vector(fits[0].var), vector(fits[1].var))
    assert not torch.equal(vector(fits[0].var), vector(fits[2].var))
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert torch.equal(state, torch.get_rng_state())


def test_only_the_covered_parameters_are_trained():
    model = MODELS[1].model()
    fitted = fit_swag(
        Classifier(model), [(X, Y)], epochs=3, learning_rate=0.1, parameters=[model[2]]
    )
    assert set(fitted.mean) == {"2.weight", "2.bias"}
    # With the body frozen the head's problem is convex, and SGD only goes down from where it was.
    assert not torch.equal(fitted.mean["2.weight"], model[2].weight)


@fits_batch_norm
def test_predicts_with_refreshed_batch_norm():
    case = MODELS[2]
    model, data = case.model(), [(case.x(6), Y)]
    classifier = Classifier(model)
    posterior = fit_swag(classifier, data, epochs=3)
    swa = classifier.at(
        {**posterior.mean, **batch_norm_statistics(classifier, data, posterior.mean)}
    )
    assert set(swa.overrides) == {*posterior.mean, "norm.running_mean", "norm.running_var"}
    log_probs = Bma(swa, posterior, samples=2).refreshed(data)(case.x())
    assert math.isclose(log_probs.exp().sum().item(), 3, abs_tol=1e-9)


def normed() -> nn.Module:
    body = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)
    return nn.Sequential(*body).double()


@pytest.mark.parametrize("fit", [fit_swag, collect_swag])
def test_stale_batch_norm_statistics_are_warned_of(fit):
    with pytest.warns(UserWarning, match="batch norm, first of layer '1', do not fit") as warned:
        fit(Classifier(normed()), [(X, Y)], epochs=2)
    assert [warning.filename for warning in warned] == [__file__]


def test_the_way_that_the_warning_names_fits_the_weights():
    """The network at the mean then has the statistics of a pass in training mode."""
    model, loader = normed(), [(X, Y)]
    classifier = Classifier(model)
    with pytest.warns(UserWarning, match="do not fit") as warned:
        posterior = fit_swag(classifier, loader, epochs=3, learning_rate=0.5)
    advice = str(warned[0].message).split("recompute them: ")[1].split("; ")
    names = {"acnml": acnml, "classifier": classifier, "loader": loader, "mean": posterior.mean}
    exec("\n".join(advice), names)
    trained = copy.deepcopy(model)
    trained.load_state_dict(posterior.mean, strict=False)
    torch.optim.swa_utils.update_bn(loader, trained)
    expected = trained.eval()(X).log_softmax(-1)
    torch.testing.assert_close(acnml.Map(names["classifier"])(X), expected, rtol=1e-10, atol=1e-12)
    stale = acnml.Map(classifier.at(posterior.mean))(X)
    assert (stale - expected).abs().max() > 0.01


def test_batch_norm_before_all_that_is_trained_is_left_as_it_is():
    model = normed()
    collect_swag(Classifier(model), [(X, Y)], epochs=2, parameters=[model[3]])  # no warning
    collect_swag(Classifier(model), [(X, Y)], epochs=2, parameters=[model[1], model[3]])


def test_an_interrupted_fit_leaves_the_model_unchanged():
    model = MODELS[1].model()
    before = [p.clone() for p in model.parameters()]

    def interrupted():
        yield X, Y
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit_swag(Classifier(model), interrupted(), epochs=5)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: Swag(rank=1), "rank must be at least 2"),
        (lambda: Swag().diagonal(), "at least 2 updates to estimate a variance, got 0"),
        (lambda: collected(nn.Linear(2, 2), torch.zeros(1, 6), Swag()).low_rank(), "got 1"),
        (lambda: fit_swag(Classifier(MODELS[1].model()), []), "the loader gave no batch"),
        (lambda: fit_swag(Classifier(MODELS[1].model()), [X]), "batch 0: there are no labels"),
        (lambda: fit_swag(Classifier(MODELS[1].model()), [(X, Y)], epochs=1), "at least 2 epochs"),
        (
            lambda: fit_swag(Classifier(MODELS[1].model()), [(X, Y)] * 5, learning_rate=1e308),
            "batch [1-4]: the model's logits are NaN .* or lower the learning rate",
        ),
    ],
)
def test_refuses_what_cannot_be_fitted(act, message):
    with pytest.raises(ValueError, match=message):
        act()


def test_refuses_to_switch_models_between_updates():
    swag = Swag()
    swag.update(nn.Linear(4, 3))
    with pytest.raises(ValueError, match="'weight' has shape"):
        swag.update(nn.Linear(5, 3))
