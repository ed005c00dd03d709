"""What the examples share: digits to learn from, a network, its training, and a table."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from acnml import Acnml, Bma, Classifier, Map, Posterior, Predictor, metrics
from acnml.experiments import digits, mnist

STEPS_PER_EPOCH = 120  # batches of 500 for MNIST, smaller ones for fewer images
DEGREES = 60


class Data(NamedTuple):
    """Training batches, and test images with their labels."""

    train: DataLoader[tuple[Tensor, ...]]
    images: Tensor  # (N, 1, H, W)
    labels: Tensor  # (N,)


def load_data() -> Data:
    """Return MNIST from the folder `ACNML_DATA`, or scikit-learn's small digits without it."""
    if mnist.available():
        (train, train_labels), (test, labels) = mnist.load("train"), mnist.load("test")
        return Data(_batches(train, train_labels), test.view(-1, 1, 28, 28), labels)
    print("MNIST is not in the folder that ACNML_DATA names: taking scikit-learn's 8x8 digits.\n")
    small = digits.load_digits(validation=1, test=400, seed=0)
    return Data(_batches(*small.train), *small.test)


def network(data: Data, *hidden: int) -> nn.Sequential:
    """Return an untrained network with hidden layers of these sizes; it takes images."""
    sizes = [data.images[0].numel(), *hidden]
    torch.manual_seed(0)
    layers = [
        layer
        for inputs, outputs in zip(sizes, hidden, strict=False)
        for layer in (nn.Linear(inputs, outputs), nn.ReLU())
    ]
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(sizes[-1], 10))


def train(model: nn.Module, data: Data, epochs: int) -> None:
    """Train by SGD with momentum, its learning rate falling to zero along a cosine."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * len(data.train))
    for _ in range(epochs):
        for images, labels in data.train:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
            schedule.step()


@contextmanager
def timed(what: str) -> Iterator[None]:
    """Print how long something took."""
    start = time.perf_counter()
    yield
    print(f"{what}: {time.perf_counter() - start:.0f} s")


def report(classifier: Classifier, posterior: Posterior, data: Data, queries: int) -> None:
    """Print how the mean does on all test images, and three predictors on the first few."""
    mean = Map(classifier.at(posterior.mean))
    accuracy = metrics.accuracy(mean(data.images), data.labels)
    print(f"accuracy of the mean on {len(data.labels)} test images: {accuracy:.2%}\n")
    images, labels = data.images[:queries], data.labels[:queries]
    turned = digits.rotate(images, DEGREES)
    column = "accuracy  confidence   NLL"
    print(f"{queries} images  {'upright':{len(column)}}   turned by {DEGREES}°")
    print(f"{'':10}{column}   {column}")
    predictors = {
        "MAP": mean,
        "BMA": Bma(classifier, posterior, samples=30),
        "ACNML": Acnml(classifier, posterior),
    }
    for name, predictor in predictors.items():
        print(
            f"{name:10}{_scores(predictor, images, labels)}   {_scores(predictor, turned, labels)}"
        )


def _batches(images: Tensor, labels: Tensor) -> DataLoader[tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(0)
    size = max(1, len(labels) // STEPS_PER_EPOCH)
    return DataLoader(TensorDataset(images, labels), size, shuffle=True, generator=generator)


def _scores(predictor: Predictor, images: Tensor, labels: Tensor) -> str:
    log_probs = predictor(images)
    confidence = log_probs.amax(1).exp().mean().item()
    accuracy, nll = metrics.accuracy(log_probs, labels), metrics.nll(log_probs, labels)
    return f"{accuracy:8.0%}{confidence:12.0%}{nll:6.2f}"
