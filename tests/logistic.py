"""Small logistic problems, and refits of them by an independent optimiser."""

from __future__ import annotations

import itertools

import numpy as np
import torch
from scipy.optimize import minimize
from scipy.special import log_softmax, softmax
from torch import Tensor

from acnml.exact import LogisticProblem, with_intercept


def normal(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def make_problem(n: int, d: int, classes: int, l2: float | Tensor) -> LogisticProblem:
    """A sample of a logistic model with an intercept, in which every class occurs."""
    features = with_intercept(normal(n + d, n, d))
    logits = features @ normal(classes, classes, d + 1).mT
    generator = torch.Generator().manual_seed(n)
    labels = torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(-1)
    labels[:classes] = torch.arange(classes)
    return LogisticProblem(features, labels, l2, classes)


def refit_by_scipy(features, labels, penalty, classes, held=None) -> np.ndarray:
    """One weight vector per class, class 0 held at zero where there are two; by trust regions."""
    held = held if held is not None else 1 if classes == 2 else 0
    d = features.shape[1]
    hot = np.eye(classes)[labels]

    def unpack(vector):
        return np.concatenate([np.zeros((held, d)), vector.reshape(-1, d)])

    def loss(vector):
        weights = unpack(vector)
        return -(log_softmax(features @ weights.T, 1) * hot).sum() + (penalty * weights**2).sum()

    def gradient(vector):
        weights = unpack(vector)
        p = softmax(features @ weights.T, 1)
        return ((p - hot).T @ features + 2 * penalty * weights)[held:].ravel()

    def hessian(vector):
        p = softmax(features @ unpack(vector).T, 1)
        middle = np.einsum("nk,kl->nkl", p, np.eye(classes)) - np.einsum("nk,nl->nkl", p, p)
        whole = np.einsum("nkl,ni,nj->kilj", middle, features, features)
        whole += 2 * np.einsum("kl,i,ij->kilj", np.eye(classes), penalty, np.eye(d))
        size = (classes - held) * d
        return whole[held:, :, held:].reshape(size, size)

    start = np.zeros((classes - held) * d)
    options = {"gtol": 1e-10, "maxiter": 500}
    found = minimize(loss, start, jac=gradient, hess=hessian, method="trust-ncg", options=options)
    assert np.abs(gradient(found.x)).max() < 1e-6
    return unpack(found.x)


def refits_by_scipy(problem: LogisticProblem, queries: Tensor) -> Tensor:
    """log p_θ̂_y(y|x) with the query simply appended to the data."""
    rows = []
    for query, label in itertools.product(queries.numpy(), range(problem.classes)):
        features = np.vstack([problem.features.numpy(), query])
        labels = np.append(problem.labels.numpy(), label)
        weights = refit_by_scipy(features, labels, problem.penalty.numpy(), problem.classes)
        rows.append(log_softmax(weights @ query)[label])
    return torch.tensor(rows, dtype=torch.float64).view(-1, problem.classes)


def grid_problem(labels: list[int]) -> LogisticProblem:
    """Points on a line of whole numbers, with intercept."""
    x = torch.arange(len(labels), dtype=torch.float64).unsqueeze(-1)
    return LogisticProblem(with_intercept(x), torch.tensor(labels), 0.0)
