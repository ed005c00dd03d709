"""`Influence` is the first-order term of the solution, and `IfComp` is made of it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.func import functional_call

import acnml
from acnml import Acnml, Classifier, IfComp, Map, UnsolvedWarning
from acnml._util.batches import as_arguments, size, take
from acnml.solve import Influence, Reference
from cases import LINEAR, MLP, POSTERIORS, diagonal, normal
from dense import covariance, vector
from predicting import each_case
from test_solvers import Scale


def gradients(classifier: Classifier, posterior, x) -> torch.Tensor:
    """∇log p_μ(y|x) by autograd, (B, K, P)."""
    rows = []
    for i in range(size(x)):
        theta = {n: t.clone().requires_grad_() for n, t in posterior.mean.items()}
        args, kwargs = as_arguments(take(x, slice(i, i + 1)))
        logits = functional_call(classifier.model.eval(), theta, args, kwargs)
        log_probs = (logits / classifier.temperature).log_softmax(-1)[0]
        for value in log_probs:
            grads = torch.autograd.grad(value, list(theta.values()), retain_graph=True)
            rows.append(vector(dict(zip(theta, grads, strict=True))))
    return torch.stack(rows).unflatten(0, (size(x), -1))


def expected_gain(classifier: Classifier, posterior, x) -> torch.Tensor:
    """gᵀΣg with all matrices written out, (B, K)."""
    g = gradients(classifier, posterior, x)
    return torch.einsum("bkp,pq,bkq->bk", g, covariance(posterior), g)


# The solver --------------------------------------------------------------------------------------


@each_case
def test_it_is_the_gradients_norm_in_the_posterior(case, build):
    model, x = case.model(), case.x(3)
    classifier, posterior = Classifier(model).tempered(1.3), build(model).scaled(0.7)
    expected = Map(classifier)(x) + expected_gain(classifier, posterior, x)
    found = Influence()(classifier, posterior, x)
    torch.testing.assert_close(found.log_lik, expected, rtol=1e-9, atol=1e-10)
    assert torch.equal(Influence().log_lik(classifier, posterior, x), found.log_lik)


@each_case
def test_it_differs_from_the_solution_to_second_order(case, build):
    """With a tenth of α, a hundredth of the error, for all weights and for the last layer.

    A small α, because a ReLU network's error has no order where the solution crosses a kink.
    """
    model, x = case.model(), case.x(2)
    classifier, posterior = Classifier(model), build(model)

    def error(alpha: float) -> float:
        scaled = posterior.scaled(alpha)
        exact = Reference(60, 0.9)(classifier, scaled, x)
        assert exact.residual.max() < 1e-8
        return (Influence()(classifier, scaled, x).log_lik - exact.log_lik).abs().max().item()

    errors = [error(alpha) for alpha in (1e-3, 1e-4)]
    assert 90 < errors[0] / errors[1] < 110


def test_layers_that_the_engine_does_not_know():
    model, x = Scale().double(), normal(3, 4)
    posterior, classifier = diagonal(model), Classifier(model)
    expected = Map(classifier)(x) + expected_gain(classifier, posterior, x)
    found = Influence()(classifier, posterior, x).log_lik
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-11)


def test_the_residual_is_that_of_the_linearised_problem():
    """At θ = μ + Σg, for a model that is linear in its weights, by autograd."""
    model, x = LINEAR.model(), LINEAR.x(2)
    posterior, classifier = diagonal(model), Classifier(model)
    cov, g = covariance(posterior), gradients(classifier, posterior, x)
    found = Influence()(classifier, posterior, x)
    sizes = [t.numel() for t in posterior.mean.values()]
    for i in range(2):
        for y in range(3):
            moved = (vector(posterior.mean) + cov @ g[i, y]).split(sizes)
            shapes = zip(posterior.mean.items(), moved, strict=True)
            theta = {n: part.view(t.shape).requires_grad_() for (n, t), part in shapes}
            value = functional_call(model, theta, x[i : i + 1]).log_softmax(-1)[0, y]
            there = torch.cat([d.flatten() for d in torch.autograd.grad(value, theta.values())])
            gap = there - g[i, y]  # the gradient of log q at θ is -g
            expected = (gap @ cov @ gap).sqrt()
            torch.testing.assert_close(found.residual[i, y], expected, rtol=1e-9, atol=1e-11)
    assert torch.equal(found.solved, found.residual <= 0.1)


def test_the_estimate_has_no_upper_limit_and_says_so():
    model, x = LINEAR.model(), LINEAR.x(4)
    wide = diagonal(model).scaled(50.0)
    predict = Acnml(Classifier(model), wide, Influence())
    with pytest.warns(UnsolvedWarning, match="labels are not solved"):
        solution = predict.solve(x)
    assert (solution.log_lik > 0).any()
    assert solution.regret.max() > math.log(3)
    assert not solution.solved.all()
    torch.testing.assert_close(solution.log_probs.exp().sum(-1), torch.ones(4).double())
    narrow = Influence()(Classifier(model), wide.scaled(1e-6), x)
    assert narrow.solved.all()
    assert (narrow.regret >= 0).all()


# IF-COMP -----------------------------------------------------------------------------------------


@pytest.fixture
def if_comp() -> IfComp:
    model = MLP.model()
    return IfComp(Classifier(model).tempered(2.5), POSTERIORS["kronecker_eigen"](model), c=0.8)


def test_if_comp_is_its_formula(if_comp):
    """softmax((z + c n) / T) with n = gᵀΣg and g the gradient of log softmax(z / T)_y."""
    x, labels = MLP.x(4), torch.tensor([0, 2, 1, 1])
    z = if_comp.classifier.model(x).detach()
    n = expected_gain(if_comp.classifier, if_comp.posterior, x)
    p = (z / 2.5).softmax(-1)
    expected = ((z + 0.8 * n) / 2.5).log_softmax(-1)
    torch.testing.assert_close(if_comp(x), expected, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(if_comp.influence(x), n, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(if_comp.ood_score(x), (p * n).sum(-1), rtol=1e-9, atol=1e-11)
    loss = nn.functional.cross_entropy(z / 2.5, labels, reduction="none")
    mislabelled = loss + 0.8 / 2.5 * (p * n).sum(-1)
    torch.testing.assert_close(if_comp.mislabel_score(x, labels), mislabelled)
    own = if_comp.classifier, if_comp.posterior, Influence(), if_comp.alpha
    assert torch.equal(if_comp(x), Acnml(*own, on_unsolved="ignore")(x))
    regret = (p * (0.8 / 2.5 * n).exp()).sum(-1).log()
    torch.testing.assert_close(if_comp.regret(x), regret, rtol=1e-9, atol=1e-10)


def test_the_scores_are_the_regret_to_first_order(if_comp):
    x, labels = MLP.x(4), torch.tensor([0, 2, 1, 1])
    small = IfComp(if_comp.classifier, if_comp.posterior, c=1e-4)
    weight = 1e-4 / 2.5
    torch.testing.assert_close(small.regret(x), weight * small.ood_score(x), rtol=1e-3, atol=0)
    scores = small.mislabel_score(x, labels) - small.complexity(x, labels)
    own = small.influence(x).gather(1, labels[:, None])[:, 0]
    torch.testing.assert_close(scores, weight * own, rtol=1e-3, atol=0)


def test_fit_if_comp_is_ekfac_at_the_temperature():
    model = MLP.model()
    data = [(normal(20, 4, seed=3), torch.arange(20) % 3)]
    found = acnml.fit_if_comp(Classifier(model), data, temperature=2.0, c=0.5, damping=0.3)
    tempered = Classifier(model).tempered(2.0)
    fisher = acnml.fit.MonteCarloFisher()
    options = {"structure": "ekfac", "fisher": fisher}
    posterior = acnml.fit_laplace(tempered, data, prior_precision=0.3, **options)
    x = MLP.x(3)
    assert torch.equal(found(x), IfComp(tempered, posterior, 0.5)(x))
    curvature = acnml.fit.fit_curvature(tempered, data, **options)
    default = acnml.fit_if_comp(Classifier(model), data, temperature=2.0, c=0.5)
    expected = IfComp(tempered, curvature.posterior(0.01 * curvature.mean_eigenvalue()), 0.5)
    torch.testing.assert_close(default(x), expected(x))
    last = acnml.fit_if_comp(Classifier(model), data, layers=[model[2]])
    assert list(last.posterior.mean) == ["2.weight", "2.bias"]


def test_if_comp_is_stored_and_takes_arrays(if_comp, tmp_path):
    x, labels = MLP.x(4), torch.tensor([0, 2, 1, 1])
    acnml.save(if_comp, tmp_path / "if_comp.safetensors")
    loaded = acnml.load(tmp_path / "if_comp.safetensors", Classifier(if_comp.classifier.model))
    assert torch.equal(loaded(x), if_comp(x))
    scores = loaded.mislabel_score(x.numpy(), labels.numpy())
    assert (scores == if_comp.mislabel_score(x, labels).numpy()).all()


def test_labels_that_are_no_class_are_refused(if_comp):
    with pytest.raises(ValueError, match=r"label 3 is outside the model's 3 .* first at index 1"):
        if_comp.mislabel_score(MLP.x(2), torch.tensor([0, 3]))
