"""Wide residual networks (Zagoruyko & Komodakis 2016) for 32×32 images, as used with SWAG.

Layers and names are those in the code of SWAG (Maddox et al. 2019): convolutions with biases, and
in the first block of a stage the *second* convolution takes the stride. The sibling with dropout
has it between the convolutions of every block and before the last layer.
"""

from __future__ import annotations

from typing import final

from torch import Tensor, nn

from studies.models.vgg import LIGHT


@final
class PreActivationBlock(nn.Module):
    """Two convolutions, each behind batch norm and ReLU, beside a shortcut."""

    def __init__(self, width_in: int, width: int, stride: int, dropout: float) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(width_in)
        self.conv1 = nn.Conv2d(width_in, width, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1)
        self.relu = nn.ReLU()
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        changes = stride != 1 or width_in != width
        projection = [nn.Conv2d(width_in, width, 1, stride=stride)] if changes else []
        self.shortcut = nn.Sequential(*projection)

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, width, H / stride, W / stride)."""
        hidden = self.dropout(self.conv1(self.relu(self.bn1(x))))
        return self.conv2(self.relu(self.bn2(hidden))) + self.shortcut(x)


@final
class WideResNet(nn.Module):
    """A convolution, three stages of blocks, batch norm, the mean over positions and a head."""

    def __init__(self, classes: int, blocks: int, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1)
        self.layer1 = _stage(16, width, blocks, 1, dropout)
        self.layer2 = _stage(width, 2 * width, blocks, 2, dropout)
        self.layer3 = _stage(2 * width, 4 * width, blocks, 2, dropout)
        self.bn1 = nn.BatchNorm2d(4 * width, momentum=0.9)
        self.relu = nn.ReLU()
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        self.linear = nn.Linear(4 * width, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits for images (B, 3, H, W)."""
        hidden = self.layer3(self.layer2(self.layer1(self.conv1(images))))
        return self.linear(self.dropout(self.relu(self.bn1(hidden)).mean((2, 3))))


def wide_resnet28x10(classes: int = 10) -> WideResNet:
    """Return the network of 28 layers that is ten times as wide as a plain one."""
    return WideResNet(classes, blocks=4, width=160)


def wide_resnet28x10_dropout(classes: int = 10) -> WideResNet:
    """Return SWAG's `WideResNet28x10Drop`."""
    return WideResNet(classes, blocks=4, width=160, dropout=LIGHT)


def _stage(width_in: int, width: int, blocks: int, stride: int, dropout: float) -> nn.Sequential:
    first = PreActivationBlock(width_in, width, stride, dropout)
    others = (PreActivationBlock(width, width, 1, dropout) for _ in range(blocks - 1))
    return nn.Sequential(first, *others)
