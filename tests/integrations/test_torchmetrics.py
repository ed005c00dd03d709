"""Accumulators: equal to the functions of `acnml.metrics` on all data, in batches and processes."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import distributed
from torch.multiprocessing import spawn

from acnml import metrics
from cases import normal

pytest.importorskip("torchmetrics", reason="torchmetrics is not installed")

from torchmetrics import MetricCollection

from acnml.torchmetrics import Aurc, Brier, Ece, Nll

KINDS = {
    "nll": (Nll, metrics.nll),
    "brier": (Brier, metrics.brier),
    "ece": (lambda: Ece(bins=7), lambda log_probs, labels: metrics.ece(log_probs, labels, 7)),
    "aurc": (Aurc, metrics.aurc),
}


def data(n: int = 101, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    """Predictions, among them confidences that tie and that are saturated."""
    logits = normal(n, 4, seed=1)
    logits[::5] = logits[0]
    logits[::9] *= 1000
    return torch.log_softmax(logits.to(dtype), -1), torch.arange(n) % 4


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", [[1] * 101, [40, 1, 60]])
def test_batches_are_as_good_as_all_data(kind, sizes):
    build, function = KINDS[kind]
    log_probs, labels = data()
    metric = build()
    for batch in zip(log_probs.split(sizes), labels.split(sizes), strict=True):
        metric.update(*batch)
    assert metric.compute().item() == pytest.approx(
        function(log_probs, labels), rel=1e-12, abs=1e-12
    )
    metric.reset()
    metric.update(log_probs[:50], labels[:50])
    expected = function(log_probs[:50], labels[:50])
    assert metric.compute().item() == pytest.approx(expected, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_single_precision_is_widened_first(kind):
    build, function = KINDS[kind]
    log_probs, labels = data(dtype=torch.float32)
    metric = build().half()  # as a module in half precision does to its metrics
    first = metric(log_probs[:30], labels[:30])
    metric(log_probs[30:], labels[30:])
    assert first.item() == pytest.approx(function(log_probs[:30], labels[:30]), rel=1e-12)
    assert metric.compute().dtype == torch.float64
    assert metric.compute().item() == pytest.approx(function(log_probs, labels), rel=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_states_of_two_metrics_merge(kind):
    build, function = KINDS[kind]
    log_probs, labels = data()
    one, other = build(), build()
    one.update(log_probs[:30], labels[:30])
    other.update(log_probs[30:], labels[30:])
    one.merge_state(other)
    assert one.compute().item() == pytest.approx(function(log_probs, labels), rel=1e-12, abs=1e-12)


def test_a_collection_keeps_scores_apart_that_begin_alike():
    """It merges metrics whose states agree after the first batch, here one without any loss."""
    collection = MetricCollection({name: build() for name, (build, _) in KINDS.items()})
    sure = torch.log_softmax(torch.tensor([[30.0, 0, 0, 0], [0, 30.0, 0, 0]]).double(), -1)
    log_probs, labels = data()
    collection.update(sure, torch.tensor([0, 1]))
    collection.update(log_probs, labels)
    whole = torch.cat([sure, log_probs]), torch.cat([torch.tensor([0, 1]), labels])
    for name, value in collection.compute().items():
        assert value.item() == pytest.approx(KINDS[name][1](*whole), rel=1e-12, abs=1e-12)


@pytest.mark.filterwarnings("ignore:The ``compute`` method")  # of torchmetrics, on what is tested
def test_mistakes():
    assert Nll().compute().isnan()
    with pytest.raises(ValueError, match="No samples"):
        Aurc().compute()
    with pytest.raises(ValueError, match="bins must be at least 1, got 0"):
        Ece(bins=0)
    with pytest.raises(ValueError, match="apply log_softmax to logits"):
        Brier().update(torch.ones(2, 3), torch.tensor([0, 1]))


# Real processes ----------------------------------------------------------------------------------


def test_a_process_may_have_seen_no_data(tmp_path):
    """Under gloo, which needs the same type of state in all processes."""
    spawn(_one_has_no_data, args=(str(tmp_path / "meeting"),), nprocs=2)


def _one_has_no_data(rank: int, meeting: str) -> None:
    distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    log_probs, labels = data()
    for build, function in KINDS.values():
        metric = build()
        if rank == 0:
            metric.update(log_probs, labels)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torchmetrics warns of what is tested here
            found = metric.compute().item()
        assert found == pytest.approx(function(log_probs, labels), rel=1e-12, abs=1e-12)
    distributed.destroy_process_group()
