"""Bayes by Backprop: gradients, noise, posteriors known in closed form, and resumed runs."""

from __future__ import annotations

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence

from acnml import Classifier, fit_bayes_by_backprop
from acnml._engine.recorder import AFFINE, SCALING, find_sites
from acnml._util.batches import take
from acnml.fit import BayesByBackprop
from acnml.fit.bayes_by_backprop import local_reparameterised
from cases import MODELS, Case, diagonal, normal
from fits import assert_identical

X, Y = normal(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])
PRIOR = Normal(*torch.tensor([0.0, 0.3], dtype=torch.float64))


def test_gradients_of_the_divergence_are_those_of_autograd():
    trainer = BayesByBackprop(MODELS[1].model(), data=7, prior_std=0.3, learning_rate=0.1)
    mean = {n: t.detach() for n, t in trainer._mean.items()}
    with torch.no_grad():
        for seed, log_var in enumerate(trainer._log_var.values()):
            log_var.add_(normal(*log_var.shape, seed=seed + 5))
    var = {n: t.detach().exp().requires_grad_() for n, t in trainer._log_var.items()}
    leaves = {
        n: (mean[n].clone().requires_grad_(), trainer._log_var[n].detach().clone().requires_grad_())
        for n in mean
    }
    divergence = sum(
        kl_divergence(Normal(m, (v / 2).exp()), PRIOR).sum() for m, v in leaves.values()
    )
    (divergence / 7).backward()
    trainer._descend(torch.zeros((), requires_grad=True), var)  # a loss without gradient
    for name, (m, log_var) in leaves.items():
        found = trainer._mean[name].grad, trainer._log_var[name].grad
        torch.testing.assert_close(found, (m.grad, log_var.grad), rtol=1e-12, atol=1e-14)


def sites_of(model):
    names = [name for name, _ in model.named_parameters()]
    return find_sites(model, names, AFFINE + SCALING, "")


def conv_outputs() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 3, stride=2, padding=1, groups=2), nn.Flatten())


LINEAR = [case for case in MODELS if case.name not in ("conv", "sequence")]
CONVOLUTION = Case("conv_outputs", conv_outputs, lambda n: normal(n, 2, 5, 5))


@pytest.mark.parametrize("case", [*LINEAR, CONVOLUTION], ids=lambda case: case.name)
def test_local_and_plain_reparameterisation_have_the_same_moments(case):
    """Mean and variance of the logits over 3,000 draws of each, within six standard errors."""
    model, n = case.model(), 3000
    one = case.x(1)
    many = take(one, torch.zeros(n, dtype=int))  # n times the same input
    posterior, classifier, generator = diagonal(model), Classifier(model), torch.Generator()
    mean, var = posterior.mean, posterior.var
    local = local_reparameterised(classifier, sites_of(model), mean, var, many, generator)
    draws = posterior.sample(n, generator)
    each = ({name: draw[i] for name, draw in draws.items()} for i in range(n))
    plain = torch.cat([classifier.logits(one, draw) for draw in each])
    mean_error = ((local.var(0) + plain.var(0)) / n).sqrt()
    assert ((local.mean(0) - plain.mean(0)).abs() < 6 * mean_error).all()
    fourth = ((plain - plain.mean(0)) ** 4).mean(0)
    var_error = (2 * (fourth - plain.var(0) ** 2) / n).sqrt()
    assert ((local.var(0) - plain.var(0)).abs() < 6 * var_error).all()


def test_without_data_to_learn_from_the_posterior_is_the_prior():
    """Zero inputs carry no information, so the minimiser is the prior N(0, σ₀²)."""
    model = nn.Linear(4, 3, bias=False).double()
    data = [(torch.zeros(6, 4), Y)]
    posterior = fit_bayes_by_backprop(
        Classifier(model), data, epochs=800, prior_std=0.5, learning_rate=0.03
    )
    assert posterior.mean["weight"].abs().max() < 1e-3
    torch.testing.assert_close(
        posterior.var["weight"], torch.full((3, 4), 0.25).double(), rtol=1e-3, atol=0
    )


def test_learns_and_leaves_the_model_alone():
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(3, (300,), generator=generator)
    x = torch.eye(3)[y] + 0.3 * torch.randn(300, 3, generator=generator)
    model = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 3))
    classifier, before = Classifier(model), [p.clone() for p in model.parameters()]
    data = [(x[i : i + 50], y[i : i + 50]) for i in range(0, 300, 50)]
    posterior = fit_bayes_by_backprop(
        classifier, data, epochs=60, prior_std=1.0, learning_rate=0.01
    )
    accuracy = (classifier.at(posterior.mean).logits(x).argmax(1) == y).float().mean()
    assert accuracy > 0.95
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


def test_seeded_and_without_global_random_state():
    state = torch.get_rng_state()
    model = MODELS[1].model()
    fits = [
        fit_bayes_by_backprop(Classifier(model), [(X, Y)], epochs=2, seed=seed)
        for seed in (1, 1, 2)
    ]
    assert torch.equal(fits[0].mean["0.weight"], fits[1].mean["0.weight"])
    assert not torch.equal(fits[0].mean["0.weight"], fits[2].mean["0.weight"])
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize(
    ("data", "arguments", "message"),
    [
        ([X], {}, "batch 0: there are no labels"),
        ([(X, Y), (X, Y + 1)], {}, "batch 1: label 3 is outside .* first at index 2"),
        ([(X, Y)], {"prior_std": 0.0}, "prior_std must be a positive"),
        ([(X, Y)] * 3, {"learning_rate": 1e300}, "batch 1: the model's logits are NaN"),
    ],
)
def test_refuses_what_cannot_be_fitted(data, arguments, message):
    with pytest.raises(ValueError, match=message):
        fit_bayes_by_backprop(Classifier(MODELS[1].model()), data, **{"epochs": 1, **arguments})


# Resuming -----------------------------------------------------------------------------------------

STEPS = 6
MLP = MODELS[1]


def batches(case, n: int = STEPS) -> list[tuple[object, Tensor]]:
    """Different batches of six inputs."""
    return [(case.x(6), Y.roll(shift)) for shift in range(n)]


def trainer(case, dtype=torch.float64, **settings) -> BayesByBackprop:
    settings = {"data": 18, "learning_rate": 3e-3, "variance_learning_rate": 0.05, **settings}
    return BayesByBackprop(Classifier(case.model().to(dtype)), **settings)


def run(trainer: BayesByBackprop, data: list) -> BayesByBackprop:
    for x, labels in data:
        trainer.step(x, labels)
    return trainer


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("done", [0, 1, 4])
@pytest.mark.parametrize("case", MODELS[1:4], ids=lambda case: case.name)
def test_a_resumed_run_equals_an_unbroken_one(case, done, dtype, tmp_path):
    data = batches(case)
    unbroken = run(trainer(case, dtype), data)
    interrupted = run(trainer(case, dtype), data[:done])
    safetensors.torch.save_file(interrupted.state_dict(), tmp_path / "state.safetensors")
    resumed = trainer(case, dtype, seed=99)  # the generator's state is loaded, too
    resumed.load_state_dict(safetensors.torch.load_file(tmp_path / "state.safetensors"))
    assert resumed.steps == done
    run(resumed, data[done:])
    assert resumed.steps == STEPS
    assert_identical(resumed.posterior(), unbroken.posterior())
    for name, tensor in unbroken.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], tensor), name


def test_fitting_is_a_loop_of_steps():
    data = batches(MLP, 3)
    fitted = fit_bayes_by_backprop(
        Classifier(MLP.model()), data, epochs=2, learning_rate=3e-3, variance_learning_rate=0.05
    )
    assert_identical(fitted, run(trainer(MLP), 2 * data).posterior())


def test_a_state_and_a_posterior_are_snapshots():
    own = run(trainer(MLP), batches(MLP, 2))
    state, posterior = own.state_dict(), own.posterior()
    copies = {name: tensor.clone() for name, tensor in state.items()}
    mean = {name: tensor.clone() for name, tensor in posterior.mean.items()}
    run(own, batches(MLP, 2))
    assert all(torch.equal(copies[name], tensor) for name, tensor in state.items())
    assert all(torch.equal(mean[name], tensor) for name, tensor in posterior.mean.items())
    own.load_state_dict(state)
    expected = run(own, batches(MLP, 1)).posterior()
    assert all(torch.equal(copies[name], tensor) for name, tensor in state.items())
    own.load_state_dict(
        state
    )  # what was loaded is a copy: the first continuation did not change it
    assert_identical(run(own, batches(MLP, 1)).posterior(), expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("generator"), r"missing \['generator'\]"),
        (lambda state: state.pop("exp_avg/mean/0.bias"), r"missing \['exp_avg/mean/0.bias'\]"),
        (lambda state: state.update(extra=torch.ones(1)), r"unexpected \['extra'\]"),
        (lambda state: state.update({"mean/0.bias": torch.ones(2)}), r"shape \(2,\)"),
    ],
)
def test_refuses_states_of_other_trainers_without_changing(change, message):
    own, other = run(trainer(MLP), batches(MLP, 2)), run(trainer(MLP), batches(MLP, 4))
    before, state = own.state_dict(), other.state_dict()
    change(state)
    with pytest.raises(ValueError, match=message):
        own.load_state_dict(state)
    assert all(torch.equal(before[name], t) for name, t in own.state_dict().items())
