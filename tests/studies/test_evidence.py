"""The study of the evidence: recorded features stand for images, and pages follow the numbers."""

from __future__ import annotations

import csv
import io
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from torch import nn

import acnml
from acnml import Classifier, Map, Tempered, metrics, tuning
from acnml.posteriors import Posterior
from acnml.solve.isotropic import solve_diagonal
from studies.data import Labelled
from studies.engine.tables import mean, select
from studies.evidence import report
from studies.evidence import study as study_module
from studies.evidence.comparisons import Cases, cases, compared, comparisons
from studies.evidence.digits import grey
from studies.evidence.measures import Interval, Scored, resampled, resamples, scores
from studies.evidence.methods import (
    ACNML,
    BMA,
    CLOSED_FORM,
    DENSITY,
    DENSITY_M,
    DROPOUT,
    ENSEMBLE,
    ENSEMBLE_WEIGHED,
    EQUAL,
    IF_COMP,
    ISOTROPIC,
    METHODS,
    OWN_CHOICE,
    PLAIN,
    PNML,
    WEIGHED,
    WHOLE,
)
from studies.evidence.report import write_pages
from studies.evidence.settings import NETWORKS, OWN, PRESETS, EvidenceStudy
from studies.evidence.study import Evidence, collect
from studies.evidence.subjects import Subject, with_unknown
from studies.evidence.views import BLOCK, Neighbours
from studies.features import RELATIVE_PRIOR
from studies.store import Reporter, Store

PRICE = 0.02
STUDY = EvidenceStudy(
    networks=("mnist",), test=200, prices=(PRICE,), resamples=50, seeds=(0, 1), samples=200
)


def subject(seed: int = 0, **more: object) -> Subject:
    """A small network on noisy clusters; shifts scale its inputs or add others of no class."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        labels = torch.arange(650) % 3
        x = 1.5 * torch.randn(3, 4)[labels] + torch.randn(650, 4)
        torch.manual_seed(1 + seed)
        network = nn.Sequential(
            nn.Linear(4, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 3)
        ).eval()
        optimizer = torch.optim.Adam(network.parameters(), lr=0.02)
        for _ in range(150):
            optimizer.zero_grad()
            nn.functional.cross_entropy(network(x[:150]), labels[:150]).backward()
            optimizer.step()
    parts = [Labelled(x[s], labels[s]) for s in (slice(0, 150), slice(150, 450), slice(450, 650))]
    train, held_out, test = parts

    def load(shift: str) -> Labelled:
        if shift == "unknown":
            return with_unknown(test, 5 * test.inputs.flip(0)[:80])
        return Labelled((1.0 if shift == "clean" else float(shift)) * test.inputs, test.labels)

    shifts = {"clean": "clean", "2": "scaled", "4": "scaled", "unknown": "beyond"}
    return Subject(
        *("tiny", "tiny", seed, lambda: network, lambda x: x, train, held_out, shifts, load),
        decided="tiny",
        methods=METHODS,
        **more,
    )


def subjects() -> list[Subject]:
    """Two seeds; the first has everything that a subject may have."""
    first, second = subject(0), subject(1)
    everything = subject(0, members=(first, second), dropout=subject(2).build, whole=True)
    return [everything, second]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("evidence")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(study_module, "subjects", lambda *_: subjects())
        for _ in range(2):  # the second run finds everything
            log = io.StringIO()
            store = Store(out, STUDY, Reporter(Console(file=log), out / "run.log"))
            evidence = collect(STUDY, out, store)
        write_pages(STUDY, evidence, out, "command")
    return evidence, out, log.getvalue()


def last_layer(own: Subject) -> tuple[Classifier, Posterior]:
    """The network at its best temperature, and a posterior of its last layer."""
    plain = Classifier(own.build())
    best = plain.tempered(tuning.temperature_by_nll(Map(plain), [own.held_out]).value)
    curvature = acnml.fit.fit_curvature(best, [own.train], layers="last", progress=False)
    return best, curvature.posterior(RELATIVE_PRIOR * curvature.mean_eigenvalue())


def weighed(own: Subject, knob: float, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """ACNML with α · s(x), input by input; s is the distance from all training data."""
    read = acnml.calibrate(own.build(), [own.train], [own.held_out], price=PRICE).features
    moments, nobody = acnml.atypicality.Moments(1), torch.zeros_like(own.train.labels)
    moments.add(read(own.train.inputs), nobody)
    held_out = read(own.held_out.inputs), torch.zeros_like(own.held_out.labels)
    scores = acnml.atypicality.Atypicality.fit(moments, *held_out)(read(x))
    predict = acnml.Acnml(*last_layer(own))
    solved = [
        replace(predict, alpha=knob * float(score)).solve(one)
        for score, one in zip(scores, x.split(1), strict=True)
    ]
    return torch.cat([each.log_probs for each in solved]), torch.cat([s.regret for s in solved])


def scores_of(row: Scored) -> dict[str, float]:
    return {name: getattr(row, name) for name in ("accuracy", "nll", "brier", "ece")}


def test_numbers_are_those_of_calibrate(finished):
    evidence, _, _ = finished
    own = subject()
    network, parts = own.build(), ([own.train], [own.held_out])
    rules = {
        ISOTROPIC[2]: "acnml",
        CLOSED_FORM: "closed-form",
        DENSITY_M: "density-temperature",
    }
    found = {m: acnml.calibrate(network, *parts, price=PRICE, rule=r) for m, r in rules.items()}
    equal = found[ISOTROPIC[2]].calibrator.temperature_of_equal_price
    predictors = {method: each.log_probs for method, each in found.items()}
    predictors[EQUAL] = Tempered(Map(Classifier(network)), equal)
    for method, log_probs in predictors.items():
        for shift in ("clean", "2", "4"):
            data = own.load(shift)
            expected = metrics.summary(log_probs(data.inputs).double(), data.labels)
            (row,) = select(evidence.rows, shift=shift, price=PRICE, method=method, seed=0)
            assert scores_of(row) == pytest.approx(expected, abs=3e-3), method


@pytest.mark.parametrize("power", ISOTROPIC)
def test_powers_of_the_score_by_the_other_solver(finished, power):
    evidence, _, _ = finished
    own = subject()
    data = own.load("4")
    (row,) = select(evidence.rows, shift="4", price=PRICE, method=ISOTROPIC[power], seed=0)
    calibrated = acnml.calibrate(own.build(), [own.train], [own.held_out], price=PRICE)
    logits = calibrated.classifier.logits(data.inputs).detach().double() / calibrated.temperature
    var = row.knob * calibrated.score(data.inputs).double().unsqueeze(1) ** power
    log_probs = torch.log_softmax(solve_diagonal(logits, var.expand_as(logits)), -1)
    expected = metrics.summary(log_probs, data.labels)
    assert scores_of(row) == pytest.approx(expected, abs=5e-4)


def test_the_family_of_nml_is_that_of_the_library(finished):
    """ACNML, IF-COMP and pNML on the tempered last layer, at the study's knobs."""
    evidence, _, _ = finished
    own = subject()
    classifier, posterior = last_layer(own)
    acnml_, if_comp = acnml.Acnml(classifier, posterior), acnml.IfComp(classifier, posterior)
    pnml = acnml.fit_pnml(classifier, [own.train], progress=False)
    for shift in ("clean", "2", "4"):
        data = own.load(shift)
        for method, of_knob in {
            ACNML: lambda knob: replace(acnml_, alpha=knob),
            IF_COMP: lambda knob: replace(if_comp, c=knob * classifier.temperature),
            PNML: lambda knob: replace(pnml, c=knob),
        }.items():
            (row,) = select(evidence.rows, shift=shift, price=PRICE, method=method, seed=0)
            expected = metrics.summary(of_knob(row.knob)(data.inputs).double(), data.labels)
            assert scores_of(row) == pytest.approx(expected, abs=5e-4), method


def test_alpha_is_weighed_by_the_score(finished):
    evidence, _, _ = finished
    own = subject()
    data = own.load("4")
    (row,) = select(evidence.rows, shift="4", price=PRICE, method=WEIGHED, seed=0)
    log_probs, _ = weighed(own, row.knob, data.inputs)
    expected = metrics.summary(log_probs.double(), data.labels)
    assert scores_of(row) == pytest.approx(expected, abs=5e-4)


def test_neighbours_by_sorting():
    generator = torch.Generator().manual_seed(0)
    train, held_out = torch.randn(2, 60, 3, generator=generator)
    scales = torch.tensor([1.0, 10.0, 0.0])  # the last feature is constant
    found = Neighbours.of(train * scales + 5, held_out * scales + 5, k=4)
    both = (train[:, :2] - train[:, :2].mean(0)) / train[:, :2].std(0, correction=0)
    asked = (held_out[:, :2] - train[:, :2].mean(0)) / train[:, :2].std(0, correction=0)
    squares = (asked.unsqueeze(1) - both).square().sum(-1).sort(1).values[:, 3]
    expected = (squares / squares.mean()).double()
    torch.testing.assert_close(found(held_out * scales + 5), expected, rtol=1e-3, atol=1e-4)


def test_all_methods_are_run_at_all_prices_and_at_their_own_choice(finished):
    evidence, _, _ = finished
    assert {row.method for row in evidence.rows} == set(METHODS)
    assert {row.price for row in evidence.rows} == {*STUDY.prices, OWN_CHOICE}


def test_a_second_run_computes_nothing(finished):
    _, _, log = finished
    assert "reused" in log
    assert "made" not in log


def test_pages_state_the_numbers(finished):
    evidence, out, _ = finished
    text = (out / "results.md").read_text()
    scaled = select(evidence.rows, group="scaled", price=PRICE, method=WEIGHED)
    assert f"| +0.02 | {WEIGHED} | {mean(scaled, 'ece'):.3f} ± " in text
    found = comparisons(evidence, STUDY.prices)
    assert "density temperature" in report.verdict(STUDY, found)
    assert {one.score for one in found if one.group == "beyond"} == {"ece"}
    assert {one.shifts for one in select(found, group="scaled", method=WEIGHED)} == {2 * 2}
    assert {one.shifts for one in select(found, group="scaled", method=ENSEMBLE)} == {2}
    with (out / "metrics.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == len(evidence.rows)
    assert {line["auroc_regret"] for line in lines if line["method"] == DENSITY} == {""}
    assert {line["nll"] for line in lines if line["shift"] == "unknown"} == {""}
    with (out / "comparisons.csv").open() as file:
        assert len(list(csv.DictReader(file))) == len(found)
    assert (out / "cases.csv").is_file()
    assert (out / "prices-tiny.png").is_file()
    assert (out / "report.html").read_text().startswith("<!DOCTYPE html>")


def test_a_resample_of_every_image_once_gives_the_metrics():
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(400, 4, generator=generator, dtype=torch.float64)
    labels = torch.randint(4, (400,), generator=generator)
    log_probs = torch.log_softmax(logits, -1)
    found = resampled(log_probs, labels, torch.ones(1, 400, dtype=torch.float64))
    summary = metrics.summary(log_probs, labels)
    for score, values in found.items():
        assert values.item() == pytest.approx(summary[score], abs=1e-9)
    weights = resamples(400, 300, seed=1)
    assert (weights.sum(1) == 400).all()
    by_repeating = log_probs.repeat_interleave(weights[0].long(), 0)
    repeated = labels.repeat_interleave(weights[0].long())
    again = resampled(log_probs, labels, weights)
    assert again["nll"][0].item() == pytest.approx(metrics.nll(by_repeating, repeated))
    assert again["brier"][0].item() == pytest.approx(metrics.brier(by_repeating, repeated))
    error = abs(again["ece"].mean().item() - summary["ece"])
    assert error < 3 * again["ece"].std().item()


def test_averages_are_those_of_the_library(finished):
    """Ensemble, dropout, all weights and Bayesian average, each at its own or at no price."""
    evidence, _, _ = finished
    first, second = subjects()
    data, held_out = first.load("4"), first.held_out
    classifiers = [Classifier(each.build()) for each in (first, second)]
    best = [tuning.temperature_by_nll(Map(each), [held_out]).value for each in classifiers]
    members = [Tempered(Map(c), t) for c, t in zip(classifiers, best, strict=True)]
    averages = {
        ENSEMBLE: acnml.Ensemble(tuple(members)),
        DROPOUT: acnml.McDropout(Classifier(first.dropout()), STUDY.samples),
    }
    for method, average in averages.items():
        warm = Tempered(average, tuning.temperature_by_nll(average, [held_out]).value)
        limit = metrics.nll(members[0](held_out.inputs), held_out.labels) + PRICE
        (row,) = select(evidence.rows, shift="4", price=PRICE, method=method, seed=0)
        warmer = Tempered(warm, 1 + row.knob)
        chosen = metrics.nll(warmer(held_out.inputs), held_out.labels)
        assert row.knob == 0 or chosen == pytest.approx(limit, abs=2e-3)
        expected = metrics.nll(warmer(data.inputs), data.labels)
        assert row.nll == pytest.approx(expected, abs=0.02 if method == DROPOUT else 1e-4)


def test_the_ensemble_of_acnml_averages_its_members(finished):
    evidence, _, _ = finished
    first, second = subjects()
    (row,) = select(evidence.rows, shift="4", price=PRICE, method=ENSEMBLE_WEIGHED, seed=0)
    data, clean = first.load("4"), first.load("clean")
    found = [[weighed(each, row.knob, x.inputs) for each in (first, second)] for x in (clean, data)]
    probs = torch.stack([log_probs.exp() for log_probs, _ in found[1]]).mean(0)
    assert row.nll == pytest.approx(metrics.nll(probs.log(), data.labels), abs=2e-3)
    regrets = [torch.stack([regret for _, regret in each]).mean(0) for each in found]
    assert row.auroc_regret == pytest.approx(metrics.auroc(*regrets), abs=2e-3)


def test_a_bayesian_average_is_that_of_the_posterior(finished):
    """From 200 samples of the logits here, and from other samples of the weights."""
    evidence, _, _ = finished
    own = subject()
    (row,) = select(evidence.rows, shift="2", price=PRICE, method=BMA, seed=0)
    classifier, posterior = last_layer(own)
    bma = acnml.Bma(classifier, posterior.scaled(row.knob), samples=400)
    data = own.load("2")
    assert row.nll == pytest.approx(metrics.nll(bma(data.inputs), data.labels), rel=0.02)


def test_all_weights_are_solved_for(finished):
    evidence, _, _ = finished
    (row,) = select(evidence.rows, shift="2", price=PRICE, method=WHOLE, seed=0)
    own = subject()
    classifier, _ = last_layer(own)
    curvature = acnml.fit.fit_curvature(classifier, [own.train])
    posterior = curvature.posterior(1e-4 * len(own.train.labels))
    solver = acnml.Acnml(classifier, posterior, alpha=row.knob, on_unsolved="ignore")
    data = own.load("2")
    # In blocks as in the study: where an ascent ends before the optimum, rounding is amplified.
    log_probs = torch.cat([solver.solve(x).log_probs for x in data.inputs.split(BLOCK)])
    assert row.nll == pytest.approx(metrics.nll(log_probs, data.labels), abs=1e-4)
    assert not select(evidence.rows, method=WHOLE, seed=1)


def test_inputs_of_no_class_are_never_answered_correctly(finished):
    evidence, _, _ = finished
    own = subject()
    data, clean = own.load("unknown"), own.load("clean")
    log_probs = torch.log_softmax(own.build()(data.inputs).double(), -1).detach()
    (row,) = select(evidence.rows, shift="unknown", price=PRICE, method=PLAIN, seed=0)
    confidence, predicted = log_probs.exp().max(1)
    correct = (predicted == data.labels).double()
    assert correct[len(clean.labels) :].sum() == 0
    assert row.accuracy == pytest.approx(correct.mean().item())
    assert row.ece == pytest.approx(metrics.ece_of_confidences(confidence, correct), abs=1e-6)
    split = len(clean.labels)
    pair = -confidence[:split], -confidence[split:]
    assert row.auroc_confidence == pytest.approx(metrics.auroc(*pair), abs=1e-6)
    assert row.aupr_confidence == pytest.approx(metrics.aupr(*pair), abs=1e-6)
    assert row.n == len(data.labels)
    (draws,) = resampled(log_probs, data.labels, torch.ones(1, len(data.labels)).double()).values()
    assert draws.item() == pytest.approx(scores(log_probs, data.labels, 20)["ece"], abs=1e-9)


def test_shifts_and_cases_are_counted():
    """Shift a is won for certain, b lost for certain, c won by a difference within its interval."""
    rows, draws = [], {}
    for shift, own, rival, spread in (("a", 1.0, 2.0, 0.1), ("b", 2, 1, 0.1), ("c", 1, 1.1, 1.0)):
        for method, value in ((ACNML, own), (EQUAL, rival)):
            blank = dict.fromkeys(Scored._fields, 0.0)
            values = {"network": "n", "shift": shift, "group": "g", "price": 0.01, "nll": value}
            rows.append(Scored(**{**blank, **values, "method": method}))
            noise = spread * torch.linspace(-1, 1, 101) if method == ACNML else torch.zeros(101)
            draws["n", 0, shift, 0.01, method, "nll"] = value + noise
    evidence = Evidence(rows, draws)
    found = compared(evidence, select(rows, method=ACNML), EQUAL, "nll")
    assert found.counts == "2 (1) : 1 (1)"
    assert found.mean == pytest.approx(-0.1 / 3)
    assert str(Interval(-0.1, -0.2, 0.3)) == "-0.1000 [-0.2000, +0.3000]"
    worse = found._replace(price=0.03, mean=0.1)
    other = found._replace(network="m")
    counted = cases([found, worse, other], {"one": ("n",), "all": ("n", "m")})
    assert counted == [
        Cases("one", ACNML, EQUAL, "nll", 1, 2),
        Cases("all", ACNML, EQUAL, "nll", 2, 3),
    ]


def test_grey_images_keep_their_mean():
    """Grey is the usual mean of the colours, on a smaller grid."""
    one = torch.full((2, 3, 32, 32), 51, dtype=torch.uint8)
    torch.testing.assert_close(grey(one), torch.full((2, 1, 28, 28), 0.2))


def test_networks_are_checked():
    assert set(PRESETS["quick"].networks) == set(PRESETS["full"].networks) == set(NETWORKS)
    with pytest.raises(ValueError, match="there is no 'resnet19', only mnist"):
        EvidenceStudy(networks=("resnet19",))


def test_seeds_without_weights_are_refused():
    with pytest.raises(ValueError, match="weights of resnet20-own for the seeds 0, 1, 2 alone"):
        EvidenceStudy(networks=(OWN,), seeds=(7, 8))
    assert EvidenceStudy(networks=(OWN,), seeds=(7, 1)).seeds == (7, 1)
