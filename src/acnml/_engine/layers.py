"""What the engines know of layers: their inputs and outputs in one tensor format.

Two kinds of layers are understood. *Affine* ones, Linear and Conv2d, multiply a matrix [W b] with
their input at every position: the one position of a plain Linear layer, the items of a sequence,
or the patches of an image. *Scaling* ones, the normalisation layers, multiply and shift their
normalised input elementwise. Inputs and outputs of affine layers become (B, [groups,] positions,
features), so that one piece of code serves them all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from acnml._algebra.dual import Affine, Outers
from acnml._util import checks
from acnml._util.batches import Inputs, size, take
from acnml._util.params import Params
from acnml.classifier import Classifier, Hook, naming_checkpoints

AFFINE = (nn.Linear, nn.Conv2d)
SCALING = (_BatchNorm, nn.LayerNorm, nn.GroupNorm)

CHECKED = 16  # inputs on which a model is checked to be understood
WAY_OUT = "leave it out of the posterior, or solve with acnml.Reference"


@final
@dataclass(frozen=True, eq=False)
class Site:
    """A module that owns covered parameters, with their names."""

    name: str  # of the module, "" for the model itself
    module: nn.Module
    layer: Affine

    @property
    def is_affine(self) -> bool:
        """Whether the module is affine; it is a scaling layer otherwise."""
        return isinstance(self.module, AFFINE)


class Pass(NamedTuple):
    """One passage of a batch through a module."""

    inputs: Tensor  # as the module received them; for a scaling layer, normalised
    output: Tensor  # as it returned them, a node of the autograd graph
    tracked: bool  # whether the model lets gradients through: not under torch.no_grad()


Passes: TypeAlias = Mapping[Site, list[Pass]]


def find_sites(
    model: nn.Module, names: Iterable[str], kinds: tuple[type[nn.Module], ...], way_out: str
) -> list[Site]:
    """Return the modules that own the named parameters, all of which must be of these kinds."""
    covered, found = set(names), []
    _refuse_shared(model, covered)
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        own = {key for key, _ in module.named_parameters(recurse=False) if prefix + key in covered}
        if own:
            _require_kind(module, name, own, kinds, way_out)
            bias = f"{prefix}bias" if "bias" in own else None
            groups = module.groups if isinstance(module, nn.Conv2d) else 1
            found.append(Site(name, module, Affine(f"{prefix}weight", bias, groups)))
    return found


def _require_kind(
    module: nn.Module, name: str, own: set[str], kinds: tuple[type[nn.Module], ...], way_out: str
) -> None:
    what = f"layer {name!r} ({type(module).__name__})"
    if isinstance(module, kinds) and "weight" not in module._parameters:
        raise ValueError(f"the weight of {what} is reparametrised, as by weight_norm; {way_out}")
    if not isinstance(module, kinds) or not is_plain(module) or not own <= {"weight", "bias"}:
        raise ValueError(f"{what} with parameters {sorted(own)} is not supported here; {way_out}")
    if "weight" not in own:
        raise ValueError(f"the bias of {what} is covered without its weight; {way_out}")


def is_plain(module: nn.Module) -> bool:
    """Whether a module of a known kind computes what its kind does, by a call of its own.

    Subclasses may compute something else, and the `out_proj` of attention is never called.
    """
    kind = next((kind for kind in (*AFFINE, *SCALING) if isinstance(module, kind)), None)
    called = not isinstance(module, NonDynamicallyQuantizableLinear)
    return kind is not None and called and type(module).forward is kind.forward


def _refuse_shared(model: nn.Module, covered: set[str]) -> None:
    """Refuse a parameter that two modules own: its passes could not be told apart by name."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner = first[id(parameter)]
        if name != owner and owner in covered:
            raise ValueError(f"{owner!r} and {name!r} are the same parameter; leave it out")


def record(classifier: Classifier, sites: list[Site], x: Inputs) -> tuple[Tensor, Passes]:
    """Run a batch and return its logits with what passed through every site.

    The outputs are nodes of the graph behind the logits; the parameters are not part of it.
    """
    passes: dict[Site, list[Pass]] = {site: [] for site in sites}
    hooks = {site.name: _recorder(site, passes[site], size(x)) for site in sites}
    with torch.inference_mode(False), torch.enable_grad(), classifier.hooked(hooks):
        logits = classifier.logits(x)
    return logits, {site: taken for site, taken in passes.items() if taken}


def require_tracked(logits: Tensor, passes: Passes) -> None:
    """Refuse layers that gradients cannot reach: they would look as if the data said nothing."""
    for site, taken in passes.items():
        if not any(one.tracked for one in taken):
            raise ValueError(
                f"layer {site.name!r} runs under torch.no_grad() in the model's forward: no "
                "gradient reaches it; leave it out of `parameters`"
            )
    if not logits.requires_grad:
        raise ValueError("the model's logits use none of `parameters`; name some that they use")


def require_understood(classifier: Classifier, sites: list[Site], x: Inputs) -> None:
    """Refuse a model in which a site uses its parameters otherwise than its kind of layer does.

    A subclass may compute something else, a parent may take a layer's weight without calling the
    layer. For some inputs, the gradients put together from the passes must be those of autograd, up
    to rounding at the scale of the largest one.
    What has been understood once is not checked again; a gradient of zero says nothing.
    """
    names = {name for site in sites for name in site.layer.names}
    if names <= classifier.understood:
        return
    some = take(x, slice(0, CHECKED))
    logits, passes = record(classifier, sites, some)
    checks.require_finite(logits, "the model's logits are", "check the model and these inputs")
    cotangent = torch.linspace(1, 2, logits.numel()).to(logits).view_as(logits)
    own = {name: classifier.parameters[name] for site in sites for name in site.layer.names}
    expected = classifier.gradient(some, own, cotangent)
    deltas = output_gradients(logits, passes, cotangent) if logits.requires_grad else {}
    largest = max((float(grad.abs().max()) for grad in expected.values()), default=0.0)
    # Under autocast the gradients of float32 weights come through narrower types.
    eps = max(torch.finfo(tensor.dtype).eps for tensor in (logits, *deltas.values()))
    for site in sites:
        inputs = site_inputs(site, passes[site]) if site in deltas else None
        found = {} if inputs is None else _summed_gradients(site, inputs, deltas[site], own)
        for name in site.layer.names:
            if not _close(found.get(name), expected.get(name), eps**0.5 * largest):
                _require_repeatable(classifier, some)
                raise ValueError(
                    f"layer {site.name!r} ({type(site.module).__name__}) uses {name!r} otherwise "
                    f"than a plain {_kind(site)} does; {WAY_OUT}"
                )
    classifier.understood |= {name for name, grad in expected.items() if grad.any()}


def example_gradients(site: Site, inputs: Tensor, deltas: Tensor, like: Params) -> Params:
    """Write out the gradients of a site's parameters for every example: (B, *shape)."""
    if not site.is_affine:
        return scaling_gradients(site, inputs, deltas)
    return site.layer.split(Outers(deltas, inputs).dense(), like)


def _summed_gradients(site: Site, inputs: Tensor, deltas: Tensor, like: Params) -> Params:
    """Return the gradients of a site's parameters, summed over the examples."""
    if site.is_affine:  # as if all were positions of one example: large layers are written out once
        inputs, deltas = (each.movedim(0, -3).flatten(-3, -2)[None] for each in (inputs, deltas))
    grads = example_gradients(site, inputs, deltas, like)
    return {name: grad.sum(0) for name, grad in grads.items()}


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
    """Compare gradients; one that is missing is zero."""
    if found is None and expected is None:
        return True
    difference = (0.0 if found is None else found) - (0.0 if expected is None else expected)
    assert isinstance(difference, Tensor)
    return bool((difference.abs() <= tolerance).all())


def _kind(site: Site) -> str:
    kinds = (*AFFINE, *SCALING)
    return next(kind.__name__ for kind in kinds if isinstance(site.module, kind)).lstrip("_")


def _recorder(site: Site, passes: list[Pass], batch: int) -> Hook:
    def hook(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        if len(args[0]) != batch:
            raise ValueError(
                f"layer {site.name!r} received a tensor of shape {tuple(args[0].shape)} for a "
                f"batch of {batch}: its first dimension must be the batch"
            )
        output = output if output.requires_grad else output.detach().requires_grad_()
        # Normalised here and now: only inside the run does the module hold its statistics.
        inputs = args[0].detach() if site.is_affine else normalised(module, args[0].detach())
        passes.append(Pass(inputs, output, torch.is_grad_enabled()))
        return output.clone()  # an in-place activation may follow and must not touch ours

    return hook


def output_gradients(logits: Tensor, passes: Passes, cotangent: Tensor) -> Mapping[Site, Tensor]:
    """Pull a cotangent (B, K) of the logits back to the sites' outputs, passes joined.

    Returns (B, [groups,] positions, out) for affine sites, and for scaling ones the gradients as
    they are, stacked by pass in front.
    """
    outputs = [one.output for taken in passes.values() for one in taken]
    with naming_checkpoints():
        pulled = torch.autograd.grad(
            logits, outputs, cotangent, retain_graph=True, allow_unused=True, materialize_grads=True
        )
    grads = iter(pulled)
    return {site: _joined(site, [next(grads) for _ in taken]) for site, taken in passes.items()}


def _joined(site: Site, grads: list[Tensor]) -> Tensor:
    if not site.is_affine:
        return torch.stack(grads)
    return torch.cat([output_positions(site.module, grad) for grad in grads], dim=-2)


def site_inputs(site: Site, passes: list[Pass]) -> Tensor:
    """Return what `output_gradients` pairs with: inputs with a 1 appended for a covered bias.

    (B, [groups,] positions, in [+ 1]) for affine sites; for scaling ones the normalised inputs.
    """
    if not site.is_affine:
        return torch.stack([one.inputs for one in passes])
    parts = [input_positions(site.module, one.inputs) for one in passes]
    inputs = torch.cat(parts, dim=-2)
    return inputs if site.layer.bias is None else functional.pad(inputs, (0, 1), value=1.0)


def input_positions(module: nn.Module, x: Tensor) -> Tensor:
    """Return the vectors that an affine module multiplies: (B, [groups,] positions, in)."""
    if isinstance(module, nn.Linear):
        return x.reshape(len(x), -1, x.shape[-1])
    assert isinstance(module, nn.Conv2d)
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    padded = functional.pad(x, module._reversed_padding_repeated_twice, mode=mode)
    patches = functional.unfold(
        padded, module.kernel_size, dilation=module.dilation, stride=module.stride
    )
    return _grouped(patches, module.groups)


def output_positions(module: nn.Module, y: Tensor) -> Tensor:
    """Return an affine module's outputs, or gradients at them: (B, [groups,] positions, out)."""
    if isinstance(module, nn.Linear):
        return y.reshape(len(y), -1, y.shape[-1])
    assert isinstance(module, nn.Conv2d)
    return _grouped(y.flatten(2), module.groups)


def from_positions(module: nn.Module, y: Tensor, shape: torch.Size) -> Tensor:
    """Invert `output_positions`, for an output whose dimensions behind the batch are `shape`."""
    features_first = isinstance(module, nn.Conv2d)
    return (y.mT if features_first else y).reshape(len(y), *shape)


def _grouped(features_first: Tensor, groups: int) -> Tensor:
    """Turn (B, features, positions) into (B, [groups,] positions, features / groups)."""
    if groups == 1:
        return features_first.mT
    return features_first.unflatten(1, (groups, -1)).mT


def normalised(module: nn.Module, x: Tensor) -> Tensor:
    """Return what a scaling layer multiplies its weight with."""
    if isinstance(module, nn.LayerNorm):
        return functional.layer_norm(x, module.normalized_shape, eps=module.eps)
    if isinstance(module, nn.GroupNorm):
        return functional.group_norm(x, module.num_groups, eps=module.eps)
    assert isinstance(module, _BatchNorm)
    return functional.batch_norm(x, module.running_mean, module.running_var, eps=module.eps)


def scaling_gradients(site: Site, inputs: Tensor, grads: Tensor) -> Params:
    """Return one example's gradients of a scaling layer's weight and bias: (B, *shape).

    Both come as (passes, B, ...); all but the batch and the parameter's dimensions is summed.
    """
    weight_grads = {site.layer.weight: inputs * grads}
    if site.layer.bias is not None:
        weight_grads[site.layer.bias] = grads
    return {name: sum_to_parameter(site.module, g.sum(0)) for name, g in weight_grads.items()}


def sum_to_parameter(module: nn.Module, grads: Tensor) -> Tensor:
    """Sum (B, ...) over all that the module's elementwise parameters are broadcast along."""
    if isinstance(module, nn.LayerNorm):  # parameters live in the last dimensions
        own = len(module.normalized_shape)
        return grads.flatten(1, -own - 1).sum(1) if grads.ndim > own + 1 else grads
    return grads.flatten(2).sum(2) if grads.ndim > 2 else grads
