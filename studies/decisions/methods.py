"""Where confidences come from, and two other estimates of the accuracy.

The held-out data are halved. All settings are chosen on one half, and the other half is labelled
data that nothing was chosen on: thresholds, intervals and references are from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, final

import torch
from torch import Tensor

from acnml import Calibrator, fit_calibrator
from acnml.calibration.calibrator import RuleName
from acnml.decisions import Outcomes

NETWORK, TEMPERATURE, EQUAL = "network", "temperature", "temperature of equal price"
DENSITY, ACNML, CLOSED_FORM = "density temperature", "ACNML", "closed-form NML"
NAMES: Mapping[RuleName, str] = {
    "density-temperature": DENSITY,
    "acnml": ACNML,
    "closed-form": CLOSED_FORM,
}
METHODS = (NETWORK, TEMPERATURE, EQUAL, DENSITY, ACNML, CLOSED_FORM)
THRESHOLDED = "average thresholded confidence"
DIFFERENCE = "difference of confidences"


class Arrays(NamedTuple):
    """What a network makes of data."""

    logits: Tensor
    features: Tensor
    labels: Tensor

    def some(self, rows: Tensor | slice) -> Arrays:
        """Return some of the rows."""
        return Arrays(*(part[rows] for part in self))


@final
@dataclass(frozen=True, eq=False)
class Fitted:
    """A calibrator for every rule, and labelled data that nothing was chosen on."""

    calibrators: dict[str, Calibrator]
    labelled: Arrays

    @staticmethod
    def of(train: Arrays, held_out: Arrays) -> Fitted:
        """Fit on the training data and one half of the held-out data."""
        half = len(held_out.labels) // 2
        chosen_on = held_out.some(slice(0, half))
        first = fit_calibrator((train.features, train.labels), chosen_on)
        calibrators = {
            name: fit_calibrator(first.atypicality, chosen_on, rule=rule)
            for rule, name in NAMES.items()
        }
        return Fitted(calibrators, held_out.some(slice(half, None)))

    def log_probs(self, method: str, data: Arrays) -> Tensor:
        """Return the log-probabilities (N, K) of a method."""
        own = self.calibrators[ACNML]
        temperatures = {
            NETWORK: 1.0,
            TEMPERATURE: own.temperature,
            EQUAL: own.temperature_of_equal_price,
        }
        if method in temperatures:
            return torch.log_softmax(data.logits.double() / temperatures[method], -1)
        return self.calibrators[method].log_probs(data.logits, data.features).double()

    def outcomes(self, method: str, data: Arrays) -> Outcomes:
        """Return confidences, and which predictions are right."""
        confidence = self.log_probs(method, data).amax(-1).exp()
        score = self.calibrators[ACNML].atypicality(data.features)
        return Outcomes.of(data.labels, data.logits.argmax(-1), confidence, 1 - confidence, score)


def thresholded(confidence: Tensor, known: Outcomes) -> float:
    """Return the share of confidences above a threshold (Garg et al. 2022).

    On labelled data, as large a share is above it as is right.
    """
    wrong = 1 - float(known.correct.double().mean())
    limit = torch.quantile(known.confidence.double(), wrong)
    return float((confidence.double() > limit).double().mean())


def difference(confidence: Tensor, known: Outcomes) -> float:
    """Return the accuracy on labelled data minus the loss of confidence (Guillory et al. 2021)."""
    lost = float(known.confidence.double().mean()) - float(confidence.double().mean())
    return float(known.correct.double().mean()) - lost
