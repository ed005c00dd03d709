"""Residual networks (He et al. 2016) for 32×32 images: ResNet-20 and -56, and ResNet-18.

ResNet-20 and -56 are those of the paper's CIFAR section: three stages, and shortcuts without
parameters (option A). ResNet-18 is the ImageNet network with a 3×3 stem and no max-pool: four
stages, and projections as shortcuts (option B).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias, final

from torch import Tensor, nn
from torch.nn import functional

from studies.models.vgg import LIGHT

# (width before, width after, stride) -> what stands in for the identity where the shape changes.
Shortcut: TypeAlias = Callable[[int, int, int], nn.Module]


@final
class SubsampleAndPad(nn.Module):
    """Option A: every stride-th pixel, and channels of zeros, half in front and half behind."""

    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.front = (width - width_in) // 2
        self.behind = width - width_in - self.front

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, width, H / stride, W / stride)."""
        pixels = x[:, :, :: self.stride, :: self.stride]
        return functional.pad(pixels, (0, 0, 0, 0, self.front, self.behind))


def projection(width_in: int, width: int, stride: int) -> nn.Module:
    """Option B: a 1×1 convolution with batch norm."""
    convolution = nn.Conv2d(width_in, width, 1, stride=stride, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(width))


@final
class BasicBlock(nn.Module):
    """Two convolutions with batch norm beside a shortcut, and ReLU behind their sum."""

    def __init__(
        self, width_in: int, width: int, stride: int, shortcut: Shortcut, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, width, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU()
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        changes = stride != 1 or width_in != width
        self.shortcut = shortcut(width_in, width, stride) if changes else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, width, H / stride, W / stride)."""
        hidden = self.dropout(self.relu(self.bn1(self.conv1(x))))
        return self.relu(self.bn2(self.conv2(hidden)) + self.shortcut(x))


@final
class ResNet(nn.Module):
    """A convolution, stages `layer1`, `layer2`, … of blocks, the mean over positions and a head."""

    def __init__(
        self,
        classes: int,
        widths: Sequence[int],
        blocks: int,
        shortcut: Shortcut,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, widths[0], 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(widths[0])
        self.relu = nn.ReLU()
        self.stages = len(widths)
        for number, width in enumerate(widths, start=1):
            stride = 1 if number == 1 else 2
            width_in = widths[max(number - 2, 0)]
            first = BasicBlock(width_in, width, stride, shortcut, dropout)
            others = (BasicBlock(width, width, 1, shortcut, dropout) for _ in range(blocks - 1))
            self.add_module(f"layer{number}", nn.Sequential(first, *others))
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        self.linear = nn.Linear(widths[-1], classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits for images (B, 3, H, W)."""
        hidden = self.relu(self.bn1(self.conv1(images)))
        for number in range(1, self.stages + 1):
            hidden = self.get_submodule(f"layer{number}")(hidden)
        return self.linear(self.dropout(hidden.mean((2, 3))))


def resnet14(classes: int = 100) -> ResNet:
    """Return a ResNet-14 with projections as shortcuts: 0.18 million parameters."""
    return ResNet(classes, (16, 32, 64), 2, projection)


def resnet20(classes: int = 10) -> ResNet:
    """Return ResNet-20: 0.27 million parameters."""
    return ResNet(classes, (16, 32, 64), 3, SubsampleAndPad)


def resnet20_dropout(classes: int = 10) -> ResNet:
    """Return ResNet-20 with light dropout where SWAG's wide residual network has it."""
    return ResNet(classes, (16, 32, 64), 3, SubsampleAndPad, dropout=LIGHT)


def resnet56(classes: int = 10) -> ResNet:
    """Return ResNet-56: 0.85 million parameters."""
    return ResNet(classes, (16, 32, 64), 9, SubsampleAndPad)


def resnet18(classes: int = 10) -> ResNet:
    """Return ResNet-18: 11.2 million parameters."""
    return ResNet(classes, (64, 128, 256, 512), 2, projection)
