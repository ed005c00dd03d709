"""DensityTempered: a temperature that rises with how atypical an input is."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import final

import torch
from torch import Tensor

from acnml._engine.trust import checked_logits
from acnml._util import checks
from acnml._util.batches import Inputs, arrays_for_arrays
from acnml._util.passes import in_chunks
from acnml.classifier import Classifier, require_classifier
from acnml.predictors.base import Predictor
from acnml.typicality import Density
from acnml.typicality.places import Taps

# A score that is larger counts as this one: its square is still finite in double precision.
LARGEST_SCORE = 1e150


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
        tempered = partial(self._tempered, self.density.taps(self.classifier))
        return torch.cat([*in_chunks(self.classifier.prepare(x), tempered)])

    def _tempered(self, taps: Taps, x: Inputs) -> Tensor:
        logits = checked_logits(self.classifier, x, taps.classifier)
        score = self.density.read(taps.features())
        log_probs = density_tempered(logits, score, self.temperature, self.slope)
        return checks.require_finite(
            log_probs, "log-probabilities are", f"raise the temperature ({self.temperature})"
        )


def density_tempered(logits: Tensor, score: Tensor, temperature: float, slope: float) -> Tensor:
    """Return the log-probabilities (B, K) for logits (B, K) and scores s (B,)."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    temperatures = (temperature * relative_temperatures(score, slope)).to(wide)
    return torch.log_softmax(logits.to(wide) / temperatures.unsqueeze(-1), dim=-1)


def relative_temperatures(score: Tensor, slope: float) -> Tensor:
    """Return 1 + c s² (B,) in double precision for scores s (B,): 1 if c = 0, however large s."""
    return 1 + slope * score.double().clamp(max=LARGEST_SCORE) ** 2
