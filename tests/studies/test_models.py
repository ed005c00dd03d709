"""The networks of the studies: their sizes, their weights, and that the solvers understand them."""

from __future__ import annotations

import math

import pytest
import torch
from safetensors.torch import save_file

from acnml import Classifier, Gradient
from acnml.solve import Reference
from cases import POSTERIORS, normal
from studies.data import cifar10
from studies.data.folder import data_folder
from studies.models import MODELS, Description, WeightsError, load_weights
from studies.models.resnet import ResNet, SubsampleAndPad
from tiny_training import TINY, tiny

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


@pytest.mark.parametrize("name", MODELS)
def test_networks_have_the_size_that_others_count(name):
    with torch.device("meta"):
        network = MODELS[name].build(10)
    assert sum(p.numel() for p in network.parameters()) == PARAMETERS[name]


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("posterior", ["low_rank", "kronecker_eigen"])
def test_the_fast_solver_equals_the_reference(name, posterior):
    model, x = tiny(name), normal(2, 3, 8, 8)
    posterior = POSTERIORS[posterior](model).scaled(0.2)
    expected = Reference(2, 0.3)(Classifier(model), posterior, x)
    actual = Gradient(2, 0.3)(Classifier(model), posterior, x)
    torch.testing.assert_close(actual.log_lik, expected.log_lik, rtol=0, atol=1e-9)
    torch.testing.assert_close(actual.residual, expected.residual, rtol=0, atol=1e-9)


def test_the_seed_decides_the_weights_and_leaves_the_global_state_alone():
    before = torch.get_rng_state()
    first, again, other = (MODELS["resnet20"].untrained(seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    torch.testing.assert_close(first.state_dict(), again.state_dict(), rtol=0, atol=0)
    assert not torch.equal(first.conv1.weight, other.conv1.weight)


def described(classes: int) -> ResNet:
    return ResNet(classes, (2, 4), 2, SubsampleAndPad)


def test_normalisation_is_per_channel():
    description = Description(described, mean=(0.1, 0.2, 0.3), std=(0.5, 0.25, 2.0))
    images = normal(2, 3, 4, 4)
    normalised = description.normalise(images)
    for channel, (mean, std) in enumerate([(0.1, 0.5), (0.2, 0.25), (0.3, 2.0)]):
        expected = (images[:, channel] - mean) / std
        torch.testing.assert_close(normalised[:, channel], expected, rtol=0, atol=1e-6)


def renamed(tensors):
    tensors["fc.weight"] = tensors.pop("linear.weight")


def widened(tensors):
    tensors["conv1.weight"] = torch.zeros(5, 3, 3, 3)


def more_classes(tensors):
    tensors["linear.weight"], tensors["linear.bias"] = torch.zeros(100, 4), torch.zeros(100)


def not_a_number(tensors):
    tensors["bn1.bias"][1] = math.nan


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: None, None),
        (renamed, "another architecture: it lacks linear.weight, and has fc.weight that the model"),
        (widened, r"another architecture: its 'conv1.weight' has shape \(5, 3, 3, 3\)"),
        (more_classes, "is for 100 classes, the model has 3: build the model for 100 classes"),
        (not_a_number, "'bn1.bias' has NaN or infinite entries"),
    ],
)
def test_weights_load_whole_or_not_at_all(tmp_path, change, message):
    trained, network = (Description(described).untrained(seed, classes=3) for seed in (1, 9))
    tensors, before = dict(trained.state_dict()), {**network.state_dict()}
    before = {name: tensor.clone() for name, tensor in before.items()}
    change(tensors)
    save_file(tensors, tmp_path / "some.safetensors")
    if message is None:
        load_weights(network, tmp_path / "some.safetensors")
    else:
        with pytest.raises(WeightsError, match=message):
            load_weights(network, tmp_path / "some.safetensors")
    expected = tensors if message is None else before
    torch.testing.assert_close(dict(network.state_dict()), expected, rtol=0, atol=0)


# Published accuracy on all 10,000 test images, and how many of them are classified here.
TRAINED = {"resnet20": (0.9173, 500), "resnet56": (0.9339, 500), "resnet18": (0.9422, 200)}


@pytest.mark.parametrize("name", TRAINED)
def test_trained_networks_are_as_accurate_as_stated(name):
    accuracy, count = TRAINED[name]
    folder = data_folder() / "weights"
    if not (cifar10.available() and (folder / f"{name}.safetensors").is_file()):
        pytest.skip(f"needs CIFAR-10 and weights/{name}.safetensors in ACNML_DATA")
    images, labels = cifar10.load("test").first(count)
    network = MODELS[name].trained(folder)
    with torch.no_grad():
        logits = network(MODELS[name].normalise(cifar10.to_unit(images)))
    found = (logits.argmax(1) == labels).double().mean().item()
    # Four standard deviations of the accuracy on so many images drawn from 10,000.
    std = math.sqrt(accuracy * (1 - accuracy) / count * (1 - count / 10_000))
    assert abs(found - accuracy) < 4 * std
