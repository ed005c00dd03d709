"""Running every (input, label) row of a batch at weights of its own, in shared matrix products.

A row's weights are μ + Σv, and v is a sum of a few gradients. They are never written out where that
costs: every layer computes its output with μ, for all rows at once, and a hook adds what Σv
contributes, which the posterior knows to do from the factors of v (see `acnml._algebra.dual`).

Tensors are (B, L, ...), inputs by labels, with L = 1 for what the labels share. Layers whose inputs
do not depend on adapted weights (the first one, or all behind a frozen trunk) run once per input:
the rows part at their output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional

from acnml._algebra.dual import Affine, Dual, Outers
from acnml._algebra.kernels import DenseKernel, Kernel
from acnml._engine.convolution import weight_gradients
from acnml._engine.layers import (
    AFFINE,
    SCALING,
    WAY_OUT,
    Site,
    find_sites,
    output_positions,
    sum_to_parameter,
)
from acnml._engine.path import Path, Tangent
from acnml._engine.quadratic import energy, gram
from acnml._engine.runner import Passage, Runner, Tape, site_inputs
from acnml._util.batches import Inputs
from acnml._util.params import Params, add
from acnml.classifier import Classifier
from acnml.posteriors import Posterior


def supported(classifier: Classifier, posterior: Posterior) -> bool:
    """Whether every covered parameter belongs to a layer that can be run at rows' own weights."""
    try:
        find_sites(classifier.model, posterior.mean, AFFINE + SCALING, WAY_OUT)
    except ValueError:
        return False
    return True


@final
@dataclass(frozen=True, eq=False)
class Rows:
    """A batch of inputs that can be run at weights of their own for every label.

    Attributes:
        classifier: the model.
        posterior: μ and Σ.
        sites: the modules that own the covered parameters.
        x: the prepared inputs.
        start: the pass at the mean, one row per input.
        factored: the sites whose gradients are kept as outer products.
    """

    classifier: Classifier
    posterior: Posterior
    sites: list[Site]
    x: Inputs
    start: Tape
    factored: frozenset[Site]

    @staticmethod
    def at_mean(classifier: Classifier, posterior: Posterior, x: Inputs, steps: int) -> Rows:
        """Run the batch at the mean; `steps` is how many gradients v will be a sum of."""
        sites = find_sites(classifier.model, posterior.mean, AFFINE + SCALING, WAY_OUT)
        start = Runner(classifier, posterior, x, frozenset()).run(sites, 1)
        if not start.passages or not start.logits.requires_grad:
            classifier.require_used(x, posterior.mean)
        pays = (s for s, taken in start.passages.items() if _pays(posterior, s, taken, steps))
        factored = frozenset(pays)
        passages = {
            site: [_in_positions(site, one) for one in taken] if site in factored else taken
            for site, taken in start.passages.items()
        }
        start = Tape(start.logits, passages)
        return Rows(classifier, posterior, sites, x, start, factored)

    def displaced(self, path: Path, labels: int) -> Tape:
        """Run all rows at μ + Σv."""
        return self._runner(path).run(self.sites, labels)

    def evaluated(self, path: Path, labels: int) -> Tensor:
        """Return the logits (B, L, K) of all rows at μ + Σv, and nothing to go on from."""
        return self._runner(path).evaluate(self.sites, labels)

    def _runner(self, path: Path) -> Runner:
        passages = self.start.passages
        return Runner(self.classifier, self.posterior, self.x, self.factored, path.moved, passages)

    @cached_property
    def tangent(self) -> Tangent:
        """Return the gradients of all K logits at the mean, (B, K, ...), with Σ applied."""
        logits = self.start.logits
        classes = torch.eye(logits.shape[-1], dtype=logits.dtype, device=logits.device)
        each = [_pulled(self.start, row.expand_as(logits)) for row in classes]
        # All classes at once: they share a layer's inputs.
        deltas = [torch.stack(parts, dim=1).flatten(0, 1) for parts in zip(*each, strict=True)]
        return Tangent.of(self.posterior, self._dual(self.start, deltas))

    def gradient(self, tape: Tape, cotangent: Tensor) -> Dual:
        """Pull a cotangent (B, L, K) of the logits back to the covered parameters of every row."""
        return self._dual(tape, _pulled(tape, cotangent))

    def _dual(self, tape: Tape, deltas: Sequence[Tensor]) -> Dual:
        """Pair the gradients (B · L, ...) at the sites' outputs with the sites' inputs."""
        grads, size = iter(deltas), len(tape.logits)
        dense: Params = {}
        outers: dict[Affine, Outers] = {}
        for site, taken in tape.passages.items():
            own = [next(grads).to(self.posterior.dtype) for _ in taken]
            if site in self.factored:
                outers[site.layer] = _outers(site, taken, own, size)
            else:
                dense.update(self._dense(site, taken, own, size))
        return Dual(dense, outers)

    def is_linear(self) -> bool:
        """Whether the logits are the outputs of the only covered layer, and so linear in it.

        Up to our own temperature, that is, and at a single position: what else a model does with
        them (divide them, score several items by one layer) is not in the layer's own kernel.
        """
        passed = [(site, one) for site, taken in self.start.passages.items() for one in taken]
        if len(passed) != 1:
            return False
        ((site, one),) = passed
        outputs = (one.output.detach() / self.classifier.temperature).flatten()
        return (
            one.shared
            and _has_one_position(site, one)
            and _is_only_reshaped(one.output, self.start.logits)
            and torch.equal(outputs, self.start.logits.detach().flatten())
        )

    def kernel(self) -> Kernel:
        """Return the covariance of the logits at the mean, with the structure that it has."""
        if not self.is_linear():
            return DenseKernel(gram(*self.tangent))
        ((site, (passed,)),) = self.start.passages.items()
        outputs = self.posterior.output_kernel(site.layer, passed.inputs[:, 0, 0])
        return outputs.scaled(self.classifier.temperature**-2)

    def log_lik_gradient(self, tape: Tape, labels: Tensor) -> Dual:
        """Return ∇ log p_θ(y|x) of every row at the weights of a tape."""
        return self.gradient(tape, self.residuals(tape, labels))

    def residuals(self, tape: Tape, labels: Tensor) -> Tensor:
        """Return e_y - softmax(z), the gradient of log p(y|x) at the logits, (B, L, K)."""
        logits = tape.logits.detach().to(self.posterior.dtype)
        return functional.one_hot(labels, logits.shape[-1]).to(logits.dtype) - logits.softmax(-1)

    def log_lik(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return log p_θ(y|x) of every row, (B, L), from logits (B, L or 1, K)."""
        wide = torch.promote_types(logits.dtype, torch.float32)
        log_probs = torch.log_softmax(logits.detach().to(wide), dim=-1)
        index = labels.expand(len(log_probs), -1).unsqueeze(-1)
        return log_probs.expand(-1, len(labels), -1).gather(-1, index).squeeze(-1)

    def residual(self, ascent: Dual) -> Tensor:
        """Return √(gᵀΣg) of every row, g the objective's gradient, (B, L)."""
        squared = energy(ascent, self.posterior.displacement(ascent))
        return squared.clamp(min=0).sqrt().to(torch.promote_types(squared.dtype, torch.float32))

    def _dense(self, site: Site, taken: list[Passage], deltas: list[Tensor], size: int) -> Params:
        if site.is_affine and not isinstance(site.module, nn.Conv2d):
            matrix = _outers(site, taken, deltas, size).dense()
            return site.layer.split(matrix, self.posterior.mean)
        gradients = _convolution_gradients if site.is_affine else _scaling_gradients
        pairs = zip(taken, deltas, strict=True)
        return reduce(add, (gradients(site, one.inputs, d, size) for one, d in pairs))


def _pulled(tape: Tape, cotangent: Tensor) -> tuple[Tensor, ...]:
    """Pull a cotangent (B, L, K) of the logits back to the outputs of all passages."""
    outputs = [one.output for taken in tape.passages.values() for one in taken]
    return torch.autograd.grad(
        tape.logits,
        outputs,
        cotangent.to(tape.logits.dtype),
        retain_graph=True,
        allow_unused=True,
        materialize_grads=True,
    )


def _pays(posterior: Posterior, site: Site, taken: list[Passage], steps: int) -> bool:
    """Whether a site's share of v is better kept in factors than written out for every row."""
    if not site.is_affine or site.layer.groups > 1:
        return False
    positions = sum(_positions(one, site) for one in taken)
    terms = positions if all(one.shared for one in taken) else positions * max(steps, 1)
    return posterior.prefers_factors(site.layer, terms, positions)


def _in_positions(site: Site, one: Passage) -> Passage:
    """Turn a passage at the mean into one of a site that is kept in factors."""
    inputs = site_inputs(site, site.module, one.received, len(one.inputs), factored=True)
    return one._replace(inputs=inputs.to(one.inputs.dtype))


def _positions(one: Passage, site: Site) -> int:
    """Count the positions of one input at an affine layer."""
    return int(output_positions(site.module, one.output).shape[-2])


def _convolution_gradients(site: Site, inputs: Tensor, deltas: Tensor, size: int) -> Params:
    """Write out the gradients of a convolution's parameters for every row: (B, L, *shape)."""
    assert isinstance(site.module, nn.Conv2d)
    by_input = deltas.unflatten(0, (size, -1))
    grads = {site.layer.weight: weight_gradients(site.module, inputs, by_input)}
    if site.layer.bias is not None:
        grads[site.layer.bias] = by_input.sum((3, 4))
    return grads


def _scaling_gradients(site: Site, inputs: Tensor, deltas: Tensor, size: int) -> Params:
    """Write out the gradients of a scaling layer's parameters for every row: (B, L, *shape)."""
    scaled = (inputs * deltas.unflatten(0, (size, -1))).flatten(0, 1)
    grads = {site.layer.weight: scaled}
    if site.layer.bias is not None:
        grads[site.layer.bias] = deltas
    summed = {name: sum_to_parameter(site.module, grad) for name, grad in grads.items()}
    return {name: grad.unflatten(0, (size, -1)) for name, grad in summed.items()}


def _outers(site: Site, taken: list[Passage], deltas: list[Tensor], size: int) -> Outers:
    """Pair the gradients at a site's outputs with its inputs, passages joined as terms."""
    parts = [output_positions(site.module, d).unflatten(0, (size, -1)) for d in deltas]
    if len(taken) == 1:
        return Outers(parts[0], taken[0].inputs)
    labels = max(one.inputs.shape[1] for one in taken)
    inputs = [one.inputs.expand(-1, labels, *one.inputs.shape[2:]) for one in taken]
    return Outers(torch.cat(parts, dim=-2), torch.cat(inputs, dim=-2))


# What lies between a last layer's output and the logits of a model that is linear in it: our own
# clone, the division by a temperature and changes of shape.
PLAIN = {"CloneBackward0", "DivBackward0", "ViewBackward0", "UnsafeViewBackward0"}


def _has_one_position(site: Site, one: Passage) -> bool:
    """Whether a layer multiplies one vector per input by one matrix."""
    in_positions = site.is_affine and site.layer.groups == 1 and one.inputs.ndim == 4
    return in_positions and one.inputs.shape[-2] == 1


def _is_only_reshaped(output: Tensor, logits: Tensor) -> bool:
    """Whether the graph from a leaf to the logits holds nothing but plain operations."""
    node = logits.grad_fn
    while node is not None and type(node).__name__ in PLAIN:
        node = node.next_functions[0][0]
    return node is not None and getattr(node, "variable", None) is output
