"""How well scores tell letters from digits: the higher a score, the less the input is known."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from acnml import metrics
from studies.rotated_mnist.methods import Method
from studies.study.saved import log_probs_of

# What needs no network: a method is worth something where it detects better than this.
NO_NETWORK, BRIGHTNESS = Method("no network", "pixels"), "brightness"
REGRET, CONFIDENCE, ENTROPY, ENERGY = "regret", "max-probability", "entropy", "energy"


class Detection(NamedTuple):
    """How well one score of one method detects, for one seed."""

    method: Method
    seed: int
    score: str
    auroc: float
    fpr95: float


def detections(
    method: Method, seed: int, inside: Mapping[str, Tensor], outside: Mapping[str, Tensor]
) -> list[Detection]:
    """Measure every score that the saved predictions have."""
    in_scores, out_scores = scores(inside), scores(outside)
    return [
        Detection(
            method,
            seed,
            name,
            metrics.auroc(in_scores[name], out_scores[name]),
            metrics.fpr95(in_scores[name], out_scores[name]),
        )
        for name in in_scores
    ]


def by_brightness(seed: int, inside: Tensor, outside: Tensor) -> Detection:
    """Measure the mean of an image's pixels (N, ...) as a score: letters have more ink."""
    in_scores, out_scores = (images.flatten(1).double().mean(1) for images in (inside, outside))
    found = metrics.auroc(in_scores, out_scores), metrics.fpr95(in_scores, out_scores)
    return Detection(NO_NETWORK, seed, BRIGHTNESS, *found)


def scores(saved: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the scores (N,) of saved predictions by name."""
    log_probs = log_probs_of(saved).double()
    found = {CONFIDENCE: -log_confidence(log_probs), ENTROPY: entropy(log_probs)}
    if "log_lik" in saved:
        found[REGRET] = torch.logsumexp(saved["log_lik"].double(), dim=-1)
    if "energy" in saved:
        found[ENERGY] = saved["energy"].double()
    return found


def log_confidence(log_probs: Tensor) -> Tensor:
    """Return max_y log p(y|x), a logarithm because probabilities near 1 would tie."""
    return log_probs.amax(dim=-1)


def entropy(log_probs: Tensor) -> Tensor:
    """Return -Σ_y p(y|x) log p(y|x)."""
    return torch.special.entr(log_probs.exp()).sum(dim=-1)
