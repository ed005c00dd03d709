"""The rotated-MNIST study: run end to end on tiny networks, killed, changed and reported."""

from __future__ import annotations

import csv
import math
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from sklearn.metrics import roc_auc_score, roc_curve

import acnml
from acnml import metrics
from acnml.cli.rotated_mnist import run_study
from acnml.experiments.pipeline import Content, Reporter, Store, Work, override
from acnml.experiments.rotated_mnist import methods, verdict
from acnml.experiments.rotated_mnist.detection import (
    by_brightness,
    detections,
    entropy,
    log_confidence,
    scores,
)
from acnml.experiments.rotated_mnist.frontier import SweepPoint, chosen
from acnml.experiments.rotated_mnist.mean_field import MeanField
from acnml.experiments.rotated_mnist.methods import METHODS, SWEPT, Method, predictor
from acnml.experiments.rotated_mnist.predict import outputs, predict_shift
from acnml.experiments.rotated_mnist.report import write_report
from acnml.experiments.rotated_mnist.results import collect
from acnml.experiments.rotated_mnist.run import run
from acnml.experiments.rotated_mnist.shifts import load_data
from acnml.experiments.rotated_mnist.study import (
    PRESETS,
    BayesByBackprop,
    Choice,
    Descent,
    Frontier,
    Images,
    NaiveCnml,
    RotatedMnist,
    Swag,
)
from acnml.experiments.rotated_mnist.training import Learner, constant, learn
from acnml.experiments.rotated_mnist.workshop import Workshop
from acnml.experiments.study.artefacts import Finished, Making, MissingError
from acnml.experiments.study.choices import most_cautious
from acnml.experiments.study.saved import curvature_content, load_curvature

TINY = replace(
    RotatedMnist(),
    seeds=(0,),
    hidden=(12,),
    train_images=400,
    angles=(0, 90),
    members=2,
    samples=2,
    training=Descent(epochs=8, batch_size=50, learning_rate=0.2),
    bayes_by_backprop=BayesByBackprop(epochs=2, batch_size=50, learning_rate=0.01),
    swag=Swag(epochs=2, batch_size=50),
    images=Images(cheap=60, paper_steps=20, converged=6),
    choice=Choice(validation=100, tolerance=0.05),
    frontier=Frontier(
        images=40,
        shifts=("0°", "90°"),
        temperatures=(1.0, 2.0),
        alphas=(0.1, 1.0),
        prior_precisions=(1.0, 100.0),
        covariance_scales=(0.5, 1.0),
    ),
    naive_cnml=NaiveCnml(
        queries=2, train_images=60, refit_epochs=1, training=Descent(epochs=3, batch_size=30)
    ),
)


@pytest.fixture(autouse=True, scope="module")
def no_mnist(tmp_path_factory):
    patch = pytest.MonkeyPatch()
    patch.setenv("ACNML_DATA", str(tmp_path_factory.mktemp("empty")))
    yield
    patch.undo()


@pytest.fixture(scope="module")
def data(no_mnist):
    return load_data(TINY)


def store_in(out, study=TINY):
    return Store(out, study, Reporter(Console(quiet=True), out / "run.log"))


@pytest.fixture(scope="module")
def finished(tmp_path_factory, data):
    """A whole run, its folder and results."""
    out = tmp_path_factory.mktemp("finished")
    run(TINY, data, Making(store_in(out)))
    return out, collect(TINY, data, Finished(store_in(out)))


def made(out):
    """The stages that the log says were made."""
    lines = (out / "run.log").read_text().splitlines()
    return [line.split("  made     ")[1].split("  ")[0] for line in lines if "  made     " in line]


# End to end ------------------------------------------------------------------------------------


def test_everything_is_measured_once(finished):
    out, results = finished
    assert results.missing == ()
    assert len({(row.method, row.shift) for row in results.rows}) == len(METHODS) * len(TINY.shifts)
    assert len({(row.method, row.shift, row.n) for row in results.rows}) == len(results.rows)
    assert len(made(out)) == len(set(made(out)))
    assert len(results.sweep) == 2 * len(SWEPT)
    assert [c.shift for c in results.comparisons] == ["0°", "random"]


def test_metrics_are_those_of_the_predictor_itself(finished, data):
    """The saved log-probabilities are what the library's predictors give."""
    out, results = finished
    workshop = Workshop(TINY, data, Finished(store_in(out)), 0)
    for row in (r for r in results.rows if r.shift == "90°" and r.method.rule != "MC dropout"):
        images, labels = data.shifted("90°", row.n)
        log_probs = predictor(row.method, workshop)(images)
        expected = metrics.summary(log_probs, labels)
        found = {name: getattr(row, name) for name in expected}
        assert found == pytest.approx(expected, abs=1e-4), row.method.name


def test_methods_are_compared_on_the_same_images(finished):
    """Those that see more are scored on the first of them as well, which all have seen."""
    _, results = finished
    shared = results.images(methods.CHEAP)
    assert shared < results.images([methods.MAP])
    for method in methods.CHEAP:
        assert len(results.values(method, "ece", "90°", shared)) == 1, method.name


def test_verdicts_wait_for_all_seeds(finished):
    _, results = finished
    n = results.images([methods.MAP])
    assert verdict.mean_far(results, methods.MAP, "ece", n) is not None
    more = replace(results, study=replace(TINY, seeds=(0, 1)))
    assert verdict.mean_far(more, methods.MAP, "ece", n) is None


def test_the_report_says_what_it_is(finished):
    out, results = finished
    page = write_report(results, out).read_text()
    assert "scikit-learn" in page
    assert "Not finished" not in page
    assert page.count("<svg") >= 14
    with (out / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    expected = "study method posterior solver knob seed shift n accuracy nll brier ece"
    assert list(rows[0]) == [*expected.split(), "seconds_per_input"]
    assert len(rows) == len(results.rows)
    assert {row["study"] for row in rows} == {"rotated-mnist"}


def test_a_report_of_nothing_names_what_is_missing(tmp_path, data):
    results = collect(TINY, data, Finished(store_in(tmp_path)))
    assert results.rows == ()
    assert "train network, seed 0" in results.missing
    assert "Not finished" in write_report(results, tmp_path).read_text()
    assert all(v.holds is None for v in verdict.verdicts(results))
    assert not (tmp_path / "artefacts").exists()


# Resuming --------------------------------------------------------------------------------------


class KilledError(Exception):
    """Stands for the end of the process."""


def test_a_changed_setting_redoes_only_what_depends_on_it(finished, data, tmp_path):
    """The samples decide what is sampled; the ensemble's size decides the ensembles."""
    out, _ = finished
    before = len(made(out))
    changed = override(TINY, ["members=1", "swag.learning_rate=0.01"])
    run(changed, data, Making(store_in(out, changed)))
    again = made(out)[before:]
    assert again
    assert all("ensemble" in name or "SWAG" in name for name in again)


def test_training_goes_on_from_its_checkpoint(data, tmp_path, monkeypatch):
    """Killed in the second epoch and started again: the same network, bit for bit."""
    kept = Work.checkpoint
    whole = Workshop(TINY, data, Making(store_in(tmp_path / "a")), 0)

    def dies(work: Work, content: Content) -> None:
        kept(work, content)
        if content.facts["epochs"] == 1:
            raise KilledError

    store = store_in(tmp_path / "b")
    for train in (Workshop.network, Workshop.bayes_by_backprop):
        monkeypatch.setattr(Work, "checkpoint", dies)
        with pytest.raises(KilledError):
            train(Workshop(TINY, data, Making(store), 0))
        monkeypatch.undo()
        resumed = train(Workshop(TINY, data, Making(store), 0)).load()
        expected = train(whole).load()
        assert all(torch.equal(resumed[name], expected[name]) for name in expected)
    assert (tmp_path / "b" / "run.log").read_text().count("resumed") == 2


def test_predictions_lose_one_block(data, tmp_path, monkeypatch):
    calls = []
    study = override(TINY, ["images.converged=12", "images.beside=1"])
    method = replace(methods.ACNML_SWAG, solver=methods.CONVERGED)  # in blocks of 10

    def dies(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise KilledError
        return outputs(*arguments)

    monkeypatch.setattr("acnml.experiments.rotated_mnist.predict.outputs", dies)
    workshop = Workshop(study, data, Making(store_in(tmp_path)), 0)
    with pytest.raises(KilledError):
        predict_shift(method, "0°", workshop)
    artefact = predict_shift(method, "0°", workshop)
    assert [len(images) for _, images, _ in calls] == [10, 2, 2]
    assert artefact.load()["log_lik"].shape == (12, 10)
    assert artefact.load()["residual"].max() < 0.05


# The command -----------------------------------------------------------------------------------


def test_the_command_reports_what_is_finished(tmp_path, capsys):
    run_study("quick", ["seeds=0,1"], tmp_path, report_only=True)
    said = capsys.readouterr().out
    assert "taking scikit-learn's 8x8 digits" in said
    assert "The study is not finished" in " ".join(said.split())
    assert "train network, seed 1" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(
    ("preset", "setting", "message"),
    [
        ("slow", [], "there is no preset 'slow', only quick, full"),
        ("quick", ["images.cheep=3"], "did you mean images.cheap?"),
        ("quick", ["angles=30"], "the angles must have 0 among them"),
        ("quick", ["frontier.shifts=60"], "there is no shift '60': write an angle such as 60°"),
        ("quick", ["naive_cnml.shift=60"], "there is no shift '60'"),
    ],
)
def test_a_wrong_setting_is_one_sentence(tmp_path, preset, setting, message):
    with pytest.raises(SystemExit) as error:
        run_study(preset, setting, tmp_path, report_only=True)
    assert message in str(error.value)


# Pieces ----------------------------------------------------------------------------------------


def test_the_mean_field_is_that_of_the_library():
    """One epoch gives what `fit_bayes_by_backprop` gives, to rounding."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(30, 4, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (30,), generator=generator)
    torch.manual_seed(0)
    classifier = acnml.Classifier(torch.nn.Linear(4, 3).double())
    batches = list(zip(x.split(10), y.split(10), strict=True))
    expected = acnml.fit_bayes_by_backprop(classifier, batches, 1, 0.2, 0.01, seed=5)
    field, noise = MeanField(classifier, 0.2), torch.Generator().manual_seed(5)
    optimizer = torch.optim.Adam(field.parameters(), lr=0.01, fused=True)
    for images, labels in batches:
        optimizer.zero_grad()
        field.loss(images, labels, 30, noise).backward()
        optimizer.step()
    found = field.posterior()
    for name in expected.mean:
        torch.testing.assert_close(found.mean[name], expected.mean[name], rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(found.var[name], expected.var[name], rtol=1e-9, atol=1e-12)


def test_curvature_survives_the_disk(finished, data):
    out, _ = finished
    workshop = Workshop(TINY, data, Finished(store_in(out)), 0)
    network = workshop.classifier(workshop.network())
    expected = acnml.kronecker_curvature(network, [tuple(data.train)], progress=False)
    found = load_curvature(workshop.curvature())
    assert [f.layer for f in found.factors] == [f.layer for f in expected.factors]
    for ours, theirs in zip(found.factors, expected.factors, strict=True):
        torch.testing.assert_close(ours.inputs, theirs.inputs, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(ours.gradients, theirs.gradients, rtol=1e-3, atol=1e-4)
    assert curvature_content(found).tensors.keys() == workshop.curvature().load().keys()


def test_choices_are_made_on_validation_images(finished, data):
    """The library's predictors, on these images alone, lead to the same choice."""
    out, _ = finished
    workshop = Workshop(TINY, data, Finished(store_in(out)), 0)

    def nll(method: Method) -> float:
        images, labels = data.validation
        return metrics.nll(predictor(method, workshop)(images), labels)

    budget = nll(methods.MAP) + TINY.choice.tolerance
    for method in (methods.TEMPERED, methods.ACNML_HEAD, methods.ACNML_KFAC, methods.BMA_KFAC):
        values = methods.sweep_values(method, TINY)
        expected = most_cautious(values, [nll(method.at(value)) for value in values], budget)
        assert chosen(method, workshop).value == pytest.approx(expected, rel=1e-2)
    for solver in (methods.PAPER, methods.CONVERGED):
        solved = replace(methods.ACNML_KFAC, solver=solver)
        assert chosen(solved, workshop).value == chosen(methods.ACNML_KFAC, workshop).value


@pytest.mark.parametrize(
    ("nlls", "value"),
    [
        ([0.1, 0.1, 0.1], 1),  # the most cautious is free
        ([0.9, 0.8, 0.7], 100),  # none is: the closest to the plain network
        ([0.4, 0.2, 0.1], 10),  # exactly at the budget
        ([0.4, 0.1, 0.1], 3.162),  # half way in logarithms
    ],
)
def test_the_most_cautious_value_in_budget(nlls, value):
    assert most_cautious([1, 10, 100], nlls, 0.2) == pytest.approx(value)


def test_detection_agrees_with_scikit_learn():
    generator = torch.Generator().manual_seed(0)
    inside, outside = (
        {"log_lik": -scale * torch.rand(50, 4, generator=generator, dtype=torch.float64)}
        for scale in (5, 2)
    )
    truth = [0] * 50 + [1] * 50
    for found in detections(methods.ACNML_HEAD, 0, inside, outside):
        both = torch.cat([scores(inside)[found.score], scores(outside)[found.score]])
        assert found.auroc == pytest.approx(roc_auc_score(truth, both))
        false, true, _ = roc_curve(truth, both, drop_intermediate=False)
        assert found.fpr95 == pytest.approx(false[true >= 0.95][0])


def test_brightness_is_the_mean_of_the_pixels():
    generator = torch.Generator().manual_seed(0)
    inside, outside = (torch.rand(20, 1, 3, 3, generator=generator) for _ in range(2))
    both = torch.cat([inside, outside]).numpy().mean(axis=(1, 2, 3))
    found = by_brightness(0, inside, outside)
    assert found.auroc == pytest.approx(roc_auc_score([0] * 20 + [1] * 20, both))


def test_scores_of_known_distributions():
    uniform = torch.full((1, 4), math.log(0.25), dtype=torch.float64)
    certain = torch.tensor([[0.0, -math.inf]], dtype=torch.float64)
    assert entropy(uniform).item() == pytest.approx(math.log(4))
    assert entropy(certain).item() == 0
    assert log_confidence(uniform).item() == pytest.approx(math.log(0.25))
    regret = scores({"log_lik": torch.zeros(1, 4)})["regret"]
    assert regret.item() == pytest.approx(math.log(4))


def test_rank_correlation_agrees_with_scipy():
    from scipy.stats import spearmanr

    x = torch.tensor([1.0, 2.0, 2.0, 5.0, 0.0])
    y = torch.tensor([3.0, 1.0, 4.0, 4.0, 0.0])
    assert verdict.rank_correlation(x, y) == pytest.approx(spearmanr(x, y).statistic)


def test_families_are_compared_on_their_cautious_branches(finished):
    """A temperature passes each NLL twice; only the cautious passage counts."""
    _, results = finished

    def points(method: Method, path: list[tuple[float, float, float]]) -> list[SweepPoint]:
        return [SweepPoint(method.family.at(v), v, n, {"90°": e}, {"90°": 1.0}) for v, n, e in path]

    # NLL falls from T = 1 to T = 2 and rises again; at NLL 0.15 the cautious ECE is 0.35.
    tempered = points(methods.TEMPERED, [(4, 0.2, 0.3), (2, 0.1, 0.4), (1, 0.15, 0.9)])
    head = points(methods.ACNML_HEAD, [(1, 0.15, 0.3), (100, 0.1, 0.4)])
    swept = replace(results, sweep=(*tempered, *head))
    gaps = verdict.matched_gaps(swept, methods.ACNML_HEAD, methods.TEMPERED)
    assert gaps == pytest.approx({"90°": (0.3 - 0.35 + 0.4 - 0.4) / 2})
    assert verdict.matched_gaps(swept, methods.TEMPERED, methods.TEMPERED) == pytest.approx(
        {"90°": 0}
    )
    assert verdict.cautious_branch([]) == []


def test_methods_have_names_of_their_own():
    assert len({method.name for method in METHODS}) == len(METHODS)
    with pytest.raises(ValueError, match="choose ACNML KFAC last layer's prior precision first"):
        predictor(methods.ACNML_HEAD, None)


def test_shifts(data):
    upright = data.shifted("0°", 7)
    assert torch.equal(upright.images, data.test.images[:7])
    assert torch.equal(data.shifted("180°", 7).images, upright.images.flip(-1, -2))
    turned = data.shifted("random", 7)
    assert torch.equal(turned.labels, upright.labels)
    assert not torch.equal(turned.images, upright.images)
    with pytest.raises(ValueError, match="there is no shift 'sideways'"):
        data.shifted("sideways", 7)
    assert len(data.shifted("0°", 10**6).labels) == data.count(10**6) == 400


def test_presets():
    assert set(PRESETS) == {"quick", "full"}
    full = PRESETS["full"]
    assert full.seeds == (0, 1, 2)
    assert full.shifts == (*(f"{angle}°" for angle in range(0, 181, 15)), "random")
    assert full.images.cheap == 10_000
    with pytest.raises(ValueError, match="angles must have 0"):
        override(full, ["angles=30,60"])


def test_missing_work_is_an_error_of_its_own(tmp_path, data):
    workshop = Workshop(TINY, data, Finished(store_in(tmp_path)), 0)
    with pytest.raises(MissingError, match="train network, seed 0"):
        predict_shift(methods.MAP, "0°", workshop)
    assert isinstance(methods.MAP, Method)


def test_learning_rates_follow_their_schedule(data):
    """SGD on a quadratic: the steps add up to the schedule's rates."""
    module = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(module.weight)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

    class NoWork:
        def resume(self):
            return None

        def progress(self, done, total):
            pass

        def checkpoint(self, content):
            pass

    learner = Learner(module, optimizer, lambda x, y, g: module.weight.sum(), constant)
    learn(learner, data.train, 2, 100, 0, NoWork())
    assert module.weight.item() == pytest.approx(-0.1 * 2 * 4)
