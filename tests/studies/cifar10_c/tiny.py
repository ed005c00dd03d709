"""Tiny networks, few images and a short study, in the place of those of CIFAR-10-C."""

from __future__ import annotations

import torch
from torch import nn

from studies.cifar10_c.recipes import Recipe
from studies.cifar10_c.settings import Choice, Curvature, Images, Sweep
from studies.data import Labelled
from studies.data.cifar10 import to_unit
from studies.models import Description
from studies.models.resnet import ResNet, SubsampleAndPad
from studies.training import Averaging

TRAIN, TEST, HELD = 60, 60, 20


def network(classes: int) -> nn.Module:
    return ResNet(classes, (2, 4), 1, SubsampleAndPad)


def dropping(classes: int) -> nn.Module:
    return nn.Sequential(network(8), nn.Dropout(0.5), nn.Linear(8, classes))


TRAINING = Averaging(
    epochs=3, swa_start=1, learning_rate=0.05, swa_learning_rate=0.02, batch_size=20
)
DESCRIPTIONS = {
    "tiny": Description(network, (0.5,) * 3, (0.25,) * 3, "tiny.safetensors"),
    "dropping": Description(dropping, (0.4,) * 3, (0.2,) * 3),
}
RECIPES = {
    "tiny": Recipe("tiny", "given", TRAINING),
    "fresh": Recipe("tiny", "random", TRAINING),
    "dropping": Recipe("dropping", "random", TRAINING),
}
GRIDS = Sweep(
    images=6,
    temperatures=(1.0, 2.0),
    alphas=(0.1, 1.0),
    prior_precisions=(1.0, 100.0),
    covariance_scales=(0.1, 1.0),
)
PIECES = {
    "samples": 2,
    "batch_norm_images": 20,
    "corruptions": ("contrast",),
    "severities": (5, 4),
    "blurred": (5,),
    "bins": 2,
    "resamples": 10,
    "images": Images(30, 12, 10, 8, 5),
    "choice": Choice(held_out=HELD),
    "curvature": Curvature(images=20, prior_precision=30.0),
    "frontier": GRIDS,
}


def bytes_of(images: int, seed: int) -> Labelled:
    """Images whose class is how bright red and green are; every sixth label is wrong."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(images) % 10
    pixels = torch.randint(60, (images, 3, 32, 32), generator=generator)
    pixels[:, 0] += 40 * (labels % 5)[:, None, None]
    pixels[:, 1] += 150 * (labels // 5)[:, None, None]
    wrong = torch.arange(images) % 6 == 0
    return Labelled(pixels.to(torch.uint8), torch.where(wrong, (labels + 3) % 10, labels))


SPLITS = {"train": bytes_of(TRAIN, 0), "test": bytes_of(TEST, 1)}


def given_weights() -> dict[str, torch.Tensor]:
    """Weights of the tiny network after some training."""
    described = DESCRIPTIONS["tiny"]
    network = described.untrained(seed=1)
    optimizer = torch.optim.Adam(network.parameters(), lr=0.03)
    images, labels = described.normalise(to_unit(SPLITS["train"].inputs)), SPLITS["train"].labels
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(images), labels).backward()
        optimizer.step()
    return network.state_dict()
