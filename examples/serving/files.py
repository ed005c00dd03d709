"""Make the files that the server needs, with a small network on random images.

cd examples && python -m serving.files FOLDER
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor, nn

import acnml
from acnml import Calibrated

PIXELS, HIDDEN, CLASSES = 784, 256, 10


def build() -> nn.Module:
    """Return the network."""
    return nn.Sequential(nn.Linear(PIXELS, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES))


def images(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return noisy images of ten prototypes, and labels of which a tenth are wrong."""
    prototypes = torch.rand(CLASSES, PIXELS, generator=torch.Generator().manual_seed(0)) ** 3
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randint(CLASSES, (count,), generator=generator)
    x = (prototypes[chosen] + 0.6 * torch.rand(count, PIXELS, generator=generator)).clamp(0, 1)
    wrong = torch.rand(count, generator=generator) < 0.1
    return x, torch.where(wrong, (chosen + 1) % CLASSES, chosen)


def write_predictor(folder: Path) -> Calibrated:
    """Train and calibrate the network, and write weights and predictor."""
    x, labels = images(6000, seed=1)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = build()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for some in torch.arange(4000).split(200):
        loss = nn.functional.cross_entropy(model(x[some]), labels[some])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    train, validation = (x[:4000], labels[:4000]), (x[4000:], labels[4000:])
    calibrated = acnml.calibrate(model, train, validation, progress=False)
    safetensors.torch.save_model(model, str(folder / "weights.safetensors"))
    acnml.save(calibrated, folder / "predictor.safetensors")
    return calibrated


def write(folder: Path) -> None:
    """Write weights, predictor and ONNX model, and the limit below which the server abstains."""
    calibrated = write_predictor(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter
        acnml.export_onnx(calibrated, images(2, seed=1)[0], folder / "model.onnx")
    (folder / "limit.txt").write_text(repr(calibrated.threshold(0.05)))


if __name__ == "__main__":
    Path(sys.argv[1]).mkdir(parents=True, exist_ok=True)
    write(Path(sys.argv[1]))
