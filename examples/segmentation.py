"""Segmentation of digits on textured backgrounds: pixel by pixel confidence and regret under shift.

A small U-Net finds the digits of scikit-learn on stripes. It is calibrated on other images of the
same kind, and tested on textures that it has never seen. The baselines spend the same price.

    python examples/segmentation.py [folder]

writes `metrics.csv` and `picture.png` into the folder.
"""

from __future__ import annotations

import csv
import sys
from dataclasses import replace
from pathlib import Path

import matplotlib as mpl
import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional

import acnml
from acnml import metrics
from acnml.calibration import Answer

SIZE, CLASSES = 48, 11  # the last class is the background
SHIFTS = ("none", "checkerboard", "noise", "contrast")


class UNet(nn.Module):
    """Two levels, and a 1×1 convolution at the end."""

    def __init__(self, classes: int = CLASSES, width: int = 16) -> None:
        super().__init__()
        self.down, self.inner = _block(1, width), _block(width, 2 * width)
        self.deep, self.up = _block(2 * width, 4 * width), _block(6 * width, 2 * width)
        self.last, self.head = _block(3 * width, width), nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (B, K, H, W)."""
        fine = self.down(x)
        middle = self.inner(functional.max_pool2d(fine, 2))
        deep = self.deep(functional.max_pool2d(middle, 2))
        middle = self.up(torch.cat([_doubled(deep), middle], dim=1))
        logits: Tensor = self.head(self.last(torch.cat([_doubled(middle), fine], dim=1)))
        return logits


def _block(inputs: int, outputs: int) -> nn.Module:
    layers: list[nn.Module] = []
    for width in (inputs, outputs):
        layers += [nn.Conv2d(width, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers)


def _doubled(x: Tensor) -> Tensor:
    return functional.interpolate(x, scale_factor=2)


def scenes(digits: slice, count: int, shift: str, seed: int) -> tuple[Tensor, Tensor]:
    """Return images (N, 1, H, W) with three digits each, and the class of every pixel (N, H, W)."""
    shapes, names = load_digits(return_X_y=True)
    shapes, names = shapes[digits].reshape(-1, 8, 8) / 16, names[digits]
    random = np.random.default_rng(seed)
    images, labels = np.empty((count, SIZE, SIZE)), np.full((count, SIZE, SIZE), CLASSES - 1)
    for image, label in zip(images, labels, strict=True):
        image[:] = _texture(random, shift)
        for corner in random.permutation(9)[:3]:
            which = random.integers(len(shapes))
            ink = np.kron(shapes[which], np.ones((2, 2)))
            rows, columns = (slice(16 * c, 16 * c + 16) for c in divmod(int(corner), 3))
            image[rows, columns] = np.maximum(image[rows, columns], ink)
            label[rows, columns][ink > 0.5] = names[which]
        if shift == "noise":
            image += 0.3 * random.normal(size=image.shape)
        if shift == "contrast":
            image[:] = 0.4 * image + 0.3
    return torch.from_numpy(images).float().unsqueeze(1), torch.from_numpy(labels)


def _texture(random: np.random.Generator, shift: str) -> np.ndarray:
    """Return stripes of any direction and width, or squares."""
    y, x = np.mgrid[:SIZE, :SIZE]
    if shift == "checkerboard":
        side = int(random.integers(2, 6))
        return 0.7 * ((x // side + y // side) % 2)
    angle, width = random.uniform(0, np.pi), random.uniform(3, 8)
    wave = np.sin((x * np.cos(angle) + y * np.sin(angle)) * 2 * np.pi / width)
    return 0.25 + 0.2 * wave + 0.05 * random.normal(size=x.shape)


def trained(images: Tensor, labels: Tensor, epochs: int) -> nn.Module:
    """Train a U-Net until it is too sure of itself."""
    torch.manual_seed(0)
    model = UNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(epochs):
        for rows in torch.randperm(len(images)).split(20):
            optimizer.zero_grad()
            functional.cross_entropy(model(images[rows]), labels[rows]).backward()
            optimizer.step()
    return model.eval()


def answers(calibrated: acnml.Calibrated, images: Tensor) -> dict[str, Tensor]:
    """Return the log-probabilities (N, K, H, W) of all methods of the table."""
    found, core = {}, calibrated.calibrator
    with torch.no_grad():
        logits, features = calibrated.classifier.model(images), calibrated.features(images)
    for row in core.table:
        if row.alpha is None:
            found[row.method] = torch.log_softmax(logits / row.temperature, dim=1)
        else:
            own = replace(core, rule=row.method, alpha=row.alpha)  # type: ignore[arg-type]
            found[row.method] = own.log_probs(logits, features)
    return found


def flat(maps: Tensor) -> Tensor:
    """Return the pixels (N · H · W, K) of maps."""
    return maps.movedim(1, -1).flatten(0, -2)


def main(folder: Path, images: int = 300, epochs: int = 15, tested: int = 50) -> None:
    """Train, calibrate, test under every shift, and draw the picture."""
    train = scenes(slice(0, 1000), images, "none", seed=0)
    validation = scenes(slice(1000, 1400), tested, "none", seed=1)
    calibrated = acnml.calibrate(trained(*train, epochs), train, validation, price=0.01)
    print(calibrated)
    rows, shown = [], {}
    for shift in SHIFTS:
        x, labels = scenes(slice(1400, None), tested, shift, seed=2)
        shown[shift] = x[:1], calibrated(x[:1])
        for method, log_probs in answers(calibrated, x).items():
            scores = metrics.summary(flat(log_probs), labels.flatten())
            rows.append({"shift": shift, "method": method, **scores})
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "metrics.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    draw(shown, folder / "picture.png")


def draw(shown: dict[str, tuple[Tensor, Answer]], path: Path) -> None:
    """Draw image, prediction, confidence and regret of one input for every shift."""
    mpl.use("agg")
    import matplotlib.pyplot as plt

    titles = ("image", "prediction", "confidence", "regret")
    figure, axes = plt.subplots(len(shown), 4, figsize=(8, 2 * len(shown)), layout="constrained")
    for line, (shift, (x, answer)) in zip(axes, shown.items(), strict=True):
        maps = x[0, 0], answer.label[0], answer.probs[0].amax(0), answer.regret[0]
        scales = (
            {"cmap": "gray", "vmin": 0, "vmax": 1},
            {"cmap": "tab20", "vmin": 0, "vmax": 19},
            {"cmap": "viridis", "vmin": 0, "vmax": 1},
            {"cmap": "magma", "vmin": 0, "vmax": 1},
        )
        for ax, values, title, scale in zip(line, maps, titles, scales, strict=True):
            ax.imshow(values, **scale)
            ax.set_xticks([])
            ax.set_yticks([])
            if shift == "none":
                ax.set_title(title)
        line[0].set_ylabel("no shift" if shift == "none" else shift)
    figure.savefig(path, dpi=80)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "segmentation"))
