"""One forward pass, recording what passes through the layers of interest.

Forward hooks on the private copy of the model's structure keep the input and output of every site.
Outputs become nodes of the autograd graph, so that gradients of the logits can be pulled back to
them; the weights are not part of the graph where their layers use them. A hook may also change an
output on the way: that is how rows get weights of their own (see `rows.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import reduce, wraps
from typing import NamedTuple, ParamSpec, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from acnml._algebra.dual import LayerInputs
from acnml._engine.layers import (
    Site,
    input_vectors,
    names_of,
    output_positions,
    scaling_gradients,
)
from acnml._util.batches import Inputs, size
from acnml._util.params import Params, add
from acnml.classifier import Classifier, Forward, Hook, naming_checkpoints, strays

P = ParamSpec("P")
T = TypeVar("T")

WAY_OUT = "leave it out of the posterior, or solve with acnml.solve.Reference"

# What a hook does to an output: (site, module, index of the passage, input, output) -> the new
# output and, where it needed them, the layer inputs as vectors.
Change: TypeAlias = Callable[
    [Site, nn.Module, int, Tensor, Tensor], tuple[Tensor, LayerInputs | None]
]


def exactly(function: Callable[P, T]) -> Callable[P, T]:
    """Leave autocast inside a function: half precision has too few digits for algebra with Σ."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
        with ExitStack() as left:
            for kind in kinds:
                left.enter_context(torch.autocast(kind, enabled=False))
            return function(*args, **kwargs)

    return run


class Passage(NamedTuple):
    """One passage of all rows through a site."""

    received: Tensor  # the module's input; normalised for a scaling layer
    output: Tensor  # a node of the autograd graph
    is_tracked: bool  # whether gradients reach it: not under torch.no_grad()
    is_shared: bool  # whether the input does not depend on covered weights
    # What the gradients multiply, (B, L or 1, positions, in [+ 1]), where that is needed.
    inputs: LayerInputs | None = None


Passages: TypeAlias = Mapping[Site, Sequence[Passage]]


class Tape(NamedTuple):
    """A forward pass: the logits, and what passed through the sites on the way."""

    logits: Tensor  # (rows, K) or (B, L, K)
    passages: Passages

    def by_input(self, n_inputs: int) -> Tape:
        """Return the tape with logits (B, L, K) instead of (B · L, K)."""
        with torch.inference_mode(False), torch.enable_grad():
            return self._replace(logits=self.logits.unflatten(0, (n_inputs, -1)))

    def pulled_back(self, cotangent: Tensor) -> Mapping[Site, list[Tensor]]:
        """Pull a cotangent of the logits back to the output of every passage."""
        outputs = [one.output for passed in self.passages.values() for one in passed]
        with naming_checkpoints():
            grads = torch.autograd.grad(
                self.logits,
                outputs,
                cotangent.to(self.logits.dtype),
                retain_graph=True,
                allow_unused=True,
                materialize_grads=True,
            )
        remaining = iter(grads)
        return {site: [next(remaining) for _ in passed] for site, passed in self.passages.items()}


def record(
    classifier: Classifier,
    sites: Sequence[Site],
    x: Inputs,
    tensors: Params | None = None,
    change: Change | None = None,
    forwards: Mapping[str, Forward] | None = None,
    rows: int = 1,
    sealed: bool = True,
) -> Tape:
    """Run a batch and record what passes through the sites.

    Parameters of the sites that reach the logits in another way are refused; see `strays`.

    Args:
        classifier: the model.
        sites: the layers of interest.
        x: a prepared batch.
        tensors: used in place of the model's own.
        change: changes the output of every passage, see `Change`.
        forwards: functions that replace the forward pass of modules, by name.
        rows: number of rows that `change` makes of every input.
        sealed: whether the sites' parameters are left out of the graph; otherwise they are part of
            it if `tensors` require gradients.
    """
    passed: dict[Site, list[Passage]] = {site: [] for site in sites}

    def keeping(site: Site) -> Hook:
        def hook(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
            received, inputs = args[0], None
            if change is None:
                require_batch_first(site, received, size(x))
            else:
                output, inputs = change(site, module, len(passed[site]), received, output)
            output = output if output.requires_grad else output.detach().requires_grad_()
            kept = site.multiplied(module, received.detach())
            tracked, shared = torch.is_grad_enabled(), not received.requires_grad
            passed[site].append(Passage(kept, output, tracked, shared, inputs))
            return output.clone()  # an in-place activation may follow and must not touch ours

        return hook

    hooks = {site.name: keeping(site) for site in sites}
    with torch.inference_mode(False), torch.enable_grad():
        if sealed:
            leaves = classifier.leaves(names_of(sites), tensors)
            view = classifier.hooked(hooks, forwards, hooks)
            logits = view.logits(x, {**(tensors or {}), **leaves}, rows)
            _require_no_strays(sites, logits, leaves)
        else:
            logits = classifier.hooked(hooks, forwards).logits(x, tensors, rows)
    return Tape(logits, {site: passages for site, passages in passed.items() if passages})


def _require_no_strays(sites: Sequence[Site], logits: Tensor, leaves: Params) -> None:
    for name in strays(logits, leaves):
        site = next(site for site in sites if name in site.layer.names)
        raise ValueError(
            f"the model uses {name!r} without calling layer {site.name!r}, so differently from a "
            f"plain {site.kind}; {WAY_OUT}"
        )


def run_changed(
    classifier: Classifier,
    sites: Sequence[Site],
    x: Inputs,
    change: Change,
    tensors: Params | None = None,
    forwards: Mapping[str, Forward] | None = None,
    rows: int = 1,
) -> Tensor:
    """Run a batch with changed outputs for its logits alone; arguments are those of `record`."""
    counts = dict.fromkeys(sites, 0)

    def changing(site: Site) -> Hook:
        def hook(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
            output, _ = change(site, module, counts[site], args[0], output)
            counts[site] += 1
            return output

        return hook

    hooks = {site.name: changing(site) for site in sites}
    with torch.inference_mode(False), torch.no_grad():
        return classifier.hooked(hooks, forwards).logits(x, tensors, rows)


def require_tracked(tape: Tape) -> None:
    """Refuse layers that gradients cannot reach: the data would seem to say nothing about them."""
    for site, passages in tape.passages.items():
        if not any(one.is_tracked for one in passages):
            raise ValueError(
                f"layer {site.name!r} runs under torch.no_grad() in the model's forward, so that "
                "no gradient reaches it; leave it out of `layers`"
            )
    if not tape.logits.requires_grad:
        raise ValueError("the model's logits use none of `layers`; name some that they use")


def require_batch_first(site: Site, received: Tensor, batch: int) -> None:
    """Raise an error if a layer's input does not have one row per input."""
    if len(received) != batch:
        raise ValueError(
            f"layer {site.name!r} received a tensor of shape {tuple(received.shape)} for a "
            f"batch of {batch}: its first dimension must be the batch"
        )


# Gradients of every example, which trust.py compares with the model's own -------------------------


def joined_inputs(site: Site, passages: Sequence[Passage]) -> Tensor:
    """Return an affine site's input vectors of all passages: (B, [groups,] positions, in [+ 1])."""
    return torch.cat([input_vectors(site, one.received) for one in passages], dim=-2)


def joined_deltas(site: Site, deltas: Sequence[Tensor]) -> Tensor:
    """Return the gradients at an affine site's outputs: (B, [groups,] positions, out)."""
    return torch.cat([output_positions(site.module, delta) for delta in deltas], dim=-2)


def summed_scaling_gradients(
    site: Site, passages: Sequence[Passage], deltas: Sequence[Tensor]
) -> Params:
    """Return every example's gradients of a scaling site, summed over passages: (B, *shape)."""
    pairs = zip(passages, deltas, strict=True)
    parts = (scaling_gradients(site, one.received[:, None], d[:, None]) for one, d in pairs)
    return {name: grad.squeeze(1) for name, grad in reduce(add, parts).items()}
