"""What the engine knows of layers: which kinds it supports, and their inputs in one format.

Two kinds of layers are supported. *Affine* layers, Linear and Conv2d, multiply a matrix [W b] with
their input at every position: the single position of a plain Linear layer, the items of a sequence,
or the patches of an image. *Scaling* layers, the normalisation layers, multiply and shift their
normalised input elementwise. Inputs and outputs of affine layers become (B, [groups,] positions,
features), so that the same code serves all of them.

The second half of this file runs layers whose weights differ from row to row, and computes weight
gradients for every row. Rows become the groups of one grouped convolution, at the cost of a plain
one; kernels too large for the cache are faster as matrix products with unfolded patches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.grad import conv2d_weight
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from acnml._algebra.dual import Affine
from acnml._util.params import Params

AFFINE = (nn.Linear, nn.Conv2d)
SCALING = (_BatchNorm, nn.LayerNorm, nn.GroupNorm)

# What a fit says to do with parameters of layers that it does not know.
OTHER_WAYS = (
    'leave it out of `layers`; or cover the last layer alone, with layers="last"; or use '
    "acnml.fit_swag, which covers any parameters, and solve with acnml.solve.Reference"
)

# Convolution kernels with more weights than this are applied as matrix products.
LARGEST_GROUPED = 2**18


@final
@dataclass(frozen=True, eq=False)
class Site:
    """A module that owns covered parameters, with their names."""

    name: str  # of the module, "" for the model itself
    module: nn.Module
    layer: Affine

    @property
    def is_affine(self) -> bool:
        """Whether the module is affine; otherwise it is a scaling layer."""
        return isinstance(self.module, AFFINE)

    @property
    def kind(self) -> str:
        """The name of the layer type that the module is an instance of."""
        kinds = (*AFFINE, *SCALING)
        return next(kind.__name__ for kind in kinds if isinstance(self.module, kind)).lstrip("_")

    def multiplied(self, module: nn.Module, x: Tensor) -> Tensor:
        """Return what the weight is multiplied with, given the module's input.

        `module` is the copy that is running: only then does it hold the right statistics.
        """
        return x if self.is_affine else normalised(module, x)


def names_of(sites: Iterable[Site]) -> list[str]:
    """Return the names of the parameters that sites own."""
    return [name for site in sites for name in site.layer.names]


# Finding the layers ------------------------------------------------------------------------------


def find_sites(
    model: nn.Module, names: Iterable[str], kinds: tuple[type[nn.Module], ...], way_out: str
) -> list[Site]:
    """Return the modules that own the named parameters, all of which must be of these kinds."""
    covered = set(names)
    objection = unsupported(model, covered, kinds)
    if objection is not None:
        raise ValueError(f"{objection}; {way_out}")
    return [_site(name, module, own) for name, module, own in _owners(model, covered)]


def unsupported(
    model: nn.Module, names: Iterable[str], kinds: tuple[type[nn.Module], ...] = AFFINE + SCALING
) -> str | None:
    """Return why the named parameters cannot all be handled by the engine, or None if they can."""
    covered = set(names)
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner = first[id(parameter)]
        if name != owner and owner in covered:
            return f"{owner!r} and {name!r} are the same parameter"
    objections = (_objection(name, m, own, kinds) for name, m, own in _owners(model, covered))
    return next(filter(None, objections), None)


def _owners(model: nn.Module, covered: set[str]) -> Iterator[tuple[str, nn.Module, set[str]]]:
    """Yield every module that owns covered parameters, with its name and their local names."""
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        own = {key for key, _ in module.named_parameters(recurse=False) if prefix + key in covered}
        if own:
            yield name, module, own


def _objection(
    name: str, module: nn.Module, own: set[str], kinds: tuple[type[nn.Module], ...]
) -> str | None:
    what = f"layer {name!r} ({type(module).__name__})"
    if isinstance(module, kinds) and "weight" not in module._parameters:
        return f"the weight of {what} is reparametrised, as by weight_norm"
    if not isinstance(module, kinds) or not is_plain(module) or not own <= {"weight", "bias"}:
        return f"{what} with parameters {sorted(own)} is not supported here"
    if "weight" not in own:
        return f"the bias of {what} is covered without its weight"
    return None


def _site(name: str, module: nn.Module, own: set[str]) -> Site:
    prefix = f"{name}." if name else ""
    bias = f"{prefix}bias" if "bias" in own else None
    groups = module.groups if isinstance(module, nn.Conv2d) else 1
    return Site(name, module, Affine(f"{prefix}weight", bias, groups))


def is_plain(module: nn.Module) -> bool:
    """Whether a module of a known kind computes what its kind computes, in a call of its own.

    Subclasses may compute something else, and the `out_proj` of attention is never called.
    """
    kind = next((kind for kind in (*AFFINE, *SCALING) if isinstance(module, kind)), None)
    called = not isinstance(module, NonDynamicallyQuantizableLinear)
    return kind is not None and called and type(module).forward is kind.forward


# Inputs and outputs in one format ----------------------------------------------------------------


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


def input_vectors(site: Site, x: Tensor) -> Tensor:
    """Return the input positions of an affine site, with a 1 appended for a covered bias."""
    vectors = input_positions(site.module, x)
    return vectors if site.layer.bias is None else functional.pad(vectors, (0, 1), value=1.0)


def output_positions(module: nn.Module, y: Tensor) -> Tensor:
    """Return an affine module's outputs, or gradients at them: (B, [groups,] positions, out)."""
    if isinstance(module, nn.Linear):
        return y.reshape(len(y), -1, y.shape[-1])
    assert isinstance(module, nn.Conv2d)
    return _grouped(y.flatten(2), module.groups)


def from_positions(module: nn.Module, y: Tensor, shape: torch.Size) -> Tensor:
    """Invert `output_positions`, for an output with shape (B, *shape)."""
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


def scaling_gradients(site: Site, inputs: Tensor, deltas: Tensor) -> Params:
    """Return the gradients of a scaling layer's weight and bias for every row: (B, L, *shape).

    `inputs` are normalised and (B, L or 1, ...), `deltas` at the layer's outputs are (B, L, ...).
    """
    grads = {site.layer.weight: inputs * deltas}
    if site.layer.bias is not None:
        grads[site.layer.bias] = deltas
    size = len(deltas)
    summed = {n: _sum_to_parameter(site.module, grad.flatten(0, 1)) for n, grad in grads.items()}
    return {name: grad.unflatten(0, (size, -1)) for name, grad in summed.items()}


def _sum_to_parameter(module: nn.Module, grads: Tensor) -> Tensor:
    """Sum (R, ...) over all dimensions that the module's parameters are broadcast along."""
    if isinstance(module, nn.LayerNorm):  # parameters live in the last dimensions
        own = len(module.normalized_shape)
        return grads.flatten(1, -own - 1).sum(1) if grads.ndim > own + 1 else grads
    return grads.flatten(2).sum(2) if grads.ndim > 2 else grads


# Layers with weights of every row's own ----------------------------------------------------------


def forward_per_row(module: nn.Module, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Run a convolution or scaling layer on rows x (R, ...), with weight and bias (R, *shape)."""
    if bias is None and isinstance(module.bias, Tensor):  # the layer has a bias that is not covered
        bias = module.bias.expand(len(weight), *module.bias.shape)
    if isinstance(module, nn.Conv2d):
        return _convolve(module, x, weight, bias)
    return _scale(module, x, weight, bias)


def _convolve(module: nn.Conv2d, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    rows, out_size = weight.shape[:2]
    padded, padding = _padded(module, x)
    if _is_large(module):
        output = weight.flatten(2) @ input_positions(module, x).mT
        output = output.unflatten(2, _output_shape(module, padded, padding))
    else:
        output = functional.conv2d(
            padded.flatten(0, 1).unsqueeze(0),
            weight.flatten(0, 1),
            None,
            module.stride,
            padding,
            module.dilation,
            rows * module.groups,
        ).unflatten(1, (rows, out_size))[0]
    return output if bias is None else output + bias[:, :, None, None]


def _scale(module: nn.Module, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    bias = torch.zeros_like(weight) if bias is None else bias
    if isinstance(module, _BatchNorm):
        assert module.running_var is not None
        assert module.running_mean is not None
        # Fold the statistics into weight and bias: activations are large and are read only once.
        weight = weight * (module.running_var + module.eps).rsqrt()
        bias = bias - weight * module.running_mean
    else:
        x = normalised(module, x)
    weight, bias = (_broadcast(module, values, x.ndim) for values in (weight, bias))
    return torch.addcmul(bias, x, weight)


def _broadcast(module: nn.Module, values: Tensor, ndim: int) -> Tensor:
    """Shape a parameter (R, *shape) to act on tensors (R, ...)."""
    missing = ndim - values.ndim
    where = 1 if isinstance(module, nn.LayerNorm) else values.ndim
    return values.reshape(*values.shape[:where], *[1] * missing, *values.shape[where:])


def convolution_gradients(site: Site, inputs: Tensor, deltas: Tensor) -> Params:
    """Return the gradients of a convolution's parameters for every row: (B, L, *shape).

    `inputs` are (B, L or 1, ...), `deltas` at the outputs (B, L, ...).
    """
    assert isinstance(site.module, nn.Conv2d)
    grads = {site.layer.weight: _weight_gradients(site.module, inputs, deltas)}
    if site.layer.bias is not None:
        grads[site.layer.bias] = deltas.sum((3, 4))
    return grads


def _weight_gradients(module: nn.Conv2d, inputs: Tensor, deltas: Tensor) -> Tensor:
    size, labels = deltas.shape[:2]
    rows, shape = size * labels, module.weight.shape
    if module.groups == 1 and (inputs.shape[1] == 1 or _is_large(module)):
        # Rows that share an input share its patches, and one matrix product serves them.
        patches = input_positions(module, inputs.flatten(0, 1)).unflatten(0, (size, -1))
        by_input = deltas.flatten(3) if inputs.shape[1] > 1 else deltas.flatten(1, 2).flatten(2)
        return (by_input @ patches.squeeze(1)).view(size, labels, *shape)
    x = inputs.expand(-1, labels, *inputs.shape[2:]).flatten(0, 1)
    padded, padding = _padded(module, x)
    gradient = conv2d_weight(
        padded.flatten(0, 1).unsqueeze(0),
        torch.Size((rows * shape[0], *shape[1:])),
        deltas.flatten(0, 2).unsqueeze(0),
        module.stride,
        padding,
        module.dilation,
        rows * module.groups,
    )
    return gradient.view(size, labels, *shape)


def _is_large(module: nn.Conv2d) -> bool:
    return module.groups == 1 and module.weight.numel() > LARGEST_GROUPED


def _padded(module: nn.Conv2d, x: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Return the input and the zero padding to convolve with; pad other modes right away."""
    if module.padding_mode == "zeros" and not isinstance(module.padding, str):
        return x, module.padding
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    return functional.pad(x, module._reversed_padding_repeated_twice, mode=mode), (0, 0)


def _output_shape(module: nn.Conv2d, padded: Tensor, padding: tuple[int, ...]) -> list[int]:
    sizes = zip(
        padded.shape[2:],
        padding,
        module.dilation,
        module.kernel_size,
        module.stride,
        strict=True,
    )
    return [(size + 2 * p - d * (k - 1) - 1) // s + 1 for size, p, d, k, s in sizes]
