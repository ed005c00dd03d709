"""The front door: a trained network and data in, a calibrated predictor and the reasons out.

`calibrate` runs the network once over the validation data and once over the training data. It

1. chooses the temperature T of least validation NLL (Guo et al. 2017),
2. fits a Laplace posterior over the last layer to the tempered likelihood, and in the same pass how
   typical an input's features are (`acnml.Typicality`), which scales α,
3. finds the largest α whose validation NLL is at most `price` nats above that of the tempered
   network, and whose accuracy is not lower beyond sampling error.

Everything but the two passes happens in logit space, on the features of the validation data.
"""

from __future__ import annotations

import enum
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from acnml import metrics
from acnml._engine.trust import require_logits
from acnml._util import checks
from acnml._util.batches import Inputs, arrays_for_arrays, chunks, tensors_for_arrays
from acnml._util.markup import html_table
from acnml._util.selection import last_linear, parameter_names
from acnml.classifier import Classifier
from acnml.fitting import Curvature, kronecker_curvature
from acnml.head.features import Features, all_features, only_linear
from acnml.head.network import AcnmlModule
from acnml.predictors import Acnml, Predictor
from acnml.solvers import Solution, UnsolvedError
from acnml.tuning._validation import Validation, joined_features
from acnml.tuning.temperature import least_nll_temperature
from acnml.typicality import Density, Place, Reader, Typicality
from acnml.typicality.density import Watch
from acnml.typicality.mahalanobis import Moments

# Fewer validation data than this say too little about an NLL to choose anything by it.
LEAST_DATA = 50

# The default prior precision as a share of the curvature's mean eigenvalue. ACNML approximates
# CNML, in which the training data alone constrain the weights. So the prior should matter only in
# directions about which the data say little. Relative to the curvature, it does not depend on the
# number of data or the scale of the features. For a ResNet-20 and the 50,000 images of CIFAR-10 the
# prior precision is then about 1.
RELATIVE_PRIOR = 1e-2

# The search for α ends when the NLL is this close to its limit, as a share of the price.
PRICE_TOLERANCE = 0.02

# α is searched between these; beyond them it makes no difference, or nothing is left to say.
SMALLEST_ALPHA, LARGEST_ALPHA = 1e-8, 1e8

# Data that the search looks at before it looks at all of them.
FIRST_LOOK = 1000

# The columns of the printed table.
COLUMNS = ["method", "T", "alpha", "accuracy", "NLL", "Brier", "ECE", "confidence", "regret"]

# How the row of the temperature of equal price begins.
EQUAL_PRICE = "temperature, +"

# One-sided 95 % quantile of the normal distribution.
SAMPLING_ERROR = 1.645

# Mean total variation below which two methods give the same answers for practical purposes.
SAME_ANSWERS = 0.005

# Quantiles of the validation scores that are kept for abstaining: 0.1 % apart.
QUANTILES = 1001


@final
class Score(enum.Enum):
    """What an abstaining predictor looks at."""

    CONFIDENCE = "confidence"  # the probability of the likeliest class; low is uncertain
    REGRET = "regret"  # log C(x); high is uncertain


@final
@dataclass(frozen=True)
class CalibrationRow:
    """A method on the validation data."""

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

    `print` it to see the table that it was chosen from. It can be saved with `acnml.save`.

    Attributes:
        predictor: the ACNML predictor.
        table: methods on the validation data, see `CalibrationRow`.
        notes: what to know about the choice, in sentences.
        price: the price that was asked for, in nats.
        confidence_quantiles: of the validation data, for `threshold`.
        regret_quantiles: of the validation data, for `threshold`.
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

    @arrays_for_arrays
    def __call__(self, x: Inputs) -> Tensor:
        """Return the normalised log-probabilities (B, K)."""
        return self.predictor(x)

    @arrays_for_arrays
    def log_probs(self, x: Inputs) -> Tensor:
        """Return the normalised log-probabilities (B, K)."""
        return self.predictor(x)

    @arrays_for_arrays
    def probs(self, x: Inputs) -> Tensor:
        """Return the probabilities (B, K)."""
        return self.predictor(x).exp()

    @arrays_for_arrays
    def predict(self, x: Inputs) -> Tensor:
        """Return the likeliest class of every input (B,), or -1 for one without an answer."""
        log_probs = self.predictor(x)
        return log_probs.argmax(-1).where(~log_probs.isnan().any(-1), -1)

    @arrays_for_arrays
    def regret(self, x: Inputs) -> Tensor:
        """Return log C(x) (B,): higher is more out of distribution."""
        return self.predictor.regret(x)

    @tensors_for_arrays
    def solve(self, x: Inputs) -> Solution:
        """Return log-probabilities, regret and residuals from one pass."""
        return self.predictor.solve(x)

    def as_module(self, steps: int | None = None) -> AcnmlModule:
        """Return network and solver as one `nn.Module`, see `Acnml.as_module`."""
        return self.predictor.as_module(steps)

    def threshold(self, share: float, score: Score = Score.CONFIDENCE) -> float:
        """Return the score beyond which the least certain `share` of the validation data lies.

        Inputs with a confidence below it, or a regret above it, are rejected. On data like the
        validation data that is a share of `share`; on other data usually a larger one.
        """
        if not 0 <= share <= 1:
            raise ValueError(f"share must be between 0 and 1, got {share}")
        if score is Score.CONFIDENCE:
            quantiles, at = self.confidence_quantiles, share
        elif score is Score.REGRET:
            quantiles, at = self.regret_quantiles, 1 - share
        else:
            raise TypeError(f"score must be Score.CONFIDENCE or Score.REGRET, got {score!r}")
        return float(quantiles[round(at * (len(quantiles) - 1))])

    @arrays_for_arrays
    def abstains(self, x: Inputs, share: float = 0.05, score: Score = Score.CONFIDENCE) -> Tensor:
        """Return which inputs (B,) are less certain than the least certain `share` in validation.

        Inputs without an answer are among them (see `on_error` of `Acnml`).

        >>> # answers = calibrated.predict(x)[~calibrated.abstains(x, share=0.05)]
        """
        solved, limit = self.predictor.solve(x), self.threshold(share, score)
        if score is Score.CONFIDENCE:
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


def calibrate(
    model: nn.Module | Classifier,
    train_loader: Iterable[Any],
    validation_loader: Iterable[Any],
    *,
    price: float = 0.01,
    layer: nn.Module | str | None = None,
    curvature: Callable[..., Curvature] = kronecker_curvature,
    prior_precision: float | None = None,
    typicality: bool | Sequence[Place] = True,
    temperature: float | None = None,
    progress: bool | None = None,
) -> Calibrated:
    """Calibrate a trained network: temperature first, then ACNML on its last layer.

    Args:
        model: the trained network, which returns logits. It is not changed. Give a `Classifier` for
            models whose output is not a tensor.
        train_loader: the training data, all of it and not augmented; labels are not needed. Data in
            memory can be given as `X` or `(X, y)`, tensors or arrays.
        validation_loader: labelled data like the training data that the network was not trained on,
            or `(X, y)`. Some hundred are enough for a rough choice, some thousand for an exact one.
        price: nats of validation NLL that the caution may cost, over the best temperature. Larger
            is more cautious.
        layer: the last Linear layer, or its name; by default the one that is registered last.
        curvature: `kronecker_curvature`, `diagonal_curvature` or `full_curvature`.
        prior_precision: of the Gaussian prior of the last layer's weights. The default is a
            hundredth of the mean eigenvalue of the curvature.
        typicality: weigh every query by how atypical the input's features are, α(x) = α s(x); see
            `acnml.Typicality`. The features are taken at places that are found in the network, or
            name the places. False leaves the weight at α for all inputs.
        temperature: of the network; by default that of least validation NLL. Set it to 1 if the
            validation data are too few to choose it by, or all predicted correctly. The price is
            then counted from the NLL at this temperature.
        progress: show progress bars; by default in a terminal only.

    Returns:
        The predictor. Print it to see what it was chosen from.

    >>> x = torch.randn(2000, 5, generator=torch.Generator().manual_seed(0))
    >>> labels = (x[:, 0] + 0.5 * x[:, 1] > 0).long()
    >>> model = nn.Linear(5, 2)  # stands for a trained network, too confident in the first input
    >>> with torch.no_grad():
    ...     _ = model.weight.copy_(torch.tensor([[-3.0, 0, 0, 0, 0], [3.0, 0, 0, 0, 0]]))
    >>> calibrated = calibrate(model, [(x[:1000], labels[:1000])], [(x[1000:], labels[1000:])])
    >>> calibrated.probs(x[:3]).shape
    torch.Size([3, 2])
    """
    checks.require_positive(price, "price")
    if train_loader is validation_loader:
        raise ValueError(
            "training and validation loader are the same object; the price must be measured on "
            "data that the network was not trained on"
        )
    places = typicality if isinstance(typicality, bool) else tuple(typicality)
    recipe = _Recipe(layer, curvature, prior_precision, places, progress)
    network = recipe.network(model)
    validation = _ValidationData.of([recipe.outputs(network, validation_loader)], temperature)
    predictor = recipe.fitted(network, train_loader, validation)
    observed = validation.observed_by(predictor.typicality)
    return _result(_Search(predictor, observed, (predictor,)), price)


def calibrate_folds(
    model: nn.Module | Classifier,
    train_loader: Iterable[Any],
    folds: Iterable[tuple[nn.Module | Classifier, Iterable[Any], Iterable[Any]]],
    *,
    price: float = 0.01,
    layer: str | None = None,
    curvature: Callable[..., Curvature] = kronecker_curvature,
    prior_precision: float | None = None,
    temperature: float | None = None,
    progress: bool | None = None,
) -> Calibrated:
    """Calibrate a network that was trained on all data by cross-validation.

    With few data, none can be spared for validation. Instead, every fold has a network that was
    trained without it, and the predictions of these networks for their folds are pooled. They
    decide the temperature and α. The result uses both with the given network, which was trained on
    all data, and a posterior that is fitted on all data. The weight is α for all inputs: typicality
    needs held-out data of the network itself.

    Args:
        model: the network that was trained on all data.
        train_loader: all data.
        folds: for every fold its network, the data that it was trained on, and the validation data.
        price: see `calibrate`, also for all following arguments.
        layer: the name of the last Linear layer; by default the one that is registered last.
        curvature: `kronecker_curvature`, `diagonal_curvature` or `full_curvature`.
        prior_precision: of the Gaussian prior of the last layer's weights.
        temperature: of the network; by default that of least validation NLL.
        progress: show progress bars; by default in a terminal only.
    """
    checks.require_positive(price, "price")
    recipe = _Recipe(layer, curvature, prior_precision, False, progress)
    parts = [(recipe.network(own), train, validation) for own, train, validation in folds]
    if not parts:
        raise ValueError("there are no folds: pass (network, training data, validation data)")
    validation = _ValidationData.of(
        [recipe.outputs(network, held_out) for network, _, held_out in parts], temperature
    )
    predictor = recipe.fitted(recipe.network(model), train_loader, validation)
    each = tuple(recipe.fitted(network, train, validation) for network, train, _ in parts)
    return _result(_Search(predictor, validation, each), price)


class _Network(NamedTuple):
    """A network and the names of the parameters of its last layer."""

    classifier: Classifier
    names: list[str]


class _Outputs(NamedTuple):
    """What a network makes of validation data."""

    features: Features
    labels: Tensor
    reader: Reader | None  # of features at other places


@final
@dataclass(frozen=True, eq=False)
class _Recipe:
    """How a posterior is fitted."""

    layer: nn.Module | str | None
    curvature: Callable[..., Curvature]
    prior_precision: float | None
    places: bool | tuple[Place, ...]  # of typicality; False for none
    progress: bool | None

    def network(self, model: nn.Module | Classifier) -> _Network:
        """Return a network with its last layer."""
        classifier = model if isinstance(model, Classifier) else Classifier(model)
        return _Network(classifier, _layer_names(classifier, self.layer))

    def outputs(self, network: _Network, loader: Iterable[Any]) -> _Outputs:
        """Return what the last layer makes of validation data, and the labels."""
        classifier, names = network
        layer = only_linear(classifier, names)
        reader: Reader | None = None

        def compute(x: Inputs) -> Features | None:
            nonlocal reader
            assert layer is not None
            x = classifier.prepare(x)
            if self.places is not False and reader is None:
                named = None if self.places is True else self.places
                reader = Reader.found(classifier, x, named)
            return all_features(classifier, layer, chunks(x), observer=reader)

        features: Features | None = None
        if layer is not None:
            validation = Validation(loader, self.progress)
            features, labels = validation.over_batches("features", compute, joined_features)
        if features is None:
            raise ValueError(
                f"the logits are not the outputs of the layer that owns {names}; name the last "
                "Linear layer by `layer`, pass acnml.transformers.LastToken(model) for a decoder "
                "with a head `score`, or use acnml.fit_kfac_laplace and acnml.Acnml with a "
                "posterior over all layers"
            )
        return _Outputs(features, labels, reader)

    def fitted(
        self, network: _Network, loader: Iterable[Any], validation: _ValidationData
    ) -> Acnml:
        """Fit a posterior to the tempered likelihood, and typicality in the same pass."""
        tempered, moments = network.classifier.tempered(validation.temperature), Moments()
        watch = None if validation.reader is None else Watch(validation.reader, moments.add)
        watched = {} if watch is None else {"watch": watch}
        fitted = self.curvature(tempered, loader, network.names, progress=self.progress, **watched)
        precision = self.prior_precision
        if precision is None:
            precision = RELATIVE_PRIOR * fitted.mean_eigenvalue()
        density = validation.density(tempered, moments)
        return Acnml(tempered, fitted.posterior(precision), typicality=density)


# The validation data -----------------------------------------------------------------------------


@final
@dataclass(frozen=True, eq=False)
class _ValidationData:
    """What the network makes of the validation data."""

    features: Features  # without a temperature
    labels: Tensor
    fold: Tensor  # (N,) which network the features are of, in ascending order
    temperature: float  # of least NLL, or given
    reader: Reader | None  # of features at other places

    @staticmethod
    def of(parts: list[_Outputs], temperature: float | None) -> _ValidationData:
        features, labels = Features.joined([p.features for p in parts]), [p.labels for p in parts]
        fold = torch.arange(len(parts)).repeat_interleave(torch.tensor([len(y) for y in labels]))
        _require_usable(features.logits, torch.cat(labels), temperature)
        if temperature is None:
            log_probs = torch.log_softmax(features.logits.cpu().double(), dim=-1)
            temperature = least_nll_temperature(log_probs, torch.cat(labels))
        checks.require_positive(temperature, "temperature")
        return _ValidationData(
            features, torch.cat(labels), fold, float(temperature), parts[0].reader
        )

    def density(self, classifier: Classifier, moments: Moments) -> Typicality | None:
        """Return the typicality for moments of the training data, if features were read."""
        if self.reader is None or self.features.observed is None:
            return None
        return Typicality.of_moments(classifier, self.reader, moments, self.features.observed)

    def observed_by(self, density: Density | None) -> _ValidationData:
        """Return the data with s(x) in place of the features that it is computed from."""
        if density is None or self.features.observed is None:
            return self
        score = density.score(self.features.observed)
        return replace(self, features=self.features._replace(observed=score))

    def tempered(self, temperature: float) -> Tensor:
        """Return the log-probabilities (N, K) of the network at a temperature."""
        return torch.log_softmax(self.features.logits.cpu().double() / temperature, dim=-1)

    def take(self, rows: slice) -> _ValidationData:
        """Return some of the data."""
        features = self.features.take(rows)
        return replace(self, features=features, labels=self.labels[rows], fold=self.fold[rows])

    def of_fold(self, index: int) -> Features:
        """Return the features that are of one network."""
        if bool((self.fold == index).all()):
            return self.features
        rows = (self.fold == index).nonzero().flatten().to(self.features.logits.device)
        return self.features.take(rows)

    @cached_property
    def best_nll(self) -> float:
        """The NLL of the tempered network."""
        return metrics.nll(self.tempered(self.temperature), self.labels)

    def temperature_of_price(self, price: float) -> float:
        """Return the T above the best one whose NLL is `price` higher; inf if there is none."""
        limit = self.best_nll + price
        if math.log(self.features.logits.shape[1]) <= limit:  # even a uniform prediction is cheaper
            return math.inf
        low, high = math.log(self.temperature), math.log(self.temperature) + 1
        while metrics.nll(self.tempered(math.exp(high)), self.labels) < limit:
            high += 1
        for _ in range(40):
            middle = (low + high) / 2
            within = metrics.nll(self.tempered(math.exp(middle)), self.labels) <= limit
            low, high = (middle, high) if within else (low, middle)
        return math.exp(low)


def _layer_names(classifier: Classifier, layer: nn.Module | str | None) -> list[str]:
    model = classifier.model
    if layer is None:
        layer = last_linear(model)
    elif isinstance(layer, str):
        modules = dict(model.named_modules())
        if layer not in modules:
            linear = [name for name, m in modules.items() if isinstance(m, nn.Linear)]
            raise ValueError(f"the model has no layer {layer!r}; its Linear layers are {linear}")
        layer = modules[layer]
    if not isinstance(layer, nn.Linear):
        raise TypeError(f"layer must be an nn.Linear or its name, got a {type(layer).__name__}")
    return parameter_names(model, [layer])


def _require_usable(logits: Tensor, labels: Tensor, temperature: float | None) -> None:
    """Refuse validation data that cannot be calibrated on, and warn of data that are doubtful."""
    n, classes = logits.shape
    if n < (LEAST_DATA if temperature is None else 2):
        raise ValueError(
            f"{n} validation data are too few to choose a temperature and a price by; give at "
            f"least {LEAST_DATA}, better some thousand, or set temperature=1"
        )
    require_logits(logits)
    missing = sorted(set(range(classes)) - set(labels.unique().tolist()))
    if missing:
        shown = ", ".join(map(str, missing[:10])) + (", …" if len(missing) > 10 else "")
        warnings.warn(
            f"{len(missing)} of {classes} classes have no validation data ({shown}): the price "
            "says nothing about them; add validation data of these classes",
            stacklevel=4,
        )


# The search for α --------------------------------------------------------------------------------


@final
@dataclass(frozen=True, eq=False)
class _Search:
    """ACNML on the validation data, as a function of α."""

    predictor: Acnml
    validation: _ValidationData
    folds: tuple[Acnml, ...]  # of the networks that the validation data were held out from

    def log_lik(self, alpha: float, data: _ValidationData | None = None) -> Tensor | None:
        """Return the log-likelihoods (N, K), or None if the solver finds no solution."""
        parts = []
        for index, predictor in enumerate(self.folds):
            features = (data or self.validation).of_fold(index)
            if len(features.logits):
                logits = features.logits / predictor.classifier.temperature
                parts.append((replace(predictor, alpha=alpha), features._replace(logits=logits)))
        try:
            solved = [predictor.solve_features(features) for predictor, features in parts]
        except UnsolvedError:
            return None
        return torch.cat([solution.log_lik.cpu().double() for solution in solved])

    def largest_alpha(self, price: float) -> float:
        """Return the largest α within a price whose accuracy is not lower beyond sampling error.

        A look at some of the data finds α roughly, and a search over all of them refines it.
        """
        some = self.validation.take(slice(0, FIRST_LOOK))
        rough = self._largest(price, self._typical_alpha(), some, steps=12)
        if len(self.validation.labels) <= FIRST_LOOK:
            return rough
        return self._largest(price, rough, self.validation, steps=6)

    def _typical_alpha(self) -> float:
        """Return the α with which a typical logit has a posterior variance of 0.01."""
        predictor, some = self.folds[0], self.validation.of_fold(0).inputs[:100]
        layer = predictor.last_layer
        assert layer is not None
        kernel = predictor.posterior.output_kernel(layer.layer, some.to(predictor.posterior.dtype))
        variance = float(kernel.diagonal().mean()) / predictor.classifier.temperature**2
        return min(max(0.01 / max(variance, 1e-300), SMALLEST_ALPHA), LARGEST_ALPHA)

    def _largest(self, price: float, start: float, data: _ValidationData, steps: int) -> float:
        """Bracket the limit from a starting point, then close in on it in log α."""
        low: tuple[float, float] | None = None  # (log α, excess over the limit), within it
        high: tuple[float, float] | None = None  # the same, beyond it
        at = math.log(start)
        factor = 1.0
        bottom, top = math.log(SMALLEST_ALPHA), math.log(LARGEST_ALPHA)
        while low is None or high is None:
            excess = self._excess(math.exp(at), price, data)
            if excess <= 0:
                low = (at, excess)
                if at >= top or -excess <= PRICE_TOLERANCE * price:
                    return math.exp(at)
                at = min(at + factor, top) if high is None else at
            else:
                high = (at, excess)
                if at <= bottom:
                    raise ValueError(
                        f"no alpha costs at most {price:g} nats on the validation data; raise the "
                        "price or give more validation data"
                    )
                at = max(at - factor, bottom) if low is None else at
            factor *= 2
        for step in range(steps):
            (a, fa), (b, fb) = low, high
            # The secant, unless it is useless: every other step halves the bracket.
            share = (
                0.5 if step % 2 or not math.isfinite(fb) else min(max(-fa / (fb - fa), 0.1), 0.9)
            )
            at = a + share * (b - a)
            excess = self._excess(math.exp(at), price, data)
            low, high = ((at, excess), high) if excess <= 0 else (low, (at, excess))
            if excess <= 0 and -excess <= PRICE_TOLERANCE * price:
                break
        return math.exp(low[0])

    def _excess(self, alpha: float, price: float, data: _ValidationData) -> float:
        """Return by how much the NLL exceeds its limit; infinite if α is not acceptable at all."""
        log_lik = self.log_lik(alpha, data)
        if log_lik is None:
            return math.inf
        log_probs = torch.log_softmax(log_lik, dim=-1)
        plain = data.tempered(self.validation.temperature)
        if _accuracy_is_lower(log_probs, plain, data.labels):
            return math.inf
        return metrics.nll(log_probs, data.labels) - metrics.nll(plain, data.labels) - price


def _accuracy_is_lower(log_probs: Tensor, plain: Tensor, labels: Tensor) -> bool:
    """Whether accuracy is lower than that of the plain network, beyond sampling error.

    Only data on which the two disagree count. If both were equally good, the difference of the
    numbers that only one gets right would have the variance of their sum (McNemar 1947).
    """
    correct, before = log_probs.argmax(-1) == labels, plain.argmax(-1) == labels
    lost, won = int((before & ~correct).sum()), int((correct & ~before).sum())
    return lost - won > SAMPLING_ERROR * math.sqrt(lost + won)


# The result --------------------------------------------------------------------------------------


def _result(search: _Search, price: float) -> Calibrated:
    """Choose α for the price and two others, and write down what it was chosen from."""
    found = {each: search.largest_alpha(each) for each in (price / 3, price, 3 * price)}
    validation, temperature = search.validation, search.validation.temperature
    chosen = found[price]
    log_lik = search.log_lik(chosen)
    assert log_lik is not None  # it was solved during the search
    log_probs, regret = torch.log_softmax(log_lik, -1), torch.logsumexp(log_lik, -1)
    equal = validation.temperature_of_price(price)
    table = [
        _row("network", validation.tempered(1.0), validation, 1.0),
        _row("temperature", validation.tempered(temperature), validation, temperature),
        _row(f"{EQUAL_PRICE}{price:g}", validation.tempered(equal), validation, equal),
    ]
    for each, alpha in (*found.items(), (None, 1.0)):
        own = search.log_lik(alpha)
        name = "ACNML, alpha = 1" if each is None else f"ACNML, +{each:.3g}"
        if own is not None:
            table.append(_acnml_row(name, own, validation, temperature, alpha))
    notes = _notes(search, table, price, chosen, equal, log_probs)
    quantiles = torch.linspace(0, 1, QUANTILES, dtype=torch.float64)
    confidence = log_probs.amax(-1).exp()
    return Calibrated(
        replace(search.predictor, alpha=chosen),
        tuple(table),
        notes,
        price,
        torch.quantile(confidence, quantiles),
        torch.quantile(regret, quantiles),
    )


def _row(
    method: str, log_probs: Tensor, validation: _ValidationData, temperature: float
) -> CalibrationRow:
    scores = metrics.summary(log_probs, validation.labels)
    confidence = log_probs.amax(-1).exp().mean().item()
    return CalibrationRow(method, temperature, None, **scores, confidence=confidence, regret=None)


def _acnml_row(
    method: str, log_lik: Tensor, validation: _ValidationData, temperature: float, alpha: float
) -> CalibrationRow:
    row = _row(method, torch.log_softmax(log_lik, -1), validation, temperature)
    return replace(row, alpha=alpha, regret=torch.logsumexp(log_lik, -1).mean().item())


def _notes(
    search: _Search,
    table: list[CalibrationRow],
    price: float,
    alpha: float,
    equal: float,
    log_probs: Tensor,
) -> tuple[str, ...]:
    validation, temperature = search.validation, search.validation.temperature
    plain = validation.tempered(temperature)
    of_label = validation.labels.unsqueeze(1)
    added = (plain - log_probs).gather(1, of_label).squeeze(1)
    error = added.std().item() / math.sqrt(len(added))
    layer = search.predictor.last_layer
    assert layer is not None
    notes = [
        f"Chosen: temperature {temperature:.3g}, then ACNML on layer {layer.name!r} with alpha = "
        f"{alpha:.4g}. On {len(added)} validation data this costs {added.mean():.4f} ± {error:.4f} "
        f"nats of NLL; a plain temperature of {equal:.3g} costs as much."
    ]
    if search.predictor.typicality is not None:
        reader = search.predictor.typicality.reader
        where = ", ".join(map(str, reader.places))
        notes.append(
            f"Alpha is multiplied by how atypical an input's features are, 1 on average: "
            f"{len(reader.shift)} features at these places: {where}."
        )
    variation = (log_probs.exp() - validation.tempered(equal).exp()).abs().sum(-1).mean().item() / 2
    if variation < SAME_ANSWERS:
        notes.append(
            f"A plain temperature of {equal:.3g} would do as well here: its probabilities differ "
            f"from ACNML's by {variation:.4f} on average (total variation)."
        )
    if error > price:
        text = (
            f"The price of {price:g} nats is known only to ± {error:.4f} from {len(added)} "
            "validation data: give more of them, or a higher price."
        )
        notes.append(text)
        warnings.warn(text, stacklevel=4)
    unchosen = next((row for row in table if row.method == "ACNML, alpha = 1"), None)
    if unchosen is None or unchosen.nll > validation.best_nll + 10 * price:
        cost = "has no solution" if unchosen is None else f"has an NLL of {unchosen.nll:.3f}"
        notes.append(f"Without a choice, at alpha = 1, ACNML {cost}: always choose alpha.")
    return tuple(notes)


def _cells(row: CalibrationRow) -> list[str]:
    numbers = (row.accuracy, row.nll, row.brier, row.ece, row.confidence)
    return [
        row.method,
        f"{row.temperature:.3g}",
        "" if row.alpha is None else f"{row.alpha:.4g}",
        *(f"{number:.4f}" for number in numbers),
        "" if row.regret is None else f"{row.regret:.4f}",
    ]
