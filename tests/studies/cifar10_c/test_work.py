"""What the study's predictions are made of: images, networks, posteriors, the order of work."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import acnml
from acnml import metrics
from stores import finished_in, made, store_in
from studies.cifar10_c import KIND, methods
from studies.cifar10_c.maddox import kfac_of_one_batch
from studies.cifar10_c.methods import methods_of
from studies.cifar10_c.recipes import WEIGHTS
from studies.cifar10_c.settings import PRESETS, Choice
from studies.cifar10_c.study import build, load_data
from studies.data import Labelled, cifar10
from studies.data.cifar10 import to_unit
from studies.engine import command
from studies.engine.choose import chosen
from studies.engine.predict import predict_shift
from studies.engine.predictors import predictor
from studies.engine.run import phases
from studies.engine.workshop import Making, Workshop
from studies.settings import SettingError
from studies.training import load_trained

from .tiny import DESCRIPTIONS, HELD, SPLITS, TEST, TRAIN, bytes_of

SEED = 3
LOAD = cifar10.load  # the real one
PARTS = ("train", "held_out", "test")

# The command and the order of the work -----------------------------------------------------------


def test_a_dry_run_needs_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("ACNML_DATA", str(tmp_path / "nothing"))
    monkeypatch.setattr(cifar10, "load", None)
    for preset in PRESETS:
        study = command.build(KIND, preset, [])
        command.show_plan(study)
        said = capsys.readouterr().out
        assert all(phase.title in said for phase in phases(study))
        assert "forward passes" in said
    assert list(tmp_path.iterdir()) == []


def test_the_command_reports_what_is_finished(tmp_path, capsys):
    settings = ["model=tiny", "choice.held_out=20", "corruptions=contrast", "severities=5,4"]
    settings.append("images.in_distribution=1000")
    command.run_study(command.build(KIND, "cpu", settings), tmp_path, report_only=True)
    assert "The study is not finished" in " ".join(capsys.readouterr().out.split())
    assert "train SWA, seed 0" in (tmp_path / "report.html").read_text()
    said = " --set ".join(["python -m studies cifar10-c --preset cpu", *settings])
    for page in ("report.html", "results.md"):
        assert said in (tmp_path / page).read_text()


def test_missing_data_are_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setenv("ACNML_DATA", str(tmp_path))
    monkeypatch.setattr(cifar10, "load", LOAD)
    with pytest.raises(SystemExit, match="`python -m studies data download cifar10` gets it"):
        command.run_study(command.build(KIND, "cpu", []), tmp_path, report_only=True)


def test_a_study_can_have_few_grounds():
    """Only methods on them take part, beside SWA, and claims about others are not made."""
    few = replace(PRESETS["scratch"], grounds=(methods.ENSEMBLE, methods.SWAG_D))
    study = KIND.build(few)
    on = {"SWA", "SWA ensemble", "SWAG-D"}
    assert {method.posterior for method in study.methods} == on
    assert {job.method.posterior for phase in phases(study) for job in phase.jobs} == on
    assert study.claims
    assert not any("KFAC" in claim.text for claim in study.claims)
    assert all(set(pair) <= set(study.methods) for pair in study.agreements)
    with pytest.raises(SettingError, match="there is no laplace, only"):
        KIND.build(replace(few, grounds=("laplace",)))


# Images ------------------------------------------------------------------------------------------


def choices_of(described, images, out) -> dict[str, float]:
    makers = Workshop(build(described), images, Making(store_in(out, described)), 0)
    some = (methods.TEMPERED, methods.TEMPERED_NEAR, methods.ACNML_HEAD, methods.BMA_KFAC)
    some += (methods.ACNML_HEAD_TEMPERED, methods.ACNML_SWAG_D_PAPERS)
    return {method.name: chosen(method, makers).value for method in some}


def test_choices_see_held_out_images_alone(tiny, finished, tmp_path, monkeypatch):
    """Other evaluation images and labels change no choice; other held-out labels do."""
    expected = choices_of(tiny, finished.data, finished.out)
    order = torch.randperm(TEST, generator=torch.Generator().manual_seed(0))

    def load(rows):
        images, labels = (tensor.clone() for tensor in SPLITS["test"])
        images[rows], labels[rows] = 255 - images[rows], (labels[rows] + 1) % 10
        changed = {**SPLITS, "test": Labelled(images, labels)}
        monkeypatch.setattr(cifar10, "load", lambda split: changed[split])
        return load_data(tiny, tmp_path / "cache")

    evaluated, held_out = load(order[HELD:]), load(order[:5])
    assert evaluated.checksum != finished.data.checksum
    assert choices_of(tiny, evaluated, tmp_path) == expected
    assert choices_of(tiny, held_out, tmp_path) != expected


@pytest.mark.parametrize("source", ["train", "test"])
def test_held_out_images_are_no_others(tiny, tmp_path, source):
    fresh = replace(tiny, model="fresh", choice=Choice(HELD, source))
    data = load_data(fresh, tmp_path)
    parts = {name: {i.numpy().tobytes() for i in getattr(data, name).inputs} for name in PARTS}
    sizes = {name: len(part) for name, part in parts.items()}
    assert not parts["held_out"] & (parts["train"] | parts["test"])
    cut = {"train": (TRAIN - HELD, HELD, TEST), "test": (TRAIN, HELD, TEST - HELD)}
    assert tuple(sizes.values()) == cut[source]


def test_a_shift_corrupts_the_first_evaluation_images(tiny, finished):
    data = finished.data
    first, corrupted = data.load("clean", 5), data.load("contrast 5", 5)
    assert torch.equal(corrupted.labels, first.labels)
    spread = [images.float().std((2, 3)) for images in (first.inputs, corrupted.inputs)]
    assert (spread[1] < 0.3 * spread[0]).all()
    assert data.count(10**6) == TEST - HELD
    assert len(data.load("contrast 5", 10**6).labels) == tiny.images.cheap


# Networks ----------------------------------------------------------------------------------------


def test_sgd_is_the_given_network_and_swa_the_average(finished, tiny_world):
    makers = finished.workshop()
    given = DESCRIPTIONS["tiny"].trained(tiny_world / WEIGHTS)
    inputs = makers.prepared(methods.SWA, finished.data.test.inputs[:4])
    sgd = makers.classifier(methods.SGD, makers.weights(methods.SGD))
    torch.testing.assert_close(sgd.logits(inputs), given(inputs))
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
    dropping = makers.classifier(methods.DROPOUT, makers.weights(methods.DROPOUT))
    dropped = acnml.McDropout(dropping, paper.samples, 0)(images)
    saved = predict_shift(methods.SWA_DROPOUT, "clean", makers).load()["log_probs"]
    torch.testing.assert_close(saved[:3], dropped)
    networks = [name for name in made(tmp_path) if name.startswith("train")]
    assert len(networks) == 4  # two members, plain SGD, dropout


def test_an_ensemble_can_be_the_networks_of_all_seeds(tiny, tmp_path):
    """Three seeds then need three networks, not nine."""
    seeds = build(replace(tiny, model="fresh", members=0, seeds=(0, 1, 2), only_papers=True))
    asked: list[int] = []

    class Named:
        def make(self, stage, function):
            asked.append(stage.seed)
            return SimpleNamespace(stage=stage, facts={})

    shop = Workshop(seeds, seeds.load(tmp_path), Named(), 1)
    assert len(seeds.grounds[methods.ENSEMBLE].artefacts(methods.SWA_ENSEMBLE, shop)) == 3
    assert set(asked) == {0, 1, 2}
    assert methods.MAP_SGD not in seeds.methods
    assert methods.SGD not in seeds.networks


def test_the_study_finds_what_torchrun_has_trained_from_given_weights(tiny, tiny_world, tmp_path):
    """At a rate that moves nothing, all weights stay those that were given."""
    still = replace(tiny.schedule, learning_rate=1e-30, swa_learning_rate=1e-30)
    study = build(replace(tiny, schedule=still))
    command.train_network(study, methods.SWA, SEED, tmp_path)
    shop = Workshop(study, study.load(tmp_path), finished_in(tmp_path, tiny), SEED)
    trained = load_trained(shop.trained(methods.SWA))
    assert trained.swag.updates == 2
    given = DESCRIPTIONS["tiny"].trained(tiny_world / WEIGHTS)
    for name, parameter in given.named_parameters():
        for found in (trained.last[name], trained.swag.mean[name]):
            torch.testing.assert_close(found, parameter.detach(), rtol=1e-6, atol=1e-20)


def key_of(settings, out, seed=SEED):
    study = build(settings)
    workshop = Workshop(study, study.load(out), finished_in(out, settings), seed)
    return workshop.training_stage(methods.SWA).key


def test_the_stage_tells_recipes_images_weights_and_seeds_apart(tiny, folder, monkeypatch):
    def store_weights(seed: int) -> None:
        weights = DESCRIPTIONS["tiny"].untrained(seed).state_dict()
        save_file(weights, folder / "weights" / "tiny.safetensors")

    (folder / "weights").mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match="there is no weight file"):
        key_of(tiny, folder)
    store_weights(seed=1)
    longer = replace(tiny, schedule=replace(tiny.schedule, epochs=4))
    keys = [
        key_of(tiny, folder),
        key_of(longer, folder),
        key_of(tiny, folder, SEED + 1),
        key_of(replace(tiny, model="fresh"), folder),
    ]
    assert key_of(tiny, folder) == keys[0]
    with monkeypatch.context() as patch:
        patch.setattr(cifar10, "load", lambda split: bytes_of(59, 5))
        keys.append(key_of(tiny, folder))
    store_weights(seed=2)
    keys.append(key_of(tiny, folder))
    assert len(set(keys)) == len(keys)


# Posteriors --------------------------------------------------------------------------------------


def test_kfac_of_one_batch_has_the_factors_of_the_empirical_fisher():
    """Without dropout and batch norm, train mode changes nothing: the library's factors, rescaled.

    Theirs sum over the data, and G over positions too.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 2, 5, 5, generator=generator, dtype=torch.float64)
    labels, n, data = torch.arange(6) % 3, 6, 1000
    with acnml._util.torch_state.seeded(0):
        layers = nn.Conv2d(2, 3, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(12, 3, bias=False)
        classifier = acnml.Classifier(nn.Sequential(*layers).double())
    found = kfac_of_one_batch(classifier, x, labels, data)
    fisher = acnml.fit.EmpiricalFisher()
    curvature = acnml.fit.fit_curvature(classifier, [(x, labels)], fisher=fisher)
    for block, factors, positions in zip(found.blocks, curvature.factors, (4, 1), strict=True):
        assert block.layer == factors.layer
        damping = (5e-4 / positions) ** 0.5
        _, A, G = factors.normalised
        A, G = A / n**0.5, G / n**0.5 / positions
        A, G = (matrix + damping * torch.eye(len(matrix)) for matrix in (A, G))
        v = torch.randn(len(G), len(A), generator=generator, dtype=torch.float64)
        torch.testing.assert_close(data**2 * G @ block.cov_mv(v) @ A, v)


def test_kfac_of_one_batch_is_measured_in_train_mode():
    """Batch norm normalises by the batch, and the user's network stays as it was."""
    generator = torch.Generator().manual_seed(0)
    x, labels = 5 + 3 * torch.randn(40, 4, generator=generator), torch.arange(40) % 3
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3)).eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    (block,) = kfac_of_one_batch(acnml.Classifier(model), x, labels, 1).blocks
    # Gradients at the logits sum to zero, so that the smallest eigenvalue of G is the damping.
    damping = 5e-4**0.5
    values = 1 / (block.var[0] * damping)
    A = block.input_basis @ values.diag() @ block.input_basis.T - damping * torch.eye(5)
    torch.testing.assert_close(A.diagonal(), torch.ones(5), rtol=1e-3, atol=1e-3)
    assert not model.training
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)


def test_the_curvature_counts_all_training_images(finished):
    """Measured on a third of the images, it is scaled to all of them."""
    makers, train = finished.workshop(), finished.data.train
    batch = [(makers.prepared(methods.SWA, train.inputs[:20]), train.labels[:20])]
    weights, fitted = finished.study.grounds[methods.KFAC].artefacts(methods.BMA_KFAC, makers)
    classifier = makers.classifier(methods.SWA, weights)
    measured = acnml.fit.fit_curvature(classifier, batch, progress=False)
    found = fitted.load_saved()
    expected = measured.eigenvalues().sum() * (TRAIN / 20)
    torch.testing.assert_close(found.eigenvalues().sum(), expected, rtol=1e-4, atol=1e-6)


def test_the_tempered_head_is_fitted_to_the_tempered_likelihood(finished):
    makers, train = finished.workshop(), finished.data.train
    ready = chosen(methods.ACNML_HEAD_TEMPERED, makers)
    classifier = makers.classifier(methods.SWA, makers.weights(methods.SWA)).tempered(
        ready.likelihood
    )
    batch = [(makers.prepared(methods.SWA, train.inputs), train.labels)]
    expected = acnml.fit_laplace(
        classifier, batch, prior_precision=ready.value, layers="last", progress=False
    )
    inputs = makers.prepared(methods.SWA, finished.data.test.inputs[:5])
    closely = {"rtol": 1e-3, "atol": 1e-3}  # both have summed in single precision
    found = predictor(ready, makers)(inputs)
    torch.testing.assert_close(found, acnml.Acnml(classifier, expected)(inputs), **closely)
