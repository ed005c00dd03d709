"""The networks of the studies: their sizes, their weights, and that the solvers understand them."""

from __future__ import annotations

import math

import pytest
import torch
from safetensors.torch import save_file

from acnml import Classifier, Gradient
from acnml.solve import Reference
from cases import POSTERIORS, Case, normal
from studies.data import cifar10
from studies.data.folder import data_folder
from studies.models import MODELS, Description, WeightsError, load_weights
from studies.models.mlp import mlp
from studies.models.resnet import ResNet, SubsampleAndPad, projection
from studies.models.vgg import vgg16, vgg16_bn_dropout
from studies.models.wide_resnet import WideResNet


def tiny_resnet(shortcut):
    return lambda: ResNet(3, (2, 4), 2, shortcut)


STAGES = ((2, 3), (4,))
TINY = [
    Case("mlp", lambda: mlp(3, (5, 4), inputs=6), lambda n: normal(n, 1, 2, 3)),
    Case("resnet_a", tiny_resnet(SubsampleAndPad), lambda n: normal(n, 3, 4, 4)),
    Case("resnet_b", tiny_resnet(projection), lambda n: normal(n, 3, 4, 4)),
    Case("wide_resnet", lambda: WideResNet(3, 1, 2), lambda n: normal(n, 3, 4, 4)),
    Case("wide_resnet_dropout", lambda: WideResNet(3, 1, 2, 0.1), lambda n: normal(n, 3, 4, 4)),
    Case("vgg", lambda: vgg16(3, STAGES), lambda n: normal(n, 3, 4, 4)),
    Case("vgg_bn_dropout", lambda: vgg16_bn_dropout(3, STAGES), lambda n: normal(n, 3, 4, 4)),
]
each_tiny = pytest.mark.parametrize("case", TINY, ids=lambda case: case.name)
# What others count for these architectures.
PARAMETERS = {
    "mlp": 784 * 1200 + 1200 + 1200 * 1200 + 1200 + 1200 * 10 + 10,
    # torchvision's features without and with batch norm, then the rest
    "vgg16": 14_714_688 + 2 * (512 * 512 + 512) + 5_130,
    "vgg16_dropout": 14_714_688 + 2 * (512 * 512 + 512) + 5_130,
    "vgg16_bn": 14_723_136 + 2 * (512 * 512 + 512) + 5_130,
    "vgg16_bn_dropout": 14_723_136 + 2 * (512 * 512 + 512) + 5_130,
    "wide_resnet28x10": 36_489_290,
    "wide_resnet28x10_dropout": 36_489_290,
    # stem, stages with two blocks of 16, 32 and 64 channels and projections, head
    "resnet14": 464 + 9_344 + 33_088 + 131_712 + 650,
    "resnet20_dropout": 269_722,
    "resnet20": 269_722,
    "resnet56": 853_018,
    "resnet18": 11_173_962,
}


def state(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_same_state(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", MODELS)
def test_networks_have_the_size_that_others_count(name):
    network = MODELS[name].untrained(seed=0)
    assert sum(p.numel() for p in network.parameters()) == PARAMETERS[name]


@each_tiny
@pytest.mark.parametrize("build", POSTERIORS.values(), ids=list(POSTERIORS))
def test_the_fast_solver_equals_the_reference(case, build):
    model, x = case.model(), case.x(2)
    posterior = build(model).scaled(0.2)
    expected = Reference(2, 0.3)(Classifier(model), posterior, x)
    actual = Gradient(2, 0.3)(Classifier(model), posterior, x)
    torch.testing.assert_close(actual.log_lik, expected.log_lik, rtol=0, atol=1e-9)
    torch.testing.assert_close(actual.residual, expected.residual, rtol=0, atol=1e-9)


def test_the_seed_decides_the_weights_and_leaves_the_global_state_alone():
    before = torch.get_rng_state()
    first, again, other = (MODELS["resnet20"].untrained(seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert_same_state(state(first), state(again))
    assert not torch.equal(first.conv1.weight, other.conv1.weight)


def test_normalisation_is_per_channel():
    description = Description(tiny_resnet(projection), mean=(0.1, 0.2, 0.3), std=(0.5, 0.25, 2.0))
    images = normal(2, 3, 4, 4)
    normalised = description.normalise(images)
    for channel, (mean, std) in enumerate([(0.1, 0.5), (0.2, 0.25), (0.3, 2.0)]):
        expected = (images[:, channel] - mean) / std
        torch.testing.assert_close(normalised[:, channel], expected, rtol=0, atol=1e-6)


@pytest.fixture
def file(tmp_path):
    """A file with the weights of a tiny network, and that network."""
    trained = TINY[1].model()
    save_file(state(trained), tmp_path / "tiny.safetensors")
    return tmp_path / "tiny.safetensors", trained


def untrained():
    return Description(lambda classes: ResNet(classes, (2, 4), 2, SubsampleAndPad)).untrained(
        seed=9, classes=3
    )


def test_weights_load(file):
    path, trained = file
    network = untrained().double()
    load_weights(network, path)
    assert_same_state(state(network), state(trained))


def renamed(tensors):
    tensors["fc.weight"] = tensors.pop("linear.weight")


def widened(tensors):
    tensors["conv1.weight"] = torch.zeros(5, 3, 3, 3)


def more_classes(tensors):
    tensors["linear.weight"], tensors["linear.bias"] = torch.zeros(100, 4), torch.zeros(100)


def wider_head(tensors):
    tensors["linear.weight"] = torch.zeros(100, 8)


def not_a_number(tensors):
    tensors["bn1.bias"][1] = math.nan


def whole_numbers(tensors):
    tensors["linear.bias"] = torch.zeros(3, dtype=torch.int64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (renamed, "another architecture: it lacks linear.weight, and has fc.weight that the model"),
        (dict.clear, r"another architecture: it lacks bn1.bias, .* and \d+ more, and has nothing"),
        (widened, r"another architecture: its 'conv1.weight' has shape \(5, 3, 3, 3\)"),
        (more_classes, "is for 100 classes, the model has 3: build the model for 100 classes"),
        (wider_head, r"another architecture: its 'linear.weight' has shape \(100, 8\)"),
        (not_a_number, "'bn1.bias' has NaN or infinite entries"),
        (whole_numbers, r"'linear.bias' is torch.int64, the model's is torch.float32"),
    ],
)
def test_weights_that_do_not_fit_are_refused_whole(file, tmp_path, change, message):
    tensors = state(file[1])
    change(tensors)
    save_file(tensors, tmp_path / "odd.safetensors")
    network = untrained()
    before = state(network)
    with pytest.raises(WeightsError, match=message):
        load_weights(network, tmp_path / "odd.safetensors")
    assert_same_state(state(network), before)


# Published accuracy on all 10,000 test images, and how many of them are classified here.
TRAINED = {"resnet20": (0.9173, 500), "resnet56": (0.9339, 500), "resnet18": (0.9422, 200)}


@pytest.fixture(scope="module")
def test_set():
    if not cifar10.available():
        pytest.skip("needs CIFAR-10 in ACNML_DATA")
    return cifar10.load("test")


@pytest.mark.parametrize("name", TRAINED)
def test_trained_networks_are_as_accurate_as_stated(name, test_set):
    accuracy, count = TRAINED[name]
    folder = data_folder() / "weights"
    if not (folder / f"{name}.safetensors").is_file():
        pytest.skip(f"needs weights/{name}.safetensors in ACNML_DATA")
    images, labels = test_set
    network = MODELS[name].trained(folder)
    with torch.no_grad():
        logits = network(MODELS[name].normalise(cifar10.to_unit(images[:count])))
    found = (logits.argmax(1) == labels[:count]).double().mean().item()
    # Four standard deviations of the accuracy on so many images drawn from 10,000.
    std = math.sqrt(accuracy * (1 - accuracy) / count * (1 - count / 10_000))
    assert abs(found - accuracy) < 4 * std
