"""One forward pass of all (input, label) rows, each at weights of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, final

import torch
from torch import Tensor, nn
from torch.nn import functional

from acnml import batches
from acnml.actions import Action, Displacement, MatrixAction
from acnml.batches import Inputs
from acnml.classifier import Classifier, Forward, Hook
from acnml.layers import Site, from_positions, input_positions, normalised, output_positions
from acnml.posteriors import Posterior
from acnml.solvers.convolution import convolve


class Passage(NamedTuple):
    """One passage of all rows through a site."""

    received: Tensor  # (B · L or B, ...) as the module receives it
    # What the gradients multiply: (B, L or 1, positions, in [+ 1]) of an affine layer; what a
    # scaling layer has normalised, or a written-out convolution receives, as (B, L or 1, ...).
    inputs: Tensor
    output: Tensor  # (B · L, ...) as the module gives it, a node of the graph
    shared: bool  # whether the inputs are the same whatever the weights


class Tape(NamedTuple):
    """A forward pass of all rows: the logits, and what passed the sites on the way."""

    logits: Tensor  # (B, L, K)
    passages: Mapping[Site, list[Passage]]


@final
@dataclass(frozen=True, eq=False)
class Runner:
    """One forward pass of all rows, with a hook at every site."""

    classifier: Classifier
    posterior: Posterior
    x: Inputs
    factored: frozenset[Site]
    displacement: Displacement | None = None
    shared: Mapping[Site, list[Passage]] = field(default_factory=dict)

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
        forwards = {site.name: self._convolution(site) for site in sites if self._replaces(site)}
        hooked = self.classifier.hooked(hooks, forwards)
        with torch.inference_mode(False), torch.enable_grad(), hooked:
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
                inputs = site_inputs(site, module, args[0], size, site in self.factored)
            if self.displacement is not None and not self._replaces(site):
                output = self._displaced(site, module, inputs, output)
            output = output if output.requires_grad else output.detach().requires_grad_()
            taken.append(Passage(received, inputs.detach(), output, not args[0].requires_grad))
            return output.clone()  # an in-place activation may follow and must not touch ours

        return hook

    def _displaced(self, site: Site, module: nn.Module, inputs: Tensor, output: Tensor) -> Tensor:
        """Add the displacement's share to an output: (B or B · L, ...) to (B · L, ...)."""
        size = batches.size(self.x)
        assert self.displacement is not None
        if site.is_affine:
            positions = output_positions(module, output).unflatten(0, (size, -1))
            moved = positions + self._action(site)(inputs)
            return from_positions(module, moved.flatten(0, 1), output.shape[1:])
        weight, bias = site.layer.weight, site.layer.bias
        moved = inputs * _broadcast(module, self.displacement.dense[weight], inputs.ndim)
        if bias is not None:
            moved = moved + _broadcast(module, self.displacement.dense[bias], inputs.ndim)
        return (output.unflatten(0, (size, -1)) + moved).flatten(0, 1)

    def _action(self, site: Site) -> Action:
        assert self.displacement is not None
        if site in self.factored:
            return self.displacement.actions[site.layer]
        return MatrixAction(site.layer.join(self.displacement.dense, self.posterior.mean))

    def _replaces(self, site: Site) -> bool:
        """Whether a convolution runs with every row's own kernel, written out."""
        if self.displacement is None or site in self.factored:
            return False
        return isinstance(site.module, nn.Conv2d) and site.layer.weight in self.displacement.dense

    def _convolution(self, site: Site) -> Forward:
        size, layer, mean = batches.size(self.x), site.layer, self.posterior.mean
        assert isinstance(site.module, nn.Conv2d)
        assert self.displacement is not None
        module, moved = site.module, self.displacement.dense
        own = {name: (mean[name] + moved[name]).flatten(0, 1) for name in layer.names}

        bias = site.name + ".bias" if site.name else "bias"
        frozen = None if layer.bias else self.classifier.parameters.get(bias)

        def forward(x: Tensor) -> Tensor:
            rows = as_rows(x.unflatten(0, (size, -1)), len(own[layer.weight]))
            moved = convolve(module, rows, own[layer.weight], own.get(layer.bias or ""))
            return moved if frozen is None else moved + frozen[:, None, None]

        return forward


def _require_rows(site: Site, received: Tensor, rows: int, size: int) -> None:
    """Refuse a tensor that has not one entry per row, or before the rows part one per input.

    A model that shapes its tensors by the size of its input would mix the labels of an input.
    """
    if len(received) != rows and (len(received) != size or received.requires_grad):
        raise ValueError(f"layer {site.name!r} received {len(received)} entries for {rows} rows")


def site_inputs(site: Site, module: nn.Module, x: Tensor, size: int, factored: bool) -> Tensor:
    """Return what a site's gradients multiply, see `Passage`."""
    if not site.is_affine:
        return normalised(module, x).unflatten(0, (size, -1))
    if isinstance(module, nn.Conv2d) and not factored:
        return x.unflatten(0, (size, -1))
    inputs = input_positions(module, x).unflatten(0, (size, -1))
    return inputs if site.layer.bias is None else functional.pad(inputs, (0, 1), value=1.0)


def as_rows(inputs: Tensor, rows: int) -> Tensor:
    """Turn (B, L or 1, ...) into (B · L, ...)."""
    size = len(inputs)
    return inputs.expand(size, rows // size, *inputs.shape[2:]).flatten(0, 1)


def _broadcast(module: nn.Module, values: Tensor, ndim: int) -> Tensor:
    """Shape a scaling layer's parameter (B, L, *shape) to act on tensors (B, L, ...)."""
    missing = ndim - values.ndim
    where = 2 if isinstance(module, nn.LayerNorm) else values.ndim
    return values.reshape(*values.shape[:where], *[1] * missing, *values.shape[where:])
