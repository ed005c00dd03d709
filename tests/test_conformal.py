"""Conformal sets: their coverage on exchangeable data, and their scores by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from acnml import conformal
from acnml.conformal import SetScore

LOG_PROBS = torch.tensor([[0.5, 0.3, 0.2], [0.4, 0.4, 0.2]], dtype=torch.float64).log()


def drawn(n: int, seed: int, classes: int = 4, temperature: float = 0.5):
    """Data whose labels follow the probabilities at another temperature: not calibrated."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(n, classes, generator=generator, dtype=torch.float64)
    labels = torch.multinomial(torch.softmax(logits, 1), 1, generator=generator).squeeze(1)
    return torch.log_softmax(logits / temperature, 1), labels


class TestScores:
    def test_lac_is_one_minus_p_up_to_a_monotone_map(self):
        assert torch.equal(SetScore.LAC(LOG_PROBS), -LOG_PROBS)

    @given(st.integers(0, 1000))
    @settings(max_examples=20, deadline=None)
    def test_aps_against_its_definition(self, seed):
        log_probs, _ = drawn(7, seed)
        p = log_probs.exp()
        above = p.unsqueeze(1) >= p.unsqueeze(2)  # (n, y, k): k is at least as probable as y
        torch.testing.assert_close(SetScore.APS(log_probs), (above * p.unsqueeze(1)).sum(2))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_aps_of_the_least_probable_label_is_exactly_one(self, dtype):
        """So that all labels are in a set whose threshold is such a score."""
        log_probs, labels = drawn(500, 0, classes=2)
        scores = SetScore.APS(log_probs.to(dtype))
        assert (scores.amax(1) == 1).all()
        surprised = labels == log_probs.argmin(1)
        fitted = conformal.fit(log_probs[surprised].to(dtype), labels[surprised], 0.9, SetScore.APS)
        assert fitted.sets(log_probs.to(dtype)).all()


@pytest.mark.parametrize("score", SetScore)
@pytest.mark.parametrize(("n", "coverage"), [(9, 0.9), (19, 0.5), (50, 0.8), (33, 0.93)])
def test_the_threshold_is_the_finite_sample_quantile(score, n, coverage):
    log_probs, labels = drawn(n, 0)
    own = score(log_probs).gather(1, labels.unsqueeze(1)).squeeze(1).sort().values
    threshold = conformal.fit(log_probs, labels, coverage, score).thresholds
    rank = next(k for k in range(1, n + 2) if k / (n + 1) >= coverage - 1e-12)
    assert torch.equal(threshold, own[rank - 1].expand(4))


@pytest.mark.parametrize("coverage", [1e-300, 0.05])
def test_a_small_coverage_takes_the_smallest_score(coverage):
    """The threshold is the smallest score that a share of k/(n + 1) ≥ c does not exceed."""
    log_probs, labels = drawn(9, 0)
    own = SetScore.LAC(log_probs).gather(1, labels.unsqueeze(1)).min()
    assert torch.equal(conformal.fit(log_probs, labels, coverage).thresholds, own.expand(4))
    few = labels != labels[0]
    by_class = conformal.fit_by_class(log_probs[few], labels[few], coverage).thresholds
    assert by_class[labels[0]] == math.inf  # a class without data


@pytest.mark.parametrize("score", SetScore)
@pytest.mark.parametrize("coverage", [0.7, 0.9])
def test_coverage_over_exchangeable_data(score, coverage):
    """Mean coverage over 400 calibration sets lies between c and c + 1/(n + 1)."""
    n, repeats = 30, 400
    found = []
    for seed in range(repeats):
        log_probs, labels = drawn(n + 50, seed)
        fitted = conformal.fit(log_probs[:n], labels[:n], coverage, score)
        found.append(conformal.coverage_of(fitted.sets(log_probs[n:]), labels[n:]))
    mean, error = np.mean(found), 4 * np.std(found) / math.sqrt(repeats)
    assert coverage - error <= mean
    # Scores of LAC have no ties. Those of APS tie at a total of 1 only.
    assert mean <= coverage + 1 / (n + 1) + error


@pytest.mark.parametrize("score", SetScore)
def test_coverage_of_every_class(score):
    n, found = 120, []
    for seed in range(200):
        log_probs, labels = drawn(n + 200, seed)
        log_probs = torch.log_softmax(log_probs + torch.tensor([2.0, 0, 0, -2.0]), 1)
        fitted = conformal.fit_by_class(log_probs[:n], labels[:n], 0.8, score)
        sets, rest = fitted.sets(log_probs[n:]), labels[n:]
        found.append([conformal.coverage_of(sets[rest == k], rest[rest == k]) for k in range(4)])
    mean, error = np.mean(found, 0), 4 * np.std(found, 0) / math.sqrt(len(found))
    assert (mean >= 0.8 - error).all()
    assert (mean <= 0.8 + 1 / 10 + error).all()


def test_a_class_with_too_few_data_is_in_every_set():
    log_probs, labels = drawn(200, 0)
    few = labels != 2
    fitted = conformal.fit_by_class(log_probs[few], labels[few], 0.9)
    assert fitted.thresholds.isinf().tolist() == [False, False, True, False]
    assert fitted.sets(log_probs)[:, 2].all()
    assert conformal.fit(log_probs[:8], labels[:8], 0.9).sets(log_probs).all()
    assert not conformal.fit(log_probs[:9], labels[:9], 0.9).thresholds.isinf().any()


def test_arrays_for_arrays():
    log_probs, labels = drawn(100, 0)
    expected = conformal.fit(log_probs, labels).sets(log_probs)
    found = conformal.fit(log_probs.numpy(), labels.numpy()).sets(log_probs.numpy())
    assert isinstance(found, np.ndarray)
    assert found.dtype == bool
    assert np.array_equal(found, expected.numpy())
    assert conformal.coverage_of(found, labels.numpy()) == conformal.coverage_of(expected, labels)
    none = conformal.fit(log_probs, labels).sets(log_probs[:0].numpy())
    assert isinstance(none, np.ndarray)
    assert (none.shape, none.dtype) == ((0, log_probs.shape[1]), bool)
    by_class = conformal.fit_by_class(log_probs.numpy(), labels.numpy())
    assert torch.equal(by_class.thresholds, conformal.fit_by_class(log_probs, labels).thresholds)


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda p, y: conformal.fit(p, y, 1.0), "coverage must be between 0 and 1"),
        (lambda p, y: conformal.fit(p.exp(), y), "log to probabilities"),
        (lambda p, y: conformal.fit(p, y).sets(p[:, :2]), r"shape \(N, 4\), got"),
        (lambda p, y: conformal.coverage_of(p > -1, y + 4), r"outside 0\.\.3"),
        (lambda p, y: conformal.coverage_of(p, y), "sets must be booleans"),
        (lambda p, y: conformal.mean_size(p[:0] > -1), "N ≥ 1"),
    ],
)
def test_mistakes(use, message):
    with pytest.raises(ValueError, match=message):
        use(*drawn(50, 0))


class TestWeighted:
    def test_without_a_shift_it_is_the_plain_threshold(self):
        log_probs, labels = drawn(199, 0)
        scores = torch.arange(199).double()
        weighted = conformal.fit_weighted(log_probs, labels, scores, scores)
        assert torch.equal(
            weighted.sets(log_probs, scores), conformal.fit(log_probs, labels).sets(log_probs)
        )
        assert weighted.effective == pytest.approx(199, rel=0.01)

    def test_coverage_where_hard_inputs_have_become_common(self):
        """Labels are as random as the score says, and the mean of the scores goes up."""

        def inputs(n, power, generator):
            scores = torch.rand(n, generator=generator, dtype=torch.float64) ** power
            logits = 3 * torch.randn(n, 4, generator=generator, dtype=torch.float64)
            true = torch.softmax(logits * (1 - scores).unsqueeze(1), 1)
            return (
                torch.log_softmax(logits, 1),
                torch.multinomial(true, 1, generator=generator).squeeze(1),
                scores,
            )

        generator, found = torch.Generator().manual_seed(0), []
        for _ in range(50):
            log_probs, labels, scores = inputs(1000, 2.0, generator)
            new, new_labels, new_scores = inputs(1000, 0.5, generator)
            weighted = conformal.fit_weighted(log_probs, labels, scores, new_scores, 0.8)
            plain = conformal.fit(log_probs, labels, 0.8)
            sets = weighted.sets(new, new_scores), plain.sets(new)
            found.append([conformal.coverage_of(each, new_labels) for each in sets])
        weighted_coverage, plain_coverage = np.mean(found, 0)
        assert plain_coverage < 0.75
        assert weighted_coverage == pytest.approx(0.8, abs=0.02)

    def test_new_inputs_beyond_the_calibration_data_get_all_labels(self):
        log_probs, labels = drawn(50, 0)
        scores = torch.arange(50).double()
        far = conformal.fit_weighted(log_probs, labels, scores, scores + 100, 0.9)
        assert far.effective == pytest.approx(5)
        assert far.sets(log_probs.numpy(), scores.numpy() + 100).all()
        with pytest.raises(ValueError, match="give the atypicality of the inputs"):
            far.sets(log_probs)
