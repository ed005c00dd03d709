"""Fits on disjoint parts of the data add up to the fit on all data."""

from __future__ import annotations

import dataclasses
from functools import reduce
from operator import add
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import acnml
from acnml import (
    Classifier,
    Curvature,
    EmpiricalFisher,
    ExactFisher,
    KroneckerCurvature,
    Swag,
    diagonal_curvature,
    ekfac_curvature,
    full_curvature,
    kronecker_curvature,
)
from acnml._util.batches import take
from acnml.typicality.mahalanobis import Moments
from cases import MODELS, Case, Sequence, normal, small_network
from stored import rewrite

SIZES = (1, 4, 7)  # of the parts: unequal, so that wrong weights show
TIGHT = {"rtol": 1e-12, "atol": 1e-12}


def parts_of(x: Any, labels: Tensor) -> list[tuple[Any, Tensor]]:
    ends = torch.tensor(SIZES).cumsum(0).tolist()
    slices = [slice(end - size, end) for size, end in zip(SIZES, ends, strict=True)]
    return [(take(x, rows), labels[rows]) for rows in slices]


def assert_equal(found: Curvature, expected: Curvature) -> None:
    assert type(found) is type(expected)
    pairs = list(zip(tensors(found), tensors(expected), strict=True))
    assert len(pairs) >= 2
    for a, b in pairs:
        torch.testing.assert_close(a, b, **TIGHT)


def tensors(value: Any) -> list[Tensor]:
    """All tensors in a value, in a fixed order."""
    if isinstance(value, Tensor):
        return [value]
    if dataclasses.is_dataclass(value):
        value = tuple(getattr(value, field.name) for field in dataclasses.fields(value))
    if isinstance(value, dict):
        value = tuple(value.values())
    return [t for part in value for t in tensors(part)] if isinstance(value, tuple) else []


@pytest.mark.parametrize("fisher", [ExactFisher(), EmpiricalFisher()], ids=["exact", "empirical"])
@pytest.mark.parametrize("fit", [diagonal_curvature, kronecker_curvature])
@pytest.mark.parametrize("case", MODELS, ids=lambda case: case.name)
def test_curvatures_of_parts_add_up(case: Case, fit, fisher, tmp_path):
    classifier, data = Classifier(case.model()), (case.x(sum(SIZES)), torch.arange(12) % 3)
    whole = fit(classifier, [data], fisher=fisher)
    parts = [fit(classifier, [part], fisher=fisher) for part in parts_of(*data)]
    assert_equal(reduce(add, parts), whole)
    assert_equal(parts[2] + (parts[1] + parts[0]), whole)
    for index, part in enumerate(parts):
        acnml.save(part, tmp_path / f"{index}.safetensors")
    loaded = [acnml.load(tmp_path / f"{index}.safetensors") for index in range(len(parts))]
    assert_equal(reduce(add, loaded), whole)


@pytest.mark.parametrize("fit", [diagonal_curvature, kronecker_curvature, full_curvature])
@pytest.mark.parametrize("temperature", [1.0, 1.7])
def test_curvatures_of_a_last_layer_add_up(fit, temperature):
    model = small_network(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    classifier, data = Classifier(model).tempered(temperature), (normal(12, 4), torch.arange(12))
    data = (data[0], data[1] % 3)
    whole = fit(classifier, [data], [model[2]])
    found = reduce(add, [fit(classifier, [part], [model[2]]) for part in parts_of(*data)])
    assert_equal(found, whole)
    for tau in (0.1, 10.0):
        assert found.log_evidence(tau) == pytest.approx(whole.log_evidence(tau), rel=1e-12)


@pytest.mark.parametrize("case", MODELS, ids=lambda case: case.name)
def test_curvatures_in_one_basis_add_up(case: Case):
    classifier, data = Classifier(case.model()), (case.x(sum(SIZES)), torch.arange(12) % 3)
    whole = ekfac_curvature(classifier, [data])
    parts = parts_of(*data)
    basis = reduce(add, [kronecker_curvature(classifier, [part]) for part in parts])
    found = [ekfac_curvature(classifier, [part], basis=basis) for part in parts]
    total = reduce(add, found)
    for tau in (0.1, 10.0):  # bases of equal matrices may differ in signs and order
        assert total.log_evidence(tau) == pytest.approx(whole.log_evidence(tau), rel=1e-9)
    again = ekfac_curvature(classifier, [data], basis=basis)
    assert_equal(total, again)
    with pytest.raises(ValueError, match="different bases, first for"):
        found[2] + ekfac_curvature(classifier, [parts[1]])


def test_a_basis_may_have_another_precision_than_the_network():
    data = [(normal(12, 4), torch.arange(12) % 3)]
    model = small_network(nn.Linear(4, 3)).float()
    basis = kronecker_curvature(Classifier(model), [(data[0][0].float(), data[0][1])])
    classifier = Classifier(model.double())
    found = ekfac_curvature(classifier, data, basis=basis)
    assert {tensor.dtype for tensor in found.mean.values()} == {torch.float64}
    assert found.trace() == pytest.approx(ekfac_curvature(classifier, data).trace(), rel=1e-5)


def test_a_basis_must_be_of_the_same_network():
    model, data = small_network(nn.Linear(4, 3)), [(normal(12, 4), torch.arange(12) % 3)]
    classifier, other = Classifier(model), Classifier(small_network(nn.Linear(4, 3)))
    other = other.at({name: tensor + 1 for name, tensor in other.parameters.items()})
    basis = kronecker_curvature(classifier, data)
    with pytest.raises(ValueError, match="the basis was fitted at other weights, first in"):
        ekfac_curvature(other, data, basis=basis)
    with pytest.raises(ValueError, match=r"has shape .* but its shape in the model is"):
        ekfac_curvature(Classifier(small_network(nn.Linear(4, 2))), data, basis=basis)
    with pytest.raises(ValueError, match="leave out `parameters`"):
        ekfac_curvature(classifier, data, list(basis.mean), basis=basis)
    with pytest.raises(TypeError, match="expected a Classifier"):
        ekfac_curvature(model, data, basis=basis)
    with pytest.raises(
        TypeError, match="basis must be from kronecker_curvature, got a DiagonalCurvature"
    ):
        ekfac_curvature(classifier, data, basis=diagonal_curvature(classifier, data))


def test_parts_may_have_other_numbers_of_positions():
    """A layer's mean over positions is weighted by positions, not by examples."""
    classifier = Classifier(Case("sequence", Sequence, lambda n: normal(n, 6, 3)).model())
    batches = [normal(2, 6, 3, seed=1), normal(5, 2, 3, seed=2)]
    whole = kronecker_curvature(classifier, batches)
    found = reduce(add, [kronecker_curvature(classifier, [x]) for x in batches])
    assert whole.data == found.data == 7
    assert whole.positions == found.positions == (2 * 6 + 5 * 2, 7)
    assert_equal(found, whole)


def test_single_precision_adds_up_to_rounding():
    model = small_network(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).float()
    x = normal(12, 4).float()
    whole = kronecker_curvature(Classifier(model), [x])
    found = reduce(add, [kronecker_curvature(Classifier(model), [part]) for part in x.split(5)])
    for a, b in zip(tensors(found), tensors(whole), strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_other_weights_and_other_kinds_are_refused():
    model = small_network(nn.Linear(4, 3))
    first = kronecker_curvature(Classifier(model), [normal(5, 4)])
    with pytest.raises(TypeError, match="a KroneckerCurvature and a DiagonalCurvature"):
        first + diagonal_curvature(Classifier(model), [normal(5, 4)])
    with torch.no_grad():
        model[0].bias += 1
    other = kronecker_curvature(Classifier(model), [normal(5, 4)])
    with pytest.raises(ValueError, match=r"different weights, first in '0\.bias'"):
        first + other
    some = kronecker_curvature(Classifier(model), [normal(5, 4)], ["0.weight"])
    with pytest.raises(ValueError, match="names of the second curvature and the first differ"):
        other + some


def test_files_without_counts_still_load_and_say_why_they_do_not_add_up(tmp_path):
    curvature = kronecker_curvature(Classifier(small_network(nn.Linear(4, 3))), [normal(5, 4)])
    path = tmp_path / "old.safetensors"
    acnml.save(curvature, path)

    def forget(header: dict[str, Any]) -> None:
        del header["value"]["data"], header["value"]["positions"]

    rewrite(path, forget)
    old = acnml.load(path)
    assert old.data is None
    for a, b in zip(tensors(old.posterior(1.0)), tensors(curvature.posterior(1.0)), strict=True):
        assert torch.equal(a, b)
    with pytest.raises(ValueError, match="does not know how many data"):
        old + curvature


def test_the_numbers_of_positions_must_fit_the_layers():
    curvature = kronecker_curvature(Classifier(small_network(nn.Linear(4, 3))), [normal(5, 4)])
    with pytest.raises(ValueError, match="2 numbers of positions for 1 layers"):
        KroneckerCurvature(curvature.mean, curvature.factors, 5, (5, 5))


def swag_of(weights: Tensor, rank: int) -> Swag:
    swag, model = Swag(rank), nn.Linear(3, 2).double()
    for row in weights:
        with torch.no_grad():
            model.weight.copy_(row[:6].view(2, 3))
            model.bias.copy_(row[6:])
        swag.update(model)
    return swag


@pytest.mark.parametrize(("first", "second"), [(2, 9), (5, 5), (9, 1)])
def test_moments_of_swag_add_up(first, second):
    weights = normal(first + second, 8) * 3 + normal(8, seed=1)
    whole = swag_of(weights, rank=20)
    merged = swag_of(weights[:first], 20) + swag_of(weights[first:], 20)
    assert merged.updates == whole.updates
    for found, expected in zip(tensors(merged.diagonal()), tensors(whole.diagonal()), strict=True):
        torch.testing.assert_close(found, expected, **TIGHT)
    again = Swag.from_state_dict(merged.state_dict())
    assert again.updates == merged.updates


def test_a_merged_swag_has_the_latest_deviations_of_both_about_the_common_mean():
    runs = [swag_of(normal(7, 8, seed=seed) + 10 * seed, rank=4) for seed in (0, 1)]
    merged = runs[0] + runs[1]
    kept = [d["bias"] + merged.mean["bias"] for d in merged._deviations]
    expected = [
        run._deviations[index]["bias"] + run.mean["bias"] for index in (-2, -1) for run in runs
    ]
    torch.testing.assert_close(torch.stack(kept), torch.stack(expected), **TIGHT)
    with pytest.raises(ValueError, match="the ranks are 4 and 5"):
        runs[0] + swag_of(normal(3, 8), rank=5)
    with pytest.raises(ValueError, match="has not collected any weights"):
        runs[0] + Swag(4)


def test_moments_of_features_add_up():
    features = normal(12, 5) * torch.tensor([1.0, 10, 100, 0.1, 1]) + 1000
    whole, parts = Moments(), []
    whole.add(features)
    for part in features.split(5):
        parts.append(Moments())
        parts[-1].add(part)
    found = Moments() + reduce(add, parts)
    assert found.count == 12
    torch.testing.assert_close(found.mean, whole.mean, **TIGHT)
    torch.testing.assert_close(found.mean, features.mean(0), **TIGHT)
    torch.testing.assert_close(found.covariance, whole.covariance, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(
        found.covariance, features.T.cov(correction=0), rtol=1e-10, atol=1e-10
    )
