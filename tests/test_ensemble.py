"""Ensembles: the mean of their members' probabilities, and how they are stored."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

import acnml
from acnml import Acnml, Classifier, Ensemble, Map, Tempered
from acnml.storage import StorageError
from cases import MLP, POSTERIORS, small_network
from predicting import FINE


def networks(n: int) -> list[nn.Module]:
    return [small_network(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)) for _ in range(n)]


def members(n: int) -> list[Map]:
    """Networks that differ: the k-th has its first bias shifted by k."""
    models = networks(n)
    with torch.no_grad():
        for shift, model in enumerate(models):
            model[0].bias += shift
    return [Map(Classifier(model)) for model in models]


def test_ensemble_of_one_is_its_member():
    member = members(1)[0]
    assert torch.equal(Ensemble((member,))(MLP.x()), member(MLP.x()))


def test_ensemble_is_the_mean_of_probabilities_in_any_order():
    parts, x = members(3), MLP.x()
    expected = torch.stack([member(x).exp() for member in parts]).mean(0)
    for order in itertools.permutations(parts):
        torch.testing.assert_close(Ensemble(order)(x).exp(), expected, **FINE)


def test_ensemble_takes_a_list_and_other_ensembles():
    parts, x = members(4), MLP.x()
    nested = Ensemble((Ensemble(parts[:2]), Ensemble(parts[2:])))
    torch.testing.assert_close(nested(x), Ensemble(parts)(x), **FINE)


def test_ensembles_over_one_network_are_stored(tmp_path):
    model = MLP.model()
    first, second = Classifier(model), Classifier(model).at({"2.bias": torch.ones(3).double()})
    parts = (Map(first), Map(second.tempered(3.0)), Acnml(second, POSTERIORS["low_rank"](model)))
    acnml.save(Ensemble(parts), tmp_path / "ensemble.safetensors")
    loaded = acnml.load(tmp_path / "ensemble.safetensors", Classifier(model))
    assert torch.equal(loaded(MLP.x()), Ensemble(parts)(MLP.x()))


def classifiers(parts) -> list[Classifier]:
    """The classifiers of `Map` members, without their temperature."""
    return [Classifier(part.classifier.model) for part in parts]


def test_ensembles_over_several_networks_are_stored(tmp_path):
    parts, path = (*members(3), *members(1)), tmp_path / "ensemble.safetensors"
    ensemble = Ensemble((Ensemble(parts[:2]), Tempered(parts[2], 2.0), parts[3]))
    acnml.save(ensemble, path)
    loaded = acnml.load(path, classifiers(parts))
    assert torch.equal(loaded(MLP.x()), ensemble(MLP.x()))
    with pytest.raises(StorageError, match=r"Of its 4 networks, .* 3 were given"):
        acnml.load(path, classifiers(parts[:3]))
    with pytest.raises(StorageError, match=r"Of its 4 networks, .* 1 were given"):
        acnml.load(path, classifiers(parts)[0])
    with pytest.raises(StorageError, match="of the given network differs from when"):
        acnml.load(path, classifiers(parts[::-1]))
    with pytest.raises(StorageError, match=r"Of its 4 networks, .* 0 were given"):
        acnml.load(path, [])


def test_two_heads_of_one_module_are_two_networks(tmp_path):
    model = MLP.model()
    heads = [Classifier(model, get_logits=head) for head in (torch.neg, torch.abs)]
    ensemble = Ensemble(tuple(map(Map, heads)))
    acnml.save(ensemble, tmp_path / "ensemble.safetensors")
    loaded = acnml.load(tmp_path / "ensemble.safetensors", heads)
    assert torch.equal(loaded(MLP.x()), ensemble(MLP.x()))
