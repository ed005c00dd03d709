"""Dense oracles: full covariance matrices, and the paper's update computed with them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import functional_call

from acnml import Diagonal, Full, Kronecker, LowRank
from acnml._util.params import Params
from acnml.posteriors import EigenBlock, Posterior


def vector(params: Params) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in params.values()])


def covariance(posterior: Posterior) -> Tensor:
    """Σ (P, P) in the order of the flattened mean."""
    if isinstance(posterior, Diagonal):
        return torch.diag(vector(posterior.var))
    if isinstance(posterior, LowRank):
        F = torch.stack(
            [
                vector({n: t[k] for n, t in posterior.directions.items()})
                for k in range(posterior.rank)
            ]
        )
        return torch.diag(vector(posterior.var)) + F.T @ F
    if isinstance(posterior, Full):
        return posterior.cov
    assert isinstance(posterior, Kronecker)
    return _kronecker_covariance(posterior)


def _kronecker_covariance(posterior: Kronecker) -> Tensor:
    total = sum(tensor.numel() for tensor in posterior.mean.values())
    offsets, position = {}, 0
    for name, tensor in posterior.mean.items():
        offsets[name] = torch.arange(position, position + tensor.numel())
        position += tensor.numel()
    dense = torch.zeros(total, total, dtype=torch.float64)
    for block in posterior.blocks:
        layer = block.layer
        out_size = len(posterior.mean[layer.weight])
        columns = offsets[layer.weight].view(out_size, -1)
        if layer.bias is not None:
            columns = torch.cat([columns, offsets[layer.bias][:, None]], dim=1)
        for group, places in enumerate(columns.chunk(layer.groups)):
            index = places.flatten()
            dense[index[:, None], index] = _block_covariance(block, group)
    return dense


def _block_covariance(block: EigenBlock, group: int) -> Tensor:
    """Covariance of the row-major flattened matrix: kron(output, input)."""

    def of_group(tensor: Tensor) -> Tensor:
        return tensor if block.layer.groups == 1 else tensor[group]

    basis = torch.kron(of_group(block.output_basis), of_group(block.input_basis))
    return basis @ torch.diag(of_group(block.var).flatten()) @ basis.T


def literal_acnml(
    model: nn.Module,
    posterior: Posterior,
    one: object,
    label: int,
    alpha: float,
    steps: int,
    step: float,
) -> tuple[Tensor, Tensor]:
    """Algorithm 1 for one input and label, with Σ and its inverse written out.

    Returns log p_θ(y|x) and the residual √(gᵀ(αΣ)g) of log p + log N(θ; μ, αΣ).
    """
    cov = covariance(posterior)
    precision = torch.linalg.inv(cov)
    mean = vector(posterior.mean)
    theta = mean.clone()
    for _ in range(steps):
        grad_q = -precision @ (theta - mean)
        theta = theta + step * cov @ (
            alpha * _gradient(model, posterior, theta, one, label)[0] + grad_q
        )
    grad, value = _gradient(model, posterior, theta, one, label)
    total = grad - precision @ (theta - mean) / alpha
    return value, (alpha * total @ cov @ total).sqrt()


def _gradient(
    model: nn.Module, posterior: Posterior, theta: Tensor, one: object, label: int
) -> tuple[Tensor, Tensor]:
    leaf = theta.clone().requires_grad_()
    pieces = leaf.split([tensor.numel() for tensor in posterior.mean.values()])
    named = {n: p.view(t.shape) for (n, t), p in zip(posterior.mean.items(), pieces, strict=True)}
    args, kwargs = (
        ((), one) if isinstance(one, dict) else (one if isinstance(one, tuple) else (one,), {})
    )
    model.eval()
    value = functional_call(model, named, args, kwargs).log_softmax(-1)[0, label]
    return torch.autograd.grad(value, leaf)[0], value.detach()
