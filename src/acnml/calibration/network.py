"""Calibrate an `nn.Module`: read logits and features in one pass, and hand them to the core."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, final

import torch
from torch import Tensor, nn

from acnml._engine.trust import Passed, probed, require_apart_from
from acnml._util import batches
from acnml._util.batches import NO_LABELS, Inputs, arrays_for_arrays, as_inputs, split_labels
from acnml._util.params import Params, is_same_or_rounded
from acnml._util.passes import each_batch, in_chunks
from acnml._util.processes import Group, group
from acnml._util.structure import tracking_batch_norms
from acnml.accuracy import accuracy_of
from acnml.atypicality import Moments
from acnml.calibration.calibrator import Answer, Calibrator, as_arrays, fit_calibrator
from acnml.calibration.module import CalibratedModule
from acnml.calibration.rules import RuleName
from acnml.calibration.table import CalibrationRow
from acnml.classifier import Classifier
from acnml.decisions import Abstention
from acnml.features import PROBED, Folding, Place, Taps, find_places
from acnml.fit.batches import checked_labels, require_classes
from acnml.monitor import Monitor
from acnml.outcomes import By


@final
@dataclass(frozen=True, eq=False)
class Calibrated:
    """A network with calibrated probabilities, made by `calibrate`.

    `print` it to see the table that it was chosen from. It can be saved with `acnml.save`. It
    shares its weights with the network: if the network has been trained since, it raises an error
    instead of an answer, see `require_current`.

    Attributes:
        classifier: the network.
        places: where features are taken.
        folding: of the features, where there are too many.
        calibrator: the core, which needs no network.

    >>> import acnml
    >>> x = torch.randn(2000, 4, generator=torch.Generator().manual_seed(0))
    >>> labels = (x[:, 0] + 0.5 * x[:, 1] > 0).long()
    >>> model = torch.nn.Linear(4, 2)  # stands for a trained network
    >>> model.weight.data = torch.tensor([[-3.0, 0.0, 0.0, 0.0], [3.0, 0.0, 0.0, 0.0]])
    >>> train, validation = (x[:1000], labels[:1000]), (x[1000:], labels[1000:])
    >>> calibrated = acnml.calibrate(model, train, validation)
    >>> answer = calibrated(x)
    >>> answer.probs.shape
    torch.Size([2000, 2])
    >>> certain = answer.label[~answer.abstain]
    """

    classifier: Classifier
    places: tuple[Place, ...]
    folding: Folding | None
    calibrator: Calibrator
    _original: Params = field(init=False, repr=False)  # tensors that training changes, as they were

    def __post_init__(self) -> None:
        tensors = self.classifier.tensors
        own = {name: tensors[name].clone() for name in _telltales(self.classifier)}
        object.__setattr__(self, "_original", own)

    def __call__(self, x: Any, share: float = 0.05, by: By = "confidence") -> Answer:
        """Return label, probabilities, regret, score and whether to abstain, from one pass.

        Args:
            x: a batch of inputs, as the network takes them; tensors or arrays.
            share: abstain on inputs that are less certain than this share of the validation data.
            by: what decides, "confidence" or "regret".
        """
        if batches.has_arrays_only(x):
            return as_arrays(self(as_inputs(x), share, by))
        self.require_current()
        reading = Reading(self.classifier, self.places, self.folding)
        flag = self.calibrator.on_error == "flag"

        def answer(chunk: Inputs) -> Answer:
            return self.calibrator(*reading(chunk), share, by)

        with torch.inference_mode(False), torch.no_grad():
            harmless, broken = _without_broken(x) if flag else (x, None)
            parts = [*in_chunks(self.classifier.prepare(harmless), answer)]
        found = Answer(*(torch.cat(part) for part in zip(*parts, strict=True)))
        return found if broken is None else found.without(broken)

    def log_probs(self, x: Any) -> Any:
        """Return the log-probabilities (B, K)."""
        return self(x).log_probs

    def probs(self, x: Any) -> Any:
        """Return the probabilities (B, K)."""
        return self(x).probs

    def predict(self, x: Any) -> Any:
        """Return the likeliest class of every input (B,), or -1 for one without an answer."""
        return self(x).label

    def regret(self, x: Any) -> Any:
        """Return log C(x) (B,), from 0 to log K: high where many labels could be explained."""
        return self(x).regret

    def score(self, x: Any) -> Any:
        """Return the atypicality m(x) (B,): about 1 for data like the training data."""
        return self(x).score

    def abstains(self, x: Any, share: float = 0.05, by: By = "confidence") -> Any:
        """Return which inputs (B,) are less certain than this share of the validation data."""
        return self(x, share, by).abstain

    @arrays_for_arrays
    def features(self, x: Inputs) -> Tensor:
        """Return the features (B, q) that the score is computed from, for other scores."""
        reading = Reading(self.classifier, self.places, self.folding)
        with torch.inference_mode(False), torch.no_grad():
            parts = in_chunks(self.classifier.prepare(x), lambda chunk: reading(chunk)[1])
            return torch.cat([*parts])

    def threshold(self, share: float, by: By = "confidence") -> float:
        """Return the confidence or regret at which inputs are rejected, see `Calibrator`."""
        return self.calibrator.threshold(share, by)

    def abstention(
        self,
        risk: float | None = None,
        *,
        coverage: float | None = None,
        confidence: float = 0.95,
        by: By = "confidence",
        by_class: bool = False,
    ) -> Abstention:
        """Return when to abstain, with a guarantee, see `Calibrator.abstention`.

        `calibrated.abstention(risk=0.02).accepts(answer)` says which predictions may go out.
        """
        return self.calibrator.abstention(
            risk, coverage=coverage, confidence=confidence, by=by, by_class=by_class
        )

    def expected_accuracy(self, x: Any, groups: Any = None, level: float = 0.95) -> Any:
        """Return the expected accuracy on inputs without labels, see `Calibrator`."""
        return accuracy_of(self(x).confidence, self.calibrator.outcomes, groups, level)

    def monitor(self, level: float = 0.01) -> Monitor:
        """Return a monitor of answers, see `Calibrator.monitor`."""
        return self.calibrator.monitor(level)

    @property
    def temperature(self) -> float:
        """The temperature T."""
        return self.calibrator.temperature

    @property
    def alpha(self) -> float:
        """The weight α of the score."""
        return self.calibrator.alpha

    @property
    def table(self) -> tuple[CalibrationRow, ...]:
        """Methods on the validation data."""
        return self.calibrator.table

    @property
    def notes(self) -> tuple[str, ...]:
        """What to know about the choice, in sentences."""
        return self.calibrator.notes

    def require_current(self) -> None:
        """Raise an error if the network has been trained since it was calibrated.

        All predictions and `acnml.save` call this. Training is noticed by the last layer, and by
        the last batch norm, which also changes if the network only runs in train mode. A change of
        other layers alone is not noticed.
        """
        for name, original in self._original.items():
            current = _live(self.classifier, name)
            if current is None or not is_same_or_rounded(current, original):
                raise ValueError(
                    f"{name!r} of the network differs from when it was calibrated. If the network "
                    "was trained since, or ran in train mode, calibrate it again; to train on and "
                    "keep the result, calibrate copy.deepcopy(model)"
                )

    def as_module(self) -> CalibratedModule:
        """Return network, score and rule as one `nn.Module`: inputs -> (log_probs, regret, score).

        It has no data-dependent control flow, so it can be compiled with `torch.compile`, exported
        with `torch.export` or `acnml.export_onnx`, and used inside other modules. Inputs without an
        answer are NaN.
        """
        self.require_current()
        return CalibratedModule(self.classifier, self.places, self.folding, self.calibrator)

    def __str__(self) -> str:
        return str(self.calibrator)

    def _repr_html_(self) -> str:
        return self.calibrator._repr_html_()

    def __repr__(self) -> str:
        return f"Calibrated({self.classifier!r}, {self.calibrator!r})"


@final
class Reading:
    """Runs a network on prepared chunks and returns its logits (B, K) and features (B, q)."""

    def __init__(
        self, classifier: Classifier, places: Sequence[Place], folding: Folding | None
    ) -> None:
        self.classifier, self.taps = classifier, Taps(classifier, places, folding)

    def __call__(self, x: Inputs) -> tuple[Tensor, Tensor]:
        """Run a chunk, and check the model if that is due."""
        due = self.classifier.findings.is_due((), x)
        probe = probed(self.classifier, [], x) if due else None
        logits = self.taps.classifier.logits(x).detach()
        if probe is not None:
            require_apart_from(self.classifier, [], x, probe, Passed(logits, {}))
        return logits, self.taps.features(batches.size(x))


def calibrate(
    model: nn.Module | Classifier,
    train_loader: Iterable[Any],
    validation_loader: Iterable[Any],
    *,
    price: float = 0.01,
    rule: RuleName = "closed-form",
    places: Sequence[Place] | None = None,
    temperature: float | None = None,
    on_error: Literal["raise", "flag"] = "raise",
    progress: bool | None = None,
    distributed: bool = False,
) -> Calibrated:
    """Calibrate a trained network: a temperature first, then ACNML by how atypical inputs are.

    The network runs once over the training data and once over the validation data. It is not
    changed.

    Args:
        model: the trained network, which returns logits. Give a `Classifier` for models whose
            output is not a tensor.
        train_loader: the training data, all of it and not augmented. Without labels, the network's
            predictions stand for them. Data in memory can be given as `X` or `(X, y)`.
        validation_loader: labelled data like the training data that the network was not trained on,
            or `(X, y)`. A few hundred are enough for a rough choice, a few thousand for an exact
            one.
        price: accepted increase of the validation NLL over the best temperature, in nats. A higher
            price gives less confident predictions. Most users need no other setting.
        rule: "closed-form" or "acnml", see `acnml.calibration.rules`.
        places: where features are taken; by default at places that are found in the network.
        temperature: of the network; by default that of least validation NLL.
        on_error: what the result does about inputs without an answer, such as NaN: "raise" an
            error, or "flag" them (the label is -1). Validation data must all have an answer.
        progress: show progress bars; by default in a terminal only.
        distributed: whether this runs in several processes of `torch.distributed`, as `torchrun`
            starts them. Each passes its own part of the training data, which must not overlap, and
            all of the validation data. All get the same result, that of one process with all data.

    >>> import acnml
    >>> x = torch.randn(2000, 5, generator=torch.Generator().manual_seed(0))
    >>> labels = (x[:, 0] + 0.5 * x[:, 1] > 0).long()
    >>> model = nn.Linear(5, 2)  # stands for a trained network, too confident in the first input
    >>> with torch.no_grad():
    ...     _ = model.weight.copy_(torch.tensor([[-3.0, 0, 0, 0, 0], [3.0, 0, 0, 0, 0]]))
    >>> train, validation = (x[:1000], labels[:1000]), (x[1000:], labels[1000:])
    >>> calibrated = acnml.calibrate(model, train, validation)
    >>> calibrated.probs(x[:3]).shape
    torch.Size([3, 2])
    """
    if train_loader is validation_loader:
        raise ValueError(
            "training and validation loader are the same object; the price must be measured on "
            "data that the network was not trained on"
        )
    classifier = model if isinstance(model, Classifier) else Classifier(model)
    classifier, processes = classifier.untempered(), group(distributed)
    _require_same_weights(classifier, processes)
    reader = _Reader(classifier, places, progress)
    logits, features, labels = reader.validation(validation_loader, processes)
    moments = reader.moments(train_loader, logits.shape[1]).over_processes(processes)
    calibrator = fit_calibrator(
        moments,
        (logits, features, labels),
        price=price,
        rule=rule,
        temperature=temperature,
        on_error=on_error,
    )
    assert reader.reading is not None  # the first batch made one
    taps = reader.reading.taps
    return Calibrated(classifier, taps.places, taps.folding, calibrator.to(classifier.device))


def _require_same_weights(classifier: Classifier, processes: Group) -> None:
    for name, tensor in classifier.tensors.items():
        if not processes.agree(tensor):
            raise ValueError(
                f"the processes have different weights: {name!r} is not the same in all of them; "
                "load the trained network in every process"
            )


@final
class _Reader:
    """Goes over data sets; the first batch decides where features are taken."""

    def __init__(
        self, classifier: Classifier, places: Sequence[Place] | None, progress: bool | None
    ) -> None:
        self._classifier, self._places, self._progress = classifier, places, progress
        self.reading: Reading | None = None

    def validation(self, loader: Iterable[Any], processes: Group) -> tuple[Tensor, Tensor, Tensor]:
        """Return logits, features and labels of all validation data, the same in all processes."""
        parts: list[tuple[Tensor, Tensor, Tensor]] = []

        def keep(logits: Tensor, features: Tensor, labels: Tensor | None) -> None:
            if labels is None:
                raise ValueError(NO_LABELS)
            require_classes(labels, logits)
            parts.append((logits.cpu(), features.cpu(), labels.cpu()))

        self._over(loader, keep, "validation")
        logits, features, labels = (torch.cat(part) for part in zip(*parts, strict=True))
        if not processes.agree(labels):
            raise ValueError(
                "the processes have different validation data: pass all validation data, in the "
                "same order, in every process; only the training data are split"
            )
        return processes.share(logits), processes.share(features), labels

    def moments(self, loader: Iterable[Any], classes: int) -> Moments:
        """Return the moments of the training features, by label or by prediction."""
        moments = Moments(classes)

        def add(logits: Tensor, features: Tensor, labels: Tensor | None) -> None:
            moments.add(features, logits.argmax(-1) if labels is None else labels)

        self._over(loader, add, "training")
        return moments

    @torch.inference_mode(False)
    @torch.no_grad()
    def _over(
        self,
        loader: Iterable[Any],
        use: Callable[[Tensor, Tensor, Tensor | None], None],
        description: str,
    ) -> None:
        """Call a function with logits, features and labels of every chunk of the data."""

        def use_batch(batch: Any) -> None:
            x, given = split_labels(batch)
            labels = None if given is None else checked_labels(given, x)
            x = self._classifier.prepare(x)
            reading = self.reading = self.reading or self._first(x)
            done = 0
            for logits, features in in_chunks(x, reading):
                own = None if labels is None else labels[done : done + len(logits)]
                use(logits, features, own)
                done += len(logits)

        each_batch(loader, use_batch, description, self._progress)

    def _first(self, x: Inputs) -> Reading:
        """Decide where features are taken, from the first inputs of a prepared batch."""
        some = batches.take(x, slice(0, PROBED))
        places = find_places(self._classifier, some) if self._places is None else self._places
        plain = Taps(self._classifier, places)
        plain.classifier.logits(some)
        folding = Folding.of(plain.features(batches.size(some)))
        return Reading(self._classifier, places, folding)


def _telltales(classifier: Classifier) -> list[str]:
    """Return the names of tensors that any further training changes."""
    names = [name for name, _ in classifier.model.named_parameters()][-2:]
    norms = list(tracking_batch_norms(classifier.model))[-1:]
    return [*names, *(f"{norm}.running_mean".lstrip(".") for norm in norms)]


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


def _without_broken(x: Inputs) -> tuple[Inputs, Tensor]:
    """Return a batch with harmless numbers for those that are not finite, and in which rows.

    Additive attention masks contain -inf, so that counts as finite.
    """
    tensors = [t for t in batches.named_tensors(x).values() if t.is_floating_point()]
    broken = torch.zeros(batches.size(x), dtype=torch.bool, device="cpu")
    for tensor in tensors:
        bad = tensor.isnan() | (tensor == torch.inf)
        broken |= bad.reshape(len(tensor), -1).any(1).cpu()

    def harmless(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        return tensor.nan_to_num(0.0, 0.0, -torch.inf)

    return batches.map_inputs(x, harmless), broken
