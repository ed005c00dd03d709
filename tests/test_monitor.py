"""A monitor: its evidence by hand, false alarms over many streams, changes, and storage."""

from __future__ import annotations

import math

import pytest
import torch

import acnml
from acnml.decisions import Monitor, Observed, Outcomes
from acnml.decisions.monitor import BINS, EPSILONS, STATISTICS
from test_decisions import calibrator


def answers(n: int, generator: torch.Generator, shift: float = 0.0) -> Observed:
    score = (torch.randn(n, generator=generator) + shift).exp()
    confidence = 0.5 + torch.rand(n, generator=generator) / 2
    label = torch.randint(0, 3, (n,), generator=generator)
    return Observed(label, confidence, score / 10, score, confidence < 0.55)


def reference(n: int, generator: torch.Generator) -> Outcomes:
    own = answers(n, generator)
    return Outcomes(own.label, own.label, own.confidence, own.regret, own.score)


def test_false_alarms_are_as_rare_as_promised():
    """Over 1,000 streams that are longer than the reference."""
    generator, alarms = torch.Generator().manual_seed(0), 0
    for _ in range(1000):
        monitor = Monitor.of(reference(200, generator), level=0.05)
        for _ in range(3):
            monitor.update(answers(150, generator))
        alarms += monitor.changed_at is not None
    assert 0 < alarms <= 50


def test_a_pattern_in_the_order_of_the_reference_is_no_change():
    """Every second example is from another source, in the reference and afterwards."""
    generator, alarms = torch.Generator().manual_seed(0), 0
    for _ in range(100):
        known, new = (answers(400, generator) for _ in range(2))
        for each in (known, new):
            each.score[::2] += 2
        own = Outcomes(known.label, known.label, known.confidence, known.regret, known.score)
        alarms += Monitor.of(own, level=0.05).update(new).changed
    assert alarms <= 5


@pytest.mark.parametrize("quiet", [0, 5000])
def test_a_change_is_found(quiet):
    generator = torch.Generator().manual_seed(0)
    monitor = Monitor.of(reference(2000, generator), level=0.01)
    if quiet:
        assert not monitor.update(answers(quiet, generator)).changed
    assert monitor.update(answers(1000, generator, shift=0.5)).changed
    assert quiet < monitor.changed_at <= quiet + 500
    assert monitor.update(answers(100, generator)).changed  # it stays


def test_the_evidence_against_its_definition():
    """The money of every start of every bet, one value after the other."""
    generator = torch.Generator().manual_seed(0)
    known = reference(60, generator)
    monitor, new = Monitor.of(known), answers(40, generator, shift=2.0)
    edges, counts = monitor.edges.clone(), monitor.counts.clone()
    monitor.update(new)
    chance = torch.rand(2, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    money = []
    for s, name in enumerate(STATISTICS):
        p = []
        for t, value in enumerate(getattr(new, name).double()):
            own = int(torch.searchsorted(edges[s], value))
            counts[s, own] += 1
            above = counts[s, own + 1 :].sum() + chance[s, t] * counts[s, own]
            p.append(float(above / counts[s].sum()))
        for side in (p, [1 - each for each in p]):
            for epsilon in EPSILONS:
                gains = [epsilon * each ** (epsilon - 1) for each in side]
                money.append(
                    [
                        sum(math.prod(gains[u:t]) / ((u + 1) * (u + 2)) for u in range(t))
                        + 1 / (t + 1)
                        for t in range(1, 41)
                    ]
                )
    mean = torch.tensor(money, dtype=torch.float64).mean(0)
    assert mean.max() > 2
    assert monitor.evidence == pytest.approx(float(mean.max().log10()), abs=1e-9)
    assert torch.equal(monitor.counts, counts)
    assert monitor.edges.shape == (2, BINS - 1)


def test_windows_say_what_is_in_them():
    generator = torch.Generator().manual_seed(0)
    monitor = Monitor.of(reference(1000, generator))
    new = answers(500, generator)
    label = new.label.clone()
    label[:100] = -1
    found = monitor.update(new._replace(label=label))
    assert (found.count, found.unanswered) == (400, 100)
    assert found.abstained == float((new.confidence[100:] < 0.55).double().mean())
    assert found.confidence == pytest.approx(float(new.confidence[100:].mean()), rel=1e-6)
    assert found.accuracy.accuracy == pytest.approx(found.confidence, rel=1e-6)
    assert found.classes < 0.1
    one = monitor.update(new._replace(label=torch.zeros(500)))
    assert one.classes == pytest.approx(2 / 3, abs=0.05)
    assert monitor.seen == 900


def test_a_monitor_goes_on_after_a_break(tmp_path):
    generator = torch.Generator().manual_seed(0)
    monitor = Monitor.of(reference(500, generator))
    first, second = answers(300, generator), answers(5000, generator, shift=0.2)
    monitor.update(first)
    acnml.save(monitor, tmp_path / "monitor.safetensors")
    again = acnml.load(tmp_path / "monitor.safetensors")
    assert again.update(second) == monitor.update(second)
    assert again.changed_at == monitor.changed_at


def test_a_monitor_of_a_calibrator():
    fitted, x, _ = calibrator("flag")
    monitor = fitted.monitor(level=0.01)
    assert not monitor.update(fitted(5 * x, x)).changed
    strange = 3 * x
    strange[0] = torch.nan
    found = monitor.update(fitted((5 * strange).numpy(), strange.numpy()))
    assert found.changed
    assert found.unanswered == 1
    with pytest.raises(ValueError, match="level must be between 0 and 1"):
        fitted.monitor(level=5)
