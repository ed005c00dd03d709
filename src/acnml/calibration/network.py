"""Calibrate an `nn.Module`: read logits and features in one pass, and hand them to the core."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, final

import torch
from torch import Tensor, nn

from acnml._engine.trust import check
from acnml._util import batches
from acnml._util.batches import (
    CHUNK,
    NO_LABELS,
    Inputs,
    arrays_for_arrays,
    as_inputs,
    each_batch,
    in_chunks,
    split_labels,
)
from acnml._util.params import Params, is_same_or_rounded
from acnml._util.processes import Group
from acnml._util.structure import tracking_batch_norms
from acnml.atypicality import Moments
from acnml.calibration.calibrator import (
    Answer,
    Answering,
    Calibrator,
    RuleName,
    as_arrays,
    without_answers,
)
from acnml.calibration.fitting import fit_cases, require_settings
from acnml.calibration.heads import IGNORED, Cases, Head, Task, as_labels, find_head, padding
from acnml.calibration.module import CalibratedModule
from acnml.calibration.table import CalibrationRow
from acnml.classifier import Classifier
from acnml.decisions import By
from acnml.features import PROBED, Folding, Place, Taps, find_last_layer, find_places, require_apart
from acnml.fit.batches import checked_labels, require_classes

# Numbers of a tensor that are compared to notice training.
SAMPLED = 1000

# Numbers in the inputs that are run at a time, where there are logits for each of their positions.
MOST_NUMBERS = 2**20


@final
@dataclass(frozen=True, eq=False)
class Calibrated(Answering):
    """A network with calibrated probabilities, made by `calibrate`.

    `print` it to see the table that it was chosen from. It can be saved with `acnml.save`. It
    shares its weights with the network: if the network has been trained since, it raises an error
    instead of an answer, see `require_current`.

    Attributes:
        classifier: the network.
        places: where features are taken.
        folding: of the features, where there are too many.
        calibrator: the core, which needs no network.

    >>> x = torch.randn(2000, 2, generator=torch.Generator().manual_seed(0))
    >>> labels, model = (x.sum(1) > 0).long(), nn.Linear(2, 2)  # stands for a trained network
    >>> model.weight.data = torch.tensor([[-3.0, 0.0], [3.0, 0.0]])
    >>> calibrated = acnml.calibrate(model, x[:1000], (x[1000:], labels[1000:]))
    >>> answer = calibrated(x)
    >>> answer.probs.shape
    torch.Size([2000, 2])
    >>> certain = answer.label[~answer.abstain]
    """

    classifier: Classifier
    places: tuple[Place, ...]
    folding: Folding | None
    calibrator: Calibrator
    _original: Params = field(init=False, repr=False)  # numbers that training changes, as they were
    _pass: Pass = field(init=False, repr=False)

    def __post_init__(self) -> None:
        own = {name: _sample(self.classifier, name).clone() for name in _telltales(self.classifier)}
        object.__setattr__(self, "_original", own)
        run = Pass(self.classifier, self.places, self.folding, self.calibrator.head)
        object.__setattr__(self, "_pass", run)

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
        head = self.calibrator.head

        def answer(chunk: Inputs) -> Answer:
            broken = None
            if self.calibrator.on_error == "flag":
                chunk, broken = without_broken(chunk)
            chunk = self.classifier.prepare(chunk)
            with self.classifier.threads_for(chunk):
                logits, features = self._pass(chunk)
                if broken is not None:
                    logits = without_answers(logits, broken)
                mask = padding(head, chunk, logits) if head.positions else None
                return self.calibrator(logits, features, share, by, mask)

        with torch.inference_mode(False), torch.no_grad():
            length = self._pass.length(x) if head.positions else CHUNK
            parts = [*in_chunks(x, answer, length)]
        return parts[0] if len(parts) == 1 else Answer(*map(torch.cat, zip(*parts, strict=True)))

    @arrays_for_arrays
    def features(self, x: Inputs) -> Tensor:
        """Return the features (B, q) that the score is computed from, for other scores."""

        def of(chunk: Inputs) -> Tensor:
            return self._pass(self.classifier.prepare(chunk))[1]

        with torch.inference_mode(False), torch.no_grad():
            return torch.cat([*in_chunks(x, of, self._pass.length(x))])

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
        for name, before in self._original.items():
            now = _sample(self.classifier, name)
            is_comparable = now.dtype == before.dtype and now.device == before.device
            if not (
                (is_comparable and torch.equal(now, before)) or is_same_or_rounded(now, before)
            ):
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
class Pass:
    """Runs a network on prepared chunks and returns its logits and features, by its head."""

    def __init__(
        self,
        classifier: Classifier,
        places: Sequence[Place],
        folding: Folding | None,
        head: Head,
    ) -> None:
        self.classifier = classifier if head.is_plain else classifier.of_any_shape()
        self.taps, self.head = Taps(self.classifier, places, folding), head

    def length(self, x: Inputs) -> int:
        """Return how many inputs to run at a time: few if there are logits for many positions."""
        if not self.head.positions:
            return CHUNK
        size = max(tensor[0].numel() for tensor in batches.named_tensors(x).values())
        return max(1, min(CHUNK, MOST_NUMBERS // size))

    def __call__(self, x: Inputs) -> tuple[Tensor, Tensor]:
        """Run a prepared chunk, and check the model if that is due."""
        is_due, (logits, features) = self.classifier.findings.is_due((), x), self.taps(x)
        if is_due:
            check(self.classifier, x, logits=logits)
        return logits, features


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
    task: Task | None = None,
    ignore_index: int = IGNORED,
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
        rule: "closed-form" or "acnml", see `acnml.calibration.calibrator`; "density-temperature" is
            a baseline without a regret.
        places: where features are taken; by default at places that are found in the network.
        temperature: of the network; by default that of least validation NLL. The price is counted
            from the NLL at this temperature.
        on_error: what the result does about inputs without an answer, such as NaN: "raise" an
            error, or "flag" them (the label is -1). Validation data must all have an answer.
        progress: show progress bars; by default in a terminal only.
        distributed: whether this runs in several processes of `torch.distributed`, as `torchrun`
            starts them. Each passes its own part of the training data, which must not overlap, and
            all of the validation data. All get the same result, that of one process with all data.
        task: "multilabel" for several labels per input; "dense" for maps (B, K, H, W), "tokens" for
            texts (B, T, K). By default what the shape of the labels says.
        ignore_index: label of positions that do not count.

    >>> x = torch.randn(2000, 2, generator=torch.Generator().manual_seed(0))
    >>> labels, model = (x.sum(1) > 0).long(), nn.Linear(2, 2)  # stands for a trained network
    >>> model.weight.data = torch.tensor([[-3.0, 0.0], [3.0, 0.0]])  # too sure of its first input
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
    classifier, processes = classifier.untempered(), Group(distributed)
    _require_same_weights(classifier, processes)
    require_settings(price, rule)
    reader = _DataReader(classifier, places, progress, task, ignore_index)
    held_out = reader.validation(validation_loader, processes)
    moments = reader.moments(train_loader, held_out.logits.shape[1]).over_processes(processes)
    calibrator = fit_cases(
        reader.decided.head, moments, held_out, price, rule, temperature, on_error
    )
    taps = reader.decided.taps
    return Calibrated(classifier, taps.places, taps.folding, calibrator.to(classifier.device))


def _require_same_weights(classifier: Classifier, processes: Group) -> None:
    for name, tensor in classifier.tensors.items():
        if not processes.agree(tensor):
            raise ValueError(
                f"the processes have different weights: {name!r} is not the same in all of them; "
                "load the trained network in every process"
            )


@final
class _DataReader:
    """Goes over data sets; the first batch decides what logits stand for, and where features are.

    Args:
        classifier: the model.
        places: where features are taken, or None.
        progress: whether to show progress bars.
        task: what the logits stand for, or None.
        ignored: the label of places that do not count.
    """

    def __init__(
        self,
        classifier: Classifier,
        places: Sequence[Place] | None,
        progress: bool | None,
        task: Task | None,
        ignored: int,
    ) -> None:
        self._classifier, self._places, self._progress = classifier, places, progress
        self._task, self._ignored = task, ignored
        self._decided: Pass | None = None

    @property
    def decided(self) -> Pass:
        """What the first batch decided."""
        assert self._decided is not None
        return self._decided

    def validation(self, loader: Iterable[Any], processes: Group) -> Cases:
        """Return what was read of all validation data, the same in all processes."""
        parts: list[Cases] = []

        def keep(cases: Cases) -> None:
            if cases.labels is None:
                raise ValueError(NO_LABELS)
            parts.append(Cases(*(part.cpu() for part in cases if part is not None)))

        self._over(loader, keep, "validation")
        logits, features, labels, inputs = (torch.cat(part) for part in zip(*parts, strict=True))
        if not processes.agree(labels):
            raise ValueError(
                "the processes have different validation data: pass all validation data, in the "
                "same order, in every process; only the training data are split"
            )
        return Cases(processes.share(logits), processes.share(features), labels, inputs)

    def moments(self, loader: Iterable[Any], size: int) -> Moments:
        """Return the moments of the training features, by label or by prediction."""
        head = self.decided.head
        moments = Moments(head.group_count(size))

        def add(cases: Cases) -> None:
            known = head.guessed(cases.logits) if cases.labels is None else cases.labels
            moments.add(cases.features, head.groups(known, len(cases.features)))

        self._over(loader, add, "training")
        return moments

    @torch.inference_mode(False)
    @torch.no_grad()
    def _over(self, loader: Iterable[Any], use: Callable[[Cases], None], description: str) -> None:
        """Call a function with what was read of every chunk of the data."""
        generator, seen = torch.Generator("cpu").manual_seed(0), 0

        def use_batch(batch: Any) -> None:
            x, given = split_labels(batch)
            with self._classifier.threads_for(x):
                use_inputs(self._classifier.prepare(x), given)

        def use_inputs(x: Inputs, labels: Tensor | None) -> None:
            nonlocal seen
            if self._decided is None:
                self._decided = self._first_look(x, labels)
            run, done = self._decided, 0
            head = run.head
            if labels is not None:
                labels = checked_labels(labels, x) if head.is_plain else as_labels(labels)
            for logits, features, chunk in in_chunks(
                x, lambda part: (*run(part), part), run.length(x)
            ):
                own = None if labels is None else labels[done : done + len(logits)]
                cases = head.read(logits, features, own, padding(head, chunk, logits), generator)
                if cases.labels is not None:
                    require_classes(cases.labels.flatten(), head.rows(cases.logits[:1])[0])
                use(cases._replace(inputs=cases.inputs + seen))
                done += len(logits)
                seen += len(logits)

        each_batch(loader, use_batch, description, self._progress)

    def _first_look(self, x: Inputs, labels: Tensor | None) -> Pass:
        """Decide on a prepared batch."""
        if labels is None:
            raise ValueError(NO_LABELS)
        view, some = self._classifier.of_any_shape(), batches.take(x, slice(0, PROBED))
        shape = torch.Size([len(labels), *view.logits(some).shape[1:]])
        head = find_head(shape, labels, self._task, self._ignored)
        view = self._classifier if head.is_plain else view
        if head.positions:
            found = self._places or [find_last_layer(view, some, head.axis)]
            return Pass(self._classifier, found, None, head)
        found = self._places or find_places(view, some)
        places = require_apart(view, some, found, all_of_them=self._places is not None)
        folding = Folding.of(Taps(view, places)(some)[1])
        return Pass(self._classifier, places, folding, head)


def _telltales(classifier: Classifier) -> list[str]:
    """Return the names of tensors that any further training changes."""
    names = [name for name, _ in classifier.model.named_parameters()][-2:]
    norms = list(tracking_batch_norms(classifier.model))[-1:]
    return [*names, *(f"{norm}.running_mean".lstrip(".") for norm in norms)]


def _sample(classifier: Classifier, name: str) -> Tensor:
    """Return some numbers of a tensor as predictions see it now; none if it is gone.

    Training changes all of them. `Classifier.tensors` would walk through the whole network.
    """
    owner, _, key = name.rpartition(".")
    tensor = classifier.overrides.get(name)
    if tensor is None:
        with suppress(AttributeError):
            tensor = getattr(classifier.model.get_submodule(owner), key)
    if tensor is None:
        return torch.empty(0, device="cpu")
    return tensor.detach().reshape(-1)[:: max(1, tensor.numel() // SAMPLED)]


def without_broken(x: Inputs) -> tuple[Inputs, Tensor]:
    """Return a batch with harmless numbers for those that are not finite, and in which rows."""
    least = 0.0 if isinstance(x, Tensor) else -torch.inf

    def harmless(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        return tensor.nan_to_num(0.0, 0.0, least)

    return batches.map_inputs(x, harmless), batches.broken_rows(x)
