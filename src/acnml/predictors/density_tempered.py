"""DensityTempered: a temperature that rises with how atypical an input is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from acnml._util import batches, checks
from acnml._util.batches import Inputs, arrays_for_arrays
from acnml.classifier import Classifier, require_classifier
from acnml.predictors.base import Predictor
from acnml.typicality import Density


@final
@dataclass(frozen=True, eq=False)
class DensityTempered(Predictor):
    """softmax(z / T(x)) with T(x) = T (1 + c s(x)²): density-aware temperature scaling.

    s(x) says how atypical the input's features are among the training data (the idea of Tomani et
    al. 2023). The ranking of classes does not change. `acnml.tuning.density_temperature` chooses T
    and c. With c = 0 this is temperature scaling.

    Args:
        classifier: the model. A temperature that it has multiplies T.
        density: s(x), from `fit_typicality` or `fit_neighbours`.
        temperature: T, for inputs with s(x) = 0.
        slope: c, not negative.

    >>> import acnml, torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    >>> classifier = acnml.Classifier(model)
    >>> x = torch.randn(300, 4, generator=torch.Generator().manual_seed(0))
    >>> typicality = acnml.fit_typicality(classifier, x[:200], x[200:])
    >>> predict = acnml.DensityTempered(classifier, typicality, temperature=1.2, slope=0.1)
    >>> predict(x[:5]).shape
    torch.Size([5, 3])
    """

    classifier: Classifier
    density: Density
    temperature: float = 1.0
    slope: float = 0.0

    def __post_init__(self) -> None:
        require_classifier(self.classifier)
        if not isinstance(self.density, Density):
            kind = type(self.density).__name__
            raise TypeError(f"density must come from fit_typicality or fit_neighbours, got {kind}")
        self.density.require_view_of(self.classifier)
        checks.require_positive(self.temperature, "temperature")
        if not 0 <= self.slope < float("inf"):
            raise ValueError(f"slope must be finite and not negative, got {self.slope}")

    @arrays_for_arrays
    @torch.inference_mode(False)
    @torch.no_grad()
    def __call__(self, x: Inputs) -> Tensor:
        """Return the normalised log-probabilities (B, K)."""
        taps, parts = self.density.taps(self.classifier), []
        for chunk in batches.chunks(self.classifier.prepare(x)):
            logits = taps.classifier.logits(chunk)
            checks.require_finite(logits, "the model's logits are", "check the model and inputs")
            score = self.density.read(taps.features())
            parts.append(density_tempered(logits, score, self.temperature, self.slope))
        return torch.cat(parts)


def density_tempered(logits: Tensor, score: Tensor, temperature: float, slope: float) -> Tensor:
    """Return the log-probabilities (B, K) for logits (B, K) and scores s (B,)."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    temperatures = temperature * (1 + slope * score.to(wide) ** 2)
    return torch.log_softmax(logits.to(wide) / temperatures.unsqueeze(-1), dim=-1)
