"""The study with tiny networks and few images."""

from __future__ import annotations

from dataclasses import replace

from studies.rotated_mnist.settings import Choice, Images, RotatedMnist, Swag, Sweep
from studies.training import BayesByBackprop, Descent

TINY = replace(
    RotatedMnist(),
    seeds=(0,),
    hidden=(12,),
    train_images=400,
    angles=(0, 90),
    members=2,
    samples=2,
    training=Descent(epochs=8, batch_size=50, learning_rate=0.2),
    bayes_by_backprop=BayesByBackprop(epochs=2, batch_size=50, learning_rate=0.01),
    swag=Swag(epochs=2, batch_size=50),
    images=Images(cheap=60, paper_steps=20, converged=6),
    choice=Choice(validation=100, tolerance=0.05),
    frontier=Sweep(
        images=40,
        shifts=("0°", "90°"),
        temperatures=(1.0, 2.0),
        alphas=(0.1, 1.0),
        prior_precisions=(1.0, 100.0),
        covariance_scales=(0.5, 1.0),
    ),
)
