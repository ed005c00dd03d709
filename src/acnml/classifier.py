"""Classifier: a frozen, eval-mode view of any `nn.Module` that returns logits.

The library treats a network as a function of its inputs and its named tensors (parameters and
buffers). It never runs the user's module. It runs a private copy of the module's structure in eval
mode and passes the tensors in: either the module's own or replacements for them. The mode,
parameters, buffers and gradients of the user's module therefore never change, even if a call fails.
"""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError

from acnml._util import batches, checks
from acnml._util.batches import Inputs
from acnml._util.params import Params
from acnml._util.structure import eval_structure, require_independent, require_viewable, unwrapped
from acnml._util.torch_state import one_thread, threads_for

NO_CHECKPOINTS = "switch the model's gradient checkpointing off"
FLOATS = "if the inputs are integers, convert them: x.float() or x.astype('float32')"

# Part of an error message from torch -> advice to append to it.
REMEDIES = {
    "saved tensor hooks": NO_CHECKPOINTS,
    "_NoopSaveInputs": NO_CHECKPOINTS,  # in torch 2.6
    "NestedTensorImpl": "build the nn.TransformerEncoder with enable_nested_tensor=False",
    "must have the same dtype": FLOATS,
    "should be the same": FLOATS,
    "positional arguments but": "in a tuple from a loader, all elements but the last are inputs",
}


# Replaces the forward pass of a module: (module, its input) -> output.
Forward: TypeAlias = Callable[[nn.Module, Tensor], Tensor]
# A forward hook: (module, its arguments, its output) -> new output.
Hook: TypeAlias = Callable[[nn.Module, tuple[Any, ...], Tensor], Tensor]


# Changes a copy of the model for one run, and leaves in the stack how to undo it.
Change: TypeAlias = Callable[[nn.Module, ExitStack], None]


def _add_hook(name: str, hook: Hook, structure: nn.Module, undo: ExitStack) -> None:
    """Add a forward hook to a module by name."""
    module = structure.get_submodule(name)
    undo.callback(module.register_forward_hook(partial(run_hook, hook), with_kwargs=True).remove)


def run_hook(
    hook: Hook, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
) -> Tensor:
    """Call a hook with a module's arguments, positional or keyword."""
    return hook(module, args or tuple(kwargs.values()), output)


def _replace_forward(name: str, run: Forward, structure: nn.Module, undo: ExitStack) -> None:
    """Replace the forward pass of a module by name, which has a single argument."""
    module = structure.get_submodule(name)

    def forward(*args: Tensor, **kwargs: Tensor) -> Tensor:
        (x,) = args or kwargs.values()
        return run(module, x)

    _set_forward(module, forward, undo)


def _seal(name: str, structure: nn.Module, undo: ExitStack) -> None:
    """Detach a module's parameters from the autograd graph while the module runs."""
    module = structure.get_submodule(name)
    inner = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        held = dict(module._parameters)
        detached: Any = {name: None if p is None else p.detach() for name, p in held.items()}
        module._parameters.update(detached)
        try:
            return inner(*args, **kwargs)
        finally:
            module._parameters.update(held)

    _set_forward(module, forward, undo)


def _set_forward(module: nn.Module, forward: Callable[..., Any], undo: ExitStack) -> None:
    if "forward" in vars(module):  # it was already replaced, by the user or by another change
        undo.callback(setattr, module, "forward", module.forward)
    else:
        undo.callback(delattr, module, "forward")  # the method of the class is visible again
    module.forward = forward


@final
class Copies:
    """A pool of copies of a model's structure in eval mode, one for every concurrent run.

    What a run changes in its copy is undone afterwards, so that any view of the model can take the
    copy next. The template itself is never run.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model, self.template = model, eval_structure(model)
        require_independent(self.template, model)
        self._idle: deque[_Copy] = deque()  # append and pop are atomic

    @contextmanager
    def running(self, changes: Iterable[Change], tensors: Params) -> Iterator[nn.Module]:
        """Take a copy, with these changes and with these tensors in place of the model's own."""
        try:
            copied = self._idle.pop()
        except IndexError:
            copied = None
        if copied is None or any(store.get(key) is not it for store, key, it in copied.held):
            with torch.inference_mode(False), torch.no_grad():
                copied = _Copy(self._model, self.template)
        with ExitStack() as undo:
            undo.callback(self._idle.append, copied)
            undo.callback(copied.restore)
            copied.fill(tensors)
            for change in changes:
                change(copied.module, undo)
            yield copied.module

    def __reduce__(self) -> tuple[type[Copies], tuple[nn.Module]]:
        return Copies, (self._model,)


class _Slot(NamedTuple):
    """Where a copy keeps a tensor."""

    store: dict[str, Any]  # `_parameters` or `_buffers` of one of its modules
    key: str
    name: str  # of the tensor in the model; the first, if it has several
    tensor: Tensor  # the model's
    is_buffer: bool


@final
class _Copy:
    """A copy of a model's structure that holds the model's own tensors between runs."""

    def __init__(self, model: nn.Module, template: nn.Module) -> None:
        self.module = eval_structure(template)
        places = {path: (store, key) for path, store, key, _ in _tensors(self.module)}
        names, self._slots = dict[int, str](), list[_Slot]()
        # The modules and tensors of the model, and where it holds them. If it holds others, this
        # copy is out of date.
        self.held: list[tuple[dict[str, Any], str, Any]] = [
            (owner._modules, name, child)
            for owner in model.modules()
            for name, child in owner._modules.items()
        ]
        for path, store, key, tensor in _tensors(model):
            self.held.append((store, key, tensor))
            name = names.setdefault(id(tensor), path)
            if path in places:
                is_buffer = not isinstance(tensor, nn.Parameter)
                self._slots.append(_Slot(*places[path], name, tensor, is_buffer))
        self._names = set(names.values())
        self._buffers = [slot for slot in self._slots if slot.is_buffer]
        self._filled: list[Tensor] | None = None
        self.restore()

    def fill(self, tensors: Params) -> None:
        """Put tensors in place of the model's own.

        A run never has the model's buffers: a module may write to them even in eval mode.
        """
        if tensors or torch.is_grad_enabled():
            checks.require_known(tensors, self._names)
            for store, key, name, its, is_buffer in self._slots:
                given = tensors[name].to(its.device, its.dtype) if name in tensors else its.detach()
                store[key] = given.clone() if is_buffer else given
        elif self._buffers:  # without a graph, which would need them later, memory is used again
            own = [slot.tensor for slot in self._buffers]
            if self._filled is None:
                with torch.inference_mode(False):
                    self._filled = [torch.empty_like(tensor) for tensor in own]
            torch._foreach_copy_(self._filled, own)
            for slot, tensor in zip(self._buffers, self._filled, strict=True):
                slot.store[slot.key] = tensor

    def restore(self) -> None:
        """Put the model's own tensors back."""
        for store, key, _, tensor, _ in self._slots:
            store[key] = tensor


def _tensors(module: nn.Module) -> Iterator[tuple[str, dict[str, Any], str, Tensor]]:
    """Yield the name of every tensor of a module and its children, and where it is kept."""
    for prefix, owner in module.named_modules():
        for store in (owner._parameters, owner._buffers):
            for key, tensor in store.items():
                if tensor is not None:
                    yield f"{prefix}.{key}".lstrip("."), store, key, tensor


# Layers whose products are counted, see `Classifier.threads_for`.
COUNTED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)

# A model is checked on the first batch, and again on batch 16, 256, 4096, ...
CHECK_AGAIN = 16


@final
@dataclass
class Findings:
    """A cache of facts about a model's structure, so that each is computed only once.

    All views of a model share it. Every entry may be written by several threads at once: they write
    the same, and at worst a check is done twice.
    """

    # Names of covered parameters -> the number of batches seen with them; see `is_due`.
    seen: dict[frozenset[str], int] = field(default_factory=dict)
    # Names of covered parameters with which rows of a batch were found not to depend on each other.
    apart: set[frozenset[str]] = field(default_factory=set)
    # Names of parameters -> the Linear layer that owns them all, or None; see `problem.py`.
    only_linear: dict[frozenset[str], Any] = field(default_factory=dict)
    # Name of a Linear layer -> whether the logits are its outputs, see `problem.py`.
    last_layers: dict[str, bool] = field(default_factory=dict)
    # Products in a forward pass of one input, see `Classifier.threads_for`.
    products: float | None = None

    def is_due(self, covered: Iterable[str], x: Inputs) -> bool:
        """Count a batch, and return whether `_engine/trust.py` should check the model on it.

        The first batch with several rows is due, and batches 16, 256, 4096, ..., in case later data
        take another path through the model. If parameters are covered, the first batch is due
        even if it is a single row. If none are, any check with covered parameters counts.
        """
        names, size = frozenset(covered), batches.size(x)
        seen = self.seen[names] = self.seen.get(names, 0) + 1
        are_apart = names in self.apart or bool(self.apart and not names)
        if not are_apart and size > 1:
            return True
        while seen > 1 and seen % CHECK_AGAIN == 0:
            seen //= CHECK_AGAIN
        return seen == 1 and (bool(names) or self.seen[names] > 1)


@final
class Classifier:
    """A frozen, eval-mode view of a module that maps inputs (B, ...) to logits (B, K).

    A Classifier shares its tensors with the module: if the module is trained further, the
    Classifier changes with it. To avoid this, pass `copy.deepcopy(module)`. A Classifier and its
    views (`at`, `tempered`) are thread-safe, because each run uses its own copy of the structure.

    Args:
        model: the trained network. Inputs may be a tensor, a tuple (positional arguments) or a
            mapping (keyword arguments).
        get_logits: extracts the logits from the model's output. By default the output itself or,
            if it is not a tensor, its attribute `logits`, as for `transformers` models. A lambda
            works too, but a Classifier that has one cannot be pickled, e.g. sent to another
            process.

    >>> classifier.log_probs(torch.zeros(2, 4)).shape
    torch.Size([2, 3])
    """

    def __init__(self, model: nn.Module, get_logits: Callable[[Any], Tensor] | None = None) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"Classifier wraps an nn.Module, got {type(model).__name__}")
        model = unwrapped(model)
        require_viewable(model)
        self.model = model
        self.get_logits = get_logits or _own_logits
        self._copies = Copies(model)
        floats = [t.dtype for t in model.parameters() if t.is_floating_point()]
        floats = floats or [t.dtype for t in model.buffers() if t.is_floating_point()]
        # If the model's parameters have several types, inputs keep their own type.
        self._has_one_type = len(set(floats)) == 1
        self._changes: tuple[Change, ...] = ()
        self.overrides: Params = {}
        self.temperature = 1.0
        self._has_any_shape = False
        self.findings = Findings()

    def at(self, tensors: Params) -> Classifier:
        """View the same model with some parameters or buffers replaced by the given tensors.

        Each tensor is converted to the floating point type and moved to the device of the one that
        it replaces.
        """
        own = self.tensors
        checks.require_fits(tensors, own)
        replaced = {n: t.detach().to(own[n].device, own[n].dtype) for n, t in tensors.items()}
        return self._with(overrides={**self.overrides, **replaced})

    def tempered(self, temperature: float) -> Classifier:
        """View the same model with its logits divided by a temperature, e.g. to calibrate it.

        Temperatures multiply: `c.tempered(a).tempered(b)` equals `c.tempered(a * b)`. The
        temperature belongs to this view and not to the network, so `copy_module` does not apply it.
        """
        checks.require_positive(temperature, "temperature")
        product = self.temperature * float(temperature)
        checks.require_positive(product, "the product of all temperatures")
        return self._with(temperature=product)

    def untempered(self) -> Classifier:
        """View the same model without a temperature: its logits as the model returns them."""
        return self._with(temperature=1.0)

    def of_any_shape(self) -> Classifier:
        """View the same model with outputs (B, ...) of any shape in place of logits (B, K)."""
        return self._with(_has_any_shape=True)

    def afresh(self) -> Classifier:
        """View the same model with a copy of its structure that has not run yet."""
        return self._with(_copies=Copies(self.model))

    def _with(self, **changes: Any) -> Classifier:
        other = copy.copy(self)
        vars(other).update(changes)
        return other

    @property
    def parameters(self) -> Params:
        """The current parameters by name: detached, not copied."""
        named = {name: tensor.detach() for name, tensor in self.model.named_parameters()}
        return {name: self.overrides.get(name, tensor) for name, tensor in named.items()}

    @property
    def tensors(self) -> Params:
        """The current parameters and buffers by name: detached, not copied."""
        buffers = {name: tensor.detach() for name, tensor in self.model.named_buffers()}
        return {**self.parameters, **{n: self.overrides.get(n, t) for n, t in buffers.items()}}

    def agrees_with(self, other: Classifier) -> bool:
        """Return whether `other` is a view of the same model that computes the same logits."""
        if self._copies is not other._copies or self.temperature != other.temperature:
            return False
        if self._changes or other._changes:
            return False
        mine, its = self.tensors, other.tensors
        changed = {*self.overrides, *other.overrides}
        return all(torch.equal(mine[name], its[name]) for name in changed)

    @property
    def device(self) -> torch.device:
        """The device of the model's tensors; the CPU for a model without any."""
        first = next(chain(self.model.parameters(), self.model.buffers()), None)
        return torch.device("cpu") if first is None else first.device

    def copy_parameters(self, names: Iterable[str]) -> Params:
        """Copy the named parameters, e.g. as the mean of a posterior."""
        parameters = self.parameters
        names = list(names)
        checks.require_known(names, parameters)
        return {name: parameters[name].clone() for name in names}

    def copy_module(self) -> nn.Module:
        """Return an independent copy of the module in eval mode, with the tensors of this view."""
        module, own = copy.deepcopy(self._copies.template), self.tensors
        with torch.no_grad():
            for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
                tensor.copy_(own[name])
        return module

    @torch.inference_mode(False)
    def prepare(self, x: Inputs) -> Inputs:
        """Check a batch and bring it to the model's device and floating point type.

        Labels in a mapping are left out, so that a model that takes them computes no loss.
        """
        if isinstance(x, Mapping):
            x = batches.without_labels(x)
        if batches.size(x) == 0:
            raise ValueError("the batch is empty: pass at least one input")
        for name, tensor in batches.named_tensors(x).items():
            if tensor.is_floating_point():
                bounded = tensor
                if not isinstance(x, Tensor):  # additive attention masks contain -inf
                    bounded = tensor.clamp(min=torch.finfo(tensor.dtype).min)
                checks.require_finite(bounded, f"input {name} is", "clean the data first")
        device, dtype = self.device, None
        if self._has_one_type:
            tensors = chain(self.model.parameters(), self.model.buffers())
            dtype = next(tensor.dtype for tensor in tensors if tensor.is_floating_point())
        if any(tensor.is_inference() for tensor in batches.named_tensors(x).values()):
            x = batches.map_inputs(x, Tensor.clone)
        return batches.map_inputs(
            x, lambda t: t.detach().to(device, dtype if t.is_floating_point() else None)
        )

    def logits(self, x: Inputs, tensors: Params | None = None, rows: int = 1) -> Tensor:
        """Return logits (B, K) with `tensors` in place of the model's own.

        This is a pure, differentiable function of `x` and `tensors` that `torch.func` can
        transform. The tensors are converted to the types and moved to the devices of the model's
        own. If hooks turn every input into several rows, the result is (B · rows, K).
        """
        with self._copies.running(self._changes, {**self.overrides, **(tensors or {})}) as module:
            return self._logits(x, module, batches.size(x) * rows)

    def logits_of(self, module: nn.Module, x: Inputs) -> Tensor:
        """Return the logits (B, K) of `module`, a copy of the model, e.g. one in training."""
        return self._logits(x, module, batches.size(x))

    @contextmanager
    def naming_batch(self, x: Inputs) -> Iterator[None]:
        """If a run of some rows of a batch fails, fail with the error of the whole batch, if any.

        Its shapes are those that the user knows, and a missing batch dimension can be named.
        """
        try:
            yield
        except ValueError:
            with torch.no_grad():
                self.logits(x)
            raise

    def log_probs(self, x: Inputs, tensors: Params | None = None) -> Tensor:
        """Return log p(y|x) as (B, K), in at least single precision."""
        return log_softmax(self.logits(x, tensors))

    def hooked(
        self,
        hooks: Mapping[str, Hook],
        forwards: Mapping[str, Forward] | None = None,
        sealed: Collection[str] = (),
    ) -> Classifier:
        """View the same model with forward hooks on some of its modules, by name.

        Hooks that this view has already run before them. `forwards` replaces the forward pass of
        modules, also by name. Each function receives the module, with the tensors of the current
        run, and its input. Modules named in `sealed` use their own parameters detached from the
        autograd graph: logits that still depend on them do so in another way than through a call
        of the module. The user's module is unchanged.
        """
        added = (
            *(partial(_add_hook, name, hook) for name, hook in hooks.items()),
            *(partial(_replace_forward, name, run) for name, run in (forwards or {}).items()),
            *(partial(_seal, name) for name in sealed),
        )
        return self._with(_changes=(*self._changes, *added))

    def gradient(self, x: Inputs, params: Params, cotangent: Tensor | None = None) -> Params:
        """Return the gradient of ⟨cotangent, logits⟩ with respect to `params`.

        The cotangent has shape (B, K) and defaults to ones. The result omits parameters on which
        the logits do not depend.
        """
        leaves = {name: tensor.detach().requires_grad_() for name, tensor in params.items()}
        with torch.inference_mode(False), torch.enable_grad():
            logits = self.logits(x, leaves)
        if not logits.requires_grad:
            return {}
        weights = torch.ones_like(logits) if cotangent is None else cotangent
        with naming_checkpoints():
            grads = torch.autograd.grad(logits, list(leaves.values()), weights, allow_unused=True)
        return {name: g for name, g in zip(leaves, grads, strict=True) if g is not None}

    def leaves(self, names: Iterable[str], tensors: Params | None = None) -> Params:
        """Return the named parameters, or `tensors` in their place, as leaves of a graph."""
        names, tensors = list(names), tensors or {}
        own = tensors if all(name in tensors for name in names) else {**self.parameters, **tensors}
        return {name: own[name].detach().requires_grad_() for name in names}

    def require_used(self, x: Inputs, params: Params) -> None:
        """Raise an error if the logits depend on none of the parameters."""
        if not self.gradient(batches.take(x, slice(0, 1)), params):
            raise ValueError(
                f"the model's logits use none of the posterior's parameters {sorted(params)}; "
                "fit a posterior over parameters that the forward pass uses"
            )

    def _logits(self, x: Inputs, run: Callable[..., Any], size: int) -> Tensor:
        own = batches.map_inputs(x, Tensor.clone)  # a model may write to its input
        try:
            args, kwargs = batches.as_arguments(own)
            output = run(*args, **kwargs)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            self._require_batch_dimension(x, run)
            shapes = {name: tuple(t.shape) for name, t in batches.named_tensors(x).items()}
            remedies = (f"; {do}" for said, do in REMEDIES.items() if said in str(error))
            what = f"the model failed on inputs of shape {shapes}: {error}{''.join(remedies)}"
            raise ValueError(what) from error
        picked = self.get_logits(output)
        try:
            return _checked_logits(picked, size, self._has_any_shape) / self.temperature
        except ValueError:
            self._require_batch_dimension(x, run)
            raise

    def _require_batch_dimension(self, x: Inputs, run: Callable[..., Any]) -> None:
        """After a failure: raise an error if the model runs once a batch dimension is added."""
        one = batches.map_inputs(x, lambda tensor: tensor.clone().unsqueeze(0))
        try:
            args, kwargs = batches.as_arguments(one)
            output = run(*args, **kwargs)
            _checked_logits(self.get_logits(output), 1, self._has_any_shape)
        except Exception:  # it fails for another reason, which the first error names
            return
        shapes = {name: tuple(t.shape) for name, t in batches.named_tensors(x).items()}
        raise ValueError(
            f"the batch dimension is missing: inputs of shape {shapes} are one input to this "
            "model; pass x[None] or x.unsqueeze(0) instead of x"
        )

    def threads_for(self, x: Inputs) -> AbstractContextManager[None]:
        """Use one thread if a forward pass of this batch is little work, or as many as before."""
        if torch.get_num_threads() == 1 or self.device.type != "cpu":
            return nullcontext()
        findings = self.findings
        if findings.products is None:
            with one_thread():
                findings.products = _products(self, batches.take(x, slice(0, 1)))
        return threads_for(batches.size(x) * findings.products)

    def __repr__(self) -> str:
        tempered = "" if self.temperature == 1 else f", temperature={self.temperature:g}"
        return f"Classifier({type(self.model).__name__}{tempered})"


def log_softmax(logits: Tensor) -> Tensor:
    """Return log-probabilities (B, K), in at least single precision."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    return torch.log_softmax(logits.to(wide), dim=-1)


def without_autocast(like: Tensor) -> AbstractContextManager[object]:
    """Leave autocast inside, on the device of a tensor.

    Autocast computes matrix products in half precision. That may do for a network, but it has too
    few digits for a solver. Where it is off, nothing is entered, so that exported graphs are as
    before.
    """
    kind = like.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


def strays(logits: Tensor, leaves: Params) -> list[str]:
    """Return the parameters that the logits of a run with sealed layers still depend on.

    A model may use a layer's weight without calling the layer, perhaps only for some inputs. What
    is found is in the graph and not in the values: zero gradients do not hide it, and if there is
    nothing to find, there is nothing to compute.
    """
    if not logits.requires_grad:
        return []
    with naming_checkpoints():
        grads = torch.autograd.grad(
            logits, list(leaves.values()), logits.detach(), retain_graph=True, allow_unused=True
        )
    return [name for name, grad in zip(leaves, grads, strict=True) if grad is not None]


def as_classifier(model: nn.Module | Classifier) -> Classifier:
    """Return a classifier as it is, and a view of a module."""
    return model if isinstance(model, Classifier) else Classifier(model)


def require_classifier(value: object) -> None:
    """Raise an error if the value is not a Classifier, for example an unwrapped model."""
    if not isinstance(value, Classifier):
        kind = type(value).__name__
        raise TypeError(
            f"expected a Classifier, got {kind}; wrap the model: acnml.Classifier(model)"
        )


@contextmanager
def naming_checkpoints() -> Iterator[None]:
    """Turn a failure of gradient checkpointing in a backward pass into an error with advice."""
    try:
        yield
    except CheckpointError as error:
        raise ValueError(f"torch.utils.checkpoint cannot be used here; {NO_CHECKPOINTS}") from error


def _own_logits(output: Any) -> Any:
    """Return a tensor as it is, and the attribute `logits` of another output if it has one."""
    return output if isinstance(output, Tensor) else getattr(output, "logits", output)


def _checked_logits(output: Any, size: int, any_shape: bool) -> Tensor:
    """Return the model's output, or raise an error if it is not (size, K) logits with K ≥ 2."""
    if not isinstance(output, Tensor):
        raise TypeError(
            f"the model returned {type(output).__name__}, not a tensor of logits; "
            "pass Classifier(model, get_logits=lambda output: ...)"
        )
    if any_shape and output.shape[:1] == (size,):
        return output.unsqueeze(1) if output.ndim == 1 else output
    if output.shape[:1] != (size,) or output.ndim > 2:
        raise ValueError(f"logits must have shape ({size}, K), got {tuple(output.shape)}")
    if output.ndim == 1 or output.shape[1] < 2:
        raise ValueError(
            "the model has one output, but a classifier needs K ≥ 2 logits: "
            "for a binary model with logit z, return [0, z]"
        )
    return output


def _products(classifier: Classifier, one: Inputs) -> float:
    """Count the products in the layers of a forward pass; ∞ if some cannot be counted."""
    modules = dict(classifier.model.named_modules())
    layers = {name: each for name, each in modules.items() if isinstance(each, COUNTED)}
    known = {
        id(each.weight) for each in modules.values() if isinstance(each, (*COUNTED, nn.Embedding))
    }
    if any(p.ndim > 1 and id(p) not in known for p in classifier.model.parameters()):
        return math.inf
    counts: list[int] = []

    def counted(layer: nn.Module, _: Any, output: Tensor, inputs: int) -> Tensor:
        counts.append(output.numel() * inputs)  # each number of the output sums up so many products
        return output

    hooks = {n: partial(counted, inputs=layer.weight[0].numel()) for n, layer in layers.items()}
    try:
        with torch.no_grad():
            classifier.hooked(hooks).logits(classifier.prepare(one))
    except (ValueError, TypeError):  # the pass itself will fail, and its error names the batch
        return math.inf
    return sum(counts)
