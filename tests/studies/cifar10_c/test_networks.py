"""Which networks a study predicts with: given ones, averages, ensembles, those of torchrun."""

from __future__ import annotations

from dataclasses import replace

import torch

import acnml
from acnml import metrics
from stores import made, store_in
from studies.cifar10_c import methods
from studies.cifar10_c.methods import methods_of
from studies.cifar10_c.recipes import WEIGHTS
from studies.cifar10_c.settings import Choice
from studies.cifar10_c.study import build, load_data
from studies.data.cifar10 import to_unit
from studies.engine.command import train_network
from studies.engine.predict import predict_shift
from studies.engine.workshop import Finished, Making, Workshop
from studies.training import load_trained

from .tiny import DESCRIPTIONS, HELD


def test_sgd_is_the_given_network_and_swa_the_average(finished, tiny, study, data, tiny_world):
    out, _ = finished
    makers = Workshop(study, data, Finished(store_in(out, tiny)), 0)
    given = DESCRIPTIONS["tiny"].trained(tiny_world / WEIGHTS)
    inputs = makers.prepared(methods.SWA, data.test.inputs[:4])
    torch.testing.assert_close(
        makers.classifier(methods.SGD, makers.weights(methods.SGD)).logits(inputs), given(inputs)
    )
    mean = load_trained(makers.trained(methods.SWA)).swag.mean
    weights = makers.classifier(methods.SWA, makers.weights(methods.SWA)).parameters
    assert all(torch.equal(weights[name], mean[name]) for name in mean)


def test_networks_of_the_paper_are_trained_and_predict(tiny, tmp_path):
    """From random weights, with held-out training images, an ensemble and dropout."""
    paper = replace(tiny, model="fresh", dropout_model="dropping", members=2)
    paper = replace(paper, choice=Choice(HELD, "train"), device="best")
    data = load_data(paper, tmp_path / "cache")
    makers = Workshop(build(paper), data, Making(store_in(tmp_path, paper)), 0)
    for method in (methods.MAP_SGD, methods.SWA_ENSEMBLE, methods.SWA_DROPOUT):
        assert method in methods_of(paper)
        saved = predict_shift(method, "clean", makers).load()["log_probs"]
        assert metrics.nll(saved, data.labels(len(saved))) < 10
    members = [
        makers.classifier(methods.SWA, makers.weights(methods.SWA, member)) for member in range(2)
    ]
    inputs = makers.prepared(methods.SWA, data.test.inputs[:3])
    mean = sum(member.log_probs(inputs).exp() for member in members) / 2
    ensemble = predict_shift(methods.SWA_ENSEMBLE, "clean", makers).load()["log_probs"]
    torch.testing.assert_close(ensemble[:3].exp(), mean)
    images = DESCRIPTIONS["dropping"].normalise(to_unit(data.test.inputs[:3]))
    weights = makers.weights(methods.DROPOUT)
    dropping = makers.classifier(methods.DROPOUT, weights)
    dropped = acnml.McDropout(dropping, paper.samples, 0)(images)
    saved = predict_shift(methods.SWA_DROPOUT, "clean", makers).load()["log_probs"]
    torch.testing.assert_close(saved[:3], dropped)
    networks = [name for name in made(tmp_path) if name.startswith("train")]
    assert len(networks) == 4  # two members, plain SGD, dropout


def test_the_study_finds_what_torchrun_has_trained(tiny, tmp_path):
    """The command for several processes makes the very stage that the study needs."""
    paper = replace(tiny, model="fresh", choice=Choice(HELD, "train"))
    data = load_data(paper, tmp_path / "cache")
    train_network(build(paper), methods.SWA, 0, tmp_path)
    found = Workshop(build(paper), data, Finished(store_in(tmp_path, paper)), 0).trained(
        methods.SWA
    )
    assert load_trained(found).swag.updates == 2
