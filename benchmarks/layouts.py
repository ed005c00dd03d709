"""Cost of calibrated predictions for several labels, maps and tokens: rows of `benchmarks.product`.

Networks and data are random; the cost does not depend on what was learned.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import acnml
from acnml.calibration.calibrator import RULES
from acnml.calibration.heads import Head
from benchmarks.timing import fastest

Row = dict[str, Any]


@torch.no_grad()
def layout_rows() -> Iterator[Row]:
    """Measure the rules for several labels, and whole predictions for maps and tokens."""
    logits, v = 3 * torch.randn(64, 1000), torch.rand(64)
    rows, variances = Head(is_multilabel=True).rows(logits, v)
    for rule in ("closed-form", "acnml"):
        seconds = fastest({"own": partial(RULES[rule], rows, variances)}, 30)["own"]
        case = f"several labels, 1,000 of an input, {rule}"
        yield {"case": case, "value": 1e3 * seconds / 64, "unit": "ms per input", "target": "≤ 0.1"}

    x = torch.randn(8, 1, 256, 256)
    network = UNet(classes=21).eval()
    known = network(x).argmax(1)
    halves = [(x[half], _noisy(known[half], 21)) for half in (slice(4), slice(4, 8))]
    yield from _passes(
        "U-Net of 32 to 128 channels, 21 classes, 256 × 256", network, halves, x[:2], "≤ 1.15"
    )

    ids = torch.randint(1, 1000, (24, 128))
    tagger = Tagger().eval()
    known = tagger(ids).argmax(-1)
    halves = [(ids[half], _noisy(known[half], 9)) for half in (slice(12), slice(12, 24))]
    yield from _passes("tokens, 6 layers of width 384", tagger, halves, ids[:4], "≤ 1.1")


class UNet(nn.Module):
    """Three resolutions, with 32 to 128 channels."""

    def __init__(self, classes: int, width: int = 32) -> None:
        super().__init__()
        self.down, self.inner = _block(1, width), _block(width, 2 * width)
        self.deep, self.up = _block(2 * width, 4 * width), _block(6 * width, 2 * width)
        self.last, self.head = _block(3 * width, width), nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (B, K, H, W)."""
        fine = self.down(x)
        middle = self.inner(functional.max_pool2d(fine, 2))
        deep = functional.interpolate(self.deep(functional.max_pool2d(middle, 2)), scale_factor=2)
        middle = functional.interpolate(self.up(torch.cat([deep, middle], 1)), scale_factor=2)
        logits: Tensor = self.head(self.last(torch.cat([middle, fine], 1)))
        return logits


def _block(inputs: int, outputs: int) -> nn.Module:
    layers = [nn.Conv2d(inputs, outputs, 3, padding=1), nn.Conv2d(outputs, outputs, 3, padding=1)]
    norms = [nn.BatchNorm2d(outputs) for _ in layers]
    return nn.Sequential(layers[0], norms[0], nn.ReLU(), layers[1], norms[1], nn.ReLU())


class Tagger(nn.Module):
    """An encoder as large as MiniLM, with nine classes for every token."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, 384)
        layer = nn.TransformerEncoderLayer(384, 12, 1536, 0.0, "gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
        self.classifier = nn.Linear(384, 9)

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits (B, T, 9)."""
        logits: Tensor = self.classifier(self.encoder(self.embedding(ids)))
        return logits


def _noisy(labels: Tensor, classes: int) -> Tensor:
    wrong = torch.rand(labels.shape) < 0.2
    return torch.where(wrong, torch.randint(classes, labels.shape), labels)


def _passes(name: str, network: nn.Module, halves: Any, x: Tensor, target: str) -> Iterator[Row]:
    """Measure predictions by two rules, in forward passes of the same batch."""
    for rule in ("closed-form", "acnml"):
        found = acnml.calibrate(network, *([half] for half in halves), rule=rule, progress=False)
        times = fastest({"plain": partial(network, x), "own": partial(found, x)}, 5)
        value = times["own"] / times["plain"]
        case = f"{name}, {rule}"
        yield {"case": case, "value": value, "unit": "forward passes", "target": target}


if __name__ == "__main__":
    for row in layout_rows():
        print(f"{row['case']:<60} {row['value']:10.3g} {row['unit']} {row['target']}", flush=True)
