"""Which networks a study predicts with: given ones, averages, ensembles, those of torchrun."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from studies.cifar10_c.data import load_data
from studies.cifar10_c.methods import methods_of
from studies.cifar10_c.predict import predict_shift
from studies.cifar10_c.study import Choice
from studies.cifar10_c.training import __main__ as training_command
from studies.cifar10_c.training import load_trained, settings, task
from studies.cifar10_c.workshop import Workshop
from studies.study.artefacts import Finished, Making

import acnml
from acnml import metrics
from stores import made, store_in
from studies.cifar10_c import methods
from studies.data.cifar10 import to_unit

from .tiny import DESCRIPTIONS, HELD, RECIPES


def test_sgd_is_the_given_network_and_swa_the_average(finished, tiny, data):
    out, _ = finished
    makers = Workshop(tiny, data, Finished(store_in(out, tiny)), 0)
    given = DESCRIPTIONS["tiny"].trained(task.weights_file(RECIPES["tiny"]).parent)
    inputs = makers.inputs(data.clean.images[:4])
    torch.testing.assert_close(makers.classifier(makers.sgd()).logits(inputs), given(inputs))
    mean = load_trained(makers.trained()).swag.mean
    weights = makers.classifier(makers.swa()).parameters
    assert all(torch.equal(weights[name], mean[name]) for name in mean)


def test_networks_of_the_paper_are_trained_and_predict(tiny, tmp_path):
    """From random weights, with held-out training images, an ensemble and dropout."""
    paper = replace(tiny, model="fresh", dropout_model="dropping", members=2)
    paper = replace(paper, choice=Choice(HELD, "train"), device="best")
    data = load_data(paper, tmp_path / "cache")
    makers = Workshop(paper, data, Making(store_in(tmp_path, paper)), 0)
    for method in (methods.MAP_SGD, methods.SWA_ENSEMBLE, methods.SWA_DROPOUT):
        assert method in methods_of(paper)
        saved = predict_shift(method, "clean", makers).load()["log_probs"]
        assert metrics.nll(saved, data.labels(len(saved))) < 10
    members = [makers.classifier(makers.swa(member)) for member in range(2)]
    inputs = makers.inputs(data.clean.images[:3])
    mean = sum(member.log_probs(inputs).exp() for member in members) / 2
    ensemble = predict_shift(methods.SWA_ENSEMBLE, "clean", makers).load()["log_probs"]
    torch.testing.assert_close(ensemble[:3].exp(), mean)
    images = DESCRIPTIONS["dropping"].normalise(to_unit(data.clean.images[:3]))
    dropped = acnml.McDropout(makers.dropout_classifier(), paper.samples, 0)(images)
    saved = predict_shift(methods.SWA_DROPOUT, "clean", makers).load()["log_probs"]
    torch.testing.assert_close(saved[:3], dropped)
    networks = [name for name in made(tmp_path) if name.startswith("train")]
    assert len(networks) == 4  # two members, plain SGD, dropout


def test_the_study_finds_what_torchrun_has_trained(tiny, tmp_path):
    """The command for several processes makes the very stage that the study needs."""
    paper = replace(tiny, model="fresh", choice=Choice(HELD, "train"))
    data = load_data(paper, tmp_path / "cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(settings.RECIPES, "fresh", RECIPES["fresh"])
        training_command.main("fresh", tmp_path, 0, None, HELD)
    found = Workshop(paper, data, Finished(store_in(tmp_path, paper)), 0).trained()
    assert load_trained(found).swag.updates == 2
