"""The CIFAR-10-C study: run end to end on a tiny network, killed, changed and reported."""

from __future__ import annotations

import csv
import json
import shutil
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file
from torch import nn

import acnml
from acnml import metrics
from acnml.cli.cifar10_c import run_study, show_plan
from acnml.cli.data import draw_sheet
from acnml.experiments.cifar10_c import methods, predict, verdict, workshop
from acnml.experiments.cifar10_c.choices import SweepPoint, chosen
from acnml.experiments.cifar10_c.data import load_data
from acnml.experiments.cifar10_c.figures import bootstrap_median
from acnml.experiments.cifar10_c.jobs import FRONTIER, HELD_OUT, phases
from acnml.experiments.cifar10_c.methods import Method, methods_of
from acnml.experiments.cifar10_c.plan import plan
from acnml.experiments.cifar10_c.posteriors import curvature, rescaled
from acnml.experiments.cifar10_c.predict import predict_shift
from acnml.experiments.cifar10_c.predictors import predictor
from acnml.experiments.cifar10_c.report import report, write_report
from acnml.experiments.cifar10_c.results import Agreement, collect
from acnml.experiments.cifar10_c.run import run
from acnml.experiments.cifar10_c.study import (
    PRESETS,
    Choice,
    Cifar10CStudy,
    Curvature,
    Frontier,
    Images,
)
from acnml.experiments.cifar10_c.training import Recipe, Training, load_trained, settings, task
from acnml.experiments.cifar10_c.training import __main__ as training_command
from acnml.experiments.cifar10_c.unsolved import outputs_or_uniform
from acnml.experiments.cifar10_c.workshop import Workshop
from acnml.experiments.data import cifar10
from acnml.experiments.data.cifar10 import LabelledBytes, to_unit
from acnml.experiments.models import MODELS, Description
from acnml.experiments.models.resnet import ResNet, SubsampleAndPad
from acnml.experiments.pipeline import Reporter, Store
from acnml.experiments.study import tranches
from acnml.experiments.study.artefacts import Finished, Making
from acnml.experiments.study.saved import load_curvature
from acnml.experiments.study.scores import Row

TRAIN, TEST, HELD = 60, 60, 20


def network(classes: int) -> nn.Module:
    return ResNet(classes, (2, 4), 1, SubsampleAndPad)


def dropping(classes: int) -> nn.Module:
    return nn.Sequential(network(8), nn.Dropout(0.5), nn.Linear(8, classes))


TRAINING = Training(
    epochs=3, swa_start=1, learning_rate=0.05, swa_learning_rate=0.02, batch_size=20
)
DESCRIPTIONS = {
    "tiny": Description(network, (0.5,) * 3, (0.25,) * 3, "tiny.safetensors"),
    "dropping": Description(dropping, (0.5,) * 3, (0.25,) * 3),
}
RECIPES = {
    "tiny": Recipe("tiny", "given", TRAINING),
    "fresh": Recipe("tiny", "random", TRAINING),
    "dropping": Recipe("dropping", "random", TRAINING),
}
GRIDS = Frontier(
    images=6,
    temperatures=(1.0, 2.0),
    alphas=(0.1, 1.0),
    prior_precisions=(1.0, 100.0),
    covariance_scales=(0.1, 1.0),
)
PIECES = {
    "samples": 2,
    "batch_norm_images": 20,
    "corruptions": ("contrast",),
    "severities": (5, 4),
    "blurred": (5,),
    "bins": 4,
    "resamples": 10,
    "images": Images(30, 12, 10, 8, 5),
    "choice": Choice(held_out=HELD),
    "curvature": Curvature(images=20, prior_precision=30.0),
    "frontier": GRIDS,
}


def bytes_of(images: int, seed: int) -> LabelledBytes:
    """Images whose class is how bright red and green are; every sixth label is wrong."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(images) % 10
    pixels = torch.randint(60, (images, 3, 32, 32), generator=generator)
    pixels[:, 0] += 40 * (labels % 5)[:, None, None]
    pixels[:, 1] += 150 * (labels // 5)[:, None, None]
    wrong = torch.arange(images) % 6 == 0
    return LabelledBytes(pixels.to(torch.uint8), torch.where(wrong, (labels + 3) % 10, labels))


SPLITS = {"train": bytes_of(TRAIN, 0), "test": bytes_of(TEST, 1)}


def given_weights() -> dict[str, torch.Tensor]:
    """Weights of the tiny network after some training."""
    described = DESCRIPTIONS["tiny"]
    network = described.untrained(seed=1)
    optimizer = torch.optim.Adam(network.parameters(), lr=0.03)
    images, labels = described.normalise(to_unit(SPLITS["train"].images)), SPLITS["train"].labels
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(images), labels).backward()
        optimizer.step()
    return network.state_dict()


@pytest.fixture(autouse=True, scope="module")
def tiny_world(tmp_path_factory):
    """A tiny network in the place of all others, and few images in that of CIFAR-10."""
    patch, folder = pytest.MonkeyPatch(), tmp_path_factory.mktemp("data")
    (folder / "weights").mkdir()
    save_file(given_weights(), folder / "weights" / "tiny.safetensors")
    patch.setenv("ACNML_DATA", str(folder))
    patch.setattr(cifar10, "load", lambda split: SPLITS[split])
    patch.setattr(tranches, "ENDS", (3, 9))  # a few stages for the images of a shift
    for module in (task, workshop):
        patch.setattr(module, "MODELS", {**MODELS, **DESCRIPTIONS})
    for name, recipe in RECIPES.items():
        patch.setitem(settings.RECIPES, name, recipe)
    yield folder
    patch.undo()


@pytest.fixture(scope="module")
def tiny(tiny_world):
    return Cifar10CStudy("tiny", **PIECES)


@pytest.fixture(scope="module")
def data(tiny, tmp_path_factory):
    return load_data(tiny, tmp_path_factory.mktemp("cache"))


def store_in(out, described):
    return Store(out, described, Reporter(Console(quiet=True), out / "run.log"))


@pytest.fixture(scope="module")
def finished(tmp_path_factory, tiny, data):
    """A whole run, its folder and results."""
    out = tmp_path_factory.mktemp("finished")
    run(tiny, data, Making(store_in(out, tiny)))
    return out, collect(tiny, data, Finished(store_in(out, tiny)))


def made(out):
    """The stages that the log says were made."""
    lines = (out / "run.log").read_text().splitlines()
    return [line.split("  made     ")[1].split("  ")[0] for line in lines if "  made     " in line]


# End to end ------------------------------------------------------------------------------------


def test_everything_is_measured_once(finished, tiny):
    out, results = finished
    assert results.missing == ()
    seen = {(row.method.name, row.shift) for row in results.rows}
    assert len(seen) == len(methods_of(tiny)) * len(tiny.shifts)
    assert len({(row.method, row.shift, row.n) for row in results.rows}) == len(results.rows)
    assert len(made(out)) == len(set(made(out)))


def test_the_plan_counts_the_stages_that_are_made(finished, tiny):
    out, _ = finished
    lines = {line.kind: line for line in plan(tiny)}
    predicted = [name for name in made(out) if name.startswith(("predict", "try", "sweep"))]
    assert sum(lines[phase.title].stages for phase in phases(tiny)) == len(predicted)
    renewed = [name for name in made(out) if name.startswith("renew")]
    assert lines["renewing batch norm"].stages == len(renewed)
    fitted = [name for name in made(out) if name.startswith("fit KFAC")]
    assert lines["fitting KFAC"].stages == len(fitted)


def test_metrics_are_those_of_the_predictor_itself(finished, tiny, data):
    """The saved log-probabilities are what the library's predictors give."""
    out, results = finished
    makers = Workshop(tiny, data, Finished(store_in(out, tiny)), 0)
    for row in (r for r in results.rows if r.shift == "contrast 5"):
        images, labels = data.shifted("contrast 5", row.n)
        log_probs = predictor(row.method, makers)(makers.inputs(images))
        found = [row.accuracy, row.nll, row.brier, row.ece]
        expected = [getattr(metrics, s)(log_probs, labels) for s in ("accuracy", "nll", "brier")]
        expected.append(metrics.ece(log_probs, labels, tiny.bins))
        assert found == pytest.approx(expected, abs=1e-4), row.method.name


def test_sgd_is_the_given_network_and_swa_the_average(finished, tiny, data):
    out, _ = finished
    makers = Workshop(tiny, data, Finished(store_in(out, tiny)), 0)
    given = DESCRIPTIONS["tiny"].trained(task.weights_file(RECIPES["tiny"]).parent)
    inputs = makers.inputs(data.clean.images[:4])
    torch.testing.assert_close(makers.classifier(makers.sgd()).logits(inputs), given(inputs))
    mean = load_trained(makers.trained()).swag.mean
    weights = makers.classifier(makers.swa()).parameters
    assert all(torch.equal(weights[name], mean[name]) for name in mean)


def test_agreement_is_the_mean_total_variation(finished, tiny, data):
    out, results = finished
    makers = Workshop(tiny, data, Finished(store_in(out, tiny)), 0)
    found = results.agreements[0]
    fast = replace(found.method, solver=methods.LINEARISED)
    distances = []
    for shift in tiny.shifts:
        inputs = makers.inputs(data.shifted(shift, 5).images)
        pair = [predictor(method, makers)(inputs).exp() for method in (found.method, fast)]
        distances.append((pair[0] - pair[1]).clamp(min=0).sum(1))
    assert found.images == 5 * len(tiny.shifts)
    assert found.total_variation == pytest.approx(torch.cat(distances).mean().item(), abs=1e-5)


def test_the_report_says_what_it_is(finished):
    out, results = finished
    page = write_report(results, out).read_text()
    assert "made here, with the parameters of CIFAR-10-C" in page
    assert "no SWA-Ensemble" in page
    assert "standard error over images" in page
    assert "Not finished" not in page
    assert page.count("<svg") >= 20
    with (out / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    expected = "study method posterior solver knob seed shift n accuracy nll brier ece"
    assert list(rows[0]) == [*expected.split(), "seconds_per_input"]
    assert len(rows) == len(results.rows)
    assert {row["study"] for row in rows} == {"cifar10-c"}


def test_a_report_of_nothing_names_what_is_missing(tmp_path, tiny, data):
    results = collect(tiny, data, Finished(store_in(tmp_path, tiny)))
    assert results.rows == ()
    assert "train tiny, seed 0" in results.missing
    assert "Not finished" in write_report(results, tmp_path).read_text()
    assert all(v.holds is None for v in verdict.verdicts(results))
    assert not (tmp_path / "artefacts").exists()


# Resuming --------------------------------------------------------------------------------------


class KilledError(Exception):
    """Stands for the end of the process."""


def hashes(out):
    """The content of every artefact, by its folder."""
    headers = (out / "artefacts").glob("*/header.json")
    return {path.parent.name: json.loads(path.read_text())["content_hash"] for path in headers}


def test_a_killed_run_goes_on_where_it_was(finished, tiny, data, tmp_path, monkeypatch):
    """Killed at some prediction and started again: nothing is done twice, all is the same."""
    some = [phase for phase in phases(tiny) if phase.title == "corruptions, cheap methods"]
    monkeypatch.setattr("acnml.experiments.cifar10_c.run.phases", lambda _: some)
    calls = []

    def dies(*arguments):
        calls.append(arguments)
        if len(calls) == 12:
            raise KilledError
        return outputs_or_uniform(*arguments)

    monkeypatch.setattr(predict, "outputs_or_uniform", dies)
    with pytest.raises(KilledError):
        run(tiny, data, Making(store_in(tmp_path, tiny)))
    half = hashes(tmp_path)
    run(tiny, data, Making(store_in(tmp_path, tiny)))
    assert len(made(tmp_path)) == len(set(made(tmp_path)))
    assert half.items() < hashes(tmp_path).items() < hashes(finished[0]).items()


def test_a_report_of_an_unfinished_run_shows_what_there_is(finished, tiny, data, tmp_path):
    """As if it had been killed after severity 5: that is there, severity 4 is named as missing."""
    kept = tmp_path / "artefacts"
    shutil.copytree(finished[0] / "artefacts", kept)
    for folder in [*kept.glob("predict-acnml*contrast-4*"), *kept.glob("sweep-acnml*")]:
        shutil.rmtree(folder)
    results = collect(tiny, data, Finished(store_in(tmp_path, tiny)))
    ours = methods.ACNML_SWAG_D_PAPERS
    assert results.at_severity(ours, "ece", 5, 10) == finished[1].at_severity(ours, "ece", 5, 10)
    assert results.at_severity(ours, "ece", 4, 10) == []
    assert any("contrast 4" in name for name in results.missing)
    page = report(results, {})
    assert "Not finished" in page
    assert "The study is not finished" in page
    assert judged(results, "with SWAG-D has a lower ECE") == [None]
    assert None not in judged(results, "In distribution")


def test_a_changed_setting_redoes_only_what_depends_on_it(finished, data, tiny):
    """The number of samples decides what is sampled, and nothing else."""
    out, _ = finished
    before = len(made(out))
    changed = replace(tiny, samples=3)
    run(changed, data, Making(store_in(out, changed)))
    again = made(out)[before:]
    assert again
    assert all("BMA" in name or name.startswith("renew batch norm") for name in again)


def test_more_images_go_on_from_fewer(finished, data, tiny):
    """Only the last tranche is made anew: those before it are of the same images."""
    out, _ = finished
    more = replace(tiny, images=replace(tiny.images, network_wide=12))
    fewer, before = predicted(tiny, data, out), len(made(out))
    many = predicted(more, data, out)
    (new,) = made(out)[before:]
    assert new.startswith("predict BMA SWAG-D contrast 5 to 12, seed 0")
    assert (len(fewer), len(many)) == (10, 12)
    assert torch.equal(many[:9], fewer[:9])
    torch.testing.assert_close(many[9], fewer[9])  # in another batch


def predicted(described, images, out):
    makers = Workshop(described, images, Making(store_in(out, described)), 0)
    return predict_shift(methods.BMA_SWAG_D, "contrast 5", makers).load()["log_probs"]


# Choices ---------------------------------------------------------------------------------------


def choices_of(described, images, out) -> dict[str, float]:
    makers = Workshop(described, images, Making(store_in(out, described)), 0)
    some = (methods.TEMPERED, methods.TEMPERED_NEAR, methods.ACNML_HEAD, methods.BMA_KFAC)
    some += (methods.ACNML_HEAD_TEMPERED, methods.ACNML_SWAG_D_PAPERS)
    return {method.name: chosen(method, makers).value for method in some}


def test_choices_see_held_out_images_alone(tiny, data, finished, tmp_path, monkeypatch):
    """Other evaluation images and labels change no choice; other held-out labels do."""
    expected = choices_of(tiny, data, finished[0])
    order = torch.randperm(TEST, generator=torch.Generator().manual_seed(0))

    def load(rows):
        images, labels = (tensor.clone() for tensor in SPLITS["test"])
        images[rows], labels[rows] = 255 - images[rows], (labels[rows] + 1) % 10
        changed = {**SPLITS, "test": LabelledBytes(images, labels)}
        monkeypatch.setattr(cifar10, "load", lambda split: changed[split])
        return load_data(tiny, tmp_path / "cache")

    evaluated, held_out = load(order[HELD:]), load(order[:5])
    assert evaluated.checksum != data.checksum
    assert choices_of(tiny, evaluated, tmp_path) == expected
    assert choices_of(tiny, held_out, tmp_path) != expected


@pytest.mark.parametrize("source", ["train", "test"])
def test_held_out_images_are_no_others(tiny, tmp_path, source):
    data = load_data(replace(tiny, choice=Choice(HELD, source)), tmp_path)
    parts = {name: {i.numpy().tobytes() for i in getattr(data, name).images} for name in PARTS}
    sizes = {name: len(part) for name, part in parts.items()}
    assert not parts["held_out"] & (parts["train"] | parts["clean"])
    cut = {"train": (TRAIN - HELD, HELD, TEST), "test": (TRAIN, HELD, TEST - HELD)}
    assert tuple(sizes.values()) == cut[source]


PARTS = ("train", "held_out", "clean")


def test_a_shift_corrupts_the_first_evaluation_images(tiny, data):
    first = data.shifted("clean", 5)
    corrupted = data.shifted("contrast 5", 5)
    assert torch.equal(corrupted.labels, first.labels)
    spread = [images.float().std((2, 3)) for images in (first.images, corrupted.images)]
    assert (spread[1] < 0.3 * spread[0]).all()
    assert data.count(10**6) == TEST - HELD
    assert data.count(10**6, "contrast 5") == tiny.images.cheap


# The paper's path ------------------------------------------------------------------------------


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


# The command -----------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", PRESETS)
def test_a_dry_run_needs_nothing(preset, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("ACNML_DATA", str(tmp_path / "nothing"))
    monkeypatch.setattr(cifar10, "load", None)
    show_plan(preset, [])
    said = capsys.readouterr().out
    for phase in phases(PRESETS[preset]):
        assert phase.title in said
    assert "forward passes" in said
    assert list(tmp_path.iterdir()) == []


def test_the_command_runs_and_reports(tmp_path, capsys):
    settings = ["model=tiny", "choice.held_out=20", "corruptions=contrast", "severities=5,4"]
    run_study("cpu", [*settings, "images.in_distribution=1000"], tmp_path, report_only=True)
    assert "The study is not finished" in " ".join(capsys.readouterr().out.split())
    assert "train tiny, seed 0" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(
    ("preset", "setting", "message"),
    [
        ("gpu", [], "there is no preset 'gpu', only cpu, paper"),
        ("cpu", ["images.cheep=3"], "did you mean images.cheap?"),
        ("cpu", ["model=resnet21"], "there is no network 'resnet21'"),
        ("cpu", ["corruptions=fogg"], "there is no corruption 'fogg', only"),
        ("cpu", ["severities=6"], "severities must be some of 1, 2, 3, 4, 5"),
        ("cpu", ["images.cheap=1"], "the numbers of images must not grow"),
        ("cpu", ["choice.held_out=60"], "60 images of the test set cannot spare 60"),
    ],
)
def test_a_wrong_setting_is_one_sentence(tmp_path, preset, setting, message):
    with pytest.raises(SystemExit) as error:
        run_study(preset, setting, tmp_path, report_only=True)
    assert message in str(error.value)


def test_missing_data_are_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setenv("ACNML_DATA", str(tmp_path))
    monkeypatch.setattr(cifar10, "load", LOAD)
    with pytest.raises(SystemExit) as error:
        run_study("cpu", [], tmp_path, report_only=True)
    assert "`acnml data download cifar10` gets it" in str(error.value)


def test_the_sheet_of_corruptions_needs_the_images(tmp_path, monkeypatch):
    monkeypatch.setenv("ACNML_DATA", str(tmp_path))
    monkeypatch.setattr(cifar10, "load", LOAD)
    with pytest.raises(SystemExit, match="acnml data download cifar10"):
        draw_sheet(tmp_path / "sheet.png")
    assert list(tmp_path.iterdir()) == []


LOAD = cifar10.load


def weights_for(widths, classes):
    return ResNet(classes, widths, 1, SubsampleAndPad).state_dict()


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (lambda: weights_for((2, 4, 8), 10), "is a weight file for another architecture"),
        (lambda: weights_for((2, 4), 7), "is for 7 classes, the model has 10"),
        (lambda: None, "there is no weight file"),
    ],
)
def test_wrong_weights_are_one_sentence(tmp_path, monkeypatch, weights, message):
    (tmp_path / "weights").mkdir()
    if (tensors := weights()) is not None:
        save_file(tensors, tmp_path / "weights" / "tiny.safetensors")
    monkeypatch.setenv("ACNML_DATA", str(tmp_path))
    with pytest.raises(SystemExit) as error:
        run_study("cpu", ["model=tiny", "choice.held_out=20"], tmp_path / "out", report_only=False)
    assert message in str(error.value)


# Pieces ----------------------------------------------------------------------------------------


def test_rescaling_is_repeating_the_data():
    """Curvature sums over the data: three times the data have three times the curvature."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 4, generator=generator, dtype=torch.float64)
    with acnml.random.seeded(0):
        classifier = acnml.Classifier(nn.Linear(4, 3).double())
    once, thrice = (
        acnml.kronecker_curvature(classifier, [(x.repeat(n, 1), torch.zeros(5 * n).long())])
        for n in (1, 3)
    )
    for scaled, expected in zip(rescaled(once, 3).factors, thrice.factors, strict=True):
        torch.testing.assert_close(scaled.inputs, expected.inputs)
        torch.testing.assert_close(scaled.gradients, expected.gradients)


def test_the_curvature_counts_all_training_images(finished, tiny, data):
    """Measured on a third of the images, it is scaled to all of them."""
    out, _ = finished
    makers = Workshop(tiny, data, Finished(store_in(out, tiny)), 0)
    few = data.train.images[:20], data.train.labels[:20]
    batch = [(makers.inputs(few[0]), few[1])]
    classifier = makers.classifier(makers.swa())
    measured = acnml.kronecker_curvature(classifier, batch, progress=False)
    found = load_curvature(curvature(makers))
    expected = measured.eigenvalues().sum() * (TRAIN / 20)
    torch.testing.assert_close(found.eigenvalues().sum(), expected, rtol=1e-4, atol=1e-6)


def test_the_tempered_head_is_fitted_to_the_tempered_likelihood(finished, tiny, data):
    out, _ = finished
    makers = Workshop(tiny, data, Finished(store_in(out, tiny)), 0)
    ready = chosen(methods.ACNML_HEAD_TEMPERED, makers)
    classifier = makers.classifier(makers.swa()).tempered(ready.likelihood)
    head = [acnml.last_linear(classifier.model)]
    batch = [(makers.inputs(data.train.images), data.train.labels)]
    expected = acnml.fit_kfac_laplace(classifier, batch, ready.value, head, progress=False)
    inputs = makers.inputs(data.clean.images[:5])
    ours = predictor(ready, makers)(inputs)
    torch.testing.assert_close(ours, acnml.Acnml(classifier, expected)(inputs), **CLOSELY)


CLOSELY = {"rtol": 1e-3, "atol": 1e-3}  # both have summed in single precision


def linear_acnml(scale: float, solver) -> acnml.Acnml:
    with acnml.random.seeded(0):
        layers = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    classifier = acnml.Classifier(layers)
    var = {name: torch.full_like(p, scale) for name, p in classifier.parameters.items()}
    return acnml.Acnml(classifier, acnml.Diagonal(classifier.parameters, var), solver)


def test_images_without_a_solution_are_counted_and_uniform():
    """A step that is far too long diverges for inputs that are not zero."""
    diverging = linear_acnml(1e30, acnml.Gradient(5, 0.5))
    images = torch.tensor([[1.0, 2.0, 3.0], [3.0, 2.0, 1.0]])
    saved = outputs_or_uniform(diverging, images)
    assert saved["unsolved"].tolist() == [1, 1]
    assert saved["log_lik"].tolist() == [[0, 0], [0, 0]]
    fine = linear_acnml(0.1, acnml.Gradient(5, 0.5))
    saved = outputs_or_uniform(fine, images)
    assert saved["unsolved"].tolist() == [0, 0]
    torch.testing.assert_close(saved["log_lik"].log_softmax(1), fine(images))
    with pytest.raises(ValueError, match="the model failed on inputs"):
        outputs_or_uniform(fine, torch.zeros(2, 5))


def test_the_bootstrap_of_a_median():
    assert bootstrap_median([0.5] * 15) == (0.5, 0.5, 0.5)
    middle, low, high = bootstrap_median([float(i) for i in range(15)])
    assert middle == 7
    assert 2 <= low < 7 < high <= 12


def test_methods_have_names_of_their_own():
    everything = (*methods.CHEAP, *methods.NETWORK_WIDE, *methods.COSTLY)
    assert len({method.name for method in everything}) == len(everything)
    with pytest.raises(ValueError, match="choose ACNML KFAC last layer, budget's prior precision"):
        predictor(methods.ACNML_HEAD, None)


def test_the_order_of_work():
    described = PRESETS["cpu"]
    titles = [phase.title for phase in phases(described)]
    severities = [title for title in titles if title.startswith("severity")]
    assert severities == [f"severity {s}, network-wide" for s in (5, 4, 3, 1, 2)]
    first = {HELD_OUT: 0, "clean": 1, "fog 1": 2, FRONTIER: 3}
    for where, place in first.items():
        assert any(job.where == where for job in phases(described)[place].jobs)
    jobs = [job for phase in phases(described) for job in phase.jobs]
    assert len(set(jobs)) == len(jobs)
    assert len(described.shifts) == 1 + 75 + 2


# Verdicts on made-up results -------------------------------------------------------------------


def made_up(results, eces, clean=None, severities=(5, 4)):
    """Results in which methods have these ECEs at all corruptions, and clean scores of 0.5."""
    n, rows = results.level(results.study.images.network_wide), []
    for method, ece in eces.items():
        accuracy, nll = (clean or {}).get(method, (0.5, 0.5))
        for shift in ("clean", *(f"contrast {s}" for s in severities)):
            row = Row(method, 0, shift, n, accuracy, nll, 0.1, ece, 1.0)
            rows += [row, replace(row, n=12)]
    return replace(results, rows=tuple(rows), sweep=(), agreements=())


def judged(results, word):
    return [v.holds for v in verdict.verdicts(results) if word in v.claim]


SWAG_D = (methods.MAP_SWA, methods.BMA_SWAG_D, methods.ACNML_SWAG_D_PAPERS)
LOWER = "with SWAG-D has a lower ECE"


@pytest.mark.parametrize(
    ("eces", "holds"),
    [((0.3, 0.2, 0.1), True), ((0.3, 0.1, 0.2), False), ((0.1, 0.3, 0.2), False)],
)
def test_the_ece_under_corruption_is_judged_against_both(finished, eces, holds):
    results = made_up(finished[1], dict(zip(SWAG_D, eces, strict=True)))
    assert judged(results, LOWER) == [holds]
    assert judged(results, "with KFAC-Laplace has a lower ECE") == [None]
    half = made_up(finished[1], dict(zip(SWAG_D, eces, strict=True)), severities=(5,))
    assert judged(half, LOWER) == [None]


@pytest.mark.parametrize(
    ("accuracy", "nll", "holds"),
    [(0.9, 0.3, [True, True]), (0.894, 0.3, [False, True]), (0.9, 0.36, [True, False])],
)
def test_clean_scores_are_judged_against_the_better(finished, accuracy, nll, holds):
    clean = dict(zip(SWAG_D, ((0.9, 0.5), (0.8, 0.3), (accuracy, nll)), strict=True))
    results = made_up(finished[1], dict.fromkeys(SWAG_D, 0.1), clean)
    assert judged(results, "In distribution, ACNML with SWAG-D") == holds


def test_solvers_and_temperatures_are_judged(finished):
    pair = {methods.ACNML_HEAD: 0.1, methods.TEMPERED: 0.2}
    results = made_up(finished[1], pair)
    word = "ACNML, last layer has a lower ECE under strong corruption than SWA-Temp"
    assert judged(results, word) == [True]
    for distance, holds in ((0.01, True), (0.2, False)):
        steps = Agreement(methods.ACNML_SWAG_D_STEPS, 6, distance, 1.0)
        found = judged(replace(results, agreements=(steps,)), "with SWAG-D, the fast solution")
        assert found == [holds]


def test_families_are_compared_on_their_cautious_branches(finished):
    """A temperature passes each NLL twice; only the cautious passage counts."""

    def points(method: Method, path):
        return [SweepPoint(method.family, method.at(v), n, e, 1.0) for v, n, e in path]

    # NLL falls from T = 1 to T = 2 and rises again; at NLL 0.15 the cautious ECE is 0.35.
    tempered = points(methods.TEMPERED, [(4, 0.2, 0.3), (2, 0.1, 0.4), (1, 0.15, 0.9)])
    head = points(methods.ACNML_HEAD, [(1, 0.15, 0.3), (100, 0.1, 0.4)])
    swept = replace(finished[1], sweep=(*tempered, *head))
    assert verdict.matched_gaps(swept, methods.ACNML_HEAD) == pytest.approx([-0.05, 0.0])
    assert judged(swept, "ACNML, last layer does more") == [True]
    assert verdict.matched_gaps(swept, methods.ACNML_KFAC) == []
