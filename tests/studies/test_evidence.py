"""The study of the evidence: recorded features stand for images, and pages follow the numbers."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import acnml
from acnml import metrics
from acnml.calibration.search import least_nll_temperature
from scalar import solve_diagonal
from stores import rows, store_in, twice
from studies.data import Labelled
from studies.data import pictures as files
from studies.engine.tables import select
from studies.evidence import study as study_module
from studies.evidence import tabular_data, variational
from studies.evidence.comparisons import Mean, cases, compared, correlations
from studies.evidence.measures import Interval, Scored, resampled, resamples, scores
from studies.evidence.methods import (
    ACNML,
    AT_ALL_PRICES,
    CLOSED,
    DAC,
    DENSITY,
    ENSEMBLE,
    ENSEMBLES,
    EQUAL,
    OWN_CHOICE,
    PLAIN,
    PUBLISHED,
    TRIED,
    class_blocks,
    fit_ets,
    kronecker_head,
    mixed,
    squared_error,
)
from studies.evidence.recorded import Source, recorded
from studies.evidence.report import write_pages
from studies.evidence.settings import NETWORKS, OWN, PRESETS, PRICE, EvidenceStudy
from studies.evidence.study import Evidence, Known, collect
from studies.evidence.subjects import CLEAN, UNKNOWN, Subject, with_unknown
from studies.evidence.variational import Variational
from studies.evidence.views import EARLIER, PRIOR, Views, kth
from studies.store import Store

STUDY = EvidenceStudy(networks=("letters",), prices=(PRICE, 0.03), resamples=50, seeds=(0, 1))


@cache
def clusters() -> dict[str, Labelled]:
    """Noisy clusters, shifted by a factor, and others of no class."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(650) % 3
    centres = 1.5 * torch.randn(3, 4, generator=generator)
    x = centres[labels] + torch.randn(650, 4, generator=generator)
    rows = {"train": slice(0, 150), "held out": slice(150, 450), CLEAN: slice(450, 650)}
    parts = {name: Labelled(x[own], labels[own]) for name, own in rows.items()}
    test = parts[CLEAN]
    unknown = Labelled(5 * test.inputs.flip(0)[:80], torch.full((80,), UNKNOWN))
    wide = {str(k): Labelled(k * test.inputs, test.labels) for k in (2, 4)}
    return {**parts, **wide, "unknown": unknown}


@cache
def network(seed: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1 + seed)
        built = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))
        optimizer = torch.optim.Adam(built.parameters(), lr=0.02)
        x, labels = clusters()["train"]
        for _ in range(150):
            optimizer.zero_grad()
            nn.functional.cross_entropy(built(x), labels).backward()
            optimizer.step()
    return built.eval()


def subject(seed: int, store: Store, members: tuple[Subject, ...] = ()) -> Subject:
    """A small network on the clusters."""

    def record(part: str):
        source = Source.of(clusters()[part])
        found = recorded(f"tiny {part}", lambda: network(seed), source, seed, store)
        return with_unknown(record(CLEAN), found) if part == "unknown" else found

    shifts = {CLEAN: CLEAN, "2": "scaled", "4": "scaled", "unknown": "beyond"}
    return Subject("tiny", "tiny", seed, shifts, record, members)


def subjects(store: Store) -> list[Subject]:
    second = subject(1, store)
    return [subject(0, store, (second,)), second]


@pytest.fixture(scope="module", autouse=True)
def quickly():
    """Train variational last layers for a few steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(variational, "ROUNDS", 1)
        patch.setattr(variational, "PRIORS", (1.0,))
        yield


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("evidence")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(study_module, "subjects", lambda *own: subjects(own[-1]))
        evidence = twice(lambda store: collect(STUDY, out, store), out, STUDY)
        write_pages(STUDY, evidence, out, "command")
    return evidence, out, store_in(out, STUDY)


def row_of(evidence: Evidence, method: str, shift: str, price: float = PRICE) -> Scored:
    (row,) = select(evidence.rows, method=method, shift=shift, price=price, seed=0)
    return row


def four(row: Scored) -> dict[str, float]:
    return {name: getattr(row, name) for name in ("accuracy", "nll", "brier", "ece")}


@pytest.mark.filterwarnings("ignore:The price")
def test_numbers_are_those_of_calibrate(finished):
    evidence, *_ = finished
    parts = [clusters()["train"]], [clusters()["held out"]]
    rules = {ACNML[2]: "acnml", CLOSED[2]: "closed-form", DENSITY[2]: "density-temperature"}
    for method, rule in rules.items():
        calibrated = acnml.calibrate(network(0), *parts, price=PRICE, rule=rule)
        for shift in (CLEAN, "2", "4"):
            data = clusters()[shift]
            expected = metrics.summary(calibrated.log_probs(data.inputs).double(), data.labels)
            found = four(row_of(evidence, method, shift))
            assert found == pytest.approx(expected, abs=3e-3), method


def test_powers_of_the_score_by_the_other_solver(finished):
    evidence, _, store = finished
    views = Views(subject(0, store))
    view = views.of("4")
    for power, method in ACNML.items():
        row = row_of(evidence, method, "4")
        var = (row.knob * view.scores["by class"] ** power).unsqueeze(1)
        logits = view.logits.double()
        log_probs = torch.log_softmax(solve_diagonal(logits, var.expand_as(logits)), -1)
        expected, found = metrics.summary(log_probs, view.labels), four(row)
        for score in ("accuracy", "nll", "brier"):  # rounding may move an input to another bin
            assert found[score] == pytest.approx(expected[score], abs=5e-5)


def test_the_kronecker_head_solves_its_equation(finished):
    """z_y = z + V(e_y - softmax z_y), by many small steps of a fixed-point iteration."""
    *_, store = finished
    view = Views(subject(0, store)).of("2")
    found, knob = kronecker_head(view, 0.3), 0.3
    basis, spectrum = view.basis.double(), view.spectrum.double()
    weight = (knob * view.scores[EARLIER])[:, None]
    V = torch.einsum("ij,nj,kj->nik", basis, weight * spectrum, basis)
    for label in range(3):
        z0 = view.logits.double()
        z, target = z0.clone(), torch.eye(3, dtype=torch.float64)[label]
        for _ in range(3000):
            gap = (V @ (target - torch.softmax(z, -1)).unsqueeze(-1)).squeeze(-1)
            z = z + 0.02 * (z0 + gap - z)
        expected = torch.log_softmax(z, -1)[:, label]
        torch.testing.assert_close(found[:, label], expected, rtol=1e-4, atol=1e-4)


def test_class_blocks_are_those_of_the_curvature(finished):
    """H_k = Σ p_k (1 - p_k) aaᵀ / T² over the training data, and a prior."""
    *_, store = finished
    views = Views(subject(0, store))
    view, train, T = views.of("2"), views.train, views.temperature
    ones = nn.functional.pad
    a, x = (ones(data.last, (0, 1), value=1.0).double() for data in (train, view.data))
    p = torch.softmax(train.logits.double() / T, -1)
    H = torch.einsum("nk,ni,nj->kij", p * (1 - p), a, a) / T**2
    H = H + PRIOR * H.diagonal(dim1=1, dim2=2).mean() * torch.eye(a.shape[1])
    expected = torch.einsum("ni,kij,nj->nk", x, torch.linalg.inv(H), x) / T**2
    torch.testing.assert_close(view.variances.double(), expected, rtol=1e-3, atol=1e-6)
    log_lik = solve_diagonal(view.logits.double(), 0.3 * view.variances.double())
    torch.testing.assert_close(class_blocks(view, 0.3), log_lik, rtol=1e-5, atol=1e-5)


def test_a_variational_last_layer_is_less_sure_far_away(finished, monkeypatch):
    monkeypatch.setattr(variational, "ROUNDS", 4)
    *_, store = finished
    views = Views(subject(0, store))
    layer = Variational(views.train, views.held_out.data)
    plain = torch.log_softmax(views.held_out.logits.double(), -1)
    nll = metrics.nll(layer(views.held_out.data), views.held_out.labels)
    assert nll < metrics.nll(plain, views.held_out.labels) + 0.1
    data = views.of("4").data
    means = layer._layer.logits(layer._prepared(data))[0]
    torch.testing.assert_close(layer(data).exp().sum(-1), torch.ones(len(data.labels)).double())
    sure = torch.softmax(means, -1).amax(-1)
    assert layer(data).exp().amax(-1).mean() < sure.mean()


def test_every_method_keeps_its_price_on_held_out_data(finished):
    evidence, _, store = finished
    assert {row.method for row in evidence.rows} == {
        *(PLAIN, "temperature", *AT_ALL_PRICES, *PUBLISHED, *ENSEMBLES, *TRIED)
    }
    views = Views(subjects(store)[0])
    best = metrics.nll(torch.log_softmax(views.held_out.logits.double(), -1), views.held_out.labels)
    for one in study_module._chosen(views, STUDY):
        nll = metrics.nll(torch.log_softmax(one.log_lik(views.held_out), -1), views.held_out.labels)
        if one.method in AT_ALL_PRICES and one.price != OWN_CHOICE:
            assert nll - best == pytest.approx(one.price, rel=0.02), one.method
        assert one.knob == 0 or nll - best <= one.price + 1e-6 or one.price == OWN_CHOICE


def test_pages_state_the_numbers(finished):
    evidence, out, _ = finished
    text = (out / "results.md").read_text()
    own = select(evidence.rows, group="scaled", price=PRICE, method=DAC)
    assert f"{sum(row.ece for row in own) / len(own):.3f} / " in text
    lines = rows(out / "metrics.csv")
    (line,) = [
        one
        for one in lines
        if (one["group"], one["method"], float(one["price"])) == ("scaled", DAC, PRICE)
    ]
    assert float(line["ece"]) == pytest.approx(sum(row.ece for row in own) / len(own), abs=1e-5)
    assert (line["shifts"], line["seeds"]) == ("2", "2")
    assert {one["nll"] for one in lines if one["group"] == "beyond"} == {""}
    for name in ("comparisons.csv", "cases.csv", "detection.csv", "by-network.png", "by-price.png"):
        assert (out / name).is_file()


def test_ensemble_temperature_scaling_finds_the_least_squared_error():
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(500, 3, generator=generator, dtype=torch.float64)
    labels = torch.distributions.Categorical(logits=logits / 3).sample()
    found = squared_error(fit_ets(logits, labels)(logits), labels)
    t = torch.tensor(least_nll_temperature(logits, labels)).double()
    for weights in torch.rand(50, 3, generator=generator, dtype=torch.float64):
        assert found <= squared_error(mixed(logits, t, weights), labels) + 1e-4


def test_neighbours_by_sorting():
    generator = torch.Generator().manual_seed(0)
    bank, points = torch.randn(60, 3, generator=generator), torch.randn(7, 3, generator=generator)
    squares = (points.unsqueeze(1) - bank).square().sum(-1).sort(1).values[:, :4]
    torch.testing.assert_close(kth(points, bank, 4), squares, rtol=1e-4, atol=1e-5)


def test_a_resample_of_every_image_once_gives_the_metrics():
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(400, 4, generator=generator, dtype=torch.float64)
    labels = torch.randint(4, (400,), generator=generator)
    log_probs = torch.log_softmax(logits, -1)
    ece, nll = resampled(log_probs, labels, torch.ones(1, 400, dtype=torch.float64))
    summary = metrics.summary(log_probs, labels)
    assert ece.item() == pytest.approx(summary["ece"], abs=1e-9)
    assert nll.item() == pytest.approx(summary["nll"], abs=1e-9)
    weights = resamples(400, 300, seed=1)
    assert (weights.sum(1) == 400).all()
    repeated = weights[0].long()
    expected = metrics.nll(
        log_probs.repeat_interleave(repeated, 0), labels.repeat_interleave(repeated)
    )
    again = resampled(log_probs, labels, weights)
    assert again[1][0].item() == pytest.approx(expected)
    error = abs(again[0].mean().item() - summary["ece"])
    assert error < 3 * again[0].std().item()


def test_an_ensemble_averages_calibrated_members(finished):
    evidence, _, store = finished
    views = [Views(subject(seed, store)).of("4") for seed in (0, 1)]
    probs = torch.stack([torch.softmax(view.logits.double(), -1) for view in views]).mean(0)
    row = row_of(evidence, ENSEMBLE, "4")
    log_probs = torch.log_softmax(probs.log() / (1 + row.knob), -1)
    assert four(row) == pytest.approx(metrics.summary(log_probs, views[0].labels), abs=1e-5)


def test_inputs_of_no_class_are_never_answered_correctly(finished):
    evidence, _, store = finished
    data = subject(0, store).record("unknown")
    log_probs = torch.log_softmax(data.logits.double(), -1)
    row = row_of(evidence, PLAIN, "unknown")
    confidence, predicted = log_probs.exp().max(1)
    correct = (predicted == data.labels).double()
    split = len(clusters()[CLEAN].labels)
    assert correct[split:].sum() == 0
    assert row.accuracy == pytest.approx(correct.mean().item())
    assert row.ece == pytest.approx(metrics.ece_of_confidences(confidence, correct), abs=1e-4)
    assert math.isnan(row.nll)
    (found,) = select(evidence.detected, seed=0, shift="unknown", score="maximum probability")
    pair = -confidence[:split], -confidence[split:]
    assert found.auroc == pytest.approx(metrics.auroc(*pair), abs=1e-3)
    assert found.fpr95 == pytest.approx(metrics.fpr95(*pair), abs=1e-2)
    draws = resampled(log_probs, data.labels, torch.ones(1, len(data.labels)).double())
    assert draws[0].item() == pytest.approx(scores(log_probs, data.labels, 20)["ece"], abs=1e-9)


def test_shifts_and_cases_are_counted():
    """Shift a is won for certain, b lost for certain, c won by a difference within its interval."""
    scored, draws = [], {}
    for shift, own, rival, spread in (("a", 1.0, 2.0, 0.1), ("b", 2, 1, 0.1), ("c", 1, 1.1, 1.0)):
        for method, value in ((CLOSED[2], own), (EQUAL, rival)):
            place = ("n", 0, "s", shift, "g", PRICE, method, 0.0, 1, 0.0)
            scored.append(Scored(*place, value, 0.0, value))
            noise = spread * torch.linspace(-1, 1, 101) * (method == CLOSED[2])
            draws["s", 0, shift, method] = (value + noise).expand(2, -1)
    evidence = Evidence(scored, [], [], draws)
    found = compared(evidence, select(scored, method=CLOSED[2]), EQUAL, "nll")
    assert found.counts == "2 (1) : 1 (1)"
    assert found.mean == pytest.approx(-0.1 / 3)
    assert str(Interval(-0.1, -0.2, 0.3)) == "-0.1000 [-0.2000, +0.3000]"
    worse = found._replace(network="m", mean=0.1)
    (counted,) = cases([found, worse])
    assert (counted.won, counted.lost) == (1, 1)
    assert counted.mean == pytest.approx((0.1 - 0.1 / 3) / 2)


def test_correlations_rank_the_gains():
    """The network of the highest temperature gains most."""
    known, averaged = [], []
    for number, gain in enumerate((0.1, 0.2, 0.5)):
        name = f"n{number}"
        accuracy, spread, errors = 0.9 - gain, 1.0 + gain, 0.5 + gain
        own = (10 + number, 1.0 + number, accuracy, spread, errors, errors, -gain)
        known.append(Known(name, name, 0, *own))
        for method, ece in ((EQUAL, 1.0), (CLOSED[2], 1.0 - gain)):
            averaged.append(Mean(name, "g", PRICE, method, 1, 1, 0.9, ece, 0.0, ece, 0.0, 0.0))
    found = correlations(known, averaged, CLOSED[2])
    (of_temperature,) = select(found, known="temperature", score="ece")
    (of_alpha,) = select(found, known="α", score="nll")
    assert (of_temperature.correlation, of_temperature.networks) == (pytest.approx(1.0), 3)
    assert of_alpha.correlation == pytest.approx(-1.0)


def test_parts_of_pictures_are_disjoint(monkeypatch, tmp_path):
    monkeypatch.setenv("ACNML_DATA", str(tmp_path))
    for name in ("ant", "bee", files.BACKGROUND):
        (tmp_path / files.CALTECH101 / name).mkdir(parents=True)
        for number in range(6):
            image = Image.fromarray(np.full((20, 30, 3), 40 * number, np.uint8))
            image.save(tmp_path / files.CALTECH101 / name / f"image_{number}.jpg")
    known, others = files.caltech101(side=16)
    assert set(known.classes) == {0, 1}
    assert set(others.classes) == {-1}
    parts = files.by_class(known, (3, 2), seed=0)
    assert [len(part.paths) for part in parts] == [6, 4]
    assert not set(parts[0].paths) & set(parts[1].paths)
    image = parts[0].read(slice(0, 2))
    assert (image.shape, image.dtype) == ((2, 16, 16, 3), np.uint8)
    assert parts[0].checksum != parts[1].checksum


def test_a_perceptron_gives_the_probabilities_of_its_pipeline():
    generator = np.random.default_rng(0)
    x = generator.normal(size=(200, 3))
    for classes in (2, 3):
        y = np.arange(200) % classes
        fitted = tabular_data.tabular.classifier("mlp", 0).set_params(mlpclassifier__max_iter=5)
        with pytest.warns(Warning, match="converge"):
            fitted.fit(x, y)
        inputs = tabular_data.inputs_of(fitted, torch.from_numpy(x))
        probs = torch.softmax(tabular_data.perceptron(fitted)(inputs), -1).detach()
        np.testing.assert_allclose(probs, fitted.predict_proba(x), atol=1e-5)


def test_networks_are_checked():
    assert set(PRESETS["quick"].networks) == set(PRESETS["full"].networks) == set(NETWORKS)
    with pytest.raises(ValueError, match="there is no 'resnet19', only letters"):
        EvidenceStudy(networks=("resnet19",))
    with pytest.raises(ValueError, match="weights of resnet20-own for the seeds 0, 1, 2 alone"):
        EvidenceStudy(networks=(OWN,), seeds=(7, 8))
    assert EvidenceStudy(networks=(OWN,), seeds=(7, 1)).seeds == (7, 1)
