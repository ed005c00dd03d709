"""Problems of last layers, and an independent solver for them."""

from __future__ import annotations

import numpy as np
import torch
from scipy.optimize import root
from scipy.special import log_softmax
from torch import Tensor

from cases import normal

KINDS = ["dense", "diagonal"]


def covariance(classes: int, coupling: float) -> Tensor:
    """A covariance with variances near 1, whose classes depend on each other as told."""
    matrix = (
        torch.eye(classes).double() + coupling * normal(classes, classes, seed=4) / classes**0.5
    )
    return matrix @ matrix.T


def kernel(kind: str, inputs: int, classes: int, coupling: float = 0.5) -> Tensor:
    """Matrices (B, K, K); the dense ones have a basis of eigenvectors in common."""
    each = normal(inputs, classes, seed=2).exp()
    if kind == "diagonal":
        return torch.diag_embed(each)
    values, basis = torch.linalg.eigh(covariance(classes, coupling))
    return (basis * (each * values)[:, None]) @ basis.T


def by_scipy(logits: Tensor, matrix: Tensor, label: int) -> float:
    """Solve z = z₀ + V(e_y - softmax(z)) along a path from V = 0; return log softmax(z)_y."""
    z0, K, y = logits.numpy(), matrix.numpy(), np.eye(len(logits))[label]

    def system(z, size):
        p = np.exp(log_softmax(z))
        jacobian = np.eye(len(z)) + size * K @ (np.diag(p) - np.outer(p, p))
        return z - z0 - size * K @ (y - p), jacobian

    z = z0
    for size in [*np.geomspace(1e-3, 1.0, 6)]:
        found = root(system, z, args=(size,), jac=True, tol=1e-13)
        for _ in range(4):  # polish: scipy stops at a relative tolerance
            value, jacobian = system(found.x, size)
            found.x = found.x - np.linalg.solve(jacobian, value)
        z = found.x
    value, _ = system(z, 1.0)
    assert np.abs(value).max() <= 1e-9 * (1 + np.abs(z).max())
    return float(log_softmax(z)[label])
