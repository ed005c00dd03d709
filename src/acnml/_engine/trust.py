"""What the library takes for granted of a model, checked on a few inputs when it is first seen.

1. The rows of a batch do not touch each other. The logits of an input, and what every covered layer
   receives for it, must be the same alone and in a batch, at whichever place.
2. A covered layer uses its parameters as its kind of layer does: gradients that are assembled from
   layer inputs and output gradients must equal autograd's.
3. The outputs are logits, not probabilities.

`Findings.is_due` decides which batches are checked. One thing costs nothing and is checked on every
batch, in `recorder.py`: no covered parameter reaches the logits except through a call of its layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from acnml._algebra.dual import LayerInputs, Outers
from acnml._engine.gradients import joined_deltas, joined_inputs, summed_scaling_gradients
from acnml._engine.layers import Site, names_of
from acnml._engine.recorder import WAY_OUT, Passage, Tape, record, require_batch_first
from acnml._util import batches
from acnml._util.batches import Inputs
from acnml._util.params import Params
from acnml.classifier import Classifier, Hook, naming_checkpoints

CONFIRMED = 64  # outputs that must all be probabilities before a model is refused

# Largest difference between runs of the same row, relative to the row's largest entry, with which a
# suspicion is dropped: in double precision, and for a model that cannot run in it.
CONFIRMING, UNCONFIRMED = 1e-5, 0.05


def require_apart(classifier: Classifier, x: Inputs) -> None:
    """Refuse a model whose logits for an input depend on the rest of its batch.

    Models that return probabilities instead of logits are refused too. A batch whose rows are all
    the same proves nothing, and neither does one with logits that are not finite.
    """
    sample = _Sample.of(x)
    if sample is None:
        return
    with classifier.naming_batch(x):
        run = _run(classifier, [], batches.take(x, sample.rows))
        _require_apart(classifier, [], x, sample, run)


def require_understood(classifier: Classifier, sites: Sequence[Site], x: Inputs) -> Tape:
    """Refuse a model whose rows touch each other, or that uses covered parameters in its own way.

    A subclass of a layer may compute something else, a hook may change its output, and a parent may
    use its weight without calling it. For every covered parameter, the gradient assembled from the
    tape must equal autograd's, up to rounding at the scale of the terms that are summed in it.

    Returns:
        The tape of a few inputs, with the covered parameters as leaves of the graph.
    """
    sample = _Sample.of(x)
    some = batches.take(x, slice(0, 1) if sample is None else sample.rows)
    leaves = classifier.leaves(names_of(sites))
    with classifier.naming_batch(x):
        tape = record(classifier, sites, some, leaves, sealed=False)
    if not torch.isfinite(tape.logits).all():
        return tape  # the caller names the rows
    _require_equal_gradients(classifier, sites, some, tape, leaves)
    if sample is not None:
        passed = {s: [one.received for one in passages] for s, passages in tape.passages.items()}
        _require_apart(classifier, sites, x, sample, _Run(tape.logits.detach(), passed))
    return tape


# Rows that do not touch each other ---------------------------------------------------------------


class _Sample(NamedTuple):
    """Rows of a batch in the order low, another one, high, low.

    `low` and `high` are the rows with the smallest and the largest sum, so that a branch like
    `if x.sum() > 0` is taken by one of them alone and not by the other. A repeated row reveals a
    model that sorts, flips or rolls its batch: whatever the order, some of the four rows move.
    """

    rows: Tensor  # indices into the batch

    @staticmethod
    def of(x: Inputs) -> _Sample | None:
        """Choose rows of a batch, or return None if they are all the same."""
        if batches.size(x) < 2:
            return None
        totals = torch.stack([_row_sums(t) for t in batches.named_tensors(x).values()]).sum(0)
        low, high = int(totals.argmin()), int(totals.argmax())
        if low == high or bool(totals[low] == totals[high]):
            low, high = 0, _row_unlike_the_first(x)
        if low == high:
            return None
        others = [row for row in range(min(3, batches.size(x))) if row not in (low, high)]
        return _Sample(torch.tensor([low, *(others or [low])[:1], high, low]))

    def alone(self) -> Iterator[tuple[int, list[int]]]:
        """Yield the places in the sample of a row to run alone, and of all that must equal it."""
        yield 0, [0, 3]
        yield 2, [2]


class _Run(NamedTuple):
    """The logits of some rows, and what every passage through the covered layers received."""

    logits: Tensor
    received: Mapping[Site, Sequence[Tensor]]


def _row_sums(tensor: Tensor) -> Tensor:
    """Sum every row; a sum that is not finite, as of an attention mask, counts as zero."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    rows = real.flatten(1) if real.ndim > 1 else real[:, None]
    return torch.nan_to_num(rows.sum(1, dtype=torch.float32), 0.0, 0.0, 0.0)


def _row_unlike_the_first(x: Inputs) -> int:
    tensors = batches.named_tensors(x).values()
    differs = torch.stack([(t != t[:1]).reshape(len(t), -1).any(1) for t in tensors]).any(0)
    return int(differs.long().argmax())  # 0 if there is none


def _run(classifier: Classifier, sites: Sequence[Site], x: Inputs) -> _Run:
    received: dict[Site, list[Tensor]] = {}

    def keeping(site: Site) -> Hook:
        def hook(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
            len(args[0])  # a nested tensor has none: here, the error says what to do
            received.setdefault(site, []).append(site.multiplied(module, args[0].detach()))
            return output

        return hook

    with torch.inference_mode(False), torch.no_grad():
        logits = classifier.hooked({site.name: keeping(site) for site in sites}).logits(x)
    return _Run(logits, received)


def _require_apart(
    classifier: Classifier, sites: Sequence[Site], x: Inputs, sample: _Sample, run: _Run
) -> None:
    """Compare a run of the sample with runs of its rows alone."""
    if not torch.isfinite(run.logits).all():
        return
    _require_no_probabilities(classifier, x, run.logits)
    some = batches.take(x, sample.rows)
    if _touch(classifier, sites, some, sample, run):
        _require_repeatable(classifier, some)
        _require_apart_but_for_rounding(classifier, sites, some, sample, run)
    classifier.findings.apart.add(frozenset(names_of(sites)))


def _require_apart_but_for_rounding(
    classifier: Classifier, sites: Sequence[Site], some: Inputs, sample: _Sample, run: _Run
) -> None:
    """Confirm in double precision that rows touch each other, and say where.

    Rounding differs between sizes of batches, and it may be large where terms cancel or a gate
    flips. In double precision, only what truly depends on the batch is left.
    """
    try:
        wide = Classifier(classifier.copy_module().double(), classifier._get_logits)
        wide_some = wide.prepare(some)
        with torch.autocast(classifier.device.type, enabled=False):
            touch = _touch(wide, sites, wide_some, sample, _run(wide, sites, wide_some), CONFIRMING)
            where = _where_rows_touch(wide, wide_some, sample) if touch else ""
    except (RuntimeError, TypeError, ValueError):  # the model runs in its own precision only
        touch = _touch(classifier, sites, some, sample, run, UNCONFIRMED)
        where = _where_rows_touch(classifier, some, sample) if touch else ""
    if touch:
        raise ValueError(
            f"the rows of a batch touch each other {where}: for the same input it gives one thing "
            "alone and another in a batch. Every input must be handled on its own; compute what "
            "depends on several inputs (means, orders, branches) from the training data, once"
        )


def _touch(
    classifier: Classifier,
    sites: Sequence[Site],
    some: Inputs,
    sample: _Sample,
    run: _Run,
    tolerance: float | None = None,
) -> bool:
    """Whether rows of the sample give something else alone."""
    for place, equals in sample.alone():
        try:
            alone = _run(classifier, sites, batches.take(some, slice(place, place + 1)))
        except ValueError:  # e.g. a squeeze drops the batch dimension of a single input: run two
            alone = _run(classifier, sites, batches.take(some, torch.tensor([place, place])))
        pairs = [(run.logits, alone.logits)]
        for site, tensors in alone.received.items():
            for own in tensors:
                require_batch_first(site, own, len(alone.logits))
            if len(tensors) == len(run.received.get(site, [])):
                pairs.extend(zip(run.received[site], tensors, strict=True))
        # A model may pad to the longest input of its batch: then only the logits are compared.
        alike = ((whole[equals], own) for whole, own in pairs if whole.shape[1:] == own.shape[1:])
        if not all(_equal_rows(whole, own[:1].expand_as(whole), tolerance) for whole, own in alike):
            return True
    return False


def _equal_rows(left: Tensor, right: Tensor, tolerance: float | None = None) -> bool:
    """Whether rows are equal up to rounding at the scale of each; NaN equals only NaN."""
    if left.numel() == 0 or torch.equal(left, right):
        return True
    if tolerance is None:
        tolerance = torch.finfo(left.dtype).eps ** 0.5 if left.is_floating_point() else 0.0
    left, right = (t.to(torch.promote_types(t.dtype, torch.float32)) for t in (left, right))
    same = (left == right) | (left.isnan() & right.isnan())
    differences = (left - right).abs().masked_fill(same, 0.0).flatten(1).amax(1)
    scales = torch.maximum(left.abs(), right.abs()).nan_to_num(0.0).flatten(1).amax(1)
    return bool((differences <= tolerance * scales).all())


def _where_rows_touch(classifier: Classifier, some: Inputs, sample: _Sample) -> str:
    """Name the first module that receives or returns something else in another batch."""

    def outputs(x: Inputs) -> list[tuple[str, Any, Any]]:
        passed: list[tuple[str, Any, Any]] = []

        def keeping(name: str) -> Hook:
            def hook(_: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
                # Recurrent layers and attention return tuples.
                first = output[0] if isinstance(output, tuple) and output else output
                passed.append((name, args[0] if args else None, first))
                return output

            return hook

        modules = dict(classifier.model.named_modules())
        with torch.inference_mode(False), torch.no_grad():
            classifier.hooked({name: keeping(name) for name in modules}).logits(x)
        return passed

    def differ(whole: Any, own: Any, equals: list[int]) -> bool:
        if not isinstance(whole, Tensor) or not isinstance(own, Tensor) or whole.ndim == 0:
            return False
        fits = len(whole) == len(sample.rows) and (1, *whole.shape[1:]) == own.shape
        return fits and not _equal_rows(whole[equals], own.expand_as(whole[equals]))

    expected, kinds = outputs(some), dict(classifier.model.named_modules())
    for place, equals in sample.alone():
        try:
            found = outputs(batches.take(some, slice(place, place + 1)))
        except ValueError:
            continue
        for (name, received, output), (other, its, own) in zip(expected, found, strict=False):
            kind = type(kinds[name]).__name__
            what = f"module {name!r} ({kind})" if name else f"the forward of {kind} itself"
            if name != other:
                return f"before {what}"
            if differ(received, its, equals):
                return f"before {what}"
            if differ(output, own, equals):
                return f"in {what}"
    return f"in the forward of {type(classifier.model).__name__} itself"


def _require_repeatable(classifier: Classifier, x: Inputs) -> None:
    """Refuse a model that draws random numbers even in eval mode."""
    with torch.no_grad():
        once, again = classifier.logits(x), classifier.logits(x)
    if not _equal_rows(once, again):
        raise ValueError(
            "the model's logits are random even in eval mode; pass training=self.training to "
            "functional.dropout, or make what is random a module"
        )


# Logits, not probabilities -----------------------------------------------------------------------


def _require_no_probabilities(classifier: Classifier, x: Inputs, logits: Tensor) -> None:
    """Refuse a model that ends in a softmax; if a few rows look like it, look at more."""
    if are_probabilities(logits * classifier.temperature):
        with torch.inference_mode(False), torch.no_grad():
            more = classifier.logits(batches.take(x, slice(0, CONFIRMED)))
        require_logits(more * classifier.temperature)


def are_probabilities(outputs: Tensor) -> bool:
    """Whether all rows (N, K) are non-negative and sum to one, up to rounding."""
    tolerance = torch.finfo(outputs.dtype).eps * max(16, outputs.shape[1])
    sums = outputs.double().sum(-1)
    return bool((outputs >= 0).all()) and bool(((sums - 1).abs() <= tolerance).all())


def require_logits(outputs: Tensor) -> None:
    """Refuse outputs (N, K) of a model that are probabilities."""
    if are_probabilities(outputs):
        raise ValueError(
            "the model's outputs are probabilities: they are not negative and sum to one. Remove "
            "the softmax at its end, or wrap it as "
            "Classifier(model, get_logits=lambda output: output.log())"
        )


# Gradients ---------------------------------------------------------------------------------------


def _require_equal_gradients(
    classifier: Classifier, sites: Sequence[Site], x: Inputs, tape: Tape, leaves: Params
) -> None:
    """Compare gradients from the tape with autograd's, each at the scale of its own terms."""
    logits = tape.logits
    if not logits.requires_grad:
        return
    outputs = [one.output for passed in tape.passages.values() for one in passed]
    cotangent = torch.linspace(1, 2, logits.numel()).to(logits).view_as(logits)
    wanted = [*outputs, *leaves.values()]
    with naming_checkpoints():
        grads = torch.autograd.grad(logits, wanted, cotangent, allow_unused=True)
    deltas = iter(
        torch.zeros_like(output) if grad is None else grad
        for output, grad in zip(outputs, grads, strict=False)
    )
    expected = dict(zip(leaves, grads[len(outputs) :], strict=True))
    for site in sites:
        passages = tape.passages.get(site, [])
        own = [next(deltas) for _ in passages]
        # Under autocast the gradients of float32 weights come through narrower types.
        rounding = max(torch.finfo(t.dtype).eps for t in (logits, *own)) ** 0.5
        found = _batch_gradients(site, passages, own, leaves) if passages else {}
        sizes = [one._replace(received=one.received.abs()) for one in passages]
        scales = _batch_gradients(site, sizes, [d.abs() for d in own], leaves) if passages else {}
        for name in site.layer.names:
            zero = torch.zeros_like(leaves[name])
            by_autograd = expected[name]
            difference = found.get(name, zero) - (zero if by_autograd is None else by_autograd)
            tolerance = rounding * float(scales.get(name, zero).max())
            if not bool((difference.abs() <= tolerance).all()):
                _require_repeatable(classifier, x)
                raise ValueError(
                    f"layer {site.name!r} ({type(site.module).__name__}) uses {name!r} differently "
                    f"from a plain {site.kind}; {WAY_OUT}"
                )


def _batch_gradients(
    site: Site, passages: Sequence[Passage], deltas: Sequence[Tensor], like: Params
) -> Params:
    """Return the gradients of a site's parameters, summed over the batch."""
    if not site.is_affine:
        grads = summed_scaling_gradients(site, passages, deltas)
        return {name: grad.sum(0) for name, grad in grads.items()}
    # Treat the batch as positions of one example, so that the matrix is written out only once.
    pair = joined_inputs(site, passages), joined_deltas(site, deltas)
    vectors, joined = (each.movedim(0, -3).flatten(-3, -2) for each in pair)
    return site.layer.split(Outers(joined, LayerInputs.new(vectors)).dense(), like)
