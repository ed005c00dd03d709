"""A calibrated network that changes afterwards: refused, restored, converted, and in files."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

import acnml
from acnml import Acnml, Classifier, Diagonal
from cases import normal
from test_storage_networks import head_posterior, network, trained


def calibrated_network(model: nn.Module | None = None) -> tuple[nn.Module, acnml.Calibrated]:
    """A calibrated network, and the result."""
    model = network() if model is None else model
    return model, calibrated_view(Classifier(model))


def calibrated_view(classifier: Classifier) -> acnml.Calibrated:
    x = normal(1500, 4).float()
    with torch.no_grad():
        labels = (classifier.logits(x) + normal(1500, 3, seed=1)).argmax(-1)
    data = (x[:700], labels[:700]), (x[700:], labels[700:])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about few validation data
        return acnml.calibrate(classifier, *data, price=0.03, progress=False)


def test_a_network_that_was_trained_after_its_calibration_is_not_certified(tmp_path):
    """The predictor would have the new first layer and the old last one."""
    model, found = calibrated_network()
    acnml.save(found, tmp_path / "before")
    before = copy.deepcopy(model.state_dict())
    trained(model, 1)
    with pytest.raises(
        ValueError, match=r"'2\.\w+' of the network differs from when it was calibr"
    ):
        acnml.save(found, tmp_path / "after")
    assert not (tmp_path / "after").exists()
    model.load_state_dict(before)
    acnml.save(found, tmp_path / "after")
    first, second = (acnml.load(tmp_path / name, model) for name in ("before", "after"))
    x = normal(5, 4).float()
    for loaded in (first, second):
        assert torch.equal(loaded.probs(x), found.probs(x))


USES = {
    "probs": lambda found, x: found.probs(x),
    "regret": lambda found, x: found.regret(x),
    "module": lambda found, x: found.as_module()(x)[0],
}


@pytest.mark.parametrize("use", USES.values(), ids=USES.keys())
@pytest.mark.parametrize("assign", [False, True], ids=["copied", "assigned"])
def test_a_network_that_was_trained_after_its_calibration_gives_no_answers(use, assign):
    """They would be those of new layers below the old last one."""
    model, found = calibrated_network()
    x, before = normal(5, 4).float(), copy.deepcopy(model.state_dict())
    expected = use(found, x)
    trained(model, 1)
    with pytest.raises(ValueError, match=r"'2\.\w+' .* trained since, or ran in train mode"):
        use(found, x)
    model.load_state_dict(before, assign=assign)
    assert torch.equal(use(found, x), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_calibrated_network_may_be_converted_to_another_type(dtype):
    model, found = calibrated_network()
    expected = found.probs(normal(5, 4).float())
    model.to(torch.bfloat16).to(dtype)
    torch.testing.assert_close(found.probs(normal(5, 4)).float(), expected, rtol=0, atol=0.02)
    trained(model, 1, rate=0.1)
    with pytest.raises(ValueError, match="trained since"):
        found(normal(5, 4))


def test_means_that_differ_from_the_network_on_purpose_are_saved(tmp_path):
    """As those of SWAG, or of another set of weights."""
    classifier = Classifier(network())
    posterior = head_posterior(classifier)
    mean = {name: tensor + 0.1 for name, tensor in posterior.mean.items()}
    acnml.save(Acnml(classifier, Diagonal(mean, posterior.var)), tmp_path / "acnml")


def calibrated_batch_norm() -> tuple[nn.Module, acnml.Calibrated]:
    return calibrated_network(
        nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)).eval()
    )


def test_running_in_train_mode_changes_batch_norm():
    """Nothing is trained, but the network is another one."""
    model, found = calibrated_batch_norm()
    x, before = normal(9, 4).float(), copy.deepcopy(model.state_dict())
    expected = found.probs(x)
    model.train()
    assert torch.equal(found.probs(x), expected)  # it runs in eval mode all the same
    model(x)
    with pytest.raises(ValueError, match=r"'1\.running_mean' .* or ran in train mode"):
        found(x)
    model.load_state_dict(before)
    assert torch.equal(found.probs(x), expected)
    model.to(torch.bfloat16)
    assert found.probs(x).isfinite().all()


def test_renewed_statistics_are_not_those_of_the_network():
    """A view with statistics of its own does not follow those of the module."""
    model, _ = calibrated_batch_norm()
    x = normal(1500, 4).float()
    view = Classifier(model).at(acnml.fit.batch_norm_statistics(Classifier(model), x))
    found = calibrated_view(view)
    expected = found.probs(x[:9])
    model.train()(x)
    assert torch.equal(found.probs(x[:9]), expected)


def test_a_last_layer_that_is_gone_is_named():
    """As after `model.fc = nn.Identity()`, which gives the features of a network."""
    model, found = calibrated_network()
    model[2] = nn.Identity()
    with pytest.raises(ValueError, match=r"'2\.\w+' of the network differs"):
        found(normal(5, 4).float())
