"""Linearise the network in its parameters at the posterior mean.

With f(θ) ≈ f(μ) + J(θ - μ) and θ ~ N(μ, Σ), the logits of an input are Gaussian. Their mean is f(μ)
and their covariance is J Σ Jᵀ, one K×K matrix per input. This covariance is called the kernel.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import jacrev, vmap

from acnml._algebra.kernels import DenseKernel, Kernel
from acnml._engine.chunks import row_chunks
from acnml._engine.layers import unsupported
from acnml._engine.trust import require_apart
from acnml._util import batches, checks
from acnml._util.batches import Inputs
from acnml._util.params import Params, count
from acnml.classifier import Classifier
from acnml.head.features import features, only_linear
from acnml.posteriors import Posterior

# Maximum size of a chunk of Jacobians. A chunk contains at least one input, whatever its size.
JACOBIAN_BYTES = 64 * 2**20


class LogitMoments(NamedTuple):
    """The Gaussian N(f_μ(x), J Σ Jᵀ) over logits, in at least single precision."""

    logits: Tensor  # (B, K)
    kernel: Tensor  # (B, K, K), exactly symmetric


@torch.no_grad()
def logit_moments(classifier: Classifier, posterior: Posterior, x: Inputs) -> LogitMoments:
    """Return the logits at the posterior mean and their kernel J Σ Jᵀ, for a prepared batch.

    J = ∂ logits / ∂ θ at θ = μ, over the parameters that the posterior covers.
    """
    logits, kernel = logit_kernel(classifier, posterior, x)
    matrix = kernel.dense()
    checks.require_finite(matrix, "the logits' covariances are", "check the posterior's")
    return LogitMoments(_wide(logits), _wide(matrix))


@torch.no_grad()
def logit_kernel(classifier: Classifier, posterior: Posterior, x: Inputs) -> tuple[Tensor, Kernel]:
    """Return the moments without writing the kernel out: a last layer's has a structure."""
    layer = only_linear(classifier, posterior.mean)
    found = None if layer is None else features(classifier, layer, x, posterior.mean)
    if layer is not None and found is not None:
        return found.logits, found.kernel(posterior, layer.layer, classifier.temperature)
    supported = unsupported(classifier.model, posterior.mean) is None
    logits, matrix = (_by_rows if supported else _by_jacobians)(classifier, posterior, x)
    return logits, DenseKernel(matrix)


def _by_rows(classifier: Classifier, posterior: Posterior, x: Inputs) -> tuple[Tensor, Tensor]:
    """Compute the kernel from gradients in factored form, as outer products."""
    parts = []
    for rows, _ in row_chunks(classifier, posterior, x, 1, memory=None, recorded=False):
        logits = rows.start.logits[:, 0].detach()
        each = torch.eye(logits.shape[1], dtype=logits.dtype, device=logits.device)
        parts.append((logits, rows.tangent_of(each).kernel()))
    logits, kernel = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    return logits, kernel


def _by_jacobians(classifier: Classifier, posterior: Posterior, x: Inputs) -> tuple[Tensor, Tensor]:
    """Compute the kernel from full Jacobians, for layers that the engine does not support."""
    if classifier.findings.is_due((), x):
        require_apart(classifier, x)
    logits = classifier.logits(x, posterior.mean)
    checks.require_finite(logits, "the model's logits are", "check the model and these inputs")
    at_once = _inputs_at_once(posterior.mean, classes=logits.shape[1])
    jacobians = (_jacobians(classifier, posterior.mean, b) for b in batches.chunks(x, at_once))
    return logits, torch.cat([_kernel(jacobian, posterior) for jacobian in jacobians])


def _inputs_at_once(mean: Params, classes: int) -> int:
    bytes_per_number = next(iter(mean.values())).element_size()
    return max(1, JACOBIAN_BYTES // (classes * count(mean) * bytes_per_number))


def _jacobians(classifier: Classifier, mean: Params, x: Inputs) -> Params:
    """Return J by name, (B, K, *shape of the parameter)."""

    def logits(params: Params, one: Inputs) -> Tensor:
        batch = batches.map_inputs(one, lambda tensor: tensor.unsqueeze(0))
        return classifier.logits(batch, params).squeeze(0)

    try:
        return vmap(jacrev(logits), in_dims=(None, 0))(mean, x)
    except (RuntimeError, ValueError) as error:  # the model has already run without vmap
        raise ValueError(
            "torch.func.vmap cannot vectorise this model; cover only Linear, Conv2d and "
            f"normalisation layers, which do not need it: {error}"
        ) from error


def _kernel(jacobian: Params, posterior: Posterior) -> Tensor:
    """Return J Σ Jᵀ (B, K, K), summed over parameters to avoid a copy of the whole Jacobian."""
    moved = posterior.cov_mv(jacobian)
    parts = [_vectors(jacobian[name]) @ _vectors(moved[name]).mT for name in jacobian]
    kernel = torch.stack(parts).sum(0)
    return (kernel + kernel.mT) / 2  # rounding errors make the product slightly asymmetric


def _vectors(tensor: Tensor) -> Tensor:
    """Flatten (B, K, *shape) to (B, K, P)."""
    return _wide(tensor.reshape(*tensor.shape[:2], -1))


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
