"""The CIFAR-10-C study: calibration of classifiers on corrupted photographs.

settings.py   settings and presets
recipes.py    how the networks are trained
methods.py    methods, how they look in figures, and what they cost
study.py      data, networks, posteriors, order of the work, claims
report.py     the sections of the report
"""

from studies.cifar10_c.settings import PRESETS
from studies.cifar10_c.study import build
from studies.engine.study import Kind

ABOUT = """CIFAR-10 under corruption: calibration, its price, and the claims of the paper.

The preset cpu takes hours, paper is for a GPU."""
KIND = Kind("cifar10-c", ABOUT, PRESETS, build)
