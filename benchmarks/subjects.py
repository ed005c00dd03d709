"""The subjects of the benchmarks: networks with posteriors and inputs.

Trained networks and real images are used if the data folder contains them. Otherwise weights and
images are random, which does not change the run time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor, nn

import acnml
from acnml import Classifier, Diagonal
from acnml._util.torch_state import seeded
from acnml.fit import KroneckerCurvature
from acnml.posteriors import Posterior
from studies.data import cifar10, digits
from studies.data.catalogue import MNIST
from studies.data.folder import data_folder, locate
from studies.models import MODELS

Labelled = tuple[Tensor, Tensor]
MNIST_IMAGES, CIFAR_IMAGES = 60_000, 50_000  # of the training sets, for the cost of naive CNML


@final
@dataclass(frozen=True)
class Subject:
    """A network and the measurements to make with it."""

    name: str
    network: nn.Module
    data: Labelled  # inputs and labels, for fitting and for prediction
    posteriors: Mapping[str, Posterior]
    solvers: Mapping[str, tuple[str, ...]]  # posterior -> methods
    inputs: int  # batch size for the linearised solution
    climbing: int  # batch size for solvers that take steps
    forward_inputs: int  # batch size for the forward pass
    rounds: int  # repetitions of each measurement
    training_images: int  # of its training set

    @property
    def classifier(self) -> Classifier:
        """The network as a `Classifier`."""
        return Classifier(self.network)

    @property
    def device(self) -> torch.device:
        """Where everything is computed."""
        return self.data[0].device

    def to(self, device: torch.device) -> Subject:
        """Move network, data and posteriors to a device."""
        return replace(
            self,
            network=self.network.to(device),
            data=(self.data[0].to(device), self.data[1].to(device)),
            posteriors={name: q.to(device) for name, q in self.posteriors.items()},
        )


def perceptron() -> Subject:
    """Return an MLP 784-1200-1200-10 on MNIST."""
    network = nn.Sequential(nn.Flatten(), *_layers())
    images, labels = _digits()
    _train(network, images, labels)
    classifier, some = Classifier(network), [(images[:5000], labels[:5000])]
    curvature = acnml.fit.fit_curvature(classifier, some, progress=False)
    assert isinstance(curvature, KroneckerCurvature)
    posteriors = {
        "diagonal": acnml.fit_laplace(
            classifier, some, structure="diag", prior_precision=300.0, progress=False
        ),
        "Kronecker": curvature.damped(30.0),
        "Kronecker, eigenbasis": curvature.posterior(30.0),
        "last layer": acnml.fit_laplace(
            classifier, some, prior_precision=30.0, layers="last", progress=False
        ),
    }
    solvers = {
        "diagonal": (
            "5 exact steps",
            "linearised",
            "network",
            "polished",
            "BMA, 30 samples",
            "the paper's loop",
        ),
        "Kronecker": ("10 exact steps", "linearised", "network", "the paper's loop"),
        "Kronecker, eigenbasis": ("linearised",),
        "last layer": ("linearised",),
    }
    data = images[5000:6000], labels[5000:6000]
    sizes = (200, 200, 1000, 2, MNIST_IMAGES)
    return Subject("MLP 784-1200-1200-10", network, data, posteriors, solvers, *sizes)


def residual() -> Subject:
    """Return ResNet-20 on CIFAR-10."""
    images, labels = _photographs(600)
    description = MODELS["resnet20"]
    weights = data_folder() / "weights"
    known = (weights / str(description.weights)).is_file()
    network = description.trained(weights) if known else description.untrained(seed=0).eval()
    data = description.normalise(images), labels
    return _convolutional("ResNet-20", network, data, (16, 16, 200, 2))


def vgg() -> Subject:
    """Return an untrained VGG16 with batch norm on 32×32 images."""
    network = MODELS["vgg16_bn"].untrained(seed=0).eval()
    return _convolutional("VGG16", network, _photographs(64), (16, 1, 50, 2))


def wide_residual() -> Subject:
    """Return an untrained WideResNet-28-10 with a batch size of one."""
    network = MODELS["wide_resnet28x10"].untrained(seed=0).eval()
    classifier = Classifier(network)
    posteriors = {"diagonal": _narrow(classifier)}
    solvers = {"diagonal": ("linearised", "one step of the paper's loop")}
    sizes = (1, 1, 4, 1, CIFAR_IMAGES)
    return Subject("WideResNet-28-10", network, _photographs(8), posteriors, solvers, *sizes)


SUBJECTS: Mapping[str, Callable[[], Subject]] = {
    "mlp": perceptron,
    "resnet20": residual,
    "vgg16": vgg,
    "wrn28x10": wide_residual,
}


def _convolutional(
    name: str, network: nn.Module, data: Labelled, sizes: tuple[int, int, int, int]
) -> Subject:
    classifier, (images, labels) = Classifier(network), data
    some = [(images[:64], labels[:64])]
    curvature = acnml.fit.fit_curvature(classifier, some, progress=False)
    assert isinstance(curvature, KroneckerCurvature)
    posteriors = {
        "diagonal": _narrow(classifier),
        "Kronecker": curvature.damped(1e5),
        "last layer": acnml.fit_laplace(
            classifier, some, prior_precision=30.0, layers="last", progress=False
        ),
    }
    solvers = {
        "diagonal": (
            "5 exact steps",
            "linearised",
            "network",
            "polished",
            "BMA, 30 samples",
            "the paper's loop",
        ),
        "Kronecker": ("linearised", "network"),
        "last layer": ("linearised",),
    }
    return Subject(name, network, data, posteriors, solvers, *sizes, CIFAR_IMAGES)


def _narrow(classifier: Classifier) -> Diagonal:
    names = [name for name, _ in classifier.model.named_parameters()]
    mean = classifier.copy_parameters(names)
    return Diagonal(mean, {name: torch.full_like(t, 1e-5) for name, t in mean.items()})


def _layers() -> list[nn.Module]:
    with seeded(0):
        sizes = (784, 1200), (1200, 1200), (1200, 10)
        first, second, last = (nn.Linear(*size) for size in sizes)
    return [first, nn.ReLU(), second, nn.ReLU(), last]


def _digits() -> Labelled:
    if all(map(locate, MNIST.files)):
        images, labels = digits.load_mnist("train")
        return images, labels
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(6000, 1, 28, 28, generator=generator)
    return images, torch.randint(0, 10, (6000,), generator=generator)


def _photographs(count: int) -> Labelled:
    if cifar10.available():
        images, labels = cifar10.load("test")
        return cifar10.to_unit(images[:count]), labels[:count]
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(count, 3, 32, 32, generator=generator)
    return images, torch.randint(0, 10, (count,), generator=generator)


def _train(network: nn.Module, images: Tensor, labels: Tensor) -> None:
    """Train for one epoch, which is enough for realistic probabilities."""
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    for batch in torch.arange(len(images)).split(500):
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(images[batch]), labels[batch]).backward()
        optimizer.step()
