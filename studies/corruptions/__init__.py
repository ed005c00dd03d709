"""The corruptions of CIFAR-10-C, made from clean images with the published parameters.

`CORRUPTIONS` has them by name: the fifteen of the `BENCHMARK`, and `gaussian_blur`. `Cifar10C`
gives the corrupted test set, from the official files where they are.
"""

from studies.corruptions.base import SEVERITIES, Corruption
from studies.corruptions.catalogue import BENCHMARK, CORRUPTIONS
from studies.corruptions.cifar10_c import Cifar10C
from studies.corruptions.sheet import contact_sheet, write_sheet

__all__ = [
    "BENCHMARK",
    "CORRUPTIONS",
    "SEVERITIES",
    "Cifar10C",
    "Corruption",
    "contact_sheet",
    "write_sheet",
]
