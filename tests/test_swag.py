"""SWAG: moments compared with those computed from all visited weights; and stored."""

from __future__ import annotations

import copy

import pytest
import safetensors.torch
import torch
from torch import nn

import acnml
from acnml import Bma, Classifier, Swag, fit_swag
from acnml._util.params import flatten
from cases import MLP, MODELS, normal
from dense import covariance, vector
from fits import assert_identical

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
    swag = Swag(layers=[model[2]])
    swag.update(model)
    swag.update(model)
    assert list(swag.mean) == ["2.weight", "2.bias"]
    assert swag.mean["2.bias"].dtype == torch.float32


# Of tests that are about something else.
no_warnings = pytest.mark.filterwarnings(
    "ignore:the stored statistics of batch norm", "ignore:the weights that SWAG has collected"
)


@no_warnings
def test_collect_is_plain_sgd():
    """The same weights as a hand-written loop visits, batch norm and order included."""
    case = MODELS[2]
    model, data = case.model(), [(case.x(6), Y)] * 2
    swag = fit_swag(model, data, epochs=3, learning_rate=0.05)
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


@no_warnings
def test_leaves_the_model_and_the_global_random_state_alone():
    model = nn.Sequential(
        nn.Linear(4, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, 3)
    ).double()
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    first, same, other = (
        vector(fit_swag(model, [(X, Y)], epochs=3, seed=seed).diagonal().var) for seed in (1, 1, 2)
    )
    assert torch.equal(first, same)
    assert not torch.equal(first, other)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert torch.equal(state, torch.get_rng_state())


def normed() -> nn.Module:
    body = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)
    return nn.Sequential(*body).double()


def test_a_spread_without_effect_is_warned_of():
    """With the remedy of the message, the average over the posterior differs from the mean."""
    x, model = normal(200, 4), MLP.model()
    y = x[:, :3].argmax(1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for _ in range(200):  # until SGD moves by its noise alone
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    data = list(zip(x.split(20), y.split(20), strict=True))

    def effect(swag: Swag) -> float:
        average = Bma(Classifier(model), swag.low_rank(), samples=50)(x)
        at_mean = acnml.Map(Classifier(model).at(swag.mean))(x)
        return (average.exp() - at_mean.exp()).abs().sum(1).mean().item() / 2

    with pytest.warns(UserWarning, match=r"only 0\.\d+ % of their size.*Raise learning_rate=0.01"):
        without = effect(fit_swag(model, data, epochs=3))
    assert effect(fit_swag(model, data, learning_rate=0.5)) > 10 * without
    assert without < 0.001


def test_the_way_that_the_warning_names_fits_the_weights():
    """The network at the mean then has the statistics of a pass in training mode."""
    model, loader = normed(), [(X, Y)]
    classifier = Classifier(model)
    with pytest.warns(UserWarning, match="do not fit") as warned:
        posterior = fit_swag(classifier, loader, epochs=3, learning_rate=0.5).low_rank()
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


# Storage -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("interrupted_after", [1, 3, 5])
def test_a_stored_swag_continues_with_the_same_bits(interrupted_after, dtype, tmp_path):
    """Before, at and after the number of updates that fills its deviations."""
    model, path = MODELS[2].model().to(dtype), tmp_path / "swag.safetensors"
    weights = visited(model, 7).to(dtype)
    unbroken = collected(model, weights, Swag(rank=3))
    acnml.save(collected(model, weights[:interrupted_after], Swag(rank=3)), path)
    resumed = collected(model, weights[interrupted_after:], acnml.load(path))
    assert resumed.updates == 7
    assert_identical(resumed.diagonal(), unbroken.diagonal())
    assert_identical(resumed.low_rank(), unbroken.low_rank())


def test_a_state_dict_is_a_snapshot_that_safetensors_stores(tmp_path):
    model = MLP.model()
    swag = collected(model, visited(model, 3), Swag(rank=2))
    state, expected = swag.state_dict(), swag.low_rank()
    safetensors.torch.save_file(state, tmp_path / "swag.safetensors")
    in_memory = Swag.from_state_dict(state)
    collected(model, visited(model, 2), swag)
    for tensor in state.values():  # neither of the restored ones depends on it
        tensor.zero_()
    restored = Swag(rank=2)
    restored.load_state_dict(safetensors.torch.load_file(tmp_path / "swag.safetensors"))
    assert_identical(restored.low_rank(), expected)
    assert_identical(in_memory.low_rank(), expected)


def test_states_without_updates_and_of_another_rank(tmp_path):
    model, empty = MLP.model(), Swag(rank=2)
    with pytest.raises(ValueError, match="store it after the first update"):
        acnml.save(empty, tmp_path / "swag.safetensors")
    used = collected(model, visited(model, 3), Swag(rank=2))
    with pytest.raises(ValueError, match=r"Swag\(rank=4\), but this is Swag\(rank=2"):
        used.load_state_dict(Swag(rank=4).state_dict())
    used.load_state_dict(empty.state_dict())
    assert (used.updates, used.mean) == (0, {})
    weights = visited(model, 5)
    expected = collected(model, weights, Swag(rank=2))
    assert_identical(collected(model, weights, used).low_rank(), expected.low_rank())


@pytest.mark.filterwarnings("ignore:the weights that SWAG has collected")
def test_named_layers_before_batch_norm_make_its_statistics_stale():
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    data = [(normal(12, 4), torch.arange(12) % 3)]
    settings = {"epochs": 2, "learning_rate": 0.1, "progress": False}
    with pytest.warns(UserWarning, match="statistics of batch norm"):
        fit_swag(model, data, layers=["0.weight"], **settings)
    fit_swag(model, data, layers="last", **settings)  # a warning would be an error
