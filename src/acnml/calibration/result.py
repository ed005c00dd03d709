"""The result of a calibration: a predictor with the table it was chosen from, and abstaining."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from acnml._util.batches import Inputs, arrays_for_arrays, tensors_for_arrays
from acnml._util.markup import html_table
from acnml._util.params import is_same_or_rounded
from acnml.classifier import Classifier
from acnml.head.network import AcnmlModule
from acnml.predictors import Acnml, Predictor
from acnml.solvers import Solution
from acnml.typicality import Density

# The columns of the printed table.
COLUMNS = ["method", "T", "alpha", "accuracy", "NLL", "Brier", "ECE", "confidence", "regret"]

# Scores tie if they differ by at most this share of them plus so many machine epsilons of the last
# layer: rounding differs from batch to batch.
TIE, TIE_EPSILONS = 1e-6, 4

# How the row of the temperature of equal price begins.
EQUAL_PRICE = "temperature, +"


@final
class Score(enum.Enum):
    """The score that decides whether to abstain.

    >>> import acnml
    >>> acnml.Score("regret") is acnml.Score.REGRET  # calibrated.abstains(x, score=...) takes both
    True
    """

    CONFIDENCE = "confidence"  # the probability of the likeliest class; low is uncertain
    REGRET = "regret"  # log C(x); high is uncertain

    @classmethod
    def _missing_(cls, value: object) -> Score:
        known = ", ".join(repr(score.value) for score in cls)
        raise ValueError(f"score must be a Score or one of {known}, got {value!r}")


@final
@dataclass(frozen=True)
class CalibrationRow:
    """The scores of one method on the validation data.

    >>> import acnml, torch
    >>> x = torch.randn(2000, 4, generator=torch.Generator().manual_seed(0))
    >>> labels = (x[:, 0] + 0.5 * x[:, 1] > 0).long()
    >>> model = torch.nn.Linear(4, 2)  # stands for a trained network
    >>> model.weight.data = torch.tensor([[-3.0, 0.0, 0.0, 0.0], [3.0, 0.0, 0.0, 0.0]])
    >>> calibrated = acnml.calibrate(model, x[:1000], (x[1000:], labels[1000:]), price=0.05)
    >>> [row.method for row in calibrated.table][:2]
    ['network', 'temperature']
    >>> calibrated.table[1].nll < calibrated.table[0].nll
    True
    """

    method: str
    temperature: float
    alpha: float | None
    accuracy: float
    nll: float
    brier: float
    ece: float
    confidence: float  # mean probability of the likeliest class
    regret: float | None  # mean log C(x)


@final
@dataclass(frozen=True, eq=False)
class Calibrated(Predictor):
    """A network with a temperature and ACNML on its last layer, as chosen by `calibrate`.

    `print` it to see the table that it was chosen from. It can be saved with `acnml.save`. It
    shares all layers but the last with the network. After more training of the network it therefore
    raises an error, see `require_current`.

    Attributes:
        predictor: the ACNML predictor.
        table: methods on the validation data, see `CalibrationRow`.
        notes: what to know about the choice, in sentences.
        price: the price that was asked for, in nats.
        confidence_quantiles: of the validation data, for `threshold`.
        regret_quantiles: of the validation data, for `threshold`.

    >>> import acnml, torch
    >>> x = torch.randn(2000, 4, generator=torch.Generator().manual_seed(0))
    >>> labels = (x[:, 0] + 0.5 * x[:, 1] > 0).long()
    >>> model = torch.nn.Linear(4, 2)  # stands for a trained network
    >>> model.weight.data = torch.tensor([[-3.0, 0.0, 0.0, 0.0], [3.0, 0.0, 0.0, 0.0]])
    >>> calibrated = acnml.calibrate(model, x[:1000], (x[1000:], labels[1000:]), price=0.05)
    >>> calibrated.probs(x[:3]).shape
    torch.Size([3, 2])
    >>> answers = calibrated.predict(x)[~calibrated.abstains(x, share=0.05)]
    >>> calibrated.temperature > 1 and calibrated.alpha > 0
    True
    """

    predictor: Acnml
    table: tuple[CalibrationRow, ...]
    notes: tuple[str, ...]
    price: float
    confidence_quantiles: Tensor
    regret_quantiles: Tensor

    @property
    def classifier(self) -> Classifier:
        """The tempered network."""
        return self.predictor.classifier

    @property
    def temperature(self) -> float:
        """The temperature T."""
        return self.predictor.classifier.temperature

    @property
    def alpha(self) -> float:
        """The weight α of the query."""
        return self.predictor.alpha

    @property
    def typicality(self) -> Density | None:
        """The scale s(x) of α, if there is one: also a score for inputs out of distribution."""
        return self.predictor.typicality

    @property
    def temperature_of_equal_price(self) -> float:
        """The plain temperature that costs as much as ACNML on the validation data."""
        return next(row.temperature for row in self.table if row.method.startswith(EQUAL_PRICE))

    def require_current(self) -> None:
        """Raise an error if the last layer of the network has changed since it was calibrated.

        All predictions and `acnml.save` call this. More training of the network would otherwise
        put new layers below the old last one. Changes of other layers alone are not noticed.
        """
        classifier = self.predictor.classifier
        for name, mean in self.predictor.posterior.mean.items():
            live = classifier.overrides.get(name)
            live = classifier.model.get_parameter(name) if live is None else live
            if not is_same_or_rounded(live, mean):
                raise ValueError(
                    f"{name!r} of the network differs from when it was calibrated. If the network "
                    "was trained since, calibrate it again; to train on and keep the result, "
                    "calibrate copy.deepcopy(model). Otherwise load the weights that it had then"
                )

    @property
    def _current(self) -> Acnml:
        """The predictor, if the network still has the last layer that was calibrated."""
        self.require_current()
        return self.predictor

    @arrays_for_arrays
    def __call__(self, x: Inputs) -> Tensor:
        """Return the normalised log-probabilities (B, K)."""
        return self._current(x)

    @arrays_for_arrays
    def log_probs(self, x: Inputs) -> Tensor:
        """Return the normalised log-probabilities (B, K)."""
        return self._current(x)

    @arrays_for_arrays
    def probs(self, x: Inputs) -> Tensor:
        """Return the probabilities (B, K)."""
        return self._current(x).exp()

    @arrays_for_arrays
    def predict(self, x: Inputs) -> Tensor:
        """Return the likeliest class of every input (B,), or -1 for one without an answer."""
        log_probs = self._current(x)
        return log_probs.argmax(-1).where(~log_probs.isnan().any(-1), -1)

    @arrays_for_arrays
    def regret(self, x: Inputs) -> Tensor:
        """Return log C(x) (B,), from 0 to log K: high where many labels could be explained."""
        return self._current.regret(x)

    @tensors_for_arrays
    def solve(self, x: Inputs) -> Solution:
        """Return log-probabilities, regret and residuals from one pass."""
        return self._current.solve(x)

    def as_module(self, steps: int | None = None, labels: int | None = None) -> AcnmlModule:
        """Return network and solver as one `nn.Module`, see `Acnml.as_module`."""
        return self._current.as_module(steps, labels)

    def threshold(self, share: float, score: Score | str = Score.CONFIDENCE) -> float:
        """Return the score beyond which the least certain `share` of the validation data lies.

        Inputs with a confidence below it, or a regret above it, are rejected. On data like the
        validation data that is a share of `share`; on other data usually a larger one.

        Args:
            share: between 0 and 1.
            score: a `Score` or its value, "confidence" or "regret".
        """
        if not 0 <= share <= 1:
            raise ValueError(f"share must be between 0 and 1, got {share}")
        if Score(score) is Score.CONFIDENCE:
            quantiles, at = self.confidence_quantiles, share
        else:
            quantiles, at = self.regret_quantiles, 1 - share
        return float(quantiles[round(at * (len(quantiles) - 1))])

    @arrays_for_arrays
    def abstains(
        self, x: Inputs, share: float = 0.05, score: Score | str = Score.CONFIDENCE
    ) -> Tensor:
        """Return which inputs (B,) are less certain than the least certain `share` in validation.

        Inputs without an answer are among them (see `on_error` of `calibrate`). Inputs whose score
        equals the threshold, up to rounding, are not.
        `calibrated.predict(x)[~calibrated.abstains(x)]` are the answers to the others. See
        `threshold` for the arguments.
        """
        limit = lenient_limit(self, share, score)
        solved = self._current.solve(x)
        if Score(score) is Score.CONFIDENCE:
            return ~(solved.log_probs.amax(-1).exp() >= limit)
        return ~(solved.regret <= limit)

    def __str__(self) -> str:
        lines = [COLUMNS, *(_cells(row) for row in self.table)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        text = [
            "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(cells))
            for cells in (list(zip(line, widths, strict=True)) for line in lines)
        ]
        return "\n".join([*text, "", *self.notes])

    def _repr_html_(self) -> str:
        """Return the table for notebooks, with the chosen row in bold."""
        rows = [_cells(row) for row in self.table]
        chosen = {i for i, row in enumerate(self.table) if row.alpha == self.alpha}
        return html_table(COLUMNS, rows, chosen, self.notes)

    def __repr__(self) -> str:
        return (
            f"Calibrated({self.predictor.classifier!r}, alpha={self.alpha:.4g}, "
            f"price={self.price:g})"
        )


def lenient_limit(calibrated: Calibrated, share: float, score: Score | str) -> float:
    """Return the threshold, moved by rounding error so that scores that equal it are answered.

    Equal inputs have scores that differ in their last bits between batches, and must be treated
    alike.
    """
    limit, layer = calibrated.threshold(share, score), calibrated.predictor.last_layer
    assert layer is not None
    assert isinstance(layer.module.weight, Tensor)
    slack = TIE * abs(limit) + TIE_EPSILONS * torch.finfo(layer.module.weight.dtype).eps
    return limit - slack if Score(score) is Score.CONFIDENCE else limit + slack


def _cells(row: CalibrationRow) -> list[str]:
    numbers = (row.accuracy, row.nll, row.brier, row.ece, row.confidence)
    return [
        row.method,
        f"{row.temperature:.3g}",
        "" if row.alpha is None else f"{row.alpha:.4g}",
        *(f"{number:.4f}" for number in numbers),
        "" if row.regret is None else f"{row.regret:.4f}",
    ]
