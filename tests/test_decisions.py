"""Certified thresholds and accuracy without labels: exact bounds, and guarantees in simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import acnml
from acnml import decisions
from acnml.decisions import Outcomes, at_least_coverage, at_most_risk, expected_accuracy
from acnml.decisions.outcomes import MOST_KEPT
from acnml.decisions.thresholds import binomial_cdf, least_examples, upper_bound

# The error rate of predictions by their sureness u, uniform on [0, 1], and the risk above u.
TOP, SLOPE = 0.004, 0.5


def drawn(n: int, generator: torch.Generator):
    u = torch.rand(n, generator=generator, dtype=torch.float64)
    wrong = torch.rand(n, generator=generator, dtype=torch.float64) < TOP + SLOPE * (1 - u) ** 3
    return u, ~wrong


def risk_above(u: float) -> float:
    return TOP + SLOPE * (1 - max(u, 0.0)) ** 3 / 4


def outcomes(n: int = 2000, seed: int = 0, classes: int = 3) -> Outcomes:
    generator = torch.Generator().manual_seed(seed)
    confidence = 0.5 + torch.rand(n, generator=generator) / 2
    predicted = torch.randint(0, classes, (n,), generator=generator)
    right = torch.rand(n, generator=generator) < confidence
    label = torch.where(right, predicted, (predicted + 1) % classes)
    score = torch.rand(n, generator=generator)
    return Outcomes.of(label, predicted, confidence, 1 - confidence, score)


class TestBinomial:
    @pytest.mark.parametrize("n", [1, 1000, 100_000])
    @pytest.mark.parametrize("p", [0.0, 1e-9, 0.02, 0.5, 0.999, 1.0])
    def test_cdf_against_scipy(self, n, p):
        stats = pytest.importorskip("scipy.stats")
        for k in {-1, 0, 1, n // 50, n // 2, n - 1, n}:
            expected = stats.binom.cdf(k, n, p)
            assert binomial_cdf(k, n, p) == pytest.approx(expected, rel=1e-8, abs=1e-300)

    def test_upper_bound_against_scipy(self):
        stats = pytest.importorskip("scipy.stats")
        for errors, n in ((0, 1), (0, 100), (3, 50), (49, 50), (200, 10_000)):
            expected = stats.beta.ppf(0.95, errors + 1, n - errors)
            assert upper_bound(errors, n, 0.95) == pytest.approx(expected, abs=1e-11)
        assert upper_bound(5, 5, 0.95) == 1.0


class TestGuarantees:
    @pytest.mark.parametrize(("n", "risk"), [(300, 0.05), (1000, 0.02)])
    def test_the_risk_is_above_its_limit_as_rarely_as_promised(self, n, risk):
        generator, above = torch.Generator().manual_seed(0), 0
        for _ in range(1000):
            found = at_most_risk(*drawn(n, generator), risk, confidence=0.9)
            above += found.is_certified and risk_above(found.threshold) > risk
        assert 0 < above <= 100

    def test_coverage_and_risk_hold_together(self):
        generator, above = torch.Generator().manual_seed(0), 0
        for _ in range(1000):
            found = at_least_coverage(*drawn(400, generator), coverage=0.7, confidence=0.9)
            missed = 1 - max(found.threshold, 0) < 0.7
            above += missed or risk_above(found.threshold) > found.risk
        assert 0 < above <= 100

    @pytest.mark.parametrize(("n", "coverage"), [(50, 0.9), (200, 0.5), (1000, 0.8)])
    def test_the_coverage_is_the_exact_tolerance_limit(self, n, coverage):
        stats = pytest.importorskip("scipy.stats")
        found = at_least_coverage(torch.rand(n), torch.ones(n), coverage)
        chance = [
            stats.beta.cdf(coverage, k, n - k + 1) for k in (found.accepted, found.accepted - 1)
        ]
        assert chance[0] <= 0.025 < chance[1]


class TestCertificates:
    def test_the_number_that_is_needed_is_enough(self):
        sureness = torch.linspace(0, 1, 100)
        few = at_most_risk(sureness, torch.ones(100), risk=0.02)
        assert not few.is_certified
        assert few.needed == 149 == least_examples(0.02, 0.05)
        more = torch.linspace(0, 1, few.needed)
        assert at_most_risk(more, torch.ones(few.needed), risk=0.02).accepted == few.needed
        assert not at_most_risk(more[1:], torch.ones(few.needed - 1), risk=0.02).is_certified
        found = at_least_coverage(torch.rand(20), torch.ones(20), coverage=0.9)
        assert found.needed == 36  # 0.9^36 < 0.025
        assert at_least_coverage(torch.rand(36), torch.ones(36), coverage=0.9).accepted == 36

    def test_errors_at_the_top_cannot_be_outnumbered(self):
        wrong = torch.ones(1000)
        wrong[::4] = 0
        found = at_most_risk(torch.linspace(0, 1, 1000), wrong, risk=0.02)
        assert (found.threshold, found.risk, found.needed) == (math.inf, 1.0, None)
        assert "More of them would not help" in str(decisions.Abstention("regret", 0.95, (found,)))

    def test_nothing_is_certified_for_a_class_that_is_never_predicted(self):
        known = outcomes(4000)
        predicted = torch.where(known.predicted == 1, 2, known.predicted)
        own = Outcomes(known.label, predicted, known.confidence, known.regret, known.score)
        found = decisions.abstention(own, risk=0.3, by_class=True).certificates
        assert [each.examples for each in found] == [
            int((predicted == k).sum()) for k in range(len(found))
        ]
        assert (found[1].threshold, found[1].needed) == (math.inf, 9)  # 0.7^9 < 0.05

    def test_examples_without_an_answer_are_the_least_sure(self):
        sureness = torch.linspace(0, 1, 1000)
        sureness[800:] = math.nan
        found = at_most_risk(sureness, ~sureness.isnan(), risk=0.02)
        assert 0 < found.accepted <= 820
        assert found.threshold > -math.inf
        most = at_least_coverage(sureness, ~sureness.isnan(), coverage=0.7)
        assert 0.7 * 1000 < most.accepted < 800
        none = at_least_coverage(sureness, ~sureness.isnan(), coverage=0.85)  # 0.8 have an answer
        assert (none.is_certified, none.needed) == (False, None)

    def test_ties_are_accepted_together(self):
        sureness = torch.tensor([0.9] * 150 + [0.5] * 850)
        correct = torch.ones(1000)
        correct[150:300] = 0
        found = at_most_risk(sureness, correct, risk=0.1)
        assert not found.is_certified  # the first test accepts 250 examples, and so all
        assert at_most_risk(sureness, correct, risk=0.2).accepted == 1000

    def test_mistakes(self):
        for arguments, message in (
            ({"risk": 0.1, "coverage": 0.5}, "give one of risk and coverage"),
            ({"coverage": 90}, "coverage must be between 0 and 1"),
            ({"risk": 0.1, "confidence": 95}, "confidence must be between 0 and 1"),
            ({"risk": 0.1, "by": "score"}, 'by must be "confidence" or "regret"'),
        ):
            with pytest.raises(ValueError, match=message):
                decisions.abstention(outcomes(), **arguments)
        with pytest.raises(ValueError, match=r"differ in shape: \(9,\) and \(10,\)"):
            at_most_risk(torch.rand(9), torch.ones(10), risk=0.1)


def calibrator(on_error: str = "raise") -> tuple[acnml.Calibrator, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6000, 3, generator=generator)
    labels = torch.multinomial(torch.softmax(3 * x, 1), 1, generator=generator).squeeze(1)
    logits = 5 * x
    fitted = acnml.fit_calibrator(
        (x[:2000], labels[:2000]),
        (logits[2000:4000], x[2000:4000], labels[2000:4000]),
        on_error=on_error,
    )
    return fitted, x[4000:], labels[4000:]


class TestCalibrator:
    @pytest.mark.parametrize("by", ["confidence", "regret"])
    def test_accepts_what_its_certificate_says(self, by):
        fitted, x, labels = calibrator()
        found = fitted.abstention(0.2, by=by)
        (certificate,) = found.certificates
        accepted = found.accepts(fitted(5 * x, x))
        assert float(accepted.double().mean()) == pytest.approx(
            certificate.accepted / certificate.examples, abs=0.04
        )
        wrong = (fitted.predict(5 * x, x) != labels)[accepted]
        assert float(wrong.double().mean()) < 0.2
        assert isinstance(found.accepts(fitted((5 * x).numpy(), x.numpy())), np.ndarray)

    def test_by_class(self):
        fitted, x, _ = calibrator()
        found = fitted.abstention(0.2, by_class=True)
        answer = fitted(5 * x, x)
        limits = torch.tensor([each.threshold for each in found.certificates])
        assert torch.equal(found.accepts(answer), answer.confidence >= limits[answer.label])
        assert sum(each.examples for each in found.certificates) == 2000
        assert str(found).count("Class ") == 3

    def test_no_answer_is_never_accepted(self):
        fitted, x, _ = calibrator("flag")
        x[0] = torch.nan
        for by_class in (False, True):
            found = fitted.abstention(coverage=0.9, by_class=by_class)
            assert not found.accepts(fitted(5 * x, x))[0]
        assert fitted.expected_accuracy(5 * x, x).count == len(x) - 1

    def test_a_class_without_validation_data_is_never_accepted(self):
        sure = decisions.Certificate(0.0, 100, 100, 0, 0.1)
        found = decisions.Abstention("confidence", 0.95, (sure, sure))
        answer = acnml.calibration.Answer(
            torch.tensor([0, 1, 2, -1]), torch.ones(4, 3), *[torch.ones(4)] * 4
        )
        assert found.accepts(answer).tolist() == [True, True, False, False]

    def test_thresholds_are_stored(self, tmp_path):
        fitted, x, _ = calibrator()
        found = fitted.abstention(0.2)
        acnml.save(found, tmp_path / "abstention.safetensors")
        acnml.save(fitted, tmp_path / "calibrator.safetensors")
        assert acnml.load(tmp_path / "abstention.safetensors") == found
        again = acnml.load(tmp_path / "calibrator.safetensors")
        assert again.abstention(0.2) == found
        assert again.expected_accuracy(5 * x, x) == fitted.expected_accuracy(5 * x, x)


class TestExpectedAccuracy:
    def test_intervals_hold_the_accuracy_as_often_as_they_say(self):
        held = 0
        for seed in range(300):
            validation, new = outcomes(500, seed), outcomes(200, 1000 + seed)
            found = expected_accuracy(new.confidence, validation, level=0.9)
            held += found.low <= float(new.correct.double().mean()) <= found.high
        assert held >= 270

    def test_the_interval_holds_the_calibration_error(self):
        """Validation predictions are right 0.1 more often than they say."""
        known = outcomes(20_000)
        confidence = known.confidence - 0.1
        shy = Outcomes(known.label, known.predicted, confidence, known.regret, known.score)
        found = expected_accuracy(confidence, shy)
        assert found.accuracy == pytest.approx(float(confidence.mean()), rel=1e-6)
        assert found.high == pytest.approx(found.accuracy + 0.1, abs=0.02)
        assert found.low == pytest.approx(found.accuracy, abs=0.02)

    def test_groups(self):
        fitted, x, _ = calibrator()
        label = fitted.predict(5 * x, x)
        found = fitted.expected_accuracy(5 * x, x, groups=label)
        assert sorted(found) == [0, 1, 2]
        whole = fitted.expected_accuracy(5 * x, x)
        total = sum(each.accuracy * each.count for each in found.values())
        assert total / whole.count == pytest.approx(whole.accuracy, rel=1e-9)
        with pytest.raises(ValueError, match="2000 predictions, but 3 groups"):
            fitted.expected_accuracy(5 * x, x, groups=[1, 2, 3])

    def test_nothing_is_known_of_nothing(self):
        found = expected_accuracy(torch.tensor([math.nan]), outcomes())
        assert math.isnan(found.accuracy)
        assert (found.low, found.high, found.count) == (0.0, 1.0, 0)


def test_large_validation_data_are_thinned_out():
    n = MOST_KEPT + 10
    values = torch.arange(n)
    kept = Outcomes.of(values, values, values / n, values / n, values / n)
    assert len(kept.label) == MOST_KEPT
    assert kept.correct.all()
    assert (kept.label.diff() > 0).all()
