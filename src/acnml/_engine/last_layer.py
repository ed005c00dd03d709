"""Features and logits of a network from one forward pass, for a posterior over its last layer.

If the logits are the outputs of the only covered layer, z = W a + b, then everything that ACNML
needs of an input is the layer's input a and the logits z. The network itself is not run again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from acnml._algebra.dual import Affine
from acnml._algebra.kernels import Kernel
from acnml._engine.layers import Site
from acnml._engine.recorder import Tape
from acnml._engine.trust import Passed, probed, require_apart_from, require_understood
from acnml._util import checks
from acnml._util.batches import Inputs, in_chunks
from acnml._util.params import Params
from acnml.classifier import Classifier, strays, without_autocast
from acnml.posteriors.base import Posterior

# What may lie between a last layer's output and the logits of a model that is linear in it: our own
# clone, the division by a temperature, and changes of shape or precision.
PLAIN = {
    "CloneBackward0",
    "DivBackward0",
    "ToCopyBackward0",
    "UnsafeViewBackward0",
    "ViewBackward0",
}


class Features(NamedTuple):
    """What a last layer receives and returns."""

    inputs: Tensor  # a (N, d [+ 1]), with a 1 appended if the posterior covers the bias
    logits: Tensor  # z (N, K), divided by the classifier's temperature

    def take(self, rows: slice | Tensor) -> Features:
        """Return the features of some inputs."""
        return Features(self.inputs[rows], self.logits[rows])

    def kernel(
        self,
        posterior: Posterior,
        layer: Affine,
        temperature: float,
    ) -> Kernel:
        """Return the covariance of the logits, divided by the temperature, under a posterior."""
        with without_autocast(self.inputs):  # half precision has too few digits for a solver
            like = posterior.mean[layer.weight]
            kernel = posterior.output_kernel(layer, self.inputs.to(like.dtype))
        return kernel.scaled(temperature**-2)

    @staticmethod
    def joined(parts: Sequence[Features]) -> Features:
        """Return the features of several batches as those of one."""
        return Features(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))


def features(
    classifier: Classifier,
    site: Site,
    x: Inputs,
    tensors: Params | None = None,
) -> Features | None:
    """Run a prepared batch once; return None if its logits are not the outputs of the layer.

    Args:
        classifier: the model.
        site: a Linear layer, see `only_linear`.
        x: the inputs.
        tensors: used in place of the model's own.
    """
    own, findings = classifier if tensors is None else classifier.at(tensors), classifier.findings
    probe = None
    if findings.is_due(_names(site), x) or site.name not in findings.last_layers:
        probe = probed(own, [site], x)
        findings.last_layers[site.name] = _is_last_layer(probe.tape, site, classifier.temperature)
    is_last = findings.last_layers[site.name]
    found = _run(classifier, site, x, tensors) if is_last else None
    if probe is not None and found is not None:
        received = found.inputs[:, : site.module.in_features]
        require_apart_from(own, [site], x, probe, Passed(found.logits, {site: [received]}))
    elif probe is not None:
        require_understood(own, [site], x)
    return found


def _run(
    classifier: Classifier,
    site: Site,
    x: Inputs,
    tensors: Params | None,
) -> Features | None:
    """Record the layer's input; return None if the logits of this batch are not its output."""
    passed: list[tuple[Tensor, Tensor]] = []

    def keep(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        # The model may change the output in place later, and must then be found out.
        passed.append((args[0].detach(), output.detach().clone()))
        return output

    # With gradients, and without a graph: nothing depends on the leaves, unless the model uses the
    # layer's weight without calling the layer.
    with torch.inference_mode(False), torch.enable_grad():
        leaves = classifier.leaves(_names(site), tensors)
        hooked = classifier.hooked({site.name: keep}, sealed=[site.name])
        logits = hooked.logits(x, {**(tensors or {}), **leaves})
    if strays(logits, leaves):
        return None
    logits = logits.detach()
    checks.require_finite(logits, "the model's logits are", "check the model and these inputs")
    assert isinstance(site.module, nn.Linear)
    if len(passed) != 1 or passed[0][0].numel() != len(logits) * site.module.in_features:
        return None
    ((received, output),) = passed
    # The structure was checked before. The values show whether this batch took the same way.
    if not torch.equal(output.to(logits).view_as(logits) / classifier.temperature, logits):
        return None
    inputs = received.reshape(len(logits), -1)
    if site.layer.bias is not None:
        inputs = functional.pad(inputs, (0, 1), value=1.0)
    return Features(inputs, logits)


def all_features(
    classifier: Classifier,
    site: Site,
    x: Inputs,
    tensors: Params | None = None,
) -> Features | None:
    """Return the features of a prepared batch, run in chunks, or None if a chunk has none."""
    parts = []
    for part in in_chunks(x, lambda chunk: features(classifier, site, chunk, tensors)):
        if part is None:
            return None
        parts.append(part)
    return Features.joined(parts)


def _names(site: Site) -> list[str]:
    return [name for name in (site.layer.weight, site.layer.bias) if name is not None]


def _is_last_layer(tape: Tape, site: Site, temperature: float) -> bool:
    """Whether the logits are the outputs of the layer, reshaped and tempered at most.

    Whatever else a model does with the outputs (dividing them, scoring several items by one layer)
    would be missing in the kernel. Found out from the autograd graph of a few inputs, when the
    model is checked.
    """
    passages = tape.passages.get(site, [])
    if len(passages) != 1:
        return False
    (one,) = passages
    assert isinstance(site.module, nn.Linear)
    if one.received.numel() != len(one.received) * site.module.in_features:
        return False  # several positions: the kernel of the logits is not that of one vector
    logits = tape.logits.detach().flatten()
    outputs = (one.output.detach().to(logits) / temperature).flatten()
    if not one.is_shared or outputs.shape != logits.shape:
        return False
    if not torch.allclose(outputs, logits, rtol=0, atol=0, equal_nan=True):
        return False
    node, last = tape.logits.grad_fn, one.output.grad_fn
    while node is not None and node is not last and type(node).__name__ in PLAIN:
        node = node.next_functions[0][0]
    return node is not None and node is last
