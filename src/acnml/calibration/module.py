"""Network, score and rule as one `nn.Module`, which can be moved, compiled and exported."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, final

import torch
from torch import Tensor, nn

from acnml.atypicality import Atypicality
from acnml.calibration.calibrator import Calibrator
from acnml.calibration.rules import RULES, spread
from acnml.classifier import Classifier, without_autocast
from acnml.features import Folding, Place, joined


@final
class CalibratedModule(nn.Module):
    """Maps inputs to log-probabilities (B, K), regret (B,) and score (B,), in single precision.

    It holds a copy of the network, in eval mode. Inputs without an answer are NaN.
    """

    factors: Tensor
    temperature: Tensor
    alpha: Tensor

    def __init__(
        self,
        classifier: Classifier,
        places: Sequence[Place],
        folding: Folding | None,
        calibrator: Calibrator,
    ) -> None:
        super().__init__()
        self.network = classifier.copy_module()
        self._get_logits = classifier.get_logits
        self._places, self._kept, self._folds = tuple(places), _Kept(), folding is not None
        self._rule = calibrator.rule
        self._score = calibrator.atypicality
        for name, tensor in _tensors(calibrator.atypicality).items():
            self.register_buffer(name, tensor.clone())
        self.register_buffer("factors", None if folding is None else folding.factors.clone())
        device = calibrator.atypicality.mean.device
        # As tensors: plain numbers are rounded to single precision in an ONNX file.
        self.register_buffer("temperature", torch.tensor(calibrator.temperature, device=device))
        self.register_buffer("alpha", torch.tensor(calibrator.alpha, device=device))
        for place in self._places:
            module = self.network.get_submodule(place.module)
            module.register_forward_hook(_Keep(place, self._kept), with_kwargs=True)
        self.eval()

    def train(self, mode: bool = True) -> CalibratedModule:
        """Stay in eval mode, also inside of modules that are trained."""
        del mode
        return super().train(False)

    def forward(self, *args: Any, **kwargs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return log-probabilities, the regret log C(x), and the atypicality m(x)."""
        if len(args) == 1 and isinstance(args[0], Mapping):  # as `Calibrated` takes it
            args, kwargs = (), dict(args[0])
        self._kept.features = {}
        logits = self._get_logits(self.network(*args, **kwargs))
        kept, self._kept.features = self._kept.features, {}
        with without_autocast(logits):
            folding = Folding(self.factors) if self._folds else None
            features = joined(self._places, kept, logits.shape[0], folding)
            score = self._atypicality()(features)
            z = logits.float() / self.temperature
            log_lik = RULES[self._rule](z, spread(self.alpha, score))
            fine = z.isfinite().all(-1) & score.isfinite()
            log_lik = log_lik.where(fine.unsqueeze(-1), torch.nan)
            regret = torch.logsumexp(log_lik, -1).clamp(min=0.0)
            return torch.log_softmax(log_lik, -1), regret, score.where(fine, torch.nan)

    def _atypicality(self) -> Atypicality:
        """Return the score with this module's buffers, which follow it to its device."""
        return replace(self._score, **{name: getattr(self, name) for name in _tensors(self._score)})


def _tensors(score: Atypicality) -> dict[str, Tensor]:
    return {name: value for name, value in vars(score).items() if isinstance(value, Tensor)}


@final
class _Kept(threading.local):
    """The features of the last run by place, for every thread its own."""

    def __init__(self) -> None:
        self.features: dict[Place, Tensor] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> _Kept:
        return _Kept()

    def __reduce__(self) -> tuple[type[_Kept], tuple[()]]:
        return _Kept, ()


@final
class _Keep:
    """A forward hook that pools what passes a place."""

    def __init__(self, place: Place, kept: _Kept) -> None:
        self._place, self._kept = place, kept

    def __call__(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        self._kept.features[self._place] = self._place.pooled(
            args or tuple(kwargs.values()), output
        )
