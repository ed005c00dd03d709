"""The layers of interest, and one forward pass that records what passes through them.

*Affine* layers, Linear and Conv2d, multiply a matrix [W b] with their input at every position: the
single position of a plain Linear layer, the items of a sequence, or the patches of an image.
*Scaling* layers, the normalisation layers, multiply and shift their normalised input elementwise.
Inputs and outputs of affine layers become (B, [groups,] positions, features), so that the same code
serves all of them. A *site* is such a layer, with the names of its covered parameters.

Forward hooks on the private copy of the model's structure keep the input and output of every
*passage* through a site, and a *tape* has them all. Outputs become nodes of the autograd graph, so
that gradients of the logits can be pulled back to them; the weights are not part of the graph where
their layers use them. A hook may also change an output on the way: that is how rows get weights of
their own (see `rows.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import reduce, wraps
from typing import Any, NamedTuple, ParamSpec, TypeAlias, TypeVar, final

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from acnml._algebra.dual import Affine
from acnml._util.batches import Inputs, size
from acnml._util.params import Params
from acnml.classifier import Classifier, Forward, Hook, naming_checkpoints, strays

P = ParamSpec("P")
T = TypeVar("T")

AFFINE = (nn.Linear, nn.Conv2d)
SCALING = (_BatchNorm, nn.LayerNorm, nn.GroupNorm)

WAY_OUT = "leave it out of the posterior, or solve with acnml.solve.Reference"

# What a fit says to do with parameters of layers that it does not know.
OTHER_WAYS = (
    'leave it out of `layers`; or cover the last layer alone, with layers="last"; or use '
    "acnml.fit_swag, which covers any parameters, and solve with acnml.solve.Reference"
)


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


# Positions of affine layers ----------------------------------------------------------------------


def input_vectors(site: Site, x: Tensor) -> Tensor:
    """Return what an affine layer multiplies: (B, [groups,] positions, in [+ 1]).

    A 1 is appended for a covered bias.
    """
    module = site.module
    if isinstance(module, nn.Linear):
        vectors = x.reshape(len(x), -1, x.shape[-1])
    else:
        assert isinstance(module, nn.Conv2d)
        mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        padded = functional.pad(x, module._reversed_padding_repeated_twice, mode=mode)
        patches = functional.unfold(
            padded, module.kernel_size, dilation=module.dilation, stride=module.stride
        )
        vectors = _grouped(patches, module.groups)
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


# Scaling layers ----------------------------------------------------------------------------------


def normalised(module: nn.Module, x: Tensor) -> Tensor:
    """Return what a scaling layer multiplies its weight with."""
    if isinstance(module, nn.LayerNorm):
        return functional.layer_norm(x, module.normalized_shape, eps=module.eps)
    if isinstance(module, nn.GroupNorm):
        return functional.group_norm(x, module.num_groups, eps=module.eps)
    assert isinstance(module, _BatchNorm)
    return functional.batch_norm(x, module.running_mean, module.running_var, eps=module.eps)


def applied(module: nn.Module, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Run a convolution or scaling layer on rows x (R, ...), with parameters (R, *shape)."""

    def broadcast(values: Tensor) -> Tensor:
        where = 1 if isinstance(module, nn.LayerNorm) else values.ndim
        missing = [1] * (x.ndim - values.ndim)
        return values.reshape(*values.shape[:where], *missing, *values.shape[where:])

    if isinstance(module, nn.Conv2d):
        # Rows become the groups of one grouped convolution, at the cost of a plain one.
        run = torch.func.vmap(lambda row, kernel: module._conv_forward(row, kernel, None))
        product = run(x.unsqueeze(1).to(weight.dtype), weight).squeeze(1)
    else:
        product = normalised(module, x).to(weight.dtype) * broadcast(weight)
    return product if bias is None else product + broadcast(bias)


def scaling_gradients(site: Site, received: Sequence[Tensor], deltas: Sequence[Tensor]) -> Params:
    """Return the gradients of a scaling site for every row, summed over passages: (B, L, *shape).

    The inputs are normalised and (B, L or 1, ...), the gradients at the outputs (B, L, ...).
    """
    pairs = zip(received, deltas, strict=True)
    each = [_scaling_gradients(site.module, x, delta) for x, delta in pairs]
    weight, bias = (reduce(torch.add, parts) for parts in zip(*each, strict=True))
    grads = {site.layer.weight: weight}
    return grads if site.layer.bias is None else {**grads, site.layer.bias: bias}


def _scaling_gradients(module: nn.Module, x: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
    if isinstance(module, nn.LayerNorm):  # parameters live in the last dimensions
        first = delta.ndim - len(module.normalized_shape)
        weight, bias = (
            t.flatten(2, first - 1).sum(2) if first > 2 else t for t in (x * delta, delta)
        )
        return weight, bias
    delta, x = (t.flatten(3) if t.ndim > 3 else t.unsqueeze(3) for t in (delta, x))
    # Labels that share the input take one matrix product per channel.
    shared = x.shape[1] == 1
    weight = torch.einsum("blcp,bcp->blc", delta, x[:, 0]) if shared else (delta * x).sum(3)
    return weight, delta.sum(3)


# Tapes -------------------------------------------------------------------------------------------


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
    # What the gradients multiply, (B, L or 1, positions, in [+ 1]), where it is known.
    inputs: Tensor | None = None


# What a hook does to an output: (site, module, index of the passage, input, output) -> the new
# output and, where it needed them, the layer inputs as vectors.
Change: TypeAlias = Callable[[Site, nn.Module, int, Tensor, Tensor], tuple[Tensor, Tensor | None]]

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
        grads = iter(self._gradients(cotangent))
        return {site: [next(grads) for _ in passed] for site, passed in self.passages.items()}

    def each_pulled_back(self, cotangents: Tensor) -> Mapping[Site, list[Tensor]]:
        """Pull several cotangents (C, *logits) back at once; gradients are (C, *output)."""
        try:
            with _silent_fallback():
                found = torch.func.vmap(self._gradients)(cotangents)
        except RuntimeError:  # vmap does not know one of the model's operations
            found = tuple(map(torch.stack, zip(*map(self._gradients, cotangents), strict=True)))
        grads = iter(found)
        return {site: [next(grads) for _ in passed] for site, passed in self.passages.items()}

    def _gradients(self, cotangent: Tensor) -> tuple[Tensor, ...]:
        """Return gradients of every output; zeros where the logits do not depend on it."""
        outputs = [one.output for passed in self.passages.values() for one in passed]
        with naming_checkpoints():
            return torch.autograd.grad(
                self.logits,
                outputs,
                cotangent.to(self.logits.dtype),
                retain_graph=True,
                allow_unused=True,
                materialize_grads=True,
            )


@contextmanager
def _silent_fallback() -> Iterator[None]:
    """Let vmap run operations that it does not know one by one, without a warning."""
    functorch: Any = torch._C._functorch
    functorch._set_vmap_fallback_warning_enabled(False)
    try:
        yield
    finally:
        functorch._set_vmap_fallback_warning_enabled(True)


def joined_inputs(site: Site, passages: Sequence[Passage]) -> Tensor:
    """Return an affine site's input vectors of all passages: (B, [groups,] positions, in [+ 1])."""
    return _joined([input_vectors(site, one.received) for one in passages])


def joined_deltas(site: Site, deltas: Sequence[Tensor]) -> Tensor:
    """Return the gradients at an affine site's outputs: (B, [groups,] positions, out)."""
    return _joined([output_positions(site.module, delta) for delta in deltas])


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat([*parts], dim=-2)


# Recording ---------------------------------------------------------------------------------------


def record(
    classifier: Classifier,
    sites: Sequence[Site],
    x: Inputs,
    tensors: Params | None = None,
    change: Change | None = None,
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
        sealed: whether the sites' parameters are left out of the graph; otherwise they are part of
            it if `tensors` require gradients.
    """
    passed: dict[Site, list[Passage]] = {site: [] for site in sites}

    def keeping(site: Site) -> Hook:
        def hook(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
            received, inputs = args[0], None
            require_batch_first(site, received, size(x))
            if change is not None:
                output, inputs = change(site, module, len(passed[site]), received, output)
            output = output if output.requires_grad else output.detach().requires_grad_()
            kept = received.detach()
            kept = kept if site.is_affine else normalised(module, kept)
            tracked, shared = torch.is_grad_enabled(), not received.requires_grad
            passed[site].append(Passage(kept, output, tracked, shared, inputs))
            return output.clone()  # an in-place activation may follow and must not touch ours

        return hook

    hooks = {site.name: keeping(site) for site in sites}
    forwards = folded_norms(classifier.model)
    with torch.inference_mode(False), torch.enable_grad():
        if sealed:
            leaves = classifier.leaves(names_of(sites), tensors)
            view = classifier.hooked(hooks, forwards, hooks)
            logits = view.logits(x, {**(tensors or {}), **leaves})
            _require_no_strays(sites, logits, leaves)
        else:
            logits = classifier.hooked(hooks, forwards).logits(x, tensors)
    return Tape(logits, {site: passages for site, passages in passed.items() if passages})


def folded_norms(model: nn.Module) -> dict[str, Forward]:
    """Return forward passes of batch norms as one product and one sum.

    `vmap` batches the gradient of a product, and takes that of a batch norm apart.
    """
    norms = (name for name, m in model.named_modules() if isinstance(m, _BatchNorm) and is_plain(m))
    return dict.fromkeys(norms, _folded_norm)


def _folded_norm(module: nn.Module, x: Tensor) -> Tensor:
    assert isinstance(module, _BatchNorm)
    assert module.running_mean is not None
    assert module.running_var is not None
    weight = (module.running_var + module.eps).rsqrt()
    weight = weight if module.weight is None else weight * module.weight
    bias = -weight * module.running_mean
    bias = bias if module.bias is None else bias + module.bias
    shape = (-1, *[1] * (x.ndim - 2))
    return (x * weight.view(shape) + bias.view(shape)).to(x.dtype)


def _require_no_strays(sites: Sequence[Site], logits: Tensor, leaves: Params) -> None:
    for name in strays(logits, leaves):
        site = next(site for site in sites if name in site.layer.names)
        raise ValueError(
            f"the model uses {name!r} without calling layer {site.name!r}, so differently from a "
            f"plain {site.kind}; {WAY_OUT}"
        )


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
