"""Running every (input, label) row of a batch at weights of its own, in shared matrix products.

The weights of a row are μ + Σv, and v is a sum of a few gradients. They are not written out where
that is expensive: every layer computes its output with μ for all rows at once, and a hook adds the
contribution of Σv, which the posterior computes from the factors of v (see `_algebra/dual.py`).

Tensors are (B, L, ...), inputs by labels, with L = 1 for what all labels share. Layers whose inputs
do not depend on covered weights (the first one, or all of a frozen trunk) run once per input: the
rows part at their output.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional

from acnml._algebra.dual import (
    Action,
    Affine,
    Displacement,
    Dual,
    LayerInputs,
    Outers,
    inner_product_pairs,
    matrix_action,
)
from acnml._engine.layers import (
    convolution_gradients,
    forward_per_row,
    from_positions,
    output_positions,
    scaling_gradients,
)
from acnml._engine.recorder import (
    AFFINE,
    SCALING,
    WAY_OUT,
    Passage,
    Site,
    Tape,
    exactly,
    find_sites,
    input_vectors,
    record,
    run_changed,
)
from acnml._util import batches, checks
from acnml._util.batches import Inputs
from acnml._util.memory import MOST, default_budget
from acnml._util.params import Params, add
from acnml.classifier import Classifier, Forward
from acnml.posteriors.base import Posterior

# Copies of a row's activations that autograd, the factors and intermediate results hold at once,
# and copies of a row's gradients. Measured as peaks of processes, see docs/reliability.md.
COPIES = 7
COPIES_OF_GRADIENTS = 10

# The same for rows that are run for their logits alone, one layer after the other and without a
# graph: the Jacobian and ΣJᵀ stay, next to what the widest layer needs.
COPIES_OF_DELTAS = 2
COPIES_OF_FACTORS = 5
COPIES_OF_WEIGHTS = 3
COPIES_OF_WIDEST = 3

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
        factored: the sites whose gradients are kept as outer products.
        dtype: the precision of the posterior.
    """

    classifier: Classifier
    posterior: Posterior
    sites: Sequence[Site]
    x: Inputs
    start: Tape
    factored: frozenset[Site]
    dtype: torch.dtype

    @staticmethod
    def at_mean(classifier: Classifier, posterior: Posterior, x: Inputs, n_gradients: int) -> Rows:
        """Run the batch at the mean; v will be a sum of `n_gradients` gradients."""
        sites = find_sites(classifier.model, posterior.mean, AFFINE + SCALING, WAY_OUT)
        tape = record(classifier, sites, x, posterior.mean)
        if not tape.passages or not tape.logits.requires_grad:
            classifier.require_used(x, posterior.mean)
        size, dtype = batches.size(x), next(iter(posterior.mean.values())).dtype
        factored, passages = set(), {}
        for site, passed in tape.passages.items():
            if _prefers_factors(posterior, site, passed, n_gradients):
                factored.add(site)
            if site in factored or isinstance(site.module, nn.Linear):
                passed = [_with_inputs(site, one, size, dtype) for one in passed]
            passages[site] = passed
        start = Tape(tape.logits, passages).by_input(size)
        return Rows(classifier, posterior, sites, x, start, frozenset(factored), dtype)

    # Running the rows ----------------------------------------------------------------------------

    def recorded(self, v: Dual, n_labels: int) -> Tape:
        """Run all rows at μ + Σv, to pull gradients back from there."""
        x, each = self._parted(n_labels)
        move = _Move(self, self.moved(v), batches.size(x) * each)
        mean = self.posterior.mean
        tape = record(self.classifier, self.sites, x, mean, move, move.forwards(), each)
        return tape.by_input(self.size)

    def logits(self, v: Dual, n_labels: int) -> Tensor:
        """Return the logits (B, L, K) of all rows at μ + Σv, and keep nothing else."""
        x, each = self._parted(n_labels)
        move = _Move(self, self.moved(v), batches.size(x) * each)
        mean = self.posterior.mean
        logits = run_changed(self.classifier, self.sites, x, move, mean, move.forwards(), each)
        return logits.unflatten(0, (self.size, -1))

    @property
    def size(self) -> int:
        """The number of inputs B."""
        return batches.size(self.x)

    def _parted(self, n_labels: int) -> tuple[Inputs, int]:
        """Return the inputs to run, and the rows that the first covered layer makes of each.

        The rows of an input part at the first covered layer, or already at the input where the
        model forbids that. A single input always parts at the input: its row could be broadcast
        to all labels without an error.
        """
        if n_labels == 1 or (self.size > 1 and self._can_part_inside()):
            return self.x, n_labels
        index = torch.arange(self.size, device="cpu").repeat_interleave(n_labels)
        return batches.take(self.x, index), 1

    def _can_part_inside(self) -> bool:
        """Whether rows may part at the first covered layer. Found out once for every model."""
        known = self.classifier.findings.parting
        key = frozenset(site.name for site in self.sites)
        if key not in known:
            two = batches.take(self.x, slice(0, 2))
            known[key] = rows_can_part(self.classifier, self.sites, two, self.posterior.mean)
        return known[key]

    # Gradients -----------------------------------------------------------------------------------

    @cached_property
    def jacobian(self) -> Dual:
        """J, the gradients of z_k - z_K at the mean, (B, K - 1, ...).

        Probabilities depend on differences of the logits alone. Without the last logit, there is
        one backward pass less.
        """
        return self._dual(self.start, self._deltas(self._differences()))

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
        deltas = {site: [self._by_input(one) for one in grads] for site, grads in pulled.items()}
        return self._dual(tape, deltas)

    def logit_gradient(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return e_y - softmax(z), the gradient of log p(y|x) by the logits, (B, L, K)."""
        logits = logits.detach().to(self.dtype)
        return functional.one_hot(labels, logits.shape[-1]).to(logits.dtype) - logits.softmax(-1)

    @exactly
    def _dual(self, tape: Tape, deltas: Mapping[Site, Sequence[Tensor]]) -> Dual:
        """Pair the gradients (B, L, ...) at the sites' outputs with the sites' inputs."""
        dtype = self.dtype
        dense: Params = {}
        outers: dict[Affine, Outers] = {}
        for site, passed in tape.passages.items():
            own = [delta.to(dtype) for delta in deltas[site]]
            if site in self.factored:
                outers[site.layer] = self._outers(site, passed, own)
            elif isinstance(site.module, nn.Linear):
                matrix = self._outers(site, passed, own).dense()
                dense.update(site.layer.split(matrix, self.posterior.mean))
            else:
                gradients = convolution_gradients if site.is_affine else scaling_gradients
                parts: list[Params] = [
                    gradients(
                        site.module, site.layer, self._by_input(one.received.to(dtype)), delta
                    )
                    for one, delta in zip(passed, own, strict=True)
                ]
                summed: Params = reduce(add, parts)
                dense.update(summed)
        return Dual(dense, outers)

    def _outers(self, site: Site, passed: Sequence[Passage], deltas: Sequence[Tensor]) -> Outers:
        """Pair the gradients at a site's outputs with its inputs; passages are joined as terms."""
        flat = [output_positions(site.module, delta.flatten(0, 1)) for delta in deltas]
        parts = [self._by_input(each) for each in flat]
        inputs = [one.inputs for one in passed if one.inputs is not None]
        if len(passed) == 1:
            return Outers(parts[0], inputs[0])
        labels = max(each.vectors.shape[1] for each in inputs)
        vectors = [v.expand(-1, labels, *v.shape[2:]) for v in (each.vectors for each in inputs)]
        return Outers(torch.cat(parts, dim=-2), LayerInputs.new(torch.cat(vectors, dim=-2)))

    def _by_input(self, rows: Tensor) -> Tensor:
        """Turn (B · L, ...) or (B, ...) into (B, L or 1, ...)."""
        return rows.unflatten(0, (self.size, -1))

    def ascended(self, v: Dual, labels: Tensor, steps: int, size: float) -> Dual:
        """Take steps of the paper's iteration, v ← (1 - ε)v + ε ∇log p_θ(y|x)."""
        for _ in range(steps):
            gradient = self.log_lik_gradient(self.recorded(v, len(labels)), labels)
            v = Dual.total([v.scaled(1 - size), gradient.scaled(size)])
        return v

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
        """Yield J for parts of the weights that Σ does not couple.

        Layer by layer, gradients that are written out need the memory of one layer only.
        """
        if self.posterior.couples_layers:
            yield self._dual(self.start, deltas)
            return
        for site, passed in self.start.passages.items():
            yield self._dual(Tape(self.start.logits, {site: passed}), {site: deltas.pop(site)})


@final
@dataclass(frozen=True, eq=False)
class _Move:
    """What hooks do to run all rows at μ + Σv: add the share of Σv to the outputs of every site.

    Convolutions and scaling layers whose Σv is written out run with every row's own weights instead
    (`forwards`).
    """

    rows: Rows
    displacement: Displacement
    expected: int  # entries that a layer receives behind the point where rows part

    @exactly
    def __call__(
        self, site: Site, module: nn.Module, index: int, received: Tensor, output: Tensor
    ) -> tuple[Tensor, LayerInputs | None]:
        """Change the output of a site's passage number `index`."""
        size, at_mean = self.rows.size, self._passage_at_mean(site, index)
        before_parting = len(received) == size and at_mean is not None
        if len(received) != self.expected and not before_parting:
            raise ValueError(
                f"layer {site.name!r} received {len(received)} entries, not {self.expected}; "
                "the model must keep the first dimension of its tensors for the batch"
            )
        if self._has_own_weights(site):
            return output, None
        inputs = None if at_mean is None else at_mean.inputs
        if at_mean is None or inputs is None or not torch.equal(received, at_mean.received):
            vectors = input_vectors(site, received).unflatten(0, (size, -1))
            inputs = LayerInputs.new(vectors.to(self.rows.dtype))
        positions = output_positions(module, output).unflatten(0, (size, -1))
        moved = (positions + self._action(site)(inputs.vectors)).to(output.dtype)
        detached = LayerInputs(inputs.vectors.detach(), inputs.id)
        return from_positions(module, moved.flatten(0, 1), output.shape[1:]), detached

    def forwards(self) -> Mapping[str, Forward]:
        """Return the forward functions of all sites that run with every row's own weights."""
        own = (site for site in self.rows.sites if self._has_own_weights(site))
        return {site.name: self._forward(site) for site in own}

    def _passage_at_mean(self, site: Site, index: int) -> Passage | None:
        """Return the passage at the mean if its input is the same at all weights."""
        passed = self.rows.start.passages.get(site, [])
        return passed[index] if index < len(passed) and passed[index].is_shared else None

    def _action(self, site: Site) -> Action:
        if site in self.rows.factored:
            return self.displacement.actions[site.layer]
        return matrix_action(site.layer.join(self.displacement.dense, self.rows.posterior.mean))

    def _has_own_weights(self, site: Site) -> bool:
        written_out = site.layer.weight in self.displacement.dense
        return written_out and not isinstance(site.module, nn.Linear)

    def _forward(self, site: Site) -> Forward:
        size, layer, mean = self.rows.size, site.layer, self.rows.posterior.mean
        moved, dtype = self.displacement.dense, self.rows.start.passages[site][0].received.dtype
        own = {name: (mean[name] + moved[name]).flatten(0, 1).to(dtype) for name in layer.names}
        weight, bias = own[layer.weight], own.get(layer.bias or "")

        def forward(module: nn.Module, x: Tensor) -> Tensor:
            by_input = x.unflatten(0, (size, -1))
            labels = len(weight) // size
            rows = by_input.expand(-1, labels, *by_input.shape[2:]).flatten(0, 1)
            return forward_per_row(module, rows, weight, bias)

        return forward


def rows_can_part(
    classifier: Classifier, sites: Sequence[Site], x: Inputs, tensors: Params
) -> bool:
    """Whether rows may part at the first covered layer, tried out on two inputs.

    A skip connection around that layer forbids it, because it carries one row per input. So does a
    model that shapes its tensors by the size of its input. The probe runs two rows per input, whose
    outputs at every site are scaled differently, and compares them with the same inputs repeated.
    """
    size, scales = batches.size(x), torch.tensor([1.0, 1.25], device="cpu")

    def parted(
        site: Site, module: nn.Module, index: int, received: Tensor, output: Tensor
    ) -> tuple[Tensor, None]:
        by_input = output.unflatten(0, (size, -1))
        factors = scales.to(output).view(1, 2, *[1] * (output.ndim - 1))
        return (by_input * factors).flatten(0, 1), None

    repeated = batches.take(x, torch.arange(size, device="cpu").repeat_interleave(2))
    expected = run_changed(classifier, sites, repeated, parted, tensors)
    try:
        actual = run_changed(classifier, sites, x, parted, tensors, rows=2)
    except ValueError:  # shapes do not fit: the probe has its answer
        return False
    tolerance = torch.finfo(actual.dtype).eps ** 0.5 * float(expected.abs().max())
    return bool(((actual - expected).abs() <= tolerance).all())


def _prefers_factors(
    posterior: Posterior, site: Site, passed: Sequence[Passage], n_gradients: int
) -> bool:
    """Whether a site's share of v is better kept in factors than written out for every row."""
    if not site.is_affine or site.layer.groups > 1:
        return False
    positions = sum(output_positions(site.module, one.output).shape[-2] for one in passed)
    all_shared = all(one.is_shared for one in passed)
    terms = positions if all_shared else positions * max(n_gradients, 1)
    return posterior.prefers_factors(site.layer, terms, positions)


def _with_inputs(site: Site, one: Passage, size: int, dtype: torch.dtype) -> Passage:
    vectors = input_vectors(site, one.received).unflatten(0, (size, -1))
    return one._replace(inputs=LayerInputs.new(vectors.to(dtype)))


@exactly
def inner_product(dual: Dual, moved: Displacement) -> Tensor:
    """Return vᵀΣw of every row, (B, L), where `moved` is Σw."""
    pairs = inner_product_pairs(dual, moved)
    return torch.stack([(a * b).flatten(2).sum(-1) for a, b in pairs]).sum(0)


# As many rows at a time as fit into memory --------------------------------------------------------


def row_chunks(
    classifier: Classifier,
    posterior: Posterior,
    x: Inputs,
    n_gradients: int,
    memory: int | None,
    recorded: bool = True,
) -> Iterator[tuple[Rows, int]]:
    """Yield chunks of inputs, run at the mean, each with the number of labels to take at a time.

    Rows that will be `recorded` keep a graph and take more memory.
    """
    with classifier.naming_batch(x):
        first = Rows.at_mean(classifier, posterior, batches.take(x, slice(0, 1)), n_gradients)
    logits = first.start.logits
    row_bytes = first.dtype.itemsize * _numbers_per_row(first, n_gradients, recorded)
    allowed = memory or default_budget(logits.device, MOST if recorded else MOST_UNRECORDED)
    affordable = allowed // row_bytes
    n_labels, most = max(1, affordable), max(1, affordable // logits.shape[-1])
    # Chunks of equal size: a small last chunk takes longer per input.
    n_chunks = max(1, math.ceil(batches.size(x) / most))
    n_inputs = max(1, math.ceil(batches.size(x) / n_chunks))
    for index, chunk in enumerate(batches.chunks(x, n_inputs)):
        rows = first  # of a single input, which need not run again
        if batches.size(x) > 1:
            rows = Rows.at_mean(classifier, posterior, chunk, n_gradients)
        remedy = "check the model and these inputs"
        with checks.counting_from(index * n_inputs, batches.size(x)):
            checks.require_finite(rows.start.logits[:, 0], "the model's logits are", remedy)
        yield rows, n_labels


def _numbers_per_row(rows: Rows, n_gradients: int, recorded: bool) -> int:
    """Estimate how many numbers one row keeps in memory."""
    classes = rows.start.logits.shape[-1]
    total, widest = COPIES * classes, 1  # a share of the matrices of its input
    for site, passed in rows.start.passages.items():
        inputs = [one.received if one.inputs is None else one.inputs.vectors for one in passed]
        outs = sum(one.output.numel() for one in passed)
        both = outs + sum(each.numel() for each in inputs)
        names = () if site in rows.factored else site.layer.names
        written_out = sum(rows.posterior.mean[name].numel() for name in names)
        if recorded:
            total += COPIES * both + (COPIES + n_gradients) * written_out
            total += 0 if written_out else COPIES_OF_GRADIENTS * n_gradients * both
        else:
            total += COPIES_OF_DELTAS * (outs + both // classes) + COPIES_OF_WEIGHTS * written_out
            total += 0 if written_out else COPIES_OF_FACTORS * outs
            widest = max(widest, COPIES_OF_WIDEST * both)
    return total + widest
