"""NML over label sequences: closed forms, and equal regret for all sequences."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from acnml.exact import LogisticProblem, fit, nml, with_intercept
from logistic import normal, refit_by_scipy


def counts_log_lik(sequence: list[int]) -> float:
    """Σ_k n_k log(n_k / n): the best independent labels for a sequence."""
    n = len(sequence)
    return sum(count * math.log(count / n) for count in Counter(sequence).values())


@pytest.mark.parametrize(("n", "classes"), [(1, 2), (6, 2), (4, 3), (3, 4)])
def test_without_features_it_is_the_shtarkov_distribution(n, classes):
    """With only an intercept, the best model predicts the label frequencies."""
    found = nml(torch.ones(n, 1), classes=classes)
    expected = torch.tensor([counts_log_lik(s) for s in found.sequences.tolist()]).double()
    assert found.converged.all()
    torch.testing.assert_close(found.log_lik, expected, rtol=0, atol=1e-6)
    shtarkov = sum(math.exp(value) for value in expected.tolist())
    assert found.complexity.item() == pytest.approx(math.log(shtarkov), abs=1e-6)


CASES = {
    "a line": (with_intercept(normal(0, 6, 1)), 0.0, 2),
    "a plane": (with_intercept(normal(1, 7, 2)), 0.0, 2),
    "three classes": (with_intercept(normal(2, 4, 1)), 0.0, 3),
    "with a penalty": (with_intercept(normal(3, 6, 1)), 0.3, 2),
    "duplicates": (with_intercept(normal(4, 3, 1)).repeat(2, 1), 0.0, 2),
}


@pytest.mark.parametrize("name", CASES)
def test_the_regret_is_the_same_for_every_sequence_and_no_distribution_has_less(name):
    features, l2, classes = CASES[name]
    found = nml(features, l2, classes)
    assert found.converged.all()
    # The likelihoods come one by one from fits of their own.
    for labels, log_lik in list(zip(found.sequences, found.log_lik, strict=True))[::5]:
        alone = fit(LogisticProblem(features, labels, l2, classes))
        torch.testing.assert_close(log_lik, alone.log_lik, rtol=0, atol=1e-9)
    assert found.log_probs.exp().sum().item() == pytest.approx(1)
    regret = found.regret(found.log_probs)
    torch.testing.assert_close(regret, found.complexity.expand_as(regret))
    rivals = torch.log_softmax(normal(5, 20, len(found.log_lik)), dim=-1)
    uniform = torch.full_like(found.log_lik, -math.log(len(found.log_lik)))
    mixed = torch.logaddexp(found.log_probs, uniform) - math.log(2)
    for rival in (*rivals, uniform, mixed):
        assert found.regret(rival).max() > found.complexity + 1e-6


def test_too_many_sequences_are_refused():
    with pytest.raises(ValueError, match="2\\^21 label sequences"):
        nml(torch.ones(21, 1))


def test_nmap_takes_the_map_of_every_sequence():
    """Against fits by SciPy; a stronger prior leaves less to choose from, and none is NML."""
    features = with_intercept(normal(6, 4, 1))
    found = nml(features, 0.7)
    penalty = torch.full((2,), 0.7).double()
    for labels, log_lik in zip(found.sequences, found.log_lik, strict=True):
        numbers = features.numpy(), labels.numpy(), penalty.numpy()
        weights = torch.from_numpy(refit_by_scipy(*numbers, 2))
        expected = torch.log_softmax(features @ weights.mT, dim=-1).gather(1, labels[:, None]).sum()
        torch.testing.assert_close(log_lik, expected, rtol=0, atol=1e-6)
    regret = found.regret(found.log_probs)
    torch.testing.assert_close(regret, found.complexity.expand_as(regret))
    assert nml(features, 7.0).complexity < found.complexity < nml(features).complexity
