"""Running every (input, label) row of a batch at weights of its own, in shared matrix products.

The weights of a row are μ + Σv, and v is a sum of a few gradients. They are not written out: every
layer computes its output with μ for all rows at once, and a hook adds the contribution of Σv, which
the posterior computes from v (see `_algebra/dual.py`).

Tensors are (B, L, ...), inputs by labels, with L = 1 for what all labels share.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional

from acnml._algebra import dual
from acnml._algebra.dual import (
    Affine,
    Displacement,
    Dual,
    Outers,
    matrix_action,
    pairs_are_cheap,
)
from acnml._engine.recorder import (
    AFFINE,
    SCALING,
    WAY_OUT,
    Passage,
    Site,
    Tape,
    applied,
    exactly,
    find_sites,
    folded_norms,
    from_positions,
    input_vectors,
    joined_deltas,
    joined_inputs,
    output_positions,
    record,
    scaling_gradients,
)
from acnml._util import batches, checks
from acnml._util.batches import Inputs
from acnml._util.memory import MOST, default_budget
from acnml._util.params import Params
from acnml.classifier import Classifier, Hook
from acnml.posteriors.base import Posterior

# Copies of a row's activations that autograd, the factors and intermediate results hold at once,
# and copies of a row's gradients. Measured as peaks of processes, see docs/reliability.md.
COPIES = 7
COPIES_OF_GRADIENTS = 10

# The same for rows that are run for their logits alone, one layer after the other and without a
# graph: the Jacobian and ΣJᵀ stay, next to what the widest layer needs.
COPIES_OF_DELTAS = 2
COPIES_OF_FACTORS = 5
COPIES_OF_WEIGHTS = 5
COPIES_OF_WIDEST = 3

# Larger kernels of convolutions are faster as matrix products with unfolded patches.
LARGEST_GROUPED = 2**18

# The default maximum for their chunks, in bytes. In larger chunks, page faults of newly requested
# memory cost more than the larger batch gains.
MOST_UNRECORDED = MOST // 2


@final
@dataclass(frozen=True, eq=False)
class Rows:
    """A batch of inputs that can be run at different weights for every label.

    Attributes:
        classifier: the model.
        posterior: μ and Σ.
        sites: the modules that own the covered parameters.
        x: the prepared inputs.
        start: the pass at the mean, one row per input.
        n_gradients: the number of gradients that v is a sum of; 0 if rows will not be run.
        dtype: the precision of the posterior.
    """

    classifier: Classifier
    posterior: Posterior
    sites: Sequence[Site]
    x: Inputs
    start: Tape
    n_gradients: int
    dtype: torch.dtype

    @staticmethod
    def at_mean(classifier: Classifier, posterior: Posterior, x: Inputs, n_gradients: int) -> Rows:
        """Run the batch at the mean."""
        sites = find_sites(classifier.model, posterior.mean, AFFINE + SCALING, WAY_OUT)
        tape = record(classifier, sites, x, posterior.mean)
        if not tape.passages or not tape.logits.requires_grad:
            classifier.require_used(x, posterior.mean)
        dtype = next(iter(posterior.mean.values())).dtype
        passages = {
            site: [_with_inputs(site, one, dtype) for one in passed]
            for site, passed in tape.passages.items()
        }
        start = Tape(tape.logits, passages).by_input(batches.size(x))
        return Rows(classifier, posterior, sites, x, start, n_gradients, dtype)

    @property
    def size(self) -> int:
        """The number of inputs B."""
        return batches.size(self.x)

    @cached_property
    def factored(self) -> frozenset[Site]:
        """The sites whose share of v is kept in factors."""
        return frozenset(filter(self._prefers_factors, self.start.passages))

    def _prefers_factors(self, site: Site) -> bool:
        """Whether a share of v in factors is cheaper than one that is written out for every row."""
        if not _has_factors(site):
            return False
        return self.posterior.prefers_factors(site.layer, *self.pairs(site))

    def pairs(self, site: Site) -> tuple[int, int]:
        """Return the numbers of terms in v and of positions of an affine site."""
        passed = self.start.passages[site]
        positions = sum(output_positions(site.module, one.output).shape[-2] for one in passed)
        all_shared = all(one.is_shared for one in passed)
        return positions if all_shared else positions * max(self.n_gradients, 1), positions

    # Running the rows ----------------------------------------------------------------------------

    def recorded(self, v: Dual, n_labels: int) -> Tape:
        """Run all rows at μ + Σv, to pull gradients back from there."""
        move = _Move(self, self.moved(v))
        x, mean = self._repeated(n_labels), self.posterior.mean
        return record(self.classifier, self.sites, x, mean, move).by_input(self.size)

    def logits(self, v: Dual, n_labels: int) -> Tensor:
        """Return the logits (B, L, K) of all rows at μ + Σv, and keep nothing else."""
        move = _Move(self, self.moved(v))
        hooks = {site.name: move.hook(site) for site in self.sites}
        view = self.classifier.hooked(hooks, folded_norms(self.classifier.model))
        with torch.inference_mode(False), torch.no_grad():
            logits = view.logits(self._repeated(n_labels), self.posterior.mean)
        return logits.unflatten(0, (self.size, -1))

    def _repeated(self, n_labels: int) -> Inputs:
        """Return every input once for each label."""
        if n_labels == 1:
            return self.x
        index = torch.arange(self.size, device="cpu").repeat_interleave(n_labels)
        return batches.take(self.x, index)

    # Gradients -----------------------------------------------------------------------------------

    @cached_property
    def jacobian(self) -> Dual:
        """J, the gradients of z_k - z_K at the mean, (B, K - 1, ...).

        Probabilities depend on differences of the logits alone. Without the last logit, there is
        one backward pass less.
        """
        return self._dual(self.start, self._deltas(self._differences()), self.factored)

    @exactly
    def pulled(self, weights: Tensor) -> Dual:
        """Return v = Jᵀw for weights (B, L, K) of the logits that sum to zero."""
        return self.jacobian.combined(weights[..., :-1].to(self.dtype))

    def _differences(self) -> Tensor:
        """Return the combinations z_k - z_K of the logits, (K - 1, K)."""
        logits = self.start.logits
        eye = torch.eye(logits.shape[-1], dtype=logits.dtype, device=logits.device)
        return eye[:-1] - eye[-1]

    def _deltas(self, combinations: Tensor) -> dict[Site, list[Tensor]]:
        """Pull combinations (C, K) of the logits at the mean back to the sites: (B, C, ...)."""
        cotangents = combinations[:, None, None].expand(-1, *self.start.logits.shape)
        pulled = self.start.each_pulled_back(cotangents)
        return {site: [each.transpose(0, 1) for each in grads] for site, grads in pulled.items()}

    @exactly
    def moved(self, v: Dual) -> Displacement:
        """Return Σv."""
        return self.posterior.displacement(v)

    def log_lik_gradient(self, tape: Tape, labels: Tensor) -> Dual:
        """Return ∇ log p_θ(y|x) of every row at the weights of a tape."""
        pulled = tape.pulled_back(self.logit_gradient(tape.logits, labels))
        deltas = {site: [self.by_input(one) for one in grads] for site, grads in pulled.items()}
        return self._dual(tape, deltas, self.factored)

    def logit_gradient(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return e_y - softmax(z), the gradient of log p(y|x) by the logits, (B, L, K)."""
        logits = logits.detach().to(self.dtype)
        return functional.one_hot(labels, logits.shape[-1]).to(logits.dtype) - logits.softmax(-1)

    @exactly
    def _dual(
        self, tape: Tape, deltas: Mapping[Site, Sequence[Tensor]], factored: frozenset[Site]
    ) -> Dual:
        """Pair the gradients (B, L, ...) at the sites' outputs with the sites' inputs."""
        dense: Params = {}
        outers: dict[Affine, Outers] = {}
        for site, passed in tape.passages.items():
            own = [delta.to(self.dtype) for delta in deltas[site]]
            if not site.is_affine:
                received = [self.by_input(one.received.to(self.dtype)) for one in passed]
                dense.update(scaling_gradients(site, received, own))
                continue
            joined = joined_deltas(site, [delta.flatten(0, 1) for delta in own])
            sums = Outers(self.by_input(joined), self._inputs(site, passed))
            if site in factored:
                outers[site.layer] = sums
            else:
                dense.update(site.layer.split(sums.dense(), self.posterior.mean))
        return Dual(dense, outers)

    def _inputs(self, site: Site, passed: Sequence[Passage]) -> Tensor:
        """Return an affine site's input vectors of all passages, (B, L or 1, ...)."""
        if len(passed) == 1 and passed[0].inputs is not None:
            return passed[0].inputs
        return self.by_input(joined_inputs(site, passed).to(self.dtype))

    def by_input(self, rows: Tensor) -> Tensor:
        """Turn (B · L, ...) or (B, ...) into (B, L or 1, ...)."""
        return rows.unflatten(0, (self.size, -1))

    # Evaluating ----------------------------------------------------------------------------------

    def log_lik(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return log p_θ(y|x) of every row, (B, L), from logits (B, L or 1, K)."""
        wide = torch.promote_types(logits.dtype, torch.float32)
        log_probs = torch.log_softmax(logits.detach().to(wide), dim=-1)
        index = labels.expand(len(log_probs), -1).unsqueeze(-1)
        return log_probs.expand(-1, len(labels), -1).gather(-1, index).squeeze(-1)

    def residual(self, gradient: Dual) -> Tensor:
        """Return √(gᵀΣg) of every row for the gradient g of the objective, (B, L)."""
        squared = inner_product(gradient, self.moved(gradient))
        return squared.clamp(min=0).sqrt().to(torch.promote_types(squared.dtype, torch.float32))

    @exactly
    def kernel(self, differences: bool = True) -> Tensor:
        """Return the covariance V = JΣJᵀ of the logits at the mean, or of z - z_K.

        The latter has zeros in its last row and column. It can replace the covariance of z wherever
        the weights of the logits sum to zero.
        """
        logits = self.start.logits
        each = torch.eye(logits.shape[-1], dtype=logits.dtype, device=logits.device)
        deltas = self._deltas(self._differences() if differences else each)
        whole = torch.stack([*map(self.posterior.covariance, self._parts(deltas))]).sum(0)
        return functional.pad(whole, (0, 1, 0, 1)) if differences else whole

    def _parts(self, deltas: dict[Site, list[Tensor]]) -> Iterator[Dual]:
        """Yield J in factors, for parts of the weights that Σ does not couple.

        Layer by layer, the memory is that of one layer.
        """
        factored = frozenset(filter(_has_factors, self.start.passages))
        if self.posterior.couples_layers:
            yield self._dual(self.start, deltas, factored)
            return
        for site, passed in self.start.passages.items():
            one = Tape(self.start.logits, {site: passed})
            yield self._dual(one, {site: deltas.pop(site)}, factored)


@final
@dataclass(frozen=True, eq=False)
class _Move:
    """Adds the share of Σv to the outputs of every site."""

    rows: Rows
    displacement: Displacement

    def hook(self, site: Site) -> Hook:
        """Return a hook that only changes outputs."""
        counts = Counter[Site]()

        def changed(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
            counts[site] += 1
            return self(site, module, counts[site] - 1, args[0], output)[0]

        return changed

    @exactly
    def __call__(
        self, site: Site, module: nn.Module, index: int, received: Tensor, output: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Change the output of a site's passage number `index`."""
        dense, layer, dtype = self.displacement.dense, site.layer, self.rows.dtype
        if site in self.rows.factored:
            action = self.displacement.actions[layer]
        elif _is_applied(site):
            bias = None if layer.bias is None else dense[layer.bias].flatten(0, 1)
            weight = dense[layer.weight].flatten(0, 1)
            moved = applied(module, received, weight, bias)
            return (output + moved).to(output.dtype), None
        else:
            action = matrix_action(layer.join(dense, self.rows.posterior.mean))
        inputs = self._shared_inputs(site, index, received)
        if inputs is None:
            inputs = self.rows.by_input(input_vectors(site, received).to(dtype))
        moved = from_positions(module, action(inputs).flatten(0, 1), output.shape[1:])
        return (output + moved).to(
            output.dtype
        ), inputs.detach() if inputs.requires_grad else inputs

    def _shared_inputs(self, site: Site, index: int, received: Tensor) -> Tensor | None:
        """Return the inputs at the mean, if all rows of an input still receive them."""
        passed = self.rows.start.passages.get(site, [])
        if index >= len(passed) or passed[index].inputs is None:
            return None
        same = passed[index].received.unsqueeze(1) == self.rows.by_input(received)
        return passed[index].inputs if bool(same.all()) else None


def _is_applied(site: Site) -> bool:
    """Whether a written-out Σv is applied as the layer itself applies its weight."""
    module = site.module
    small = isinstance(module, nn.Conv2d) and module.weight.numel() <= LARGEST_GROUPED
    return small or not site.is_affine


def _has_factors(site: Site) -> bool:
    return site.is_affine and site.layer.groups == 1


def _with_inputs(site: Site, one: Passage, dtype: torch.dtype) -> Passage:
    """Keep the vectors of inputs that all rows share."""
    if not (_has_factors(site) and one.is_shared):
        return one
    return one._replace(inputs=input_vectors(site, one.received).to(dtype).unsqueeze(1))


@exactly
def inner_product(v: Dual, moved: Displacement) -> Tensor:
    """Return vᵀΣw of every row, (B, L), where `moved` is Σw."""
    return dual.inner_product(v, moved)


# As many rows at a time as fit into memory --------------------------------------------------------


def row_chunks(
    classifier: Classifier,
    posterior: Posterior,
    x: Inputs,
    n_gradients: int,
    memory: int | None,
    recorded: bool = True,
) -> Iterator[tuple[Rows, tuple[Tensor, ...]]]:
    """Yield chunks of inputs, run at the mean, each with the labels to take at a time.

    Rows that will be `recorded` keep a graph and take more memory.
    """
    with classifier.naming_batch(x):
        first = Rows.at_mean(classifier, posterior, batches.take(x, slice(0, 1)), n_gradients)
    logits, total = first.start.logits, batches.size(x)
    row_bytes = first.dtype.itemsize * _numbers_per_row(first, recorded)
    allowed = memory or default_budget(logits.device, MOST if recorded else MOST_UNRECORDED)
    affordable = allowed // row_bytes
    n_labels, most = max(1, affordable), max(1, affordable // logits.shape[-1])
    labels = torch.arange(logits.shape[-1], device=logits.device).split(int(n_labels))
    # Chunks of equal size: a small last chunk takes longer per input.
    n_inputs = math.ceil(total / max(1, math.ceil(total / most)))
    for start, chunk in zip(range(0, total, n_inputs), batches.chunks(x, n_inputs), strict=True):
        rows = first  # of a single input, which need not run again
        if total > 1:
            rows = Rows.at_mean(classifier, posterior, chunk, n_gradients)
        remedy = "check the model and these inputs"
        with checks.counting_from(start, total):
            checks.require_finite(rows.start.logits[:, 0], "the model's logits are", remedy)
        yield rows, labels


def _numbers_per_row(rows: Rows, recorded: bool) -> int:
    """Estimate how many numbers one row keeps in memory."""
    classes = rows.start.logits.shape[-1]
    total, widest = COPIES * classes, 1  # a share of the matrices of its input
    for site, passed in rows.start.passages.items():
        outs = sum(one.output.numel() for one in passed)
        both = outs + sum(
            input_vectors(site, one.received).numel() if site.is_affine else one.received.numel()
            for one in passed
        )
        by_pairs = site in rows.factored and pairs_are_cheap(*rows.pairs(site))
        names = () if by_pairs else site.layer.names
        written_out = sum(rows.posterior.mean[name].numel() for name in names)
        if recorded:
            total += COPIES * both + (COPIES + rows.n_gradients) * written_out
            total += 0 if written_out else COPIES_OF_GRADIENTS * rows.n_gradients * both
        else:
            total += COPIES_OF_DELTAS * (outs + both // classes)
            widest = max(widest, COPIES_OF_WIDEST * both)
            if rows.n_gradients:  # rows will be run
                total += COPIES_OF_WEIGHTS * written_out or COPIES_OF_FACTORS * outs
    return total + widest
