"""Problem: the logits of inputs and their covariance, and who makes one.

With f(θ) ≈ f(μ) + J(θ - μ) and θ ~ N(μ, Σ), the logits of an input are Gaussian. Their mean is
z = f(μ) and their covariance V = JΣJᵀ, one K×K matrix per input. ACNML, its first order and
GLM-Laplace need nothing else of an input. If the posterior covers the last Linear layer alone, the
network is linear in it, and no Jacobian is needed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar, final

import torch
from torch import Tensor, nn
from torch.func import jacrev, vmap
from torch.nn import functional

from acnml._algebra.dual import Affine
from acnml._engine.recorder import AFFINE, Site, Tape, find_sites, record, unsupported
from acnml._engine.rows import row_chunks
from acnml._engine.trust import check
from acnml._util import batches, checks
from acnml._util.batches import Inputs, in_chunks
from acnml._util.params import Params, count
from acnml.classifier import Classifier, strays, without_autocast
from acnml.posteriors.base import Posterior
from acnml.solution import REMEDY, Solution, UnsolvedError

T = TypeVar("T")

# Vectors of K numbers, and K×K matrices, that an input takes at most while it is solved.
VECTORS, MATRICES = 40, 4

# Bytes that the inputs of a part take at most, if nothing else is asked for.
PART = 2**26

# Maximum size of a chunk of Jacobians. A chunk contains at least one input, whatever its size.
JACOBIAN_BYTES = 64 * 2**20


# What may lie between a last layer's output and the logits of a model that is linear in it: our own
# clone, the division by a temperature, and changes of shape or precision.
PLAIN = {
    "CloneBackward0",
    "DivBackward0",
    "ToCopyBackward0",
    "UnsafeViewBackward0",
    "ViewBackward0",
}


@final
@dataclass(frozen=True, eq=False)
class Problem:
    """Logits z and their covariance V, for B inputs and K classes, in double precision.

    Only differences of logits matter: V may lack what all logits of an input share.

    Args:
        logits: z (B, K).
        kernel: V (B, K, K).
        dtype: the precision of answers.

    >>> predict = acnml.Acnml(classifier, posterior)
    >>> problem = predict.problem(torch.randn(5, 4))
    >>> [predict.solve_problem(problem.scaled(a)).regret.shape for a in (0.1, 1.0)]
    [torch.Size([5]), torch.Size([5])]
    """

    logits: Tensor
    kernel: Tensor
    dtype: torch.dtype = torch.float64

    @staticmethod
    def of(logits: Tensor, kernel: Tensor) -> Problem:
        """Convert to double precision; answers have the precision of the logits, or single."""
        dtype = torch.promote_types(logits.dtype, torch.float32)
        checks.require_finite(kernel, "the covariances of the logits are", REMEDY, UnsolvedError)
        kernel = (kernel + kernel.mT) / 2  # rounding errors make products slightly asymmetric
        return Problem(logits.double(), kernel.double(), dtype)

    def __len__(self) -> int:
        return len(self.logits)

    def scaled(self, alpha: float) -> Problem:
        """Return the problem with αV."""
        checks.require_positive(alpha, "alpha")
        return replace(self, kernel=alpha * self.kernel)

    @staticmethod
    def joined(parts: Sequence[Problem]) -> Problem:
        """Return the problems of several batches, made in the same way, as one."""
        logits = torch.cat([part.logits for part in parts])
        return Problem(logits, torch.cat([part.kernel for part in parts]), parts[0].dtype)


def solutions(
    parts: Iterable[Problem], solve: Callable[[Problem], Solution], total: int
) -> Solution:
    """Solve the parts of a batch of `total` inputs; errors name inputs by their index in it."""
    found: list[Solution] = []
    done = 0
    for problem in parts:
        with checks.counting_from(done, total):
            found.append(solve(problem))
        done += len(problem)
    return Solution.joined(found)


class LogitSolver(ABC):
    """A solver that needs only the `Problem` of an input: its logits and their covariance.

    >>> solver: acnml.solve.LogitSolver = acnml.Linearised()
    >>> problem = acnml.problem.Problem(torch.randn(5, 3), torch.eye(3).expand(5, 3, 3))
    >>> solver.of(problem).log_lik.shape
    torch.Size([5, 3])
    """

    memory: int | None = None

    @property
    def takes_problem(self) -> bool:
        """Whether `of` is all that this solver does, with its present settings."""
        return True

    @abstractmethod
    def of(self, problem: Problem) -> Solution:
        """Solve for every label of every input of a problem."""

    def __call__(self, classifier: Classifier, posterior: Posterior, x: Inputs) -> Solution:
        """Solve for every label of every input."""
        parts = problems(classifier, posterior, x, self.memory)
        return solutions(parts, self.of, batches.size(x))

    def log_lik(self, classifier: Classifier, posterior: Posterior, x: Inputs) -> Tensor:
        """Return the log-likelihoods of the solution."""
        return self(classifier, posterior, x).log_lik


# Who makes a problem ------------------------------------------------------------------------------


def problems(
    classifier: Classifier,
    posterior: Posterior,
    x: Inputs,
    memory: int | None = None,
    differences: bool = True,
) -> Iterator[Problem]:
    """Yield the problem of a prepared batch in parts, as many inputs at a time as fit into memory.

    Args:
        classifier: the model.
        posterior: μ and Σ. J is taken at μ, over the parameters that the posterior covers.
        x: the batch.
        memory: bytes that a part may take; by default a share of what is free.
        differences: whether V may be that of the differences of logits from the last one. This
            saves one backward pass of K.
    """
    exact = exact_problems(classifier, posterior, x, memory)
    if exact is not None:
        return exact
    if unsupported(classifier.model, posterior.mean) is None:
        return _counted(_by_rows(classifier, posterior, x, memory, differences), x)
    return _counted(_by_jacobians(classifier, posterior, x), x)


def of_problems(
    classifier: Classifier,
    posterior: Posterior,
    x: Inputs,
    use: Callable[[Problem], T],
    differences: bool = True,
) -> list[T]:
    """Return what a function gives for the problem of every part of a batch of any size."""

    def used(chunk: Inputs) -> list[T]:
        return [use(part) for part in problems(classifier, posterior, chunk, None, differences)]

    chunks = in_chunks(classifier.prepare(x), used, within=classifier.threads_for)
    return [found for parts in chunks for found in parts]


@torch.no_grad()
def exact_problems(
    classifier: Classifier, posterior: Posterior, x: Inputs, memory: int | None = None
) -> Iterator[Problem] | None:
    """Return the problem in parts if the posterior covers the last layer alone, else None."""
    site = only_linear(classifier, posterior.mean)
    if site is None:
        return None
    found = at_last_layer(classifier.at(posterior.mean), site, x)
    if found is None:
        return None
    parts = _of_last_layer(found, posterior, site.layer, classifier.temperature, memory)
    return _counted(parts, x)


def _counted(parts: Iterator[Problem], x: Inputs) -> Iterator[Problem]:
    """Let errors about the parts of a batch name inputs by their index in it."""
    done, total = 0, batches.size(x)
    while done < total:
        with checks.counting_from(done, total):
            part = next(parts)
        yield part
        done += len(part)


# A last layer, in which every network is linear --------------------------------------------------


class LastLayer(NamedTuple):
    """What a last layer receives and returns."""

    inputs: Tensor  # a (N, d [+ 1]), with a 1 appended if the layer has a bias
    logits: Tensor  # z (N, K), divided by the classifier's temperature


def only_linear(classifier: Classifier, names: Iterable[str]) -> Site | None:
    """Return the layer that owns all named parameters, if it is a single plain Linear layer."""
    known, key = classifier.findings.only_linear, frozenset(names)
    if key not in known:
        fits = unsupported(classifier.model, key, AFFINE) is None
        sites = find_sites(classifier.model, key, AFFINE, "") if fits else []
        linear = len(sites) == 1 and isinstance(sites[0].module, nn.Linear)
        known[key] = sites[0] if linear else None
    site: Site | None = known[key]
    return site


def at_last_layer(classifier: Classifier, site: Site, x: Inputs) -> LastLayer | None:
    """Run a prepared batch once; return None if its logits are not the outputs of the layer.

    Args:
        classifier: the model, at the weights in question.
        site: a Linear layer, see `only_linear`.
        x: the inputs.
    """
    findings = classifier.findings
    if is_due := findings.is_due(_names(site), x):
        check(classifier, x, [site])
    if site.name not in findings.last_layers:
        leaves, two = classifier.leaves(_names(site)), batches.take(x, slice(0, 2))
        tape = record(classifier, [site], two, leaves, sealed=False)
        findings.last_layers[site.name] = _is_last_layer(tape, site)
    found = _run(classifier, site, x) if findings.last_layers[site.name] else None
    if is_due and found is not None:
        check(classifier, x, logits=found.logits)
    return found


def _run(classifier: Classifier, site: Site, x: Inputs) -> LastLayer | None:
    """Record the layer's input; return None if the logits of this batch are not its output."""
    passed: list[tuple[Tensor, Tensor]] = []

    def keep(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        # The model may change the output in place later, and must then be found out.
        passed.append((args[0].detach(), output.detach().clone()))
        return output

    # With gradients, and without a graph: nothing depends on the leaves, unless the model uses the
    # layer's weight without calling the layer.
    with torch.inference_mode(False), torch.enable_grad():
        leaves = classifier.leaves(_names(site))
        logits = classifier.hooked({site.name: keep}, sealed=[site.name]).logits(x, leaves)
    if strays(logits, leaves):
        return None
    logits = logits.detach()
    checks.require_finite(logits, "the model's logits are", "check the model and these inputs")
    assert isinstance(site.module, nn.Linear)
    if len(passed) != 1 or passed[0][0].numel() != len(logits) * site.module.in_features:
        return None
    ((received, output),) = passed
    # The structure was checked before. The values show whether this batch took the same way, and
    # that nothing but the temperature divides them.
    if not torch.equal(output.to(logits).view_as(logits) / classifier.temperature, logits):
        return None
    inputs = received.reshape(len(logits), -1)
    if site.layer.bias is not None:
        inputs = functional.pad(inputs, (0, 1), value=1.0)
    return LastLayer(inputs, logits)


def _names(site: Site) -> list[str]:
    return [name for name in (site.layer.weight, site.layer.bias) if name is not None]


def _is_last_layer(tape: Tape, site: Site) -> bool:
    """Whether the logits are the outputs of the layer, reshaped and tempered at most.

    Whatever else a model does with the outputs (dividing them, scoring several items by one layer)
    would be missing in their covariance. Found out from the autograd graph of a few inputs, when
    the model is checked.
    """
    passages = tape.passages.get(site, [])
    if len(passages) != 1 or not passages[0].is_shared:
        return False
    node, last = tape.logits.grad_fn, passages[0].output.grad_fn
    while node is not None and node is not last and type(node).__name__ in PLAIN:
        node = node.next_functions[0][0]
    return node is not None and node is last


def _of_last_layer(
    found: LastLayer,
    posterior: Posterior,
    layer: Affine,
    temperature: float,
    memory: int | None,
) -> Iterator[Problem]:
    """Compute V from what the layer receives."""
    classes = found.logits.shape[1]
    each = (VECTORS + MATRICES * classes) * classes * torch.float64.itemsize
    size = max(1, (memory or PART) // each)
    for inputs, logits in zip(*(tensor.split(size) for tensor in found), strict=True):
        with without_autocast(inputs):  # half precision has too few digits for a solver
            wide = inputs.to(posterior.mean[layer.weight].dtype)
            kernel = posterior.output_kernel(layer, wide) / temperature**2
        yield Problem.of(logits, kernel)


# Any layers: the network is linearised ------------------------------------------------------------


def _by_rows(
    classifier: Classifier,
    posterior: Posterior,
    x: Inputs,
    memory: int | None,
    differences: bool,
) -> Iterator[Problem]:
    """Compute V of a linearised network from gradients in factored form, as outer products."""
    due = classifier.findings.is_due(posterior.mean, x)
    for rows, _ in row_chunks(classifier, posterior, x, 0, memory, recorded=False):
        if due:
            check(classifier.at(posterior.mean), x, rows.sites)
        due = False
        yield Problem.of(rows.start.logits[:, 0].detach(), rows.kernel(differences))


def _by_jacobians(classifier: Classifier, posterior: Posterior, x: Inputs) -> Iterator[Problem]:
    """Compute V from full Jacobians, for layers that the engine does not support."""
    if classifier.findings.is_due((), x):
        check(classifier, x)
        classifier.require_used(x, posterior.mean)
    logits = classifier.logits(x, posterior.mean)
    checks.require_finite(logits, "the model's logits are", "check the model and these inputs")
    size = next(iter(posterior.mean.values())).element_size()
    at_once = max(1, JACOBIAN_BYTES // (logits.shape[1] * count(posterior.mean) * size))
    for own, its in zip(batches.chunks(x, at_once), logits.split(at_once), strict=True):
        jacobian = _jacobians(classifier, posterior.mean, own)
        with without_autocast(its):
            moved = posterior.cov_mv(jacobian)
            # Summed over parameters, to avoid a copy of the whole Jacobian.
            kernels = [_vectors(jacobian[n]) @ _vectors(moved[n]).mT for n in jacobian]
        yield Problem.of(its, torch.stack(kernels).sum(0))


def _jacobians(classifier: Classifier, mean: Params, x: Inputs) -> Params:
    """Return J by name, (B, K, *shape of the parameter)."""

    def logits(params: Params, one: Inputs) -> Tensor:
        batch = batches.map_inputs(one, lambda tensor: tensor.unsqueeze(0))
        return classifier.logits(batch, params).squeeze(0)

    try:
        return vmap(jacrev(logits), in_dims=(None, 0))(mean, x)
    except (RuntimeError, ValueError) as error:  # the model has already run without vmap
        raise ValueError(
            "torch.func.vmap cannot vectorise this model: cover only Linear, Conv2d and "
            "normalisation layers, which do not need it, or solve with "
            f"Reference(rows_at_once=1): {error}"
        ) from error


def _vectors(tensor: Tensor) -> Tensor:
    """Flatten (B, K, *shape) to (B, K, P), in at least single precision."""
    flat = tensor.reshape(*tensor.shape[:2], -1)
    return flat.to(torch.promote_types(flat.dtype, torch.float32))
