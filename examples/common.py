"""Code shared by the examples: a data set of digits, a network, its training, a comparison."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from acnml import Acnml, Bma, Classifier, Map, metrics, tuning
from acnml.posteriors import Posterior
from acnml.predictors import Predictor
from studies.data.digits import handwritten_digits, rotate

VALIDATION = 200  # images held out from the training data to choose alpha
STEPS_PER_EPOCH = 120  # maximum; gives batches of about 500 for MNIST and 50 for the small digits
DEGREES = 60  # angle of the rotated test images


class Data(NamedTuple):
    """Training batches, one validation batch, and the test images and labels."""

    train: DataLoader[tuple[Tensor, ...]]
    validation: list[tuple[Tensor, Tensor]]
    images: Tensor  # (N, 1, H, W)
    labels: Tensor  # (N,)


def load_data() -> Data:
    """Return MNIST from the folder `ACNML_DATA`, or scikit-learn's digits if it is missing."""
    data = handwritten_digits()
    print(f"{data.note}\n")
    images, labels = data.train
    validation = [(images[:VALIDATION], labels[:VALIDATION])]
    return Data(_batches(images[VALIDATION:], labels[VALIDATION:]), validation, *data.test)


def network(data: Data, hidden: int) -> nn.Sequential:
    """Return an untrained network for images, with two hidden layers of this size."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Flatten(), nn.Linear(data.images[0].numel(), hidden), nn.ReLU()),
        *(nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 10)),
    )


def train(model: nn.Module, data: Data, epochs: int) -> None:
    """Train by SGD with momentum and a cosine schedule of the learning rate."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9, weight_decay=3e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * len(data.train))
    for _ in range(epochs):
        for images, labels in data.train:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
            schedule.step()


@contextmanager
def timed(what: str) -> Iterator[None]:
    """Print the run time of a block of code."""
    start = time.perf_counter()
    yield
    print(f"{what}: {time.perf_counter() - start:.0f} s")


def compare(classifier: Classifier, posterior: Posterior, data: Data, queries: int) -> None:
    """Choose alpha, then print the scores of MAP, BMA and ACNML on upright and rotated images."""
    # Posteriors over all layers leave some labels roughly solved. That is good enough here.
    rough = Acnml(classifier, posterior, on_unsolved="ignore")
    mean = Map(classifier.at(posterior.mean))
    choice = tuning.within_price(
        lambda alpha: replace(rough, alpha=alpha), data.validation, price=0.05, reference=mean
    )
    print(f"alpha = {choice}\n")
    rescaled = posterior.scaled(choice.value)
    accuracy = metrics.accuracy(mean(data.images), data.labels)
    print(f"accuracy of the mean on all {len(data.labels)} test images: {accuracy:.2%}\n")
    predictors = {
        "MAP": mean,
        "BMA": Bma(classifier, rescaled, samples=30),
        "ACNML": replace(rough, posterior=rescaled),
    }
    _print_table(predictors, data.images[:queries], data.labels[:queries])


def _print_table(predictors: dict[str, Predictor], images: Tensor, labels: Tensor) -> None:
    columns = "accuracy  confidence   NLL"
    print(f"first {len(labels):<6}{'upright':{len(columns)}}   rotated by {DEGREES}°")
    print(f"{'':12}{columns}   {columns}")
    turned = rotate(images, DEGREES)
    for name, predictor in predictors.items():
        print(
            f"{name:12}{_scores(predictor(images), labels)}   {_scores(predictor(turned), labels)}"
        )


def _scores(log_probs: Tensor, labels: Tensor) -> str:
    confidence = log_probs.amax(1).exp().mean().item()
    accuracy, nll = metrics.accuracy(log_probs, labels), metrics.nll(log_probs, labels)
    return f"{accuracy:8.0%}{confidence:12.0%}{nll:6.2f}"


def _batches(images: Tensor, labels: Tensor) -> DataLoader[tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(0)
    size = max(50, len(labels) // STEPS_PER_EPOCH)
    return DataLoader(TensorDataset(images, labels), size, shuffle=True, generator=generator)
