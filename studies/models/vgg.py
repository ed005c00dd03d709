"""VGG16 with batch norm for 32×32 images, and its sibling with dropout before each layer.

The layers, their names and their initial weights are those of `VGG16BN` in the code of SWAG (Maddox
et al. 2019): 13 convolutions with batch norm, five max-pools that leave one position, and three
linear layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from torch import Tensor, nn

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


def vgg16(classes: int = 10, stages: Sequence[Sequence[int]] = STAGES) -> Vgg:
    """Return VGG16 with batch norm, and dropout of ½ before the first two linear layers."""
    features: list[nn.Module] = []
    width_in = 3
    for stage in stages:
        for width in stage:
            features += _convolution(width_in, width)
            width_in = width
        features.append(nn.MaxPool2d(2))
    hidden = nn.Linear(width_in, width_in), nn.ReLU()
    again = nn.Linear(width_in, width_in), nn.ReLU()
    head = nn.Linear(width_in, classes)
    return Vgg(features, [nn.Dropout(0.5), *hidden, nn.Dropout(0.5), *again, head])


def vgg16_dropout(
    classes: int = 10, stages: Sequence[Sequence[int]] = STAGES, dropout: float = 0.05
) -> Vgg:
    """Return VGG16 with batch norm, and light dropout before every layer with weights.

    SWAG's code has none before the last linear layer; "before each layer" is what its text says.
    """
    plain = vgg16(classes, stages)
    return Vgg(_with_dropout(plain.features, dropout), _with_dropout(plain.classifier, dropout))


def _convolution(width_in: int, width: int) -> list[nn.Module]:
    return [nn.Conv2d(width_in, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]


def _with_dropout(layers: nn.Sequential, dropout: float) -> list[nn.Module]:
    """Put dropout before each affine layer, in place of any there was."""
    result: list[nn.Module] = []
    for layer in layers:
        if isinstance(layer, (nn.Conv2d, nn.Linear)):
            result.append(nn.Dropout(dropout))
        if not isinstance(layer, nn.Dropout):
            result.append(layer)
    return result
