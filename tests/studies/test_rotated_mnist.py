"""The rotated-MNIST study: one run of it on tiny networks serves all tests."""

from __future__ import annotations

import html
import math
from dataclasses import replace

import pytest
import torch
from sklearn.metrics import roc_auc_score, roc_curve

import acnml
from acnml import metrics
from stores import Whole, collected, rows, store_in
from studies.data import Labelled
from studies.engine.choose import chosen, most_cautious
from studies.engine.claims import verdicts
from studies.engine.method import CONVERGED, PAPER_STEPS, Method
from studies.engine.predictors import outputs, predictor
from studies.engine.report import write_report
from studies.engine.results import detected, entropy, log_confidence, scores
from studies.engine.run import run
from studies.engine.workshop import Making
from studies.rotated_mnist import methods
from studies.rotated_mnist.settings import Choice, Images, RotatedMnist, Swag, Sweep
from studies.rotated_mnist.study import build
from studies.store import Content
from studies.store.work import mixed
from studies.training import BayesByBackprop, Descent, Nobody, train_mean_field

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
    frontier=Sweep(
        images=40,
        shifts=("0°", "90°"),
        temperatures=(1.0, 2.0),
        alphas=(0.1, 1.0),
        prior_precisions=(1.0, 100.0),
        covariance_scales=(0.5, 1.0),
    ),
)


@pytest.fixture(scope="module")
def finished(no_mnist, tmp_path_factory):
    whole = Whole.run(build(TINY), tmp_path_factory.mktemp("finished"))
    write_report(whole.results, whole.out)
    return whole


def test_choices_are_made_on_validation_images(finished):
    """The library's predictors, on these images alone, lead to the same choice."""
    workshop = finished.workshop()

    def nll(method: Method) -> float:
        images, labels = finished.data.held_out
        return metrics.nll(predictor(method, workshop)(images), labels)

    budget = nll(methods.MAP) + TINY.choice.tolerance
    for method in (methods.TEMPERED, methods.ACNML_HEAD, methods.ACNML_KFAC, methods.BMA_KFAC):
        values = finished.study.values(method)
        expected = most_cautious(values, [nll(method.at(value)) for value in values], budget)
        assert chosen(method, workshop).value == pytest.approx(expected, rel=1e-2)
    for solver in (PAPER_STEPS, CONVERGED):
        solved = replace(methods.ACNML_KFAC, solver=solver)
        assert chosen(solved, workshop).value == chosen(methods.ACNML_KFAC, workshop).value


def test_detection_agrees_with_scikit_learn():
    generator = torch.Generator().manual_seed(0)
    inside, outside = (
        {"log_lik": -scale * torch.rand(50, 4, generator=generator, dtype=torch.float64)}
        for scale in (5, 2)
    )
    truth = [0] * 50 + [1] * 50
    for name in ("regret", "entropy", "max-probability"):
        pair = scores(inside)[name], scores(outside)[name]
        found, both = detected(methods.ACNML_HEAD, 0, name, *pair), torch.cat(pair)
        assert found.auroc == pytest.approx(roc_auc_score(truth, both))
        false, true, _ = roc_curve(truth, both, drop_intermediate=False)
        assert found.fpr95 == pytest.approx(false[true >= 0.95][0])


def test_scores_of_known_distributions():
    uniform = torch.full((1, 4), math.log(0.25), dtype=torch.float64)
    certain = torch.tensor([[0.0, -math.inf]], dtype=torch.float64)
    assert entropy(uniform).item() == pytest.approx(math.log(4))
    assert entropy(certain).item() == 0
    assert log_confidence(uniform).item() == pytest.approx(math.log(0.25))
    assert scores({"log_lik": torch.zeros(1, 4)})["regret"].item() == pytest.approx(math.log(4))


def test_methods_are_compared_on_the_same_images(finished):
    """Those that see more are scored on the first of them as well, which all have seen."""
    shared = finished.results.inputs(methods.CHEAP)
    assert shared < finished.results.inputs([methods.MAP])
    for method in methods.CHEAP:
        assert len(finished.results.values(method, "ece", "90°", shared)) == 1, method.name


@pytest.mark.parametrize("best", [methods.ACNML_HEADS, methods.TEMPERED_ENSEMBLE])
def test_a_claim_is_about_a_method_that_it_names(finished, best):
    """Whichever method is best on rotated test images: the claim is about the ensemble of ACNML."""
    results = finished.results
    told = [row._replace(ece=0.1 if row.method.name == best.name else 0.2) for row in results.rows]
    judged = verdicts(replace(results, rows=tuple(told)))
    (found,) = [v for v in judged if "is better calibrated than all others" in v.claim]
    assert found.holds is (best == methods.ACNML_HEADS)


def test_the_report_and_its_files_show_the_same(finished):
    page = (finished.out / "report.html").read_text()
    assert "Not finished" not in page
    assert page.count("<svg") >= 12
    scored, timed = (rows(finished.out / f"{name}.csv") for name in ("metrics", "timings"))
    assert len(scored) == len(finished.results.rows)
    assert {row["name"] for row in scored} == {method.name for method in finished.study.methods}
    assert {row["shift"] for row in timed} == {row["shift"] for row in scored}
    assert all(float(row["seconds_per_input"]) > 0 for row in timed)
    text = (finished.out / "results.md").read_text()
    lines = [line for line in text.splitlines() if line.startswith("| ") and "---" not in line]
    cells = {cell.strip() for line in lines for cell in line.strip("|").split("|")}
    assert len(cells) > 100
    assert not [cell for cell in cells if html.escape(cell) not in page and cell != "holds if"]


def test_a_killed_run_has_the_numbers_of_an_unbroken_one(finished, tmp_path, monkeypatch):
    """Killed twice and started again: metrics.csv is the same, byte for byte."""
    study, data, calls = finished.study, finished.data, []

    def dies(*arguments):
        calls.append(arguments)
        if len(calls) in (40, 90):
            raise KeyboardInterrupt
        return outputs(*arguments)

    monkeypatch.setattr("studies.engine.predict.outputs", dies)
    store = store_in(tmp_path, TINY)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            run(study, data, Making(store))
    run(study, data, Making(store))
    write_report(collected(study, data, tmp_path), tmp_path)
    for name in ("metrics.csv", "frontier.csv"):
        assert (tmp_path / name).read_bytes() == (finished.out / name).read_bytes()


def test_the_mean_field_is_that_of_the_library():
    """One epoch gives what the library's trainer gives for the same batches."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(30, 4, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (30,), generator=generator)
    torch.manual_seed(0)
    network, settings = torch.nn.Linear(4, 3).double(), BayesByBackprop(1, 10, 0.01, 10.0, 0.2)
    content = train_mean_field(
        network, Labelled(x, y), lambda inputs, _: inputs, settings, 5, Nobody()
    )
    classifier = acnml.Classifier(network)
    trainer = acnml.fit.BayesByBackprop(classifier, 30, 0.2, 0.01, 0.1, seed=5)
    order = torch.Generator().manual_seed(mixed(5, 0))
    for batch in torch.randperm(30, generator=order).split(10):
        trainer.step(x[batch], y[batch])
    expected = Content.of_saved(trainer.posterior()).tensors
    assert content.tensors.keys() == expected.keys()
    assert all(torch.equal(content.tensors[name], expected[name]) for name in expected)
    std = torch.cat([v.sqrt().flatten() for v in trainer.posterior().var.values()]).mean().item()
    assert content.facts == {"epochs": 1, "std": [pytest.approx(std / 0.2)]}
