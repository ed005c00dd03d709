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
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from types import FunctionType
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


@final
class Structures:
    """A pool of copies of a module's structure in eval mode, one for every concurrent run.

    The copies share all tensors with the module. `functional_call` and hooks modify a module while
    it runs, so two threads must never run the same copy. The template itself is never run.
    """

    def __init__(self, model: nn.Module) -> None:
        self.template = eval_structure(model)
        require_independent(self.template, model)
        self._idle: deque[nn.Module] = deque()  # append and pop are atomic
        self.ready = Ready(model, self.template, {}, {})
        tensors = (*model.parameters(), *model.buffers())
        kinds = {tensor.dtype for tensor in model.parameters() if tensor.is_floating_point()}
        # If the model's parameters have several types, inputs keep their own type.
        self._has_one_type = len(kinds or {t.dtype for t in tensors if t.is_floating_point()}) == 1

    def kind(self, model: nn.Module) -> tuple[torch.device, torch.dtype | None]:
        """Return the device of the inputs of a model, and their type where it is floating point."""
        tensors = chain(model.parameters(), model.buffers())
        first = next(tensors, None)
        device = torch.device("cpu") if first is None else first.device
        if first is None or not self._has_one_type:
            return device, None
        return device, next(t.dtype for t in chain([first], tensors) if t.is_floating_point())

    @contextmanager
    def borrowed(self, changes: Changes) -> Iterator[nn.Module]:
        """Take a copy from the pool, with these changes."""
        try:
            structure = self._idle.pop()
        except IndexError:
            structure = eval_structure(self.template)
        handles = []
        for name in changes.sealed:  # before the hooks, which then see the module as it was
            seal = _Seal()
            module = structure.get_submodule(name)
            handles.append(module.register_forward_pre_hook(seal.close))
            handles.append(module.register_forward_hook(seal.open))
        for name, hook in changes.hooks.items():
            module = structure.get_submodule(name)
            handles.append(module.register_forward_hook(partial(run_hook, hook), with_kwargs=True))
        replaced = [(structure.get_submodule(name), run) for name, run in changes.forwards.items()]
        own = [vars(module).get("forward") for module, _ in replaced]
        for module, run in replaced:
            module.forward = partial(_run_forward, run, module)
        try:
            yield structure
        finally:
            for handle in handles:
                handle.remove()
            for (module, _), forward in zip(replaced, own, strict=True):
                del module.forward  # the method of the class is visible again
                if forward is not None:
                    module.forward = forward
            self._idle.append(structure)


@final
class _ReadyCopy:
    """A copy of a model with everything in place, so that a run costs little beyond the model's.

    It shares the parameters, detached, and hooks stay attached to it. Its buffers are its own and
    are filled before every run, because a module may write to them even in eval mode.
    """

    def __init__(
        self, model: nn.Module, template: nn.Module, overrides: Params, hooks: Mapping[str, Hook]
    ) -> None:
        self.module = eval_structure(template)
        theirs = {slot.path: slot for slot in _slots(model)}
        # Where the model holds its modules and tensors, and which they were.
        self._places: list[tuple[dict[str, Any], str]] = [
            *((slot.store, slot.key) for slot in theirs.values()),
            *((owner._modules, n) for owner in model.modules() for n in owner._modules),
        ]
        tensors = [slot.tensor for slot in theirs.values()]
        self._count = len(tensors)
        self._held = [store.get(key) for store, key in self._places]  # keeps their ids from others
        self.made_for = self.current()
        self.own: list[tuple[dict[str, Any], str, Tensor]] = []
        self.buffers: tuple[list[Tensor], list[Tensor]] = ([], [])
        for slot in _slots(self.module):
            if slot.path in theirs:
                self._take(slot, theirs[slot.path], overrides)
        for name, hook in hooks.items():
            module = self.module.get_submodule(name)
            module.register_forward_hook(partial(run_hook, hook), with_kwargs=True)

    def _take(self, own: _Slot, its: _Slot, overrides: Params) -> None:
        tensor = overrides.get(its.name, its.tensor).detach()
        if not isinstance(its.tensor, nn.Parameter):
            copied = tensor.clone()
            self.buffers[0].append(copied)
            self.buffers[1].append(tensor)
            tensor = copied
        self.own.append((own.store, own.key, tensor))

    def current(self) -> list[int]:
        """Return which modules and tensors the user's model holds, and where their memory is."""
        held = [store.get(key) for store, key in self._places]
        tensors = [tensor for tensor in held[: self._count] if tensor is not None]
        where = (*map(Tensor.data_ptr, tensors), *map(Tensor.numel, tensors))
        return [*map(id, held[self._count :]), *where]


@final
class Ready:
    """A pool of copies that are ready to run, one for every concurrent run of a view."""

    def __init__(
        self, model: nn.Module, template: nn.Module, overrides: Params, hooks: Mapping[str, Hook]
    ) -> None:
        self._of = (model, template, overrides, hooks)
        self._idle: deque[_ReadyCopy] = deque()  # append and pop are atomic

    @contextmanager
    def borrowed(self) -> Iterator[nn.Module]:
        """Take a copy from the pool."""
        ready = self._taken()
        # The last run may have put other tensors in place, and written to buffers.
        for store, key, tensor in ready.own:
            store[key] = tensor
        if ready.buffers[0]:
            with torch.no_grad():
                torch._foreach_copy_(*ready.buffers)
        try:
            yield ready.module
        finally:
            self._idle.append(ready)

    def _taken(self) -> _ReadyCopy:
        """Take a copy that is not out of date; others are dropped."""
        try:
            ready = self._idle.pop()
        except IndexError:
            ready = None
        if ready is not None and ready.current() == ready.made_for:
            return ready
        with torch.inference_mode(False):
            return _ReadyCopy(*self._of)

    def __deepcopy__(self, memo: dict[int, Any]) -> Ready:
        return Ready(*copy.deepcopy(self._of, memo))

    def __reduce__(self) -> tuple[type[Ready], tuple[Any, ...]]:
        return Ready, self._of


@final
@dataclass(frozen=True)
class Changes:
    """What differs from a plain run, by the names of modules; see `Classifier.hooked`."""

    hooks: Mapping[str, Hook] = field(default_factory=dict)
    forwards: Mapping[str, Forward] = field(default_factory=dict)
    sealed: Collection[str] = ()

    @property
    def any(self) -> bool:
        """Whether anything is changed."""
        return bool(self.hooks or self.forwards or self.sealed)


@final
class _Seal:
    """Detaches a module's parameters from the autograd graph while the module itself runs."""

    def __init__(self) -> None:
        self._held: dict[str, nn.Parameter | None] = {}

    def close(self, module: nn.Module, _: tuple[Any, ...]) -> None:
        self._held = dict(module._parameters)
        detached = {n: None if p is None else p.detach() for n, p in self._held.items()}
        module._parameters.update(detached)  # type: ignore[arg-type]

    def open(self, module: nn.Module, _: tuple[Any, ...], __: Tensor) -> None:
        module._parameters.update(self._held)


def _chained(first: Hook, second: Hook) -> Hook:
    """Return a hook that runs two, one after the other."""
    return lambda module, args, output: second(module, args, first(module, args, output))


def run_hook(
    hook: Hook, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
) -> Tensor:
    """Call a hook with a module's arguments, positional or keyword."""
    return hook(module, args or tuple(kwargs.values()), output)


def _run_forward(run: Forward, module: nn.Module, *args: Tensor, **kwargs: Tensor) -> Tensor:
    """Call a forward function with a module's only argument, positional or keyword."""
    (x,) = args or kwargs.values()
    return run(module, x)


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
    # Names of the layers that a posterior covers -> whether the batch may be expanded into one row
    # per label at the first of them (instead of at the model's input), see `_engine/rows.py`.
    parting: dict[frozenset[str], bool] = field(default_factory=dict)
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

    >>> classifier = Classifier(nn.Linear(4, 3))
    >>> classifier.log_probs(torch.zeros(2, 4)).shape
    torch.Size([2, 3])
    """

    def __init__(self, model: nn.Module, get_logits: Callable[[Any], Tensor] | None = None) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"Classifier wraps an nn.Module, got {type(model).__name__}")
        model = unwrapped(model)
        require_viewable(model)
        self.model = model
        self._get_logits = _own_logits if get_logits is None else _Extractor(get_logits)
        self._structures = Structures(model)
        self._changes = Changes()
        self._ready: Ready | None = self._structures.ready
        self.overrides: Params = {}
        self.temperature = 1.0
        self._has_any_shape = False
        self.findings = Findings()

    @property
    def get_logits(self) -> Callable[[Any], Any]:
        """The function from the model's output to its logits."""
        return self._get_logits

    def at(self, tensors: Params) -> Classifier:
        """View the same model with some parameters or buffers replaced by the given tensors.

        Each tensor is converted to the floating point type and moved to the device of the one that
        it replaces.
        """
        own = self.tensors
        checks.require_fits(tensors, own)
        other = copy.copy(self)
        replaced = {name: tensor.detach() for name, tensor in _like(own, tensors).items()}
        other.overrides, other._ready = {**self.overrides, **replaced}, None
        return other

    def tempered(self, temperature: float) -> Classifier:
        """View the same model with its logits divided by a temperature, e.g. to calibrate it.

        Temperatures multiply: `c.tempered(a).tempered(b)` equals `c.tempered(a * b)`. The
        temperature belongs to this view and not to the network, so `copy_module` does not apply it.
        """
        checks.require_positive(temperature, "temperature")
        product = self.temperature * float(temperature)
        other = copy.copy(self)
        other.temperature = checks.require_positive(product, "the product of all temperatures")
        return other

    def untempered(self) -> Classifier:
        """View the same model without a temperature: its logits as the model returns them."""
        other = copy.copy(self)
        other.temperature = 1.0
        return other

    def of_any_shape(self) -> Classifier:
        """View the same model with outputs (B, ...) of any shape in place of logits (B, K)."""
        other = copy.copy(self)
        other._has_any_shape = True
        return other

    def afresh(self) -> Classifier:
        """View the same model with a copy of its structure that has not run yet."""
        other = copy.copy(self)
        other._structures, other._ready = Structures(self.model), None
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
        if self._structures is not other._structures or self.temperature != other.temperature:
            return False
        if self._changes.any or other._changes.any:
            return False
        mine, its = self.tensors, other.tensors
        changed = {*self.overrides, *other.overrides}
        return all(torch.equal(mine[name], its[name]) for name in changed)

    @property
    def device(self) -> torch.device:
        """The device of the model's tensors; the CPU for a model without any."""
        tensors = list((self.parameters or self.tensors).values())
        return tensors[0].device if tensors else torch.device("cpu")

    def copy_parameters(self, names: Iterable[str]) -> Params:
        """Copy the named parameters, e.g. as the mean of a posterior."""
        parameters = self.parameters
        names = list(names)
        checks.require_known(names, parameters)
        return {name: parameters[name].clone() for name in names}

    def copy_module(self, tensors: Params | None = None) -> nn.Module:
        """Return an independent copy of the module in eval mode, with `tensors` replaced."""
        own = self.tensors
        checks.require_fits(tensors or {}, own)
        module = copy.deepcopy(self._structures.template)
        values = {**own, **(tensors or {})}
        with torch.no_grad():
            for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
                tensor.copy_(values[name])
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
        device, dtype = self._structures.kind(self.model)
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
        if self._ready is not None and not tensors:
            with self._ready.borrowed() as module:
                return self._logits(x, module, batches.size(x) * rows)
        # Buffers are cloned because a module may write to them, even in eval mode.
        named = {}
        for name, _, _, _, own in _slots(self.model):
            tensor = self.overrides.get(name, own).detach()
            named[name] = tensor if isinstance(own, nn.Parameter) else tensor.clone()
        values = named
        if tensors:
            checks.require_known(tensors, named)
            values = {**named, **_like(named, tensors)}
        with self._structures.borrowed(self._changes) as structure:
            run = partial(_run_with, structure, values)
            return self._logits(x, run, batches.size(x) * rows)

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
        other, old = copy.copy(self), self._changes
        both = {n: _chained(old.hooks[n], hooks[n]) for n in hooks if n in old.hooks}
        other._changes = Changes(
            {**old.hooks, **hooks, **both},
            {**old.forwards, **(forwards or {})},
            (*old.sealed, *sealed),
        )
        other._ready = None
        return other

    def observed(self, hooks: Mapping[str, Hook]) -> Classifier:
        """View the same model with hooks that stay attached, for a view that runs many times."""
        other = self.hooked(hooks)
        hooks = other._changes.hooks
        other._ready = Ready(self.model, self._structures.template, self.overrides, hooks)
        return other

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
        picked = self._get_logits(output)
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
            _checked_logits(self._get_logits(output), 1, self._has_any_shape)
        except Exception:  # it fails for another reason, which the first error names
            return
        shapes = {name: tuple(t.shape) for name, t in batches.named_tensors(x).items()}
        raise ValueError(
            f"the batch dimension is missing: inputs of shape {shapes} are one input to this "
            "model; pass x[None] or x.unsqueeze(0) instead of x"
        )

    def threads_for(self, x: Inputs) -> AbstractContextManager[None]:
        """Use one thread if a forward pass of this batch is little work, or as many as before."""
        if torch.get_num_threads() == 1 or self._structures.kind(self.model)[0].type != "cpu":
            return nullcontext()
        findings = self.findings
        if findings.products is None:
            with one_thread():
                findings.products = _products(self, batches.take(x, slice(0, 1)))
        return threads_for(batches.size(x) * findings.products)

    def __repr__(self) -> str:
        tempered = "" if self.temperature == 1 else f", temperature={self.temperature:g}"
        return f"Classifier({type(self.model).__name__}{tempered})"


@final
@dataclass(frozen=True)
class _Extractor:
    """A user's function from the model's output to the logits; pickled if the function can be."""

    function: Callable[[Any], Tensor]

    def __post_init__(self) -> None:
        if not callable(self.function):
            kind = type(self.function).__name__
            raise TypeError(f"get_logits must be a function of the model's output, got {kind}")

    def __call__(self, output: Any) -> Tensor:
        return self.function(output)

    def __deepcopy__(self, memo: Mapping[int, Any]) -> _Extractor:
        return self  # functions are not copied

    def __reduce__(self) -> tuple[type[_Extractor], tuple[Callable[[Any], Tensor]]]:
        function = self.function
        if isinstance(function, FunctionType) and "<" in function.__qualname__:
            raise TypeError(
                "this Classifier cannot be pickled, because its get_logits is a lambda or a local "
                'function; use operator.attrgetter("logits") or operator.itemgetter(0), or define '
                "the function with `def` at the top level of a module"
            )
        return _Extractor, (function,)


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


class _Slot(NamedTuple):
    """Where a module keeps one of its tensors."""

    name: str  # the first name of the tensor, if several modules share it
    path: str  # its name here
    store: dict[str, Any]  # `_parameters` or `_buffers` of the module that holds it
    key: str
    tensor: Tensor


def _slots(module: nn.Module) -> list[_Slot]:
    """Return where a module and its children keep parameters and buffers, in one walk."""
    found, names, seen = [], dict[int, str](), set[int]()
    waiting = [("", module)]  # recursion through generators, as in `named_modules`, is slow
    while waiting:
        prefix, owner = waiting.pop()
        if id(owner) in seen:
            continue
        seen.add(id(owner))
        for store in (owner._parameters, owner._buffers):
            for key, tensor in store.items():
                if tensor is not None:
                    name = names.setdefault(id(tensor), prefix + key)
                    found.append(_Slot(name, prefix + key, store, key, tensor))
        children = [
            (f"{prefix}{n}.", child) for n, child in owner._modules.items() if child is not None
        ]
        waiting += reversed(children)
    return found


def _run_with(module: nn.Module, tensors: Params, *args: Any, **kwargs: Any) -> Any:
    """Run a module with other tensors by name, as `torch.func.functional_call` does, but faster."""
    replaced = [slot for slot in _slots(module) if slot.name in tensors]
    try:
        for slot in replaced:
            slot.store[slot.key] = tensors[slot.name]
        return module(*args, **kwargs)
    finally:
        for slot in replaced:
            slot.store[slot.key] = slot.tensor


def _like(own: Params, tensors: Params) -> Params:
    """Bring each tensor to the device and the type of the tensor of the same name in `own`."""
    return {n: tensor.to(own[n].device, own[n].dtype) for n, tensor in tensors.items()}


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
    layers = {n: m for n, m in classifier.model.named_modules() if isinstance(m, COUNTED)}
    known = {id(layer.weight) for layer in layers.values()}
    for module in classifier.model.modules():
        for parameter in module.parameters(recurse=False):
            is_matrix = parameter.ndim > 1 and not isinstance(module, nn.Embedding)
            if is_matrix and id(parameter) not in known:
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
