"""Networks of the studies, each with its normalisation and, where there are some, trained weights.

`MODELS` has them all by name: `MODELS["resnet20"].untrained(seed=0)`.
"""

from collections.abc import Mapping
from types import MappingProxyType

from studies.models.description import Description, WeightsError, load_weights
from studies.models.mlp import mlp
from studies.models.resnet import resnet14, resnet18, resnet20, resnet20_dropout, resnet56
from studies.models.vgg import vgg16, vgg16_bn, vgg16_bn_dropout, vgg16_dropout
from studies.models.wide_resnet import wide_resnet28x10, wide_resnet28x10_dropout

__all__ = ["MODELS", "Description", "WeightsError", "load_weights"]

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
CIFAR100 = ((0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761))
CIFAR10 = ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))

MODELS: Mapping[str, Description] = MappingProxyType(
    {
        "mlp": Description(mlp, mean=(0.0,), std=(1.0,)),
        "vgg16": Description(vgg16, *IMAGENET),
        "vgg16_dropout": Description(vgg16_dropout, *IMAGENET),
        "vgg16_bn": Description(vgg16_bn, *IMAGENET),
        "vgg16_bn_dropout": Description(vgg16_bn_dropout, *IMAGENET),
        "wide_resnet28x10": Description(wide_resnet28x10, *CIFAR10),
        "wide_resnet28x10_dropout": Description(wide_resnet28x10_dropout, *CIFAR10),
        "resnet14": Description(resnet14, *CIFAR100, "resnet14_cifar100.safetensors"),
        "resnet20": Description(resnet20, *IMAGENET, "resnet20.safetensors"),
        "resnet20_dropout": Description(resnet20_dropout, *IMAGENET),
        "resnet56": Description(resnet56, *IMAGENET, "resnet56.safetensors"),
        "resnet18": Description(resnet18, weights="resnet18.safetensors"),
    }
)
