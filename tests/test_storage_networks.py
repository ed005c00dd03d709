"""A stored predictor loads for its own network and no other; networks that change are noticed."""

from __future__ import annotations

import copy
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import acnml
from acnml import Acnml, Classifier, Diagonal, Map
from acnml.storage import StorageError
from cases import CONV, MLP, normal

# A stored predictor loads for its own network, and for no other -----------------------------------


def head_posterior(classifier: Classifier) -> Diagonal:
    """A diagonal posterior over the last layer alone."""
    mean = classifier.copy_parameters(["2.weight", "2.bias"])
    return Diagonal(mean, {name: torch.full_like(t, 0.1) for name, t in mean.items()})


def network() -> nn.Module:
    """A network in single precision, as users have."""
    return MLP.model().float()


@pytest.fixture(params=["map", "acnml"])
def path(request, tmp_path):
    classifier = Classifier(network())
    is_map = request.param == "map"
    value = Map(classifier) if is_map else Acnml(classifier, head_posterior(classifier))
    acnml.save(value, tmp_path / "predictor")
    return tmp_path / "predictor"


def trained(model: nn.Module, steps: int, rate: float = 1e-3) -> nn.Module:
    """The same network after a few more steps of SGD."""
    optimizer = torch.optim.SGD(model.parameters(), rate)
    x, labels = normal(20, 4).to(next(model.parameters()).dtype), torch.arange(20) % 3
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), labels).backward()
        optimizer.step()
    return model


def shifted(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        model[0].weight.add_(0.01)
    return model


def nudged(model: nn.Module) -> nn.Module:
    """One weight changed in its last digit."""
    with torch.no_grad():
        model[0].weight[2, 1] = torch.nextafter(model[0].weight[2, 1], torch.tensor(9.0))
    return model


OTHERS = {"5 steps of SGD": lambda m: trained(m, 5), "shifted": shifted, "nudged": nudged}


@pytest.mark.parametrize("change", OTHERS.values(), ids=OTHERS)
@pytest.mark.parametrize("weights", ["exact", "rounded"])
def test_other_weights_are_refused(path, change, weights):
    with pytest.raises(StorageError, match=r"'0\.weight' of the given network differs from when"):
        acnml.load(path, Classifier(change(network())), weights=weights)


# Conversions of a network, and of a network that is not the same one any more.
HALVES = {
    "float16": lambda m: m.half(),
    "bfloat16": lambda m: m.bfloat16(),
    "float64": lambda m: m.double(),
    "float16 and back": lambda m: m.half().float(),
    "bfloat16 and back": lambda m: m.bfloat16().float(),
    "bfloat16, then float16": lambda m: m.bfloat16().half(),
}


@pytest.mark.parametrize("convert", HALVES.values(), ids=HALVES)
def test_rounded_copies_are_accepted_only_explicitly(path, convert):
    with pytest.raises(StorageError, match=r"use load\(\.\.\., weights='rounded'\)"):
        acnml.load(path, Classifier(convert(network())))
    loaded = acnml.load(path, Classifier(convert(network())), weights="rounded")
    x = MLP.x(3).float()
    expected = acnml.load(path, Classifier(network()))(x)
    torch.testing.assert_close(loaded(x).float(), expected, rtol=0, atol=0.05)


def test_a_network_stored_in_half_precision_loads_for_the_original(tmp_path):
    acnml.save(Map(Classifier(network().half())), tmp_path / "map")
    acnml.load(tmp_path / "map", Classifier(network()), weights="rounded")
    acnml.load(tmp_path / "map", Classifier(network().half().double()), weights="rounded")
    with pytest.raises(StorageError, match=r"\(torch.float32 instead of torch.float16\)"):
        acnml.load(tmp_path / "map", Classifier(network()))
    with pytest.raises(StorageError, match="differs"):
        acnml.load(tmp_path / "map", Classifier(shifted(network())), weights="rounded")


# The same network in another dress -----------------------------------------------------------


def negative_zeros(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        model.stem.bias.copy_(torch.tensor([0.0, -0.0, 1.0, 2.0]).neg())
    return model


def zeros(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        model.stem.bias.copy_(torch.tensor([0.0, 0.0, -1.0, -2.0]))
    return model


def counted(model: nn.Module) -> nn.Module:
    model.norm.num_batches_tracked += 7
    return model


def in_other_memory(model: nn.Module) -> nn.Module:
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                wide = torch.zeros(*parameter.shape, 2, dtype=parameter.dtype)
                wide[..., 1] = parameter.detach()
                module._parameters[name] = nn.Parameter(wide[..., 1])
    return model


SAME = {
    "channels last": lambda m: m.to(memory_format=torch.channels_last),
    "strided": in_other_memory,
    "negative zeros": negative_zeros,
    "batches counted": counted,
    "in training": lambda m: m.train(),
    "frozen": lambda m: m.requires_grad_(False),
    "data parallel": nn.DataParallel,
}


@pytest.mark.parametrize("change", SAME.values(), ids=SAME)
def test_the_same_network_in_another_form_is_accepted(change, tmp_path):
    acnml.save(Map(Classifier(zeros(CONV.model()))), tmp_path / "map")
    acnml.load(tmp_path / "map", Classifier(change(zeros(CONV.model()))))


def moved_statistics(model: nn.Module) -> nn.Module:
    model.norm.running_mean += 1e-9
    return model


def test_buffers_count(tmp_path):
    acnml.save(Map(Classifier(CONV.model())), tmp_path / "map")
    with pytest.raises(StorageError, match=r"'norm\.running_mean' of the given network differs"):
        acnml.load(tmp_path / "map", Classifier(moved_statistics(CONV.model())))


# The structure -------------------------------------------------------------------------------


class Block(nn.Module):
    """A layer with settings of its own."""

    def __init__(self, scale: float = 0.5, activation=torch.tanh, tied: bool = False) -> None:
        super().__init__()
        self.scale, self.activation = scale, activation
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.arange(parameter.numel()).view(parameter.shape) / 10)
        if tied:
            self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(self.activation(self.scale * self.first(x)))


def sequential(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Identity(), *layers)


STRUCTURES = [
    (Block, lambda: Block(scale=0.25), r"scale of 'the model' \(Block\) is 0\.25.*0\.5"),
    (Block, lambda: Block(activation=torch.relu), 'activation .* is "relu" .* was "tanh"'),
    (lambda: Block(tied=True), Block, "has 'second.weight', but had no such tensor"),
    (Block, lambda: Block(tied=True), "has no 'second.weight', but had such tensor"),
    (lambda: sequential(nn.ReLU()), lambda: sequential(nn.GELU()), "no ReLU at '1'"),
    (lambda: sequential(Block()), lambda: sequential(Block(), nn.ReLU()), "more modules"),
]


@pytest.mark.parametrize(("saved", "given", "message"), STRUCTURES)
def test_another_structure_is_refused(saved, given, message, tmp_path):
    acnml.save(Map(Classifier(saved())), tmp_path / "map")
    acnml.load(tmp_path / "map", Classifier(saved()))
    with pytest.raises(StorageError, match=message):
        acnml.load(tmp_path / "map", Classifier(given()))


def test_weights_in_the_file_may_be_others_in_the_network_but_not_of_another_shape(tmp_path):
    classifier = Classifier(network())
    acnml.save(Acnml(classifier, head_posterior(classifier)), tmp_path / "acnml")
    other = copy.deepcopy(network())
    with torch.no_grad():
        other[2].weight.zero_()
    expected = acnml.load(tmp_path / "acnml", Classifier(network()))(MLP.x(3))
    loaded = acnml.load(tmp_path / "acnml", Classifier(other))
    torch.testing.assert_close(loaded(MLP.x(3)), expected, rtol=0, atol=0)
    other[2] = nn.Linear(5, 4)
    with pytest.raises(StorageError, match=r"out_features of '2' \(Linear\) is 4"):
        acnml.load(tmp_path / "acnml", Classifier(other))


def test_private_attributes_are_settings_and_other_objects_are_not(tmp_path):
    model = Block()
    model._power, model.steps, model.shift = 1.0, object(), torch.ones(2)
    acnml.save(Map(Classifier(model)), tmp_path / "map")
    acnml.load(tmp_path / "map", Classifier(Block()))
    model._power = 5.0
    with pytest.raises(StorageError, match=r"_power of 'the model' .* is 5\.0 .*was 1\.0"):
        acnml.load(tmp_path / "map", Classifier(model))


# A calibrated network that changes afterwards: refused, restored, converted, and in files ---------


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


class Shifting(nn.Module):
    """A network with tensors that are neither parameters nor buffers, and a list of parameters."""

    def __init__(self, shift: float = 1.0) -> None:
        super().__init__()
        self.cell = nn.LSTM(4, 4, batch_first=True)
        self.head = nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))
        self.shift, self.steps = torch.tensor([shift, 0.0, 0.0]), {"of": [np.arange(3)]}

    def forward(self, x):
        return self.head(self.cell(x)[0]) + self.shift


def test_tensors_that_are_attributes_are_settings_too(tmp_path):
    model = Shifting()
    acnml.save(Map(Classifier(model)), tmp_path / "map")
    acnml.load(tmp_path / "map", copy.deepcopy(model))
    for name, value in {"shift": Shifting(2.0).shift, "steps": {"of": [np.arange(4)]}}.items():
        other = copy.deepcopy(model)
        setattr(other, name, value)
        with pytest.raises(StorageError, match=rf"{name} of 'the model' \(Shifting\) is"):
            acnml.load(tmp_path / "map", other)
