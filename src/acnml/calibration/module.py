"""Network, score and rule as one `nn.Module`, which can be moved, compiled and exported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn

from acnml._util import batches
from acnml._util.batches import Inputs
from acnml.calibration.calibrator import Calibrator, without_answers
from acnml.calibration.heads import padding
from acnml.classifier import Classifier, run_hook, without_autocast
from acnml.features import Folding, Keeper, Place


@final
class CalibratedModule(nn.Module):
    """Maps inputs to log-probabilities (B, K), regret (B,) and score (B,), in single precision.

    For maps, tokens and several labels they have the layout of `Answer`.

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
        self._keeper, self._folds = Keeper(places), folding is not None
        self._calibrator = calibrator
        for name, tensor in calibrator.atypicality.tensors.items():
            self.register_buffer(name, tensor.clone())
        self.register_buffer("factors", None if folding is None else folding.factors.clone())
        device = calibrator.atypicality.mean.device
        # As tensors: plain numbers are rounded to single precision in an ONNX file.
        self.register_buffer("temperature", torch.tensor(calibrator.temperature, device=device))
        self.register_buffer("alpha", torch.tensor(calibrator.alpha, device=device))
        for name, hook in self._keeper.hooks().items():
            module = self.network.get_submodule(name)
            module.register_forward_hook(partial(run_hook, hook), with_kwargs=True)
        self.eval()

    def train(self, mode: bool = True) -> CalibratedModule:
        """Stay in eval mode, also inside of modules that are trained."""
        del mode
        return super().train(False)

    def forward(self, *args: Any, **kwargs: Tensor) -> tuple[Tensor, ...]:
        """Return log-probabilities, the regret log C(x), and the atypicality m(x)."""
        if len(args) == 1 and isinstance(args[0], Mapping):  # as `Calibrated` takes it
            kwargs, args = dict(args[0]), ()
        self._keeper.run.features = {}
        logits = self._get_logits(self.network(*args, **kwargs))
        logits = logits.unsqueeze(1) if logits.ndim == 1 else logits
        given: Inputs = kwargs or (args if len(args) > 1 else next(iter(args)))
        logits = without_answers(logits, batches.broken_rows(given))
        with without_autocast(logits):
            folding = Folding(self.factors) if self._folds else None
            features = self._keeper.joined(logits.shape[0], folding)
            calibrator = self._with_buffers()
            mask = padding(calibrator.head, kwargs, logits)
            _, _, _, *parts = calibrator.explained(logits.float(), features, mask)
            return tuple(parts)

    def _with_buffers(self) -> Calibrator:
        """Return the calibrator with this module's buffers, which follow it to its device."""
        score = self._calibrator.atypicality
        own: Any = {name: getattr(self, name) for name in score.tensors}
        settings: Any = {"temperature": self.temperature, "alpha": self.alpha}
        return replace(self._calibrator, atypicality=replace(score, **own), **settings)
