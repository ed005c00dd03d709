"""The result of a calibration: a predictor with the table it was chosen from, and abstaining."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor

from acnml._util.batches import Inputs, arrays_for_arrays, tensors_for_arrays
from acnml._util.markup import html_table
from acnml._util.params import Params, is_same_or_rounded
from acnml._util.structure import tracking_batch_norms
from acnml.classifier import Classifier
from acnml.head.network import AcnmlModule
from acnml.predictors import Acnml, Predictor
from acnml.solvers import Solution
from acnml.typicality import Density

# The columns of the printed table.
COLUMNS = ["method", "T", "alpha", "accuracy", "NLL", "Brier", "ECE", "confidence", "regret"]

# Scores tie if they differ by at most this share of them plus so many machine epsilons: rounding
# differs from batch to batch.
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
    shares all layers but the last with the network. If the network has been trained since, it
    raises an error instead of an answer, see `require_current`.

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
    _statistics: Params = field(init=False, repr=False)  # of batch norm, as they were

    def __post_init__(self) -> None:
        tensors, statistics = self.classifier.tensors, Params()
        for name in tracking_batch_norms(self.classifier.model):
            own = (f"{name}.{key}".lstrip(".") for key in ("running_mean", "running_var"))
            statistics |= {key: tensors[key].clone() for key in own if key in tensors}
        object.__setattr__(self, "_statistics", statistics)

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
        return self._current.typicality

    @property
    def temperature_of_equal_price(self) -> float:
        """The plain temperature that costs as much as ACNML on the validation data."""
        return next(row.temperature for row in self.table if row.method.startswith(EQUAL_PRICE))

    def require_current(self) -> None:
        """Raise an error if the network has been trained since it was calibrated.

        All predictions and `acnml.save` call this. More training would put new layers below the
        old last one. It is noticed by the last layer and by the statistics of batch norm, which
        also change if the network only runs in train mode. Changes of the weights of other layers
        alone are not noticed.
        """
        changed = changed_tensor(self)
        if changed is not None:
            raise ValueError(
                f"{changed!r} of the network differs from when it was calibrated. If the network "
                "was trained since, or ran in train mode, calibrate it again; to train on and keep "
                "the result, calibrate copy.deepcopy(model). Otherwise load the weights that it "
                "had then"
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


def changed_tensor(calibrated: Calibrated) -> str | None:
    """Return the name of a tensor that differs from when the network was calibrated, if any."""
    classifier = calibrated.classifier
    statistics, mean = calibrated._statistics, calibrated.predictor.posterior.mean
    live = {name: _live(classifier, name) for name in (*statistics, *mean)}
    there = {name: tensor for name, tensor in live.items() if tensor is not None}
    if len(there) < len(live):
        return min(live.keys() - there.keys())
    for name, tensor in mean.items():
        if not is_same_or_rounded(there[name], tensor):
            return name
    # All statistics at once, because every comparison on a GPU waits for it.
    if statistics and not is_same_or_rounded(
        _joined(there, statistics), _joined(statistics, statistics)
    ):
        return next(iter(statistics))
    return None


def _joined(tensors: Params, names: Iterable[str]) -> Tensor:
    """Return the numbers of all named tensors as one vector, on the device of the first."""
    own = [tensors[name] for name in names]
    return torch.cat([tensor.to(own[0].device) for tensor in own])


def _live(classifier: Classifier, name: str) -> Tensor | None:
    """Return a parameter or buffer as predictions see it now, or None if it is gone.

    `Classifier.tensors` would walk through the whole network for every prediction.
    """
    if name in classifier.overrides:
        return classifier.overrides[name]
    owner, _, key = name.rpartition(".")
    try:
        tensor = getattr(classifier.model.get_submodule(owner), key)
    except AttributeError:
        return None
    return tensor if isinstance(tensor, Tensor) else None


def lenient_limit(calibrated: Calibrated, share: float, score: Score | str) -> float:
    """Return the threshold, moved by rounding error so that scores that equal it are answered.

    Equal inputs have scores that differ in their last bits between batches, and must be treated
    alike.
    """
    limit, layer = calibrated.threshold(share, score), calibrated.predictor.last_layer
    assert layer is not None
    assert isinstance(layer.module.weight, Tensor)
    dtype = torch.promote_types(layer.module.weight.dtype, torch.float32)  # that of the solver
    slack = TIE * abs(limit) + TIE_EPSILONS * torch.finfo(dtype).eps
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
