"""Logits and their covariance, against J Σ Jᵀ written out."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import functional_call

import acnml
from acnml import Classifier
from acnml import problem as making
from acnml._util.batches import as_arguments, take
from cases import CONV, MLP, diagonal
from dense import covariance, vector
from predicting import FINE, every_case, moments_of


def dense_kernel(model: nn.Module, posterior: acnml.posteriors.Posterior, one: object) -> Tensor:
    """J Σ Jᵀ for one input, with dense matrices."""
    args, kwargs = as_arguments(one)

    def logits(*tensors: Tensor) -> Tensor:
        named = dict(zip(posterior.mean, tensors, strict=True))
        return functional_call(model.eval(), named, args, kwargs)[0]

    jacobians = torch.autograd.functional.jacobian(logits, tuple(posterior.mean.values()))
    J = torch.stack([vector(dict(enumerate(j))) for j in zip(*jacobians, strict=True)])
    return J @ covariance(posterior) @ J.T


@every_case
def test_kernel_equals_the_dense_one(case, build):
    model, x = case.model(), case.x()
    posterior = build(model)
    moments = moments_of(Classifier(model), posterior, x)
    expected = [dense_kernel(model, posterior, take(x, slice(i, i + 1))) for i in range(3)]
    torch.testing.assert_close(moments.kernel, torch.stack(expected), rtol=1e-10, atol=1e-11)
    assert torch.equal(moments.kernel, moments.kernel.mT)
    torch.testing.assert_close(moments.logits, Classifier(model).logits(x), **FINE)


def test_kernel_is_taken_at_the_posterior_mean():
    model, other = MLP.model(), MLP.model()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    moments = moments_of(Classifier(model), diagonal(other), MLP.x())
    expected = moments_of(Classifier(other), diagonal(other), MLP.x())
    torch.testing.assert_close(moments.kernel, expected.kernel, **FINE)
    torch.testing.assert_close(moments.logits, expected.logits, **FINE)


def test_kernel_does_not_depend_on_how_many_inputs_share_a_computation(monkeypatch):
    model, x = CONV.model(), CONV.x(5)
    together = moments_of(Classifier(model), diagonal(model), x)
    for budget in (1, 10_000):
        monkeypatch.setattr(making, "JACOBIAN_BYTES", budget)
        parts = moments_of(Classifier(model), diagonal(model), x)
        torch.testing.assert_close(parts.kernel, together.kernel, **FINE)


def test_tempering_divides_logits_and_kernel():
    model, x = MLP.model(), MLP.x()
    plain = moments_of(Classifier(model), diagonal(model), x)
    tempered = moments_of(Classifier(model).tempered(2.0), diagonal(model), x)
    torch.testing.assert_close(tempered.logits, plain.logits / 2, **FINE)
    torch.testing.assert_close(tempered.kernel, plain.kernel / 4, **FINE)
