"""What the library takes for granted of a model, checked on a few inputs when it is first seen.

1. The rows of a batch do not depend on each other. The logits of an input, and what every covered
   layer receives for it, must be the same among other rows, without them, and at another place.
2. A covered layer uses its parameters as its kind of layer does: gradients that are assembled from
   layer inputs and output gradients must equal autograd's.
3. The outputs are logits, not probabilities.

`Findings.is_due` decides which batches are checked. One thing costs nothing and is checked on every
batch, in `recorder.py`: no covered parameter reaches the logits except through a call of its layer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from acnml._engine.recorder import (
    WAY_OUT,
    Site,
    Tape,
    exactly,
    input_vectors,
    joined_deltas,
    names_of,
    record,
    scaling_gradients,
)
from acnml._util import batches, checks
from acnml._util.batches import Inputs
from acnml._util.params import Params
from acnml.classifier import Classifier, naming_checkpoints

CONFIRMED = 64  # outputs that must all be probabilities before a model is refused

# Largest difference between runs of the same row, relative to the row's largest entry, with which a
# suspicion is dropped: in double precision, and for a model that cannot run in it.
CONFIRMING, UNCONFIRMED = 1e-5, 0.05

WHOLE = "the output of the whole model"  # where no part of a model mixes inputs

# The share of the level of an input's logits that counts in comparisons.
LEVEL = 1e-6


def check(
    classifier: Classifier,
    x: Inputs,
    sites: Sequence[Site] = (),
    logits: Tensor | None = None,
) -> None:
    """Refuse a model that mixes inputs, or that uses parameters of the sites in its own way.

    Two rows are run by themselves, and among others. If all rows are the same, or some logits are
    not finite, the batch proves nothing about mixing.

    Args:
        classifier: the model.
        x: the batch.
        sites: what the gradients of parameters are assembled from.
        logits: of the batch, if it was run and there are no sites.
    """
    ends, last = _ends(x), batches.size(x) - 1
    rows = sorted({*ends, 0, min(1, last), last // 2, last})
    if logits is not None:
        rows = list(range(last + 1))
    elif not sites:  # with sites, memory allows a few rows only
        rows = sorted({*rows, *range(min(last + 1, batches.CHUNK))})
    few = x if logits is not None else batches.take(x, torch.tensor(rows, device="cpu"))
    groups = _groups(*map(rows.index, ends))
    some = batches.take(few, groups[0])
    leaves = classifier.leaves(names_of(sites))
    with classifier.naming_batch(x):
        first = record(classifier, sites, some, leaves, sealed=False)
        among = record(classifier, sites, few, sealed=False) if logits is None else Tape(logits, {})
    if first.logits.isfinite().all():  # otherwise the caller names the rows
        _require_plain(classifier, sites, some, first, leaves)
    if len(ends) < 2:
        return
    if are_probabilities(first.logits * classifier.temperature):
        with torch.inference_mode(False), torch.no_grad():
            more = classifier.logits(batches.take(x, slice(0, CONFIRMED)))
        _require_logits(more * classifier.temperature)
    fresh = classifier.afresh()  # a copy of their own cannot remember other rows
    others = (batches.take(few, group) for group in groups[1:])
    apart = [first, *(record(fresh, sites, part, sealed=False) for part in others)]
    if not all(tape.logits.isfinite().all() for tape in (among, *apart)):
        return
    if _differ(among, apart, groups):
        _require_repeatable(classifier, some)
        _require_apart_but_for_rounding(classifier, sites, few, groups, among, apart)
    classifier.findings.apart.add(frozenset(names_of(sites)))


def checked_logits(classifier: Classifier, x: Inputs) -> Tensor:
    """Return the logits of a prepared chunk, all finite, and check the model if that is due."""
    is_due, logits = classifier.findings.is_due((), x), classifier.logits(x).detach()
    if is_due:
        check(classifier, x, logits=logits)
    return checks.require_finite(
        logits, "the model's logits are", "check the model and these inputs"
    )


# Rows that do not depend on each other -----------------------------------------------------------


def _ends(x: Inputs) -> list[int]:
    """Return the rows with the least and the largest sum, in order; one row if all are the same."""
    tensors = batches.named_tensors(x).values()
    totals = torch.stack([_row_sums(tensor) for tensor in tensors]).sum(0)
    if bool(totals.min() < totals.max()):
        return sorted({int(totals.argmin()), int(totals.argmax())})
    # Rows with the same sum may differ.
    differs = torch.stack([(t != t[:1]).reshape(len(t), -1).any(1) for t in tensors]).any(0)
    return sorted({0, int(differs.long().argmax())})


def _row_sums(tensor: Tensor) -> Tensor:
    """Sum every row; a sum that is not finite, as of an attention mask, counts as zero."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    rows = real.flatten(1) if real.ndim > 1 else real[:, None]
    return torch.nan_to_num(rows.sum(1, dtype=torch.float32), 0.0, 0.0, 0.0)


def _groups(low: int, high: int | None = None) -> list[Tensor]:
    """Return groups of rows to run by themselves.

    Two rows far apart, out of order: a model that sorts its batch then moves them, even if the
    batch is sorted. And each of them beside itself: what a row gets from others, such as a mean, a
    largest number or a branch that the batch takes, is then missing. As the groups differ in size,
    at least one shows a model whose first dimension is not the batch.
    """
    groups = [[low]] if high is None else [[high, low, high], [low, low], [high, high]]
    return [torch.tensor(rows, device="cpu") for rows in groups]


def _require_apart_but_for_rounding(
    classifier: Classifier,
    sites: Sequence[Site],
    x: Inputs,
    groups: Sequence[Tensor],
    together: Tape,
    apart: Sequence[Tape],
) -> None:
    """Confirm in double precision that rows depend on each other, and say where.

    Rounding differs between sizes of batches, and it may be large where terms cancel or a gate
    flips. In double precision, only what truly depends on the batch is left.
    """
    try:
        wide = Classifier(classifier.copy_module().double(), classifier.get_logits)
        with torch.autocast(classifier.device.type, enabled=False):
            wide_x, fresh = wide.prepare(x), wide.afresh()
            whole = record(wide, sites, wide_x, sealed=False)
            parts = (batches.take(wide_x, rows) for rows in groups)
            alone = [record(fresh, sites, part, sealed=False) for part in parts]
            depend = _differ(whole, alone, groups, CONFIRMING)
            where = _first_difference(wide, wide_x, groups) if depend else ""
    except (RuntimeError, TypeError, ValueError):  # the model runs in its own precision only
        depend = _differ(together, apart, groups, UNCONFIRMED)
        where = _first_difference(classifier, x, groups) if depend else ""
    if depend:
        raise ValueError(
            "the logits of an input, or what a layer receives for it, depend on the rest of its "
            f"batch, first seen in {where}. Every input must be handled on its own; compute what "
            "depends on several inputs (means, orders, branches) once, from the training data"
        )


def _differ(
    together: Tape, apart: Sequence[Tape], groups: Sequence[Tensor], tolerance: float | None = None
) -> bool:
    """Whether rows give something else among others than in a group of a few."""
    for own, rows in zip(apart, groups, strict=True):
        left, right = together.logits.detach()[rows], own.logits.detach()
        compared = [(left, right), (_levelled(left), _levelled(right))]
        for site, passed in own.passages.items():
            others = together.passages.get(site, [])
            if len(passed) == len(others):
                pairs = zip(others, passed, strict=True)
                compared += [(whole.received[rows], one.received) for whole, one in pairs]
        # A model may pad to the longest input of its batch: then only the logits are compared.
        alike = (both for both in compared if both[0].numel() == both[1].numel())
        if not all(_equal_rows(*both, tolerance) for both in alike):
            return True
    return False


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


def _first_difference(classifier: Classifier, x: Inputs, groups: Sequence[Tensor]) -> str:
    """Name the first module whose output for an input is another one in another batch."""
    together = _outputs(classifier, x)
    for rows in groups:
        for name, own in _outputs(classifier, batches.take(x, rows)).items():
            if name not in together or together[name].shape[1:] != own.shape[1:]:
                continue
            if not _equal_rows(together[name][rows], own):
                kind = type(classifier.model.get_submodule(name)).__name__
                return f"the output of module {name!r} ({kind})" if name else WHOLE
    return WHOLE


def _outputs(classifier: Classifier, x: Inputs) -> dict[str, Tensor]:
    """Return what modules give for every row in their first call, in the order of their returns."""
    found: dict[str, Tensor] = {}

    def keep(name: str, _: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        # Recurrent layers and attention return tuples.
        first = output[0] if isinstance(output, tuple) and output else output
        if isinstance(first, Tensor) and first.shape[:1] == (batches.size(x),):
            found.setdefault(name, first.clone())
        return output

    hooks = {name: partial(keep, name) for name, _ in classifier.model.named_modules()}
    with torch.inference_mode(False), torch.no_grad():
        classifier.hooked(hooks).logits(x)
    return found


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


def _require_logits(outputs: Tensor) -> None:
    """Refuse outputs (N, K) of a model that are probabilities."""
    if are_probabilities(outputs):
        raise ValueError(
            "the model's outputs are probabilities: they are not negative and sum to one. Remove "
            "the softmax at its end, or wrap it as "
            "Classifier(model, get_logits=lambda output: output.log())"
        )


# Gradients ---------------------------------------------------------------------------------------


def _require_plain(
    classifier: Classifier, sites: Sequence[Site], x: Inputs, tape: Tape, leaves: Params
) -> None:
    """Refuse a model that uses covered parameters in its own way.

    A subclass of a layer may compute something else, a hook may change its output, and a parent may
    use its weight without calling it. For every covered parameter, the gradient assembled from the
    tape must equal autograd's, up to rounding at the scale of the terms that are summed in it.
    """
    logits = tape.logits
    if not sites or not logits.requires_grad:
        return
    numbers = torch.linspace(1, 2, logits.numel(), device=logits.device)
    cotangent = numbers.to(logits).view_as(logits)
    deltas = tape.pulled_back(cotangent) if tape.passages else {}
    with naming_checkpoints():
        grads = torch.autograd.grad(
            logits, [*leaves.values()], cotangent, allow_unused=True, materialize_grads=True
        )
    expected = dict(zip(leaves, grads, strict=True))
    for site in sites:
        received, own = [p.received for p in tape.passages.get(site, [])], deltas.get(site, [])
        # Under autocast the gradients of float32 weights come through narrower types.
        rounding = max(torch.finfo(t.dtype).eps for t in (logits, *own)) ** 0.5
        found = _summed_gradients(site, received, own, leaves)
        sizes = [t.abs() for t in received], [t.abs() for t in own]
        scales = _summed_gradients(site, *sizes, leaves)
        for name in site.layer.names:
            difference = (found[name] - expected[name]).abs()
            # It is infinite where inputs are so large that the terms overflow.
            tolerance = rounding * float(scales[name].max())
            if tolerance < math.inf and not bool((difference <= tolerance).all()):
                _require_repeatable(classifier, x)
                raise ValueError(
                    f"layer {site.name!r} ({type(site.module).__name__}) uses {name!r} differently "
                    f"from a plain {site.kind}; {WAY_OUT}"
                )


@exactly
def _summed_gradients(
    site: Site, received: Sequence[Tensor], deltas: Sequence[Tensor], like: Params
) -> Params:
    """Return the gradients of a site's parameters, summed over passages and the batch."""
    if not received:
        return {name: torch.zeros_like(like[name]) for name in site.layer.names}
    if not site.is_affine:
        rows = [t[:, None] for t in received], [t[:, None] for t in deltas]
        return {name: g.sum((0, 1)) for name, g in scaling_gradients(site, *rows).items()}
    # Treat the batch as positions of one example, so that the matrix is written out only once.
    vectors = torch.cat([input_vectors(site, x) for x in received], dim=-2)
    pair = vectors, joined_deltas(site, deltas)
    common = torch.promote_types(*(each.dtype for each in pair))  # they differ under autocast
    a, delta = (each.to(common).movedim(0, -3).flatten(-3, -2) for each in pair)
    return site.layer.split(delta.mT @ a, like)
