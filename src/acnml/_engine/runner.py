"""One forward pass of all (input, label) rows, each at weights of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple, TypeVar, final

import torch
from torch import Tensor, nn
from torch.nn import functional

from acnml._algebra.actions import Action, Displacement, MatrixAction
from acnml._engine.convolution import convolve
from acnml._engine.layers import Site, from_positions, input_positions, normalised, output_positions
from acnml._engine.scaling import scale
from acnml._util import batches
from acnml._util.batches import Inputs
from acnml.classifier import Classifier, Forward, Hook
from acnml.posteriors import Posterior

Run = TypeVar("Run")


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
    at_mean: Mapping[Site, list[Passage]] = field(default_factory=dict)

    def run(self, sites: list[Site], labels: int) -> Tape:
        """Run with a graph, and keep what passes the sites."""

        def attempt(x: Inputs, each: int) -> Tape:
            taken: dict[Site, list[Passage]] = {site: [] for site in sites}
            rows = batches.size(x) * each
            hooks = {site.name: self._keeper(site, taken[site], rows) for site in sites}
            with torch.inference_mode(False), torch.enable_grad():
                logits = self._logits(sites, hooks, x, each)
            return Tape(logits, {site: passed for site, passed in taken.items() if passed})

        return self._parting(attempt, labels)

    def evaluate(self, sites: list[Site], labels: int) -> Tensor:
        """Run for the logits alone (B, L, K): nothing is kept."""

        def attempt(x: Inputs, each: int) -> Tensor:
            hooks = {site.name: self._mover(site, batches.size(x) * each) for site in sites}
            with torch.inference_mode(False), torch.no_grad():
                return self._logits(sites, hooks, x, each)

        return self._parting(attempt, labels)

    def _parting(self, attempt: Callable[[Inputs, int], Run], labels: int) -> Run:
        """Let the rows part at the first adapted layer or, where a model forbids it, at the input.

        A skip connection around the first adapted layer forbids it: it carries one row per input.
        A single input's row would be broadcast to all of its labels without an error.
        """
        try:
            if labels == 1 or batches.size(self.x) > 1:
                return attempt(self.x, labels)
        except ValueError:
            if labels == 1:
                raise
        index = torch.arange(batches.size(self.x)).repeat_interleave(labels)
        return attempt(batches.take(self.x, index), 1)

    def _logits(
        self, sites: list[Site], hooks: Mapping[str, Hook], x: Inputs, labels: int
    ) -> Tensor:
        forwards = {site.name: self._forward(site) for site in sites if self._replaces(site)}
        with self.classifier.hooked(hooks, forwards):
            logits = self.classifier.logits(x, self.posterior.mean, rows=labels)
        return logits.unflatten(0, (batches.size(self.x), -1))

    def _keeper(self, site: Site, taken: list[Passage], rows: int) -> Hook:
        def hook(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
            self._require_rows(site, args[0], rows, len(taken))
            inputs = self._inputs(site, module, args[0], len(taken))
            if not self._replaces(site):
                output = self._displaced(site, module, inputs, output)
            output = output if output.requires_grad else output.detach().requires_grad_()
            received, shared = args[0].detach(), not args[0].requires_grad
            taken.append(Passage(received, inputs.detach(), output, shared))
            return output.clone()  # an in-place activation may follow and must not touch ours

        return hook

    def _mover(self, site: Site, rows: int) -> Hook:
        passages = count()

        def hook(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
            passage = next(passages)
            self._require_rows(site, args[0], rows, passage)
            if self._replaces(site):
                return output
            inputs = self._inputs(site, module, args[0], passage)
            return self._displaced(site, module, inputs, output)

        return hook

    def _inputs(self, site: Site, module: nn.Module, x: Tensor, passage: int) -> Tensor:
        """Return what the gradients multiply, see `Passage`."""
        shared = self._shared(site, passage)
        if shared is not None and torch.equal(x.detach(), shared.received):
            return shared.inputs  # the same tensor, so that its terms merge
        inputs = site_inputs(site, module, x, batches.size(self.x), site in self.factored)
        return inputs.to(self.posterior.dtype)

    def _shared(self, site: Site, passage: int) -> Passage | None:
        """Return a passage at the mean if its inputs are the same whatever the weights."""
        found = self.at_mean.get(site, [])[passage : passage + 1]
        return found[0] if found and found[0].shared else None

    def _require_rows(self, site: Site, received: Tensor, rows: int, passage: int) -> None:
        """Refuse a tensor that has not one entry per row, or before the rows part one per input.

        A model that shapes its tensors by the size of its input would mix the labels of an input.
        """
        before_parting = len(received) == batches.size(self.x) and self._shared(site, passage)
        if len(received) != rows and not before_parting:
            raise ValueError(f"layer {site.name!r} received {len(received)} entries, not {rows}")

    def _displaced(self, site: Site, module: nn.Module, inputs: Tensor, output: Tensor) -> Tensor:
        """Add the displacement's share to an affine output: (B or B · L, ...) to (B · L, ...)."""
        if self.displacement is None:
            return output
        positions = output_positions(module, output).unflatten(0, (batches.size(self.x), -1))
        moved = (positions + self._action(site)(inputs)).to(output.dtype)
        return from_positions(module, moved.flatten(0, 1), output.shape[1:])

    def _action(self, site: Site) -> Action:
        assert self.displacement is not None
        if site in self.factored:
            return self.displacement.actions[site.layer]
        return MatrixAction(site.layer.join(self.displacement.dense, self.posterior.mean))

    def _replaces(self, site: Site) -> bool:
        """Whether a layer runs with every row's own weights, written out."""
        if self.displacement is None or isinstance(site.module, nn.Linear):
            return False
        return site.layer.weight in self.displacement.dense

    def _forward(self, site: Site) -> Forward:
        size, layer, mean = batches.size(self.x), site.layer, self.posterior.mean
        assert self.displacement is not None
        moved, dtype = self.displacement.dense, self.at_mean[site][0].received.dtype
        own = {name: (mean[name] + moved[name]).flatten(0, 1).to(dtype) for name in layer.names}
        weight, own_bias = own[layer.weight], own.get(layer.bias or "")

        def forward(module: nn.Module, x: Tensor) -> Tensor:
            rows = as_rows(x.unflatten(0, (size, -1)), len(weight))
            bias = own_bias
            if bias is None and isinstance(module.bias, Tensor):  # there is one that does not adapt
                bias = module.bias.expand(len(weight), *module.bias.shape)
            if isinstance(module, nn.Conv2d):
                return convolve(module, rows, weight, bias)
            return scale(module, rows, weight, bias)

        return forward


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
