"""Fit what ACNML needs: features of the validation data, a posterior and typicality."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias, final, get_args

from torch import nn

from acnml._util import checks
from acnml._util.batches import Inputs, take
from acnml._util.processes import group
from acnml._util.selection import last_linear, parameter_names
from acnml.calibration._validation import Outputs, ValidationData
from acnml.classifier import Classifier
from acnml.fit import Structure, fit_curvature
from acnml.head.features import (
    Features,
    all_features,
    is_changed_later,
    only_linear,
    why_not_linear,
)
from acnml.predictors import Acnml
from acnml.tuning._validation import Validation, joined_features
from acnml.typicality import Place, Reader
from acnml.typicality.density import Watch
from acnml.typicality.mahalanobis import Moments

OnError: TypeAlias = Literal["raise", "flag"]

# The default prior precision as a share of the curvature's mean eigenvalue. ACNML approximates
# CNML, in which the training data alone constrain the weights. So the prior should matter only in
# directions about which the data say little. Relative to the curvature, it does not depend on the
# number of data, and it follows the scale of the features unless these are much smaller than 1, the
# feature of the bias. For a ResNet-20 and the 50,000 images of CIFAR-10 it is about 1.
RELATIVE_PRIOR = 1e-2


# Inputs that are run again to say why a layer is not the last one.
PROBED = 100


class Network(NamedTuple):
    """A network and the names of the parameters of its last layer."""

    classifier: Classifier
    names: list[str]


@final
@dataclass(frozen=True, eq=False)
class Recipe:
    """How a posterior is fitted."""

    layer: nn.Module | str | None
    curvature: Structure
    prior_precision: float | None
    places: bool | tuple[Place, ...]  # of typicality; False for none
    progress: bool | None
    distributed: bool = False  # whether every process has a part of the training data
    on_error: OnError = "raise"  # of the predictor

    def __post_init__(self) -> None:
        # All of this would be found out later too, after the network has run over the data.
        if self.on_error not in get_args(OnError):
            raise ValueError(f"on_error must be one of {get_args(OnError)}, got {self.on_error!r}")
        if self.curvature not in get_args(Structure):
            raise ValueError(
                f"curvature must be one of {get_args(Structure)}, got {self.curvature!r}"
            )
        if self.prior_precision is not None:
            checks.require_positive(self.prior_precision, "prior_precision")

    def network(self, model: nn.Module | Classifier) -> Network:
        """Return a network, without a temperature, and its last layer."""
        classifier = model.untempered() if isinstance(model, Classifier) else Classifier(model)
        if not isinstance(self.places, bool):
            _require_modules(classifier.model, self.places)
        return Network(classifier, layer_names(classifier, self.layer))

    def outputs(self, network: Network, loader: Iterable[Any]) -> Outputs:
        """Return what the last layer makes of validation data, and the labels."""
        classifier, names = network
        layer = only_linear(classifier, names)
        reader: Reader | None = None
        is_changed = False

        def compute(x: Inputs) -> Features | None:
            nonlocal reader, is_changed
            assert layer is not None
            x = classifier.prepare(x)
            if self.places is not False and reader is None:
                named = None if self.places is True else self.places
                reader = Reader.found(classifier, x, named)
            found = all_features(classifier, layer, x, observer=reader)
            if found is None and not is_changed:
                is_changed = is_changed_later(classifier, layer, take(x, slice(0, PROBED)))
            return found

        features: Features | None = None
        if layer is not None:
            validation = Validation(loader, self.progress)
            features, labels = validation.over_batches("features", compute, joined_features)
        else:
            reason = why_not_linear(classifier, names)
            if reason is not None:
                raise ValueError(reason)
        if features is None:
            # An adapter on the head changes its outputs too, so that the other ways are named.
            change = (
                ": the model changes these outputs before it returns them, for example by "
                "LogSoftmax. Return them as they are, or pass Classifier(model, get_logits=...). "
                "Otherwise"
            )
            raise ValueError(
                f"the logits are not the outputs of the layer that owns {names}"
                f"{change if is_changed else ';'} name the last Linear layer by `layer`, pass "
                "acnml.transformers.LastToken(model) for a decoder with a head `score`, or use "
                "acnml.fit_laplace and acnml.Acnml with a posterior over all layers"
            )
        outputs = Outputs(features, labels, reader)
        return outputs.of_first_process(group(True)) if self.distributed else outputs

    def fitted(self, network: Network, loader: Iterable[Any], validation: ValidationData) -> Acnml:
        """Fit a posterior to the tempered likelihood, and typicality in the same pass."""
        tempered, moments = network.classifier.tempered(validation.temperature), Moments()
        watch = None if validation.reader is None else Watch(validation.reader, moments.add)
        options: dict[str, Any] = {} if watch is None else {"watch": watch}
        if self.distributed:
            _require_same_weights(tempered, network.names)
            options["distributed"] = True
        fitted = fit_curvature(
            tempered,
            loader,
            structure=self.curvature,
            layers=network.names,
            progress=self.progress,
            **options,
        )
        if self.distributed and watch is not None:
            moments = moments.over_processes(group(True))
        precision = self.prior_precision
        if precision is None:
            precision = RELATIVE_PRIOR * fitted.mean_eigenvalue()
            if precision == 0:
                raise ValueError(
                    f"at a temperature of {tempered.temperature:.3g} the network gives all "
                    "training data a probability of 0 or 1, so that they do not constrain its last "
                    "layer; pass a higher temperature, or a prior_precision"
                )
        density = validation.density(tempered, moments)
        posterior = fitted.posterior(precision)
        return Acnml(tempered, posterior, on_error=self.on_error, typicality=density)


def checked_places(typicality: bool | Sequence[Place]) -> bool | tuple[Place, ...]:
    """Return the argument `typicality` of `calibrate`, or say what to pass."""
    if isinstance(typicality, bool):
        return typicality
    places = tuple(typicality) if isinstance(typicality, Iterable) else ()
    if not places or not all(isinstance(place, Place) for place in places):
        raise TypeError(
            "typicality must be True, False or a list of places such as [acnml.Place('layer4')], "
            f"got {typicality!r}"
        )
    return places


def _require_modules(model: nn.Module, places: tuple[Place, ...]) -> None:
    """Raise an error if the model lacks a module at which features are to be taken."""
    names = [name for name, _ in model.named_modules(remove_duplicate=False)]
    for place in places:
        if place.module not in names:
            close = difflib.get_close_matches(str(place.module), names[1:], n=1, cutoff=0)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ValueError(
                f"typicality: the model has no module {place.module!r} to take features at{hint}"
            )


def _require_same_weights(classifier: Classifier, names: list[str]) -> None:
    """Raise an error in all processes if one has other weights."""
    for name, tensor in classifier.copy_parameters(names).items():
        if not group(True).agree(tensor):
            raise ValueError(
                f"the processes have different weights {name!r}: load the same network in each"
            )


def layer_names(classifier: Classifier, layer: nn.Module | str | None) -> list[str]:
    """Return the names of the parameters of a Linear layer, by default the last one."""
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
