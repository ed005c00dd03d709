"""The settings of the study."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

LOGISTIC, DIGITS, MNIST = "logistic regression", "digits", "MNIST"


@final
@dataclass(frozen=True)
class Problem:
    """A data set and a network for it that can be retrained for every label of every query.

    Args:
        name: `LOGISTIC` (logistic regression on the digits of scikit-learn, averaged to 4×4
            pixels), `DIGITS` (an MLP on their 8×8 pixels) or `MNIST` (an MLP on MNIST, averaged to
            14×14 pixels).
        train: number of training data.
        hidden: units of the hidden layer, which has tanh; 0 for none.
        prior_precision: τ of the Gaussian prior of all weights, in training, in retraining and in
            all posteriors.
    """

    name: str
    train: int
    hidden: int
    prior_precision: float


@final
@dataclass(frozen=True)
class FidelityStudy:
    """The settings.

    Args:
        problems: what is solved.
        queries: inputs for which the networks are retrained: one half from the test data, the other
            half rotated by `angle`.
        held_out: data for choosing the temperature.
        angle: in degrees.
        alphas: weights of the query; CNML has 1.
        steps: of retraining, at most.
        seed: of splits and initial weights.
    """

    problems: tuple[Problem, ...] = (
        Problem(LOGISTIC, 300, 0, 1.0),
        Problem(DIGITS, 200, 8, 1.0),
        Problem(MNIST, 300, 6, 1.0),
    )
    queries: int = 40
    held_out: int = 300
    angle: float = 60.0
    alphas: tuple[float, ...] = (0.1, 0.3, 1.0, 3.0)
    steps: int = 300
    seed: int = 0


PRESETS: Mapping[str, FidelityStudy] = {
    "quick": FidelityStudy(
        problems=(Problem(LOGISTIC, 60, 0, 1.0), Problem(DIGITS, 60, 3, 1.0)),
        queries=4,
        held_out=100,
        alphas=(0.3, 1.0),
    ),
    "full": FidelityStudy(),
}
