"""Follow the variances of Bayes by Backprop while they grow: `python -m benchmarks.variances`.

The network 784-256-256-10 of the study `paper-mnist`, preset "small", trained with one common
learning rate for means and variances. Writes the mean standard deviation after every epoch, as a
share of the prior's, to docs/results/measurements/variances.csv. Needs MNIST (`ACNML_DATA`); takes
a few minutes of one core.
"""

from __future__ import annotations

import torch

from benchmarks.recording import MEASUREMENTS, record
from studies.paper_mnist.settings import SMALL
from studies.rotated_mnist.study import load_data, mlp_model
from studies.training import train_mean_field
from studies.training.loop import Nobody


def main() -> None:
    """Train, and keep the standard deviations."""
    torch.set_num_threads(1)
    (seed,), model = SMALL.seeds, mlp_model(SMALL.hidden, has_mnist=True)
    data, network = load_data(SMALL.train_images, SMALL.validation), model.untrained(seed)
    trained = train_mean_field(network, data.train, model.augmented, SMALL.one_rate, seed, Nobody())
    shares = enumerate(trained.facts["std"], start=1)
    record(MEASUREMENTS / "variances.csv", [{"epoch": n, "std": share} for n, share in shares])


if __name__ == "__main__":
    main()
