"""What the library takes for granted of a model, checked on a few inputs when it is first seen.

1. The rows of a batch do not depend on each other. The logits of an input, and what every covered
   layer receives for it, must be the same in its batch, without it, and at another place.
2. A covered layer uses its parameters as its kind of layer does: gradients that are assembled from
   layer inputs and output gradients must equal autograd's.
3. The outputs are logits, not probabilities.

`Findings.is_due` decides which batches are checked. A check runs two rows of the batch, which is
run anyway: a predictor calls `probed` before and `require_apart_from` after that. Where the batch
is not run as it is, `require_understood` and `require_apart` check a few of its rows instead. One
thing costs nothing and is checked on every batch, in `recorder.py`: no covered parameter reaches
the logits except through a call of its layer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from acnml._algebra.dual import LayerInputs, Outers
from acnml._engine.recorder import (
    AFFINE,
    SCALING,
    WAY_OUT,
    Passage,
    Site,
    Tape,
    exactly,
    find_sites,
    joined_deltas,
    joined_inputs,
    names_of,
    record,
    require_batch_first,
    run_changed,
    summed_scaling_gradients,
)
from acnml._util import batches, checks
from acnml._util.batches import Inputs
from acnml._util.params import Params
from acnml.classifier import Classifier, Hook, naming_checkpoints

CONFIRMED = 64  # outputs that must all be probabilities before a model is refused

# Largest difference between runs of the same row, relative to the row's largest entry, with which a
# suspicion is dropped: in double precision, and for a model that cannot run in it.
CONFIRMING, UNCONFIRMED = 1e-5, 0.05

# The share of the level of an input's logits that counts in comparisons.
LEVEL = 1e-6


class Passed(NamedTuple):
    """The logits of some rows, and what every passage through the covered layers received."""

    logits: Tensor
    received: Mapping[Site, Sequence[Tensor]]

    @staticmethod
    def on(tape: Tape) -> Passed:
        """Return what is on a tape."""
        received = {s: [one.received for one in passed] for s, passed in tape.passages.items()}
        return Passed(tape.logits.detach(), received)

    def take(self, rows: Tensor) -> Passed:
        """Return what belongs to some of the rows."""
        self.require_batch_first()
        received = {site: [t[rows] for t in tensors] for site, tensors in self.received.items()}
        return Passed(self.logits[rows], received)

    def require_batch_first(self) -> None:
        """Refuse a model whose layers do not receive one row per input."""
        for site, tensors in self.received.items():
            for tensor in tensors:
                require_batch_first(site, tensor, len(self.logits))


class Probe(NamedTuple):
    """Rows of a batch that were run without the others, and understood."""

    groups: Sequence[Tensor]  # rows to compare with the batch; none if all rows are the same
    tape: Tape  # of the first group, with the covered parameters as leaves of the graph


# The same rows, in their batch and in a group of their own.
Pair: TypeAlias = tuple[Passed, Passed]


def check(classifier: Classifier, x: Inputs, mean: Params | None = None) -> None:
    """Check a model on a batch, with the parameters that a posterior covers.

    A batch whose rows are all the same proves nothing, and neither does one with logits that are
    not finite.
    """
    mean = mean or {}
    sites = find_sites(classifier.model, mean, AFFINE + SCALING, WAY_OUT)
    require_understood(classifier.at(mean), sites, x)


def require_understood(classifier: Classifier, sites: Sequence[Site], x: Inputs) -> None:
    """Refuse a model whose rows depend on each other, or that uses parameters in its own way.

    A few rows stand for the batch.
    """
    last = batches.size(x) - 1
    rows = sorted({*_ends(x), 0, min(1, last), last // 2, last})
    few = batches.take(x, torch.tensor(rows, device="cpu"))
    with classifier.naming_batch(x):
        probe, whole = probed(classifier, sites, few), _run(classifier, sites, few)
    require_apart_from(classifier, sites, few, probe, whole, x)


def probed(classifier: Classifier, sites: Sequence[Site], x: Inputs) -> Probe:
    """Run some rows of a batch; refuse a model that uses covered parameters in its own way.

    A subclass of a layer may compute something else, a hook may change its output, and a parent may
    use its weight without calling it. For every covered parameter, the gradient assembled from the
    tape must equal autograd's, up to rounding at the scale of the terms that are summed in it.
    """
    groups = _groups(x)
    some = batches.take(x, groups[0] if groups else slice(0, 1))
    leaves = classifier.leaves(names_of(sites))
    with classifier.naming_batch(x):
        tape = record(classifier, sites, some, leaves, sealed=False)
    if torch.isfinite(tape.logits).all():  # otherwise the caller names the rows
        _require_equal_gradients(classifier, sites, some, tape, leaves)
    return Probe(groups, tape)


def require_apart_from(
    classifier: Classifier,
    sites: Sequence[Site],
    x: Inputs,
    probe: Probe,
    whole: Passed,
    more: Inputs | None = None,
) -> None:
    """Refuse a model if rows that were run by themselves gave something else in their batch.

    Args:
        classifier: the model.
        sites: the covered layers.
        x: the batch.
        probe: some of its rows, run by themselves.
        whole: what the batch gave.
        more: further inputs, to look at if logits look like probabilities.
    """
    if not probe.groups:
        return
    if are_probabilities(probe.tape.logits.detach() * classifier.temperature):
        with torch.inference_mode(False), torch.no_grad():
            some = classifier.logits(batches.take(x if more is None else more, slice(0, CONFIRMED)))
        require_logits(some * classifier.temperature)
    _require_equal(classifier, sites, x, probe, whole)


def checked_logits(classifier: Classifier, x: Inputs, view: Classifier | None = None) -> Tensor:
    """Return the logits of a prepared chunk, all finite, and check the model if that is due.

    Args:
        classifier: the model.
        x: the chunk.
        view: a view of the model to run in its place, such as one with hooks.
    """
    probe = probed(classifier, [], x) if classifier.findings.is_due((), x) else None
    logits = (view or classifier).logits(x).detach()
    checks.require_finite(logits, "the model's logits are", "check the model and these inputs")
    if probe is not None:
        require_apart_from(classifier, [], x, probe, Passed(logits, {}))
    return logits


# Rows that do not depend on each other -----------------------------------------------------------


def _groups(x: Inputs) -> list[Tensor]:
    """Choose rows of a batch to run by themselves; none if all rows are the same.

    Two rows far apart, out of order: a model that sorts its batch then moves them, even if the
    batch is sorted. And each of them beside itself: what a row gets from others, such as a mean, a
    largest number or a branch that the batch takes, is then missing. As the groups differ in size,
    at least one shows a model whose first dimension is not the batch.
    """
    ends = _ends(x)
    if len(ends) < 2:
        return []
    low, high = sorted(ends)
    groups = [high, low, high], [low, low], [high, high]
    return [torch.tensor(rows, device="cpu") for rows in groups]


def _ends(x: Inputs) -> set[int]:
    """Return the rows with the least and the largest sum; a single row if all are the same."""
    tensors = batches.named_tensors(x).values()
    totals = torch.stack([_row_sums(tensor) for tensor in tensors]).sum(0)
    ends = {int(totals.argmin()), int(totals.argmax())}
    if bool(totals.min() < totals.max()):
        return ends
    # Rows with the same sum may be the same.
    differs = torch.stack([(t != t[:1]).reshape(len(t), -1).any(1) for t in tensors]).any(0)
    return {0, int(differs.long().argmax())}


def _row_sums(tensor: Tensor) -> Tensor:
    """Sum every row; a sum that is not finite, as of an attention mask, counts as zero."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    rows = real.flatten(1) if real.ndim > 1 else real[:, None]
    return torch.nan_to_num(rows.sum(1, dtype=torch.float32), 0.0, 0.0, 0.0)


def _run(classifier: Classifier, sites: Sequence[Site], x: Inputs) -> Passed:
    found: dict[Site, list[Tensor]] = {}

    def keep(
        site: Site, module: nn.Module, _: int, received: Tensor, output: Tensor
    ) -> tuple[Tensor, None]:
        found.setdefault(site, []).append(site.multiplied(module, received.detach()))
        return output, None

    return Passed(run_changed(classifier, sites, x, keep), found)


def _require_equal(
    classifier: Classifier, sites: Sequence[Site], x: Inputs, probe: Probe, whole: Passed
) -> None:
    """Compare runs of groups of rows with the run of the batch."""
    # A copy of their own cannot remember the batch.
    fresh, (_, *others) = classifier.afresh(), probe.groups
    runs = [_run(fresh, sites, batches.take(x, rows)) for rows in others]
    for run in runs:
        run.require_batch_first()
    own = [Passed.on(probe.tape), *runs]
    pairs = [(whole.take(rows), run) for rows, run in zip(probe.groups, own, strict=True)]
    if not all(bool(each.logits.isfinite().all()) for pair in pairs for each in pair):
        return
    if any(_differ(pair) for pair in pairs):
        _require_repeatable(classifier, batches.take(x, probe.groups[0]))
        _require_equal_but_for_rounding(classifier, sites, x, probe.groups, pairs)
    classifier.findings.apart.add(frozenset(names_of(sites)))


def _require_equal_but_for_rounding(
    classifier: Classifier,
    sites: Sequence[Site],
    x: Inputs,
    groups: Sequence[Tensor],
    pairs: Sequence[Pair],
) -> None:
    """Confirm in double precision that rows depend on each other, and say where.

    Rounding differs between sizes of batches, and it may be large where terms cancel or a gate
    flips. In double precision, only what truly depends on the batch is left.
    """
    try:
        wide = Classifier(classifier.copy_module().double(), classifier.get_logits)
        wide_x, other = wide.prepare(x), wide.afresh()
        with torch.autocast(classifier.device.type, enabled=False):
            whole = _run(wide, sites, wide_x)
            apart = (_run(other, sites, batches.take(wide_x, rows)) for rows in groups)
            pairs_wide = zip(map(whole.take, groups), apart, strict=True)
            depend = any(_differ(pair, CONFIRMING) for pair in pairs_wide)
            where = _where_rows_depend(wide, wide_x, groups) if depend else ""
    except (RuntimeError, TypeError, ValueError):  # the model runs in its own precision only
        depend = any(_differ(pair, UNCONFIRMED) for pair in pairs)
        where = _where_rows_depend(classifier, x, groups) if depend else ""
    if depend:
        raise ValueError(
            "the logits of an input, or what a layer receives for it, depend on the rest of its "
            f"batch, beginning {where}. Every input must be handled on its own; compute what "
            "depends on several inputs (means, orders, branches) once, from the training data"
        )


def _differ(pair: Pair, tolerance: float | None = None) -> bool:
    """Whether rows give something else in their batch than in a group of a few."""
    whole, own = pair
    compared = [(whole.logits, own.logits), (_levelled(whole.logits), _levelled(own.logits))]
    for site, tensors in own.received.items():
        if len(tensors) == len(whole.received.get(site, [])):
            compared.extend(zip(whole.received[site], tensors, strict=True))
    # A model may pad to the longest input of its batch: then only the logits are compared.
    alike = (both for both in compared if both[0][0].numel() == both[1][0].numel())
    return not all(_equal_rows(left, right, tolerance) for left, right in alike)


def _levelled(logits: Tensor) -> Tensor:
    """Return logits (B, ...) minus their means, beside a millionth of these: a floor for rounding.

    A level that all logits of an input share changes no probability, but would hide differences.
    """
    flat = logits.reshape(len(logits), -1)
    level = flat.mean(1, keepdim=True)
    return torch.cat([flat - level, LEVEL * level], dim=1)


def _equal_rows(left: Tensor, right: Tensor, tolerance: float | None = None) -> bool:
    """Whether rows are equal up to rounding at the scale of each; NaN equals only NaN."""
    if left.numel() == 0 or torch.equal(left, right):
        return True
    if tolerance is None:
        tolerance = torch.finfo(left.dtype).eps ** 0.5 if left.is_floating_point() else 0.0
    wide = torch.promote_types(left.dtype, torch.float32)
    left, right = (t.reshape(len(t), -1).to(wide) for t in (left, right))
    same = (left == right) | (left.isnan() & right.isnan())
    differences = (left - right).abs().masked_fill(same, 0.0).amax(1)
    scales = torch.maximum(left.abs(), right.abs()).nan_to_num(0.0).amax(1)
    return bool((differences <= tolerance * scales).all())


def _where_rows_depend(classifier: Classifier, x: Inputs, groups: Sequence[Tensor]) -> str:
    """Name the first module that receives or returns something else in another batch."""
    kinds = dict(classifier.model.named_modules())
    for rows in groups:
        own = _at_modules(classifier, batches.take(x, rows), slice(None))
        for (name, *values), (other, *its) in zip(
            _at_modules(classifier, x, rows), own, strict=False
        ):
            kind = type(kinds[name]).__name__
            what = f"module {name!r} ({kind})" if name else f"the forward of {kind} itself"
            received, returned = (_is_other(*both) for both in zip(values, its, strict=True))
            if name != other or received:
                return f"before {what}"
            if returned:
                return f"in {what}"
    return f"in the forward of {type(classifier.model).__name__} itself"


def _at_modules(
    classifier: Classifier, x: Inputs, rows: Tensor | slice
) -> list[tuple[str, Tensor | None, Tensor | None]]:
    """Return the name of every module that runs, with the rows that it received and gave."""
    passed: list[tuple[str, Tensor | None, Tensor | None]] = []

    def kept(value: Any) -> Tensor | None:
        # Recurrent layers and attention return tuples.
        first = value[0] if isinstance(value, tuple) and value else value
        is_batch = isinstance(first, Tensor) and first.shape[:1] == (batches.size(x),)
        return first[rows].clone() if is_batch else None

    def keeping(name: str) -> Hook:
        def hook(_: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            passed.append((name, kept(args), kept(output)))
            return output

        return hook

    hooks = {name: keeping(name) for name, _ in classifier.model.named_modules()}
    with torch.inference_mode(False), torch.no_grad():
        classifier.hooked(hooks).logits(x)
    return passed


def _is_other(whole: Tensor | None, own: Tensor | None) -> bool:
    if whole is None or own is None or whole.shape != own.shape:
        return False
    return not _equal_rows(whole, own)


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
    cotangent = (
        torch.linspace(1, 2, logits.numel(), device=logits.device).to(logits).view_as(logits)
    )
    wanted = [*outputs, *leaves.values()]
    if not wanted:
        return
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
            # It is infinite where inputs are so large that the terms overflow.
            tolerance = rounding * float(scales.get(name, zero).max())
            if tolerance < math.inf and not bool((difference.abs() <= tolerance).all()):
                _require_repeatable(classifier, x)
                raise ValueError(
                    f"layer {site.name!r} ({type(site.module).__name__}) uses {name!r} differently "
                    f"from a plain {site.kind}; {WAY_OUT}"
                )


@exactly
def _batch_gradients(
    site: Site, passages: Sequence[Passage], deltas: Sequence[Tensor], like: Params
) -> Params:
    """Return the gradients of a site's parameters, summed over the batch."""
    if not site.is_affine:
        grads = summed_scaling_gradients(site, passages, deltas)
        return {name: grad.sum(0) for name, grad in grads.items()}
    # Treat the batch as positions of one example, so that the matrix is written out only once.
    pair = joined_inputs(site, passages), joined_deltas(site, deltas)
    common = torch.promote_types(*(each.dtype for each in pair))  # they differ under autocast
    vectors, joined = (each.to(common).movedim(0, -3).flatten(-3, -2) for each in pair)
    return site.layer.split(Outers(joined, LayerInputs.new(vectors)).dense(), like)
