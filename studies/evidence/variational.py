"""A variational last layer (VBLL, Harrison, Willes & Snoek 2024), trained on recorded features.

The rows of the last layer are Gaussian with diagonal covariances, the logits have Gaussian noise of
their own. Mean, variances and noise maximise the published bound: for each input

    w̄_yᵀφ − logsumexp_k(w̄_kᵀφ + ½ (φᵀS_kφ + σ_k²)),

minus (KL(q(W) ‖ N(0, s)) − Wishart term of the noise) / N. The prior's variance s and the number of
steps are those of least held-out NLL. Features are standardised and have a constant.
"""

from __future__ import annotations

import math
from typing import NamedTuple, final

import torch
from torch import Tensor
from torch.nn import functional

from acnml import metrics
from studies.evidence.recorded import Recorded

PRIORS = (0.01, 0.1, 1.0)  # variances
ROUNDS, STEPS, BATCH, RATE = 12, 100, 200, 5e-3  # the held-out NLL is seen after every round
SAMPLES = 100  # of the logits


class _Layer(NamedTuple):
    """The parameters."""

    mean: Tensor  # (K, d + 1)
    log_std: Tensor  # (K, d + 1)
    log_noise: Tensor  # (K,)

    def logits(self, a: Tensor) -> tuple[Tensor, Tensor]:
        """Return means and variances (N, K)."""
        var = a.square() @ (2 * self.log_std).exp().T + (2 * self.log_noise).exp()
        return a @ self.mean.T, var

    def loss(self, a: Tensor, labels: Tensor, prior: float, count: int) -> Tensor:
        """Return the bound of a batch, negated."""
        mean, var = self.logits(a)
        fit = mean.gather(1, labels[:, None])[:, 0] - torch.logsumexp(mean + var / 2, -1)
        spread = (2 * self.log_std).exp()
        kl = ((self.mean.square() + spread) / prior - 2 * self.log_std + math.log(prior)).sum() / 2
        degrees = (len(self.mean) + 2) / 2
        wishart = -2 * degrees * self.log_noise.sum() - (-2 * self.log_noise).exp().sum() / 2
        return -fit.mean() - (wishart - kl) / count

    def log_probs(self, a: Tensor) -> Tensor:
        """Return the logarithm of the mean of softmax over samples of the logits (N, K)."""
        mean, var = self.logits(a)
        generator = torch.Generator().manual_seed(0)
        draws = torch.randn(SAMPLES, 1, len(self.mean), generator=generator)
        total = torch.full_like(mean, -math.inf, dtype=torch.float64)
        for draw in draws:
            one = torch.log_softmax((mean + var.sqrt() * draw).double(), -1)
            total = torch.logaddexp(total, one)
        return total - math.log(SAMPLES)


@final
class Variational:
    """A variational last layer for the training data of a network."""

    def __init__(self, train: Recorded, held_out: Recorded) -> None:
        self._origin, self._scale = train.last.mean(0), train.last.std(0).clamp(min=1e-6)
        tried = [self._trained(train, held_out, prior) for prior in PRIORS]
        self._layer = min(tried, key=lambda pair: pair[0])[1]

    def __call__(self, data: Recorded) -> Tensor:
        """Return log-probabilities (N, K)."""
        return self._layer.log_probs(self._prepared(data))

    def _prepared(self, data: Recorded) -> Tensor:
        own = (data.last - self._origin) / self._scale
        return functional.pad(own.float(), (0, 1), value=1.0)

    @torch.enable_grad()
    def _trained(self, train: Recorded, held_out: Recorded, prior: float) -> tuple[float, _Layer]:
        """Return the least held-out NLL of all rounds, and the layer that has it."""
        a, b, K = self._prepared(train), self._prepared(held_out), train.logits.shape[1]
        start = torch.zeros(K, a.shape[1])
        given = start, start - math.log(a.shape[1]) / 2 - 1, torch.full((K,), -1.0)
        layer = _Layer(*(tensor.clone().requires_grad_() for tensor in given))
        optimizer = torch.optim.Adam(list(layer), lr=RATE)
        generator, found = torch.Generator().manual_seed(0), list[tuple[float, _Layer]]()
        for _ in range(ROUNDS):
            for _ in range(STEPS):
                rows = torch.randint(len(a), (BATCH,), generator=generator)
                optimizer.zero_grad()
                layer.loss(a[rows], train.labels[rows], prior, len(a)).backward()
                optimizer.step()
            kept = _Layer(*(tensor.detach().clone() for tensor in layer))
            found.append((metrics.nll(kept.log_probs(b), held_out.labels), kept))
        return min(found, key=lambda pair: pair[0])
