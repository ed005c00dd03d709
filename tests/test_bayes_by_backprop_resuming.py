"""The trainer of Bayes by Backprop: resumed runs are bitwise equal to uninterrupted ones."""

from __future__ import annotations

import pytest
import safetensors.torch
import torch
from torch import Tensor

from acnml import Classifier, Diagonal, fit_bayes_by_backprop
from acnml.fit import BayesByBackprop
from cases import MODELS

LABELS = torch.tensor([0, 1, 2, 0, 1, 2])
STEPS = 6
MLP = MODELS[1]


def batches(case, n: int = STEPS) -> list[tuple[object, Tensor]]:
    """Different batches of six inputs."""
    return [(case.x(6), LABELS.roll(shift)) for shift in range(n)]


def trainer(case, dtype=torch.float64, **settings) -> BayesByBackprop:
    settings = {"data": 18, "learning_rate": 3e-3, "variance_learning_rate": 0.05, **settings}
    return BayesByBackprop(Classifier(case.model().to(dtype)), **settings)


def run(trainer: BayesByBackprop, data: list) -> BayesByBackprop:
    for x, labels in data:
        trainer.step(x, labels)
    return trainer


def assert_identical(a: Diagonal, b: Diagonal) -> None:
    assert list(a.mean) == list(b.mean)
    assert list(a.var) == list(b.var)
    for name in a.mean:
        assert torch.equal(a.mean[name], b.mean[name])
        assert torch.equal(a.var[name], b.var[name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("done", range(STEPS + 1))
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
