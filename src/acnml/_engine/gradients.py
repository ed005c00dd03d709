"""Per-example gradients from a tape, and the check that they are the model's own gradients.

The engine assembles gradients from layer inputs and output gradients. It neither traces nor
rewrites the model, so it has to check that a layer uses its parameters as its kind of layer does:
`require_understood` compares the assembled gradients with autograd's.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

from acnml._algebra.dual import LayerInputs, Outers
from acnml._engine.layers import Site, input_vectors, output_positions, scaling_gradients
from acnml._engine.recorder import Passage, record
from acnml._util import checks
from acnml._util.batches import Inputs, take
from acnml._util.params import Params, add
from acnml.classifier import Classifier

CHECKED = 16  # inputs on which a model is checked to be understood
WAY_OUT = "leave it out of the posterior, or solve with acnml.Reference"


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


def require_understood(classifier: Classifier, sites: Sequence[Site], x: Inputs) -> None:
    """Refuse a model in which a site uses its parameters differently from its kind of layer.

    A subclass may compute something else, and a parent may use a layer's weight without calling
    the layer. For some inputs, the gradients assembled from the tape must equal autograd's, up to
    rounding at the scale of the largest one. A parameter that has passed is not checked again; one
    with a zero gradient has not passed.
    """
    names = {name for site in sites for name in site.layer.names}
    if names <= classifier.findings.understood:
        return
    some = take(x, slice(0, CHECKED))
    tape = record(classifier, sites, some)
    logits = tape.logits
    checks.require_finite(logits, "the model's logits are", "check the model and these inputs")
    cotangent = torch.linspace(1, 2, logits.numel()).to(logits).view_as(logits)
    own = {name: classifier.parameters[name] for site in sites for name in site.layer.names}
    expected = classifier.gradient(some, own, cotangent)
    deltas = tape.pulled_back(cotangent) if logits.requires_grad else {}
    largest = max((float(grad.abs().max()) for grad in expected.values()), default=0.0)
    # Under autocast the gradients of float32 weights come through narrower types.
    dtypes = [logits.dtype, *(delta.dtype for pulled in deltas.values() for delta in pulled)]
    tolerance = max(torch.finfo(dtype).eps for dtype in dtypes) ** 0.5 * largest
    for site in sites:
        found = {}
        if site in deltas:
            found = _batch_gradients(site, tape.passages[site], deltas[site], own)
        for name in site.layer.names:
            if not _close(found.get(name), expected.get(name), tolerance):
                _require_repeatable(classifier, some)
                raise ValueError(
                    f"layer {site.name!r} ({type(site.module).__name__}) uses {name!r} differently "
                    f"from a plain {site.kind}; {WAY_OUT}"
                )
    classifier.findings.understood |= {name for name, grad in expected.items() if grad.any()}


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


def _require_repeatable(classifier: Classifier, x: Inputs) -> None:
    """Refuse a model that draws random numbers even in eval mode."""
    with torch.no_grad():
        once, again = classifier.logits(x), classifier.logits(x)
    if not torch.equal(once, again):
        raise ValueError(
            "the model's logits are random even in eval mode; pass training=self.training to "
            "functional.dropout, or make what is random a module"
        )


def _close(found: Tensor | None, expected: Tensor | None, tolerance: float) -> bool:
    """Compare gradients; a missing one counts as zero."""
    if found is None and expected is None:
        return True
    difference = (0.0 if found is None else found) - (0.0 if expected is None else expected)
    assert isinstance(difference, Tensor)
    return bool((difference.abs() <= tolerance).all())
