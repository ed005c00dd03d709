"""Fit what ACNML needs: features of the validation data, a posterior and typicality."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, final

from torch import nn

from acnml._util.batches import Inputs, chunks
from acnml._util.processes import group
from acnml._util.selection import last_linear, parameter_names
from acnml.calibration._validation import Outputs, ValidationData
from acnml.classifier import Classifier
from acnml.fitting import Curvature
from acnml.head.features import Features, all_features, only_linear
from acnml.predictors import Acnml
from acnml.tuning._validation import Validation, joined_features
from acnml.typicality import Place, Reader
from acnml.typicality.density import Watch
from acnml.typicality.mahalanobis import Moments

# The default prior precision as a share of the curvature's mean eigenvalue. ACNML approximates
# CNML, in which the training data alone constrain the weights. So the prior should matter only in
# directions about which the data say little. Relative to the curvature, it does not depend on the
# number of data or the scale of the features. For a ResNet-20 and the 50,000 images of CIFAR-10 the
# prior precision is then about 1.
RELATIVE_PRIOR = 1e-2


class Network(NamedTuple):
    """A network and the names of the parameters of its last layer."""

    classifier: Classifier
    names: list[str]


@final
@dataclass(frozen=True, eq=False)
class Recipe:
    """How a posterior is fitted."""

    layer: nn.Module | str | None
    curvature: Callable[..., Curvature]
    prior_precision: float | None
    places: bool | tuple[Place, ...]  # of typicality; False for none
    progress: bool | None
    distributed: bool = False  # whether every process has a part of the training data

    def network(self, model: nn.Module | Classifier) -> Network:
        """Return a network, without a temperature, and its last layer."""
        classifier = model.untempered() if isinstance(model, Classifier) else Classifier(model)
        return Network(classifier, layer_names(classifier, self.layer))

    def outputs(self, network: Network, loader: Iterable[Any]) -> Outputs:
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
        fitted = self.curvature(tempered, loader, network.names, progress=self.progress, **options)
        if self.distributed and watch is not None:
            moments = moments.over_processes(group(True))
        precision = self.prior_precision
        if precision is None:
            precision = RELATIVE_PRIOR * fitted.mean_eigenvalue()
        density = validation.density(tempered, moments)
        return Acnml(tempered, fitted.posterior(precision), typicality=density)


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
