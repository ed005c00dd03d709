"""VGG16 for 32×32 images, with and without batch norm, and its siblings with light dropout.

The layers, their names and their initial weights are those of `VGG16`, `VGG16BN`, `VGG16Drop` and
`VGG16BNDrop` in the code of SWAG (Maddox et al. 2019): 13 convolutions, five max-pools that leave
one position, and three linear layers. The paper's commands use `VGG16`, which has no batch norm.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from torch import Tensor, nn

LIGHT = 0.05  # the share of dropout in the networks that have it before every layer
# Widths of the convolutions between one max-pool and the next.
STAGES = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))


@final
class Vgg(nn.Module):
    """Stages of convolutions that each halve the image, then a classifier of three layers."""

    def __init__(self, features: Sequence[nn.Module], classifier: Sequence[nn.Module]) -> None:
        super().__init__()
        self.features = nn.Sequential(*features)
        self.classifier = nn.Sequential(*classifier)
        for module in self.features:
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
                assert module.bias is not None
                nn.init.zeros_(module.bias)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits for images (B, 3, H, W) whose sides the max-pools bring down to one."""
        return self.classifier(self.features(images).flatten(1))


def vgg16(
    classes: int = 10,
    stages: Sequence[Sequence[int]] = STAGES,
    batch_norm: bool = False,
    dropout: float | None = None,
) -> Vgg:
    """Return VGG16, by default without batch norm.

    Args:
        classes: number of logits.
        stages: widths of the convolutions between one max-pool and the next.
        batch_norm: whether it stands behind every convolution.
        dropout: None for ½ before the two hidden linear layers alone; otherwise the share before
            every convolution and before these layers. There is none before the last layer.
    """
    features: list[nn.Module] = []
    width_in = 3
    for stage in stages:
        for width in stage:
            features += [] if dropout is None else [nn.Dropout(dropout)]
            features.append(nn.Conv2d(width_in, width, 3, padding=1))
            features += [nn.BatchNorm2d(width), nn.ReLU()] if batch_norm else [nn.ReLU()]
            width_in = width
        features.append(nn.MaxPool2d(2))
    share = 0.5 if dropout is None else dropout
    classifier: list[nn.Module] = []
    for _ in range(2):
        classifier += [nn.Dropout(share), nn.Linear(width_in, width_in), nn.ReLU()]
    return Vgg(features, [*classifier, nn.Linear(width_in, classes)])


def vgg16_dropout(classes: int = 10, stages: Sequence[Sequence[int]] = STAGES) -> Vgg:
    """Return SWAG's `VGG16Drop`."""
    return vgg16(classes, stages, dropout=LIGHT)


def vgg16_bn(classes: int = 10, stages: Sequence[Sequence[int]] = STAGES) -> Vgg:
    """Return SWAG's `VGG16BN`."""
    return vgg16(classes, stages, batch_norm=True)


def vgg16_bn_dropout(classes: int = 10, stages: Sequence[Sequence[int]] = STAGES) -> Vgg:
    """Return SWAG's `VGG16BNDrop`."""
    return vgg16(classes, stages, batch_norm=True, dropout=LIGHT)
