"""Predictors whose scores are known by hand, and data to tune them on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from acnml import Acnml, Classifier, Diagonal
from acnml.predictors import Predictor
from acnml.solve import Solution


@dataclass(frozen=True)
class Scaled(Predictor):
    """A predictor whose logits are the inputs times a number."""

    factor: float = 1.0

    def __call__(self, x: Tensor) -> Tensor:
        return (self.factor * x).log_softmax(-1)


@dataclass(frozen=True)
class FakeSolver:
    """Likelihoods that α changes in a known way: it flattens them, and above 1 adds errors."""

    def __call__(self, classifier: Classifier, posterior: Diagonal, x: Tensor) -> Solution:
        alpha = posterior.var["weight"][0, 0].item()
        logits = x / (1 + alpha) if alpha <= 1 else x.flip(-1)
        zeros = torch.zeros_like(logits)
        return Solution(logits.log_softmax(-1), zeros, zeros, zeros == 0)

    def log_lik(self, classifier: Classifier, posterior: Diagonal, x: Tensor) -> Tensor:
        return self(classifier, posterior, x).log_lik


def identity() -> nn.Linear:
    """Logits are the inputs."""
    model = nn.Linear(3, 3, bias=False).double()
    nn.init.eye_(model.weight)
    return model


def fake_acnml() -> Acnml:
    """The posterior's mean is the identity, and the model's own weights are something else."""
    mean = {"weight": identity().weight.detach()}
    posterior = Diagonal(mean, {"weight": torch.ones(3, 3).double()})
    return Acnml(Classifier(nn.Linear(3, 3, bias=False).double()), posterior, FakeSolver(), 7.0)


# 3 of 4 are right. With the logit 2 for one class and 0 for two, p = e²/(e² + 2) and 1/(e² + 2).
FOUR = [(2 * torch.eye(3, dtype=torch.float64)[[0, 1, 2, 2]], torch.tensor([0, 1, 2, 0]))]
