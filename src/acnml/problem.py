"""Problem: the logits of inputs and their covariance, and who makes one.

With f(θ) ≈ f(μ) + J(θ - μ) and θ ~ N(μ, Σ), the logits of an input are Gaussian. Their mean is
z = f(μ) and their covariance V = JΣJᵀ, one K×K matrix per input. ACNML, its first order and
GLM-Laplace need nothing else of an input. If the posterior covers the last Linear layer alone, the
network is linear in it: no Jacobian is needed, and V has a structure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar, final

import torch
from torch import Tensor
from torch.func import jacrev, vmap

from acnml._algebra.dual import Affine
from acnml._algebra.kernels import DenseKernel, Kernel
from acnml._engine.chunks import row_chunks
from acnml._engine.last_layer import Features, features
from acnml._engine.layers import only_linear, unsupported
from acnml._engine.trust import require_apart
from acnml._util import batches, checks
from acnml._util.batches import Inputs
from acnml._util.memory import default_budget
from acnml._util.params import Params, count
from acnml.classifier import Classifier, without_autocast
from acnml.posteriors.base import Posterior
from acnml.solution import Solution, UnsolvedError

T = TypeVar("T")

# Vectors of K numbers, and K×K matrices, that an input takes at most while it is solved.
VECTORS, MATRICES = 40, 4

# Inputs that take no more bytes are solved for together, whatever memory is free.
UNCUT = 2**26

# Maximum size of a chunk of Jacobians. A chunk contains at least one input, whatever its size.
JACOBIAN_BYTES = 64 * 2**20

REMEDY = "lower alpha, or use a narrower posterior"


@final
@dataclass(frozen=True, eq=False)
class Problem:
    """Logits z and their covariance V, for B inputs and K classes, in double precision.

    Only differences of logits matter: V may lack what all logits of an input share.

    Args:
        logits: z (B, K).
        kernel: V.
        dtype: the precision of answers.

    >>> import acnml, torch
    >>> classifier = acnml.Classifier(torch.nn.Linear(4, 3))
    >>> posterior = acnml.fit_laplace(classifier, torch.randn(100, 4))
    >>> predict = acnml.Acnml(classifier, posterior)
    >>> problem = predict.problem(torch.randn(5, 4))
    >>> [predict.solve_problem(problem.scaled(a)).regret.shape for a in (0.1, 1.0)]
    [torch.Size([5]), torch.Size([5])]
    """

    logits: Tensor
    kernel: Kernel
    dtype: torch.dtype = torch.float64

    @staticmethod
    def of(logits: Tensor, kernel: Kernel) -> Problem:
        """Convert to double precision; answers have the precision of the logits, or single."""
        dtype = torch.promote_types(logits.dtype, torch.float32)
        checks.require_finite(
            kernel.diagonal(), "the covariances of the logits are", REMEDY, UnsolvedError
        )
        return Problem(logits.double(), kernel.double(), dtype)

    def __len__(self) -> int:
        return len(self.logits)

    def scaled(self, alpha: float) -> Problem:
        """Return the problem with αV."""
        checks.require_positive(alpha, "alpha")
        return replace(self, kernel=self.kernel.scaled(alpha))

    def take(self, rows: slice | Tensor) -> Problem:
        """Return the problem of some inputs."""
        return replace(self, logits=self.logits[rows], kernel=self.kernel.take(rows))

    @staticmethod
    def joined(parts: Sequence[Problem]) -> Problem:
        """Return the problems of several batches, made in the same way, as one."""
        logits = torch.cat([part.logits for part in parts])
        return Problem(logits, Kernel.joined([part.kernel for part in parts]), parts[0].dtype)


def each_solved(parts: Iterable[Problem], solve: Callable[[Problem], T], total: int) -> list[T]:
    """Solve the parts of a batch of `total` inputs; errors name inputs by their index in it."""
    solved: list[T] = []
    done = 0
    for problem in parts:
        with checks.counting_from(done, total):
            solved.append(solve(problem))
        done += len(problem)
    return solved


def joined(parts: Sequence[Solution]) -> Solution:
    """Return the solutions of several parts of a batch as one."""
    return Solution(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))


@torch.no_grad()
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
        return _by_rows(classifier, posterior, x, memory, differences)
    return _by_jacobians(classifier, posterior, x)


@torch.no_grad()
def exact_problems(
    classifier: Classifier, posterior: Posterior, x: Inputs, memory: int | None = None
) -> Iterator[Problem] | None:
    """Return the problem in parts if the posterior covers the last layer alone, else None."""
    layer = only_linear(classifier, posterior.mean)
    found = None if layer is None else features(classifier, layer, x, posterior.mean)
    if layer is None or found is None:
        return None
    return of_features(found, posterior, layer.layer, classifier.temperature, memory)


def of_features(
    found: Features,
    posterior: Posterior,
    layer: Affine,
    temperature: float,
    memory: int | None = None,
) -> Iterator[Problem]:
    """Yield the problem of inputs with known features of the last layer, in parts."""

    def part(some: slice) -> Problem:
        own = found.take(some)
        return Problem.of(own.logits, own.kernel(posterior, layer, temperature))

    total, classes = found.logits.shape
    size, largest = total, (VECTORS + MATRICES * classes) * classes * torch.float64.itemsize
    if total * largest > (memory or UNCUT):
        kernel = part(slice(0, 1)).kernel
        matrices = MATRICES * classes if isinstance(kernel, DenseKernel) else 0
        limit = memory or default_budget(found.logits.device)
        size = max(1, limit // ((VECTORS + matrices) * classes * torch.float64.itemsize))
    for start in range(0, total, size):
        with checks.counting_from(start, total):
            yield part(slice(start, start + size))


def _by_rows(
    classifier: Classifier,
    posterior: Posterior,
    x: Inputs,
    memory: int | None,
    differences: bool,
) -> Iterator[Problem]:
    """Compute V from gradients in factored form, as outer products."""
    done, total = 0, batches.size(x)
    for rows, _ in row_chunks(classifier, posterior, x, 1, memory, recorded=False):
        with checks.counting_from(done, total):
            yield Problem.of(rows.start.logits[:, 0].detach(), rows.kernel(differences))
        done += rows.size


def _by_jacobians(classifier: Classifier, posterior: Posterior, x: Inputs) -> Iterator[Problem]:
    """Compute V from full Jacobians, for layers that the engine does not support."""
    if classifier.findings.is_due((), x):
        require_apart(classifier, x)
        classifier.require_used(x, posterior.mean)
    logits = classifier.logits(x, posterior.mean)
    checks.require_finite(logits, "the model's logits are", "check the model and these inputs")
    size = next(iter(posterior.mean.values())).element_size()
    at_once = max(1, JACOBIAN_BYTES // (logits.shape[1] * count(posterior.mean) * size))
    parts = zip(batches.chunks(x, at_once), logits.split(at_once), strict=True)
    for index, (own, its) in enumerate(parts):
        jacobian = _jacobians(classifier, posterior.mean, own)
        with checks.counting_from(index * at_once, len(logits)), without_autocast(its):
            yield Problem.of(its, DenseKernel(_kernel(jacobian, posterior)))


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


def _kernel(jacobian: Params, posterior: Posterior) -> Tensor:
    """Return J Σ Jᵀ (B, K, K), summed over parameters to avoid a copy of the whole Jacobian."""
    moved = posterior.cov_mv(jacobian)
    parts = [_vectors(jacobian[name]) @ _vectors(moved[name]).mT for name in jacobian]
    kernel = torch.stack(parts).sum(0)
    return (kernel + kernel.mT) / 2  # rounding errors make the product slightly asymmetric


def _vectors(tensor: Tensor) -> Tensor:
    """Flatten (B, K, *shape) to (B, K, P), in at least single precision."""
    flat = tensor.reshape(*tensor.shape[:2], -1)
    return flat.to(torch.promote_types(flat.dtype, torch.float32))
