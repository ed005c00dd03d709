"""Curvatures and SWAG states are restored exactly, for every kind of layer."""

from __future__ import annotations

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import acnml
from acnml import (
    Classifier,
    Curvature,
    DiagonalCurvature,
    FactorBlock,
    KroneckerCurvature,
    StorageError,
    Swag,
    diagonal_curvature,
    ekfac_curvature,
    kronecker_curvature,
)
from acnml.fitting import Factors
from cases import MODELS, normal, small_network
from stored import rewrite

LABELS = torch.tensor([0, 1, 2, 0, 1, 2])


def grouped() -> nn.Module:
    return small_network(
        nn.Conv2d(4, 6, 3, padding=1, groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(54, 3)
    )


def depthwise() -> nn.Module:
    return small_network(
        nn.Conv2d(4, 8, 3, padding=1, groups=4), nn.Tanh(), nn.Flatten(), nn.Linear(72, 3)
    )


def without_bias() -> nn.Module:
    return small_network(
        nn.Conv2d(4, 2, 3, bias=False),
        nn.Tanh(),
        nn.Conv2d(2, 2, 1, groups=2, bias=False),
        nn.Flatten(),
        nn.Linear(2, 3, bias=False),
    )


FITS = {
    "diagonal": diagonal_curvature,
    "kronecker": kronecker_curvature,
    "ekfac": ekfac_curvature,
}


def tensors_of(posterior: acnml.Posterior) -> list[Tensor]:
    """All tensors of a posterior, in a fixed order."""
    found: list[Tensor] = []
    acnml._util.params.map_tensors(posterior, lambda t: found.append(t) or t)
    return found


def assert_identical(actual: acnml.Posterior, expected: acnml.Posterior) -> None:
    assert type(actual) is type(expected)
    pairs = list(zip(tensors_of(actual), tensors_of(expected), strict=True))
    assert len(pairs) >= 2
    for a, b in pairs:
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


def curvature_of(model: nn.Module, fit: str, dtype: torch.dtype) -> Curvature:
    data = [(normal(6, 4, 3, 3).to(dtype), LABELS)]
    return FITS[fit](Classifier(model.to(dtype)), data)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("fit", FITS)
@pytest.mark.parametrize("build", [grouped, depthwise, without_bias])
def test_a_loaded_curvature_makes_the_same_posteriors(build, fit, dtype, tmp_path):
    curvature, path = curvature_of(build(), fit, dtype), tmp_path / "curvature.safetensors"
    acnml.save(curvature, path)
    loaded = acnml.load(path)
    assert type(loaded) is type(curvature)
    for tau in (0.01, 3.0):
        assert_identical(loaded.posterior(tau), curvature.posterior(tau))
        assert loaded.log_evidence(tau) == curvature.log_evidence(tau)


def test_named_tuples_keep_their_type_when_tensors_are_mapped():
    curvature = curvature_of(depthwise(), "kronecker", torch.float64)
    half = acnml._util.params.map_tensors(curvature, lambda tensor: tensor / 2)
    for found, factors in zip(half.factors, curvature.factors, strict=True):
        assert type(found) is Factors
        assert found.layer == factors.layer
        assert torch.equal(found.inputs, factors.inputs / 2)
        assert torch.equal(found.gradients, factors.gradients / 2)


def test_factors_are_restored_as_they_are(tmp_path):
    curvature = curvature_of(depthwise(), "kronecker", torch.float64)
    acnml.save(curvature, tmp_path / "curvature.safetensors")
    loaded = acnml.load(tmp_path / "curvature.safetensors")
    assert [type(factors) for factors in loaded.factors] == [Factors, Factors]
    layers = [factors.layer for factors in loaded.factors]
    assert layers == [factors.layer for factors in curvature.factors]
    assert layers[0].groups == 4
    damped = [c.posterior(2.0, FactorBlock.damped) for c in (loaded, curvature)]
    assert_identical(*damped)


def test_a_curvature_needs_no_classifier(tmp_path):
    curvature = curvature_of(without_bias(), "diagonal", torch.float64)
    acnml.save(curvature, tmp_path / "curvature.safetensors")
    with pytest.raises(StorageError, match="DiagonalCurvature, which has no network"):
        acnml.load(tmp_path / "curvature.safetensors", Classifier(MODELS[1].model()))


def rewritten(path, change) -> None:
    """Change the stored value of a file."""
    rewrite(path, lambda header: change(header["value"]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda value: value["factors"][0]["layer"].update(groups=1), "factors of '0.weight' have"),
        (lambda value: value["factors"].pop(), "the names of the factors and mean differ"),
        (lambda value: value["factors"][0].update(kind="Affine"), "cannot be restored"),
    ],
)
def test_a_damaged_curvature_is_a_storage_error(change, message, tmp_path):
    path = tmp_path / "curvature.safetensors"
    acnml.save(curvature_of(grouped(), "kronecker", torch.float64), path)
    rewritten(path, change)
    with pytest.raises(StorageError, match=message):
        acnml.load(path)


def test_parts_of_a_value_are_not_stored(tmp_path):
    curvature = curvature_of(grouped(), "kronecker", torch.float64)
    for part in (curvature.factors, dict(curvature.mean)):
        with pytest.raises(TypeError, match="Swag, densities and predictors can be stored"):
            acnml.save(part, tmp_path / "part")
    assert list(tmp_path.iterdir()) == []


def test_curvatures_refuse_parts_that_do_not_fit():
    mean = {"weight": normal(3, 2)}
    with pytest.raises(ValueError, match=r"missing \['weight'\]"):
        DiagonalCurvature(mean, {})
    with pytest.raises(ValueError, match=r"has shape \(2,\), but its mean .* \(3, 2\)"):
        DiagonalCurvature(mean, {"weight": torch.ones(2)})
    wrong = Factors(acnml.Affine("weight"), torch.eye(3), torch.eye(3))
    with pytest.raises(
        ValueError, match=r"\(3, 3\) and \(3, 3\), but its parameters need \(2, 2\)"
    ):
        KroneckerCurvature(mean, (wrong,))


# SWAG -----------------------------------------------------------------------------------------


def trained(model: nn.Module, swag: Swag, updates: range) -> Swag:
    """Set the model to the weights of a fake training run, and collect them."""
    for seed in updates:
        size = sum(parameter.numel() for parameter in model.parameters())
        weights = normal(size, seed=seed).to(next(model.parameters()).dtype)
        nn.utils.vector_to_parameters(weights, model.parameters())
        swag.update(model)
    return swag


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("interrupted_after", range(1, 7))
def test_a_stored_swag_continues_with_the_same_bits(interrupted_after, dtype, tmp_path):
    """Before, at and after the number of updates that fills its deviations."""
    model, path = MODELS[2].model().to(dtype), tmp_path / "swag.safetensors"
    unbroken = trained(model, Swag(rank=3), range(7))
    first = trained(model, Swag(rank=3), range(interrupted_after))
    acnml.save(first, path)
    resumed = trained(model, acnml.load(path), range(interrupted_after, 7))
    assert resumed.updates == 7
    assert_identical(resumed.diagonal(), unbroken.diagonal())
    assert_identical(resumed.low_rank(), unbroken.low_rank())


def test_a_state_dict_is_a_snapshot_that_safetensors_stores(tmp_path):
    model = MODELS[1].model()
    swag = trained(model, Swag(rank=2), range(3))
    state, expected = swag.state_dict(), swag.low_rank()
    safetensors.torch.save_file(state, tmp_path / "swag.safetensors")
    trained(model, swag, range(3, 5))
    for tensor in state.values():  # what was stored does not depend on it either
        tensor.zero_()
    restored = Swag(rank=2)
    restored.load_state_dict(safetensors.torch.load_file(tmp_path / "swag.safetensors"))
    assert_identical(restored.low_rank(), expected)


def test_what_is_loaded_does_not_share_memory():
    swag = trained(MODELS[1].model(), Swag(rank=2), range(3))
    state, expected = swag.state_dict(), swag.low_rank()
    restored = Swag.from_state_dict(state)
    for tensor in state.values():
        tensor.zero_()
    assert_identical(restored.low_rank(), expected)


def test_a_restored_swag_covers_the_same_parameters(tmp_path):
    model, path = MODELS[1].model(), tmp_path / "swag.safetensors"
    swag = Swag(parameters=[model[2]])
    swag.update(model)
    acnml.save(swag, path)
    loaded = acnml.load(path)
    loaded.update(model)
    assert list(loaded.mean) == ["2.weight", "2.bias"]


def test_an_empty_state_can_be_loaded_but_not_saved(tmp_path):
    model, empty = MODELS[1].model(), Swag(rank=2)
    with pytest.raises(ValueError, match="store it after the first update"):
        acnml.save(empty, tmp_path / "swag.safetensors")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="construct Swag"):
        Swag.from_state_dict(empty.state_dict())
    used = trained(model, Swag(rank=2), range(3))
    used.load_state_dict(empty.state_dict())
    assert (used.updates, used.mean) == (0, {})
    expected = trained(model, Swag(rank=2), range(5))
    assert_identical(trained(model, used, range(5)).low_rank(), expected.low_rank())


def test_a_loaded_swag_follows_the_model_to_its_device():
    model = MODELS[1].model()
    swag = trained(model, Swag(rank=3), range(3))
    swag.update(model.to("meta"))
    assert {tensor.device.type for tensor in tensors_of_state(swag)} == {"meta"}


def tensors_of_state(swag: Swag) -> list[Tensor]:
    return [t for name, t in swag.state_dict().items() if name not in ("rank", "updates", "order")]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("rank"), "no 'rank'"),
        (lambda state: state.pop("updates"), "no 'updates'"),
        (
            lambda state: state.update(rank=torch.tensor(4)),
            r"Swag\(rank=4\), but this is Swag\(rank=3",
        ),
        (lambda state: state.update(updates=torch.tensor(2)), r"deviations of '0.weight' have"),
        (lambda state: state.update(updates=torch.tensor(0)), "0 updates but means of 4"),
        (lambda state: state.update(updates=torch.tensor(-1)), "-1 updates"),
        (lambda state: state.pop("squares/2.bias"), r"squares and mean differ: missing \['2.bias'"),
        (lambda state: state.pop("mean/2.bias"), "order must be a permutation of 3"),
        (
            lambda state: state.update(order=torch.tensor([0, 0, 1, 2])),
            "order must be a permutation",
        ),
        (lambda state: state.pop("deviations/0.bias"), r"deviations and mean differ: missing"),
        (lambda state: state.update({"squares/2.bias": torch.ones(4)}), "squares of '2.bias' have"),
        (lambda state: state.update({"weight": torch.ones(4)}), "names in the state must be"),
    ],
)
def test_refuses_invalid_states_without_changing(change, message):
    model = MODELS[1].model()
    swag, other = (trained(model, Swag(rank=3), range(start, start + 4)) for start in (0, 10))
    expected, state = swag.low_rank(), other.state_dict()
    change(state)
    with pytest.raises(ValueError, match=message):
        swag.load_state_dict(state)
    assert_identical(swag.low_rank(), expected)


def test_update_says_what_to_give_instead_of_a_classifier():
    model = MODELS[1].model()
    with pytest.raises(TypeError, match=r"got a Classifier; call swag.update\(classifier.model\)"):
        Swag().update(Classifier(model))
    with pytest.raises(TypeError, match=r"takes the nn\.Module in training, got a dict$"):
        Swag().update(dict(model.state_dict()))
