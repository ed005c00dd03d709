"""The evidence study's artefacts: what was made with other settings is never taken for its own."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import cache, partial

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from stores import store_in
from studies.data import Labelled, cifar10
from studies.evidence import digits
from studies.evidence import views as views_module
from studies.evidence.settings import DIGITS, DIGITS_200, EvidenceStudy
from studies.evidence.study import subjects
from studies.evidence.subjects import TRAIN
from studies.evidence.views import Views
from studies.models import Description, weights
from studies.models.mlp import mlp

GIVEN = "resnet20"
UNSEEN = ("networks", "prices", "resamples")  # by everything but the comparison
STUDY = EvidenceStudy(
    networks=(DIGITS,),
    held_out=12,
    test=8,
    severities=(5,),
    angles=(30,),
    train_images=30,
    neighbours=3,
    epochs=1,
    members=2,
    samples=2,
    folds=0,
    seeds=(0,),
)
OTHER = EvidenceStudy(
    held_out=13,
    test=7,
    severities=(3,),
    angles=(45,),
    train_images=29,
    neighbours=4,
    epochs=2,
    members=1,
    dropout=0.4,
    samples=3,
    folds=1,
    seeds=(1,),
    seed=1,
)


def network(classes: int = 10) -> nn.Module:
    layers = nn.Linear(48, 6), nn.ReLU(), nn.Linear(6, classes)
    return nn.Sequential(nn.AvgPool2d(8), nn.Flatten(), *layers)


@pytest.fixture
def data(monkeypatch, tmp_path):
    """Random images in the place of every data set, small networks, and a file of weights."""

    @cache
    def images(count: int, seed: int, *shape: int) -> Labelled:
        drawn = torch.rand(count, *shape, generator=torch.Generator().manual_seed(seed))
        return Labelled(drawn, torch.arange(count) % 10)

    def colour(split: str) -> Labelled:
        drawn = images(150, {"train": 3, "test": 4}[split], 3, 32, 32)
        return Labelled((255 * drawn.inputs).byte(), drawn.labels)

    monkeypatch.setattr(cifar10, "load", colour)
    monkeypatch.setattr(digits, "load_mnist", lambda part: images(150, len(part), 1, 28, 28))
    monkeypatch.setattr(digits, "load_letters", lambda: images(150, 2, 1, 28, 28))
    monkeypatch.setattr(digits, "mlp", partial(mlp, hidden=(8,)))
    # Labels are arbitrary here, so no temperature is best.
    monkeypatch.setattr(views_module, "least_nll_temperature", lambda *_: 2.0)
    described = Description(network, weights="tiny.safetensors")
    monkeypatch.setattr(weights, "MODELS", {GIVEN: described})
    monkeypatch.setenv("ACNML_DATA", str(tmp_path / "data"))
    (tmp_path / "data" / "weights").mkdir(parents=True)
    write_weights(tmp_path, seed=0)
    return tmp_path


def write_weights(folder, seed: int) -> None:
    torch.manual_seed(seed)
    save_file(network().state_dict(), folder / "data" / "weights" / "tiny.safetensors")


def views(name: str, study: EvidenceStudy, out) -> list[Tensor]:
    """What the methods know of the training data and a shift."""
    store = store_in(out, study)
    found: list[Tensor] = []
    for own in subjects(name, study, out, store):
        own_views = Views(own, study, store)
        for part in (TRAIN, list(own.shifts)[1]):
            view = own_views.of(part)
            more = view.whole(0.1) if view.whole and part != TRAIN else None
            tensors = (view.logits, view.score, view.labels, view.ensemble, view.dropout, more)
            found += [tensor for tensor in tensors if tensor is not None]
    return found


def equal(first: list[Tensor], second: list[Tensor]) -> bool:
    return len(first) == len(second) and all(map(torch.equal, first, second))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [DIGITS, DIGITS_200, GIVEN])
def test_a_store_that_has_seen_other_settings_answers_as_an_empty_one(data, name):
    views(name, STUDY, data / "shared")
    for setting in [f.name for f in fields(EvidenceStudy) if f.name not in UNSEEN]:
        changed = replace(STUDY, **{setting: getattr(OTHER, setting)})
        fresh = views(name, changed, data / setting)
        assert equal(views(name, changed, data / "shared"), fresh), setting


def test_a_store_that_has_seen_other_weights_answers_as_an_empty_one(data):
    before = views(GIVEN, STUDY, data / "shared")
    write_weights(data, seed=1)
    after = views(GIVEN, STUDY, data / "shared")
    assert not equal(before, after)
    assert equal(after, views(GIVEN, STUDY, data / "fresh"))
