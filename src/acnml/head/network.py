"""Network and head as one `nn.Module`, which can be moved, compiled and exported."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor, nn

from acnml._engine.layers import Site
from acnml.classifier import Classifier
from acnml.head.module import (
    EigenKernel,
    FullKernel,
    HeadModule,
    KernelModule,
    KroneckerKernel,
    VarianceKernel,
)
from acnml.posteriors import Diagonal, EigenBlock, FactorBlock, Full, Kronecker, Posterior
from acnml.typicality import Density
from acnml.typicality.module import TypicalityModule

# Solver steps of a module by default.
STEPS = 5


@final
class PassThrough(nn.Linear):
    """Stands for a network's last layer in the trunk: it returns its input.

    A network may read attributes of the layer, such as the type of its weight or its number of
    inputs, so they are those of the layer. Weight and bias stay with the layer alone: they are
    neither parameters of this module nor written twice to an exported file.
    """

    def __init__(self, layer: nn.Linear) -> None:
        nn.Module.__init__(self)  # without new weights
        # A layer may have a `forward` of its own, as accelerate's hooks give it one.
        internal = {*vars(nn.Module()), "forward"}
        self.__dict__.update({k: v for k, v in vars(layer).items() if k not in internal})
        self._layer = (layer,)  # in a tuple, so that it is not registered as a submodule

    @staticmethod
    def in_place_of(layer: nn.Linear) -> PassThrough:
        """Take over the functions that change what the layer receives, so that they run once."""
        stand_in = PassThrough(layer)
        for name in ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"):
            setattr(stand_in, name, getattr(layer, name))
            setattr(layer, name, OrderedDict())
        return stand_in

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The weight of the layer."""
        return self._layer[0].weight

    @property
    def bias(self) -> Tensor:  # type: ignore[override]
        """The bias of the layer."""
        return self._layer[0].bias

    def forward(self, input: Tensor) -> Tensor:
        """Return the features that the layer would have received."""
        return input


@final
class AcnmlModule(nn.Module):
    """Maps inputs to ACNML's log-probabilities (B, K) and regret (B,).

    It holds a copy of the network, in eval mode, without its last layer. The head solves with a
    fixed number of steps and without data-dependent control flow. `residual` says how far from the
    optimum that leaves an input. The head solves in at least single precision, also for a network
    in half precision. So convert the network, not this module, to half precision.

    Args:
        trunk: the network, whose last layer has been replaced by a `PassThrough`.
        get_features: picks the features out of the trunk's output.
        linear: the last layer.
        temperature: by which the logits are divided.
        head: the solver.
        typicality: weighs the query by how atypical the input's features are.
    """

    def __init__(
        self,
        trunk: nn.Module,
        get_features: Callable[[Any], Tensor] | None,
        linear: nn.Linear,
        temperature: float,
        head: HeadModule,
        typicality: TypicalityModule | None = None,
    ) -> None:
        super().__init__()
        self.trunk, self.linear, self.head, self.typicality = trunk, linear, head, typicality
        weight = linear.weight
        wide = torch.promote_types(weight.dtype, torch.float32)
        divisor = torch.tensor(temperature, dtype=wide, device=weight.device)
        self.register_buffer("temperature", divisor)
        self._get_features = get_features
        self.eval()

    def forward(self, *args: Tensor, **kwargs: Tensor) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and regret."""
        log_probs, regret = self.head(*self._features(*args, **kwargs))
        return log_probs, regret

    def residual(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        """Return the residuals of the labels solved for, see `Solution.residual`."""
        return self.head.residual(*self._features(*args, **kwargs))

    def _features(self, *args: Tensor, **kwargs: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        output = self.trunk(*args, **kwargs)
        features = self._get_features(output) if self._get_features else output
        scale = None if self.typicality is None else self.typicality()
        # A network may convert its logits to another precision: the trunk then converts features.
        logits = self.linear(features.to(self.linear.weight.dtype)).to(features.dtype)
        return features, logits / self.temperature, scale


def network_module(
    classifier: Classifier,
    layer: Site,
    posterior: Posterior,
    steps: int | None = None,
    typicality: Density | None = None,
    labels: int | None = None,
    negligible: float = 1e-3,
) -> AcnmlModule:
    """Join a network and the head of a posterior over its last layer, with α in the posterior.

    See `HeadModule` for the number of labels to solve for, and what the others may add.
    """
    _require_last(classifier, layer, typicality)
    network = classifier.copy_module(posterior.mean)
    linear = network.get_submodule(layer.name)
    assert isinstance(linear, nn.Linear)
    trunk: nn.Module = PassThrough.in_place_of(linear)
    if layer.name:
        parent, _, own_name = layer.name.rpartition(".")
        setattr(network.get_submodule(parent), own_name, trunk)
        trunk = network
    temperature = classifier.temperature
    # In the posterior's precision: half precision has too few digits for variances.
    head = HeadModule(
        kernel_module(posterior, layer),
        temperature**-2,
        STEPS if steps is None else steps,
        labels=labels,
        negligible=negligible,
    )
    get_features = classifier._get_logits if layer.name else None
    weigh = None if typicality is None else TypicalityModule(typicality, trunk)
    module = AcnmlModule(trunk, get_features, linear, temperature, head, weigh)
    return module.to(linear.weight.device)


def _require_last(classifier: Classifier, layer: Site, typicality: Density | None) -> None:
    """Refuse what is wrong in a trunk that returns features in place of logits."""
    if classifier.findings.last_layers.get(layer.name) is False:
        raise ValueError(
            f"the logits are not the outputs of layer {layer.name!r}, so the network cannot become "
            "a module; use the predictor itself"
        )
    for place in () if typicality is None else typicality.reader.places:
        holds_layer = place.module in ("", layer.name) or layer.name.startswith(f"{place.module}.")
        if holds_layer and not place.is_input:
            raise ValueError(
                f"the typicality reads the {place}, which are logits; a module has no logits "
                f"before its solver: fit it with Place({layer.name!r}, is_input=True) or other "
                "places"
            )


def kernel_module(posterior: Posterior, layer: Site) -> KernelModule:
    """Return the covariance of the layer's outputs as a module."""
    if isinstance(posterior, Diagonal):
        return VarianceKernel(layer.layer.join(posterior.var, posterior.mean))
    if isinstance(posterior, Full):
        return FullKernel(posterior.by_output(layer.layer))
    if isinstance(posterior, Kronecker):
        (block,) = posterior.blocks
        if isinstance(block, FactorBlock):
            return KroneckerKernel(block.input_cov, block.output_cov)
        if isinstance(block, EigenBlock):
            return EigenKernel(block.input_basis, block.output_basis, block.var)
    kind = type(posterior).__name__
    raise TypeError(
        f"a {kind} posterior cannot be exported; use Diagonal, Kronecker or Full, for example by "
        "acnml.calibrate"
    )
