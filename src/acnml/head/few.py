"""Few classes: plain Newton steps from the mean, for all labels of all inputs at once.

Where the logits' variances are moderate, as they are for an α that was chosen on validation data,
two to four full Newton steps solve every label. There is no line search: a row counts as solved if
its residual says so, and φ is concave, so no other check is needed. Other rows are left to the
robust method of `acnml.head.solve`, which also explains φ, the gap F and the residual.

Newton's step solves (I + HV)d = F with H = diag(p) - ppᵀ. Let w = √p and S = I + diag(w) V diag(w),
whose eigenvalues are at least 1. Then d = F - w ⊙ x with x = S⁻¹(w ⊙ VF - νw), where ν is such that
wᵀx = 0. At the mean all labels of an input have the same p, so their first step shares one S.

Tensors have the classes first and the inputs last: (K, K, labels, B), (K, labels, B). Sums over ten
classes are several times faster in this order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from acnml._algebra.kernels import Kernel

# Inputs with a larger centred variance are not tried: full steps would not converge.
MODERATE = 8.0

# Steps after the first.
STEPS = 4

# Numbers in one block of systems: it should stay in the processor's cache.
BLOCK = 2**18

# Up to this many systems LAPACK is faster than elimination over all of them at once.
FEW_SYSTEMS = 256


class FewSolution(NamedTuple):
    """All labels of inputs, (B, K)."""

    log_lik: Tensor
    residual: Tensor
    solved: Tensor  # whether residual · max(1, ‖u‖) is within the tolerance


def solve_few(logits: Tensor, kernel: Kernel, var: Tensor, tolerance: float) -> FewSolution:
    """Try all labels of inputs with logits z₀ (B, K) and centred variances (B, K)."""
    near = var.amax(-1) <= MODERATE
    if not bool(near.all()):
        tried = near.nonzero()[:, 0]
        unknown = torch.full_like(var, torch.nan)
        found = FewSolution(unknown, unknown.clone(), torch.zeros_like(var, dtype=torch.bool))
        if len(tried):
            part = solve_few(logits[tried], kernel.take(tried), var[tried], tolerance)
            for tensor, new in zip(found, part, strict=True):
                tensor[tried] = new
        return found
    size = max(1, BLOCK // logits.shape[1] ** 3)
    slices = [slice(i, i + size) for i in range(0, len(logits), size)]
    parts = [_block(logits[s], kernel.take(s), var[s], tolerance) for s in slices]
    return FewSolution(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))


def _block(logits: Tensor, kernel: Kernel, var: Tensor, tolerance: float) -> FewSolution:
    z, var = logits.T.unsqueeze(1).contiguous(), var.T.unsqueeze(1)  # (K, 1, B)
    V = kernel.dense().permute(1, 2, 0).contiguous()  # (K, K, B)
    targets = torch.eye(len(z), dtype=z.dtype, device=z.device).unsqueeze(2)
    hidden = 4 * torch.finfo(z.dtype).eps * var  # what rounding may hide of V along the gap
    p = z.softmax(0)
    gap = targets - p
    u = _newton(V, p, gap, _mv(V, gap))
    for left in reversed(range(STEPS)):
        shift = _mv(V, u)
        log_p = (z + shift).log_softmax(0)
        p = log_p.exp()
        gap = targets - p - u
        moved = _mv(V, gap)
        residual = (gap * moved.addcmul(hidden, gap)).sum(0).clamp_(min=0).sqrt_()
        solved = residual * (u * shift).sum(0).clamp_(min=1).sqrt_() <= tolerance
        if left == 0 or bool(solved.all()):
            break
        u = u + _newton(V, p, gap, moved).masked_fill_(solved, 0.0)
    return FewSolution(log_p.diagonal(dim1=0, dim2=1), residual.T, solved.T)


def _mv(V: Tensor, u: Tensor) -> Tensor:
    """Return Vu for V (K, K, B) and u (K, L, B)."""
    return (V.unsqueeze(2) * u).sum(1)


def _newton(V: Tensor, p: Tensor, gap: Tensor, moved: Tensor) -> Tensor:
    """Return Newton's step (K, L, B) for p (K, L or 1, B), the gap F and VF."""
    w = p.sqrt()
    system = V.unsqueeze(2) * w.unsqueeze(1) * w
    system.diagonal(dim1=0, dim2=1).add_(1)
    if p.shape[1] == 1:  # one system, many right sides
        right = torch.cat([w * moved, w], 1).unsqueeze(2)
        x, normal = _solved(system, right).squeeze(2).split([moved.shape[1], 1], 1)
    else:
        x, normal = _solved(system, torch.stack([w * moved, w], 1)).unbind(1)
    nu = (w * x).sum(0) / (w * normal).sum(0)
    return gap - w * (x - nu * normal)


def _solved(system: Tensor, right: Tensor) -> Tensor:
    """Solve positive definite systems (K, K, P, B) for right sides (K, M, P, B)."""
    if system[0, 0].numel() <= FEW_SYSTEMS:
        systems, rights = (tensor.permute(2, 3, 0, 1) for tensor in (system, right))
        return torch.linalg.solve_ex(systems, rights)[0].permute(2, 3, 0, 1)
    last = len(system) - 1
    for j in range(last):
        factor = system[j + 1 :, j] / system[j, j]
        system[j + 1 :, j + 1 :].addcmul_(factor.unsqueeze(1), system[j, j + 1 :], value=-1)
        right[j + 1 :].addcmul_(factor.unsqueeze(1), right[j], value=-1)
    for j in range(last, -1, -1):
        right[j].div_(system[j, j])
        right[:j].addcmul_(system[:j, j].unsqueeze(1), right[j], value=-1)
    return right
