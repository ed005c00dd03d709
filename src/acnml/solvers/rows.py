"""Running every (input, label) row of a batch at weights of its own, in shared matrix products.

A row's weights are μ + Σv, and v is a sum of a few gradients. They are never written out where that
costs: every layer computes its output with μ, for all rows at once, and a hook adds what Σv
contributes, which the posterior knows to do from the factors of v (see `acnml.dual`).

Tensors are (B, L, ...), inputs by labels, with L = 1 for what the labels share. Layers whose inputs
do not depend on adapted weights (the first one, or all behind a frozen trunk) run once per input:
the rows part at their output.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, final

import torch
from torch import Tensor, nn
from torch.nn import functional

from acnml import batches
from acnml.actions import Action, Displacement, MatrixAction
from acnml.batches import Inputs
from acnml.classifier import Classifier, Hook
from acnml.dual import Affine, Dual, Outers
from acnml.kernels import DenseKernel, Kernel
from acnml.layers import (
    AFFINE,
    SCALING,
    WAY_OUT,
    Site,
    find_sites,
    from_positions,
    input_positions,
    normalised,
    output_positions,
    scaling_gradients,
)
from acnml.params import Params
from acnml.posteriors import Posterior
from acnml.solvers.path import Path, Tangent
from acnml.solvers.quadratic import energy, gram


def supported(classifier: Classifier, posterior: Posterior) -> bool:
    """Whether every covered parameter belongs to a layer that can be run at rows' own weights."""
    try:
        find_sites(classifier.model, posterior.mean, AFFINE + SCALING, WAY_OUT)
    except ValueError:
        return False
    return True


class Passage(NamedTuple):
    """One passage of all rows through a site."""

    received: Tensor  # (B · L or B, ...) as the module receives it
    inputs: Tensor  # (B, L or 1, [groups,] positions, in [+ 1]); normalised (B, L or 1, ...)
    output: Tensor  # (B · L, ...) as the module gives it, a node of the graph
    shared: bool  # whether the inputs are the same whatever the weights


class Tape(NamedTuple):
    """A forward pass of all rows: the logits, and what passed the sites on the way."""

    logits: Tensor  # (B, L, K)
    passages: Mapping[Site, list[Passage]]


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
        start = _Runner(classifier, posterior, x, {}, {}, None).run(sites, 1)
        if not start.passages or not start.logits.requires_grad:
            classifier.require_used(x, posterior.mean)
        kept = (s for s, taken in start.passages.items() if _pays(posterior, s, taken, steps))
        return Rows(classifier, posterior, sites, x, start, frozenset(kept))

    def displaced(self, path: Path, labels: int) -> Tape:
        """Run all rows at μ + Σv."""
        displacement = path.moved
        actions = {site: self._action(site, displacement) for site in self.sites if site.is_affine}
        shared = {
            site: taken
            for site, taken in self.start.passages.items()
            if all(one.shared for one in taken)
        }
        runner = _Runner(self.classifier, self.posterior, self.x, shared, actions, displacement)
        return runner.run(self.sites, labels)

    @cached_property
    def tangent(self) -> Tangent:
        """Return the gradients of all K logits at the mean, (B, K, ...), with Σ applied."""
        logits = self.start.logits
        classes = torch.eye(logits.shape[-1], dtype=logits.dtype, device=logits.device)
        grads = [self.gradient(self.start, row.expand_as(logits)) for row in classes]
        outers = {
            layer: Outers(torch.cat([g.outers[layer].deltas for g in grads], dim=1), one.inputs)
            for layer, one in grads[0].outers.items()
        }
        dense = {name: torch.cat([g.dense[name] for g in grads], dim=1) for name in grads[0].dense}
        return Tangent.of(self.posterior, Dual(dense, outers))

    def gradient(self, tape: Tape, cotangent: Tensor) -> Dual:
        """Pull a cotangent (B, L, K) of the logits back to the covered parameters of every row."""
        outputs = [one.output for taken in tape.passages.values() for one in taken]
        pulled = torch.autograd.grad(
            tape.logits,
            outputs,
            cotangent,
            retain_graph=True,
            allow_unused=True,
            materialize_grads=True,
        )
        grads = iter(pulled)
        dense: Params = {}
        outers: dict[Affine, Outers] = {}
        for site, taken in tape.passages.items():
            deltas = [next(grads) for _ in taken]
            if site in self.factored:
                outers[site.layer] = _outers(site, taken, deltas, tape.logits.shape[0])
            else:
                dense.update(self._dense(site, taken, deltas, tape.logits.shape[0]))
        return Dual(dense, outers)

    def is_linear(self) -> bool:
        """Whether the logits are the outputs of the only covered layer, and so linear in it."""
        passed = [one for taken in self.start.passages.values() for one in taken]
        if len(passed) != 1 or not passed[0].shared:
            return False
        return _is_only_reshaped(passed[0].output, self.start.logits)

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
        targets = functional.one_hot(labels, tape.logits.shape[-1]).to(tape.logits.dtype)
        return targets - tape.logits.detach().softmax(-1)

    def log_lik(self, tape: Tape, labels: Tensor) -> Tensor:
        """Return log p_θ(y|x) of every row at the weights of a tape, (B, L)."""
        wide = torch.promote_types(tape.logits.dtype, torch.float32)
        log_probs = torch.log_softmax(tape.logits.detach().to(wide), dim=-1)
        index = labels.expand(len(log_probs), -1).unsqueeze(-1)
        return log_probs.expand(-1, len(labels), -1).gather(-1, index).squeeze(-1)

    def residual(self, ascent: Dual) -> Tensor:
        """Return √(gᵀΣg) of every row, g the objective's gradient, (B, L)."""
        squared = energy(ascent, self.posterior.displacement(ascent))
        return squared.clamp(min=0).sqrt().to(torch.promote_types(squared.dtype, torch.float32))

    def _action(self, site: Site, displacement: Displacement) -> Action | None:
        if site in self.factored:
            return displacement.actions[site.layer]
        if site.layer.weight in displacement.dense:
            return MatrixAction(site.layer.join(displacement.dense, self.posterior.mean))
        return None  # the forward pass does not use this site

    def _dense(self, site: Site, taken: list[Passage], deltas: list[Tensor], size: int) -> Params:
        if site.is_affine:
            matrix = _outers(site, taken, deltas, size).dense()
            return site.layer.split(matrix, self.posterior.mean)
        grads = torch.stack(deltas)  # (passages, B · L, ...)
        inputs = torch.stack([_as_rows(one.inputs, grads.shape[1]) for one in taken])
        by_row = scaling_gradients(site, inputs, grads)
        return {name: grad.unflatten(0, (size, -1)) for name, grad in by_row.items()}


@final
@dataclass(frozen=True, eq=False)
class _Runner:
    """One forward pass of all rows, with a hook at every site."""

    classifier: Classifier
    posterior: Posterior
    x: Inputs
    shared: Mapping[Site, list[Passage]]
    actions: Mapping[Site, Action | None]
    displacement: Displacement | None

    def run(self, sites: list[Site], labels: int) -> Tape:
        """Let the rows part at the first adapted layer or, where a model forbids it, at the input.

        A skip connection around the first adapted layer forbids it: it carries one row per input.
        """
        try:
            return self._run(sites, self.x, labels)
        except ValueError:
            if labels == 1:
                raise
        size = batches.size(self.x)
        index = torch.arange(size).repeat_interleave(labels)
        return self._run(sites, batches.take(self.x, index), 1)

    def _run(self, sites: list[Site], x: Inputs, labels: int) -> Tape:
        taken: dict[Site, list[Passage]] = {site: [] for site in sites}
        rows = batches.size(x) * labels
        hooks = {site.name: self._hook(site, taken[site], rows) for site in sites}
        with torch.inference_mode(False), torch.enable_grad(), self.classifier.hooked(hooks):
            logits = self.classifier.logits(x, self.posterior.mean, rows=labels)
            by_input = logits.unflatten(0, (batches.size(self.x), -1))
        return Tape(by_input, {site: passed for site, passed in taken.items() if passed})

    def _hook(self, site: Site, taken: list[Passage], rows: int) -> Hook:
        size = batches.size(self.x)

        def hook(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
            received, at_mean = args[0].detach(), self.shared.get(site)
            _require_rows(site, args[0], rows, size)
            if at_mean and torch.equal(received, at_mean[len(taken)].received):
                inputs = at_mean[len(taken)].inputs  # the same tensor, so that its terms merge
            else:
                inputs = _site_inputs(site, module, args[0], size)
            if self.displacement is not None:
                output = self._displaced(site, module, inputs, output)
            output = output if output.requires_grad else output.detach().requires_grad_()
            taken.append(Passage(received, inputs.detach(), output, not args[0].requires_grad))
            return output.clone()  # an in-place activation may follow and must not touch ours

        return hook

    def _displaced(self, site: Site, module: nn.Module, inputs: Tensor, output: Tensor) -> Tensor:
        """Add the displacement's share to an output: (B or B · L, ...) to (B · L, ...)."""
        size = batches.size(self.x)
        if site.is_affine:
            action = self.actions[site]
            assert action is not None
            positions = output_positions(module, output).unflatten(0, (size, -1))
            moved = positions + action(inputs)
            return from_positions(module, moved.flatten(0, 1), output.shape[1:])
        assert self.displacement is not None
        weight, bias = site.layer.weight, site.layer.bias
        moved = inputs * _broadcast(module, self.displacement.dense[weight], inputs.ndim)
        if bias is not None:
            moved = moved + _broadcast(module, self.displacement.dense[bias], inputs.ndim)
        return (output.unflatten(0, (size, -1)) + moved).flatten(0, 1)


def _require_rows(site: Site, received: Tensor, rows: int, size: int) -> None:
    """Refuse a tensor that has not one entry per row, or before the rows part one per input.

    A model that shapes its tensors by the size of its input would mix the labels of an input.
    """
    if len(received) != rows and (len(received) != size or received.requires_grad):
        raise ValueError(f"layer {site.name!r} received {len(received)} entries for {rows} rows")


def _pays(posterior: Posterior, site: Site, taken: list[Passage], steps: int) -> bool:
    """Whether a site's share of v is better kept in factors than written out for every row."""
    if not site.is_affine or site.layer.groups > 1:
        return False
    positions = sum(one.inputs.shape[-2] for one in taken)
    terms = positions if all(one.shared for one in taken) else positions * max(steps, 1)
    return posterior.prefers_factors(site.layer, terms, positions)


def _site_inputs(site: Site, module: nn.Module, x: Tensor, size: int) -> Tensor:
    if not site.is_affine:
        return normalised(module, x).unflatten(0, (size, -1))
    inputs = input_positions(module, x).unflatten(0, (size, -1))
    return inputs if site.layer.bias is None else functional.pad(inputs, (0, 1), value=1.0)


def _outers(site: Site, taken: list[Passage], deltas: list[Tensor], size: int) -> Outers:
    """Pair the gradients at a site's outputs with its inputs, passages joined as terms."""
    parts = [output_positions(site.module, d).unflatten(0, (size, -1)) for d in deltas]
    if len(taken) == 1:
        return Outers(parts[0], taken[0].inputs)
    labels = parts[0].shape[1]
    inputs = [one.inputs.expand(-1, labels, *one.inputs.shape[2:]) for one in taken]
    return Outers(torch.cat(parts, dim=-2), torch.cat(inputs, dim=-2))


def _as_rows(inputs: Tensor, rows: int) -> Tensor:
    """Turn (B, L or 1, ...) into (B · L, ...)."""
    size = len(inputs)
    return inputs.expand(size, rows // size, *inputs.shape[2:]).flatten(0, 1)


def _broadcast(module: nn.Module, values: Tensor, ndim: int) -> Tensor:
    """Shape a scaling layer's parameter (B, L, *shape) to act on tensors (B, L, ...)."""
    missing = ndim - values.ndim
    where = 2 if isinstance(module, nn.LayerNorm) else values.ndim
    return values.reshape(*values.shape[:where], *[1] * missing, *values.shape[where:])


# What lies between a last layer's output and the logits of a model that is linear in it: our own
# clone, the division by a temperature and changes of shape.
PLAIN = {"CloneBackward0", "DivBackward0", "ViewBackward0", "UnsafeViewBackward0"}


def _is_only_reshaped(output: Tensor, logits: Tensor) -> bool:
    """Whether the graph from a leaf to the logits holds nothing but plain operations."""
    node = logits.grad_fn
    while node is not None and type(node).__name__ in PLAIN:
        node = node.next_functions[0][0]
    return node is not None and getattr(node, "variable", None) is output
