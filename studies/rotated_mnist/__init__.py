"""The rotated-MNIST study: calibration of classifiers on rotated digits.

settings.py   settings and presets
methods.py    methods, and how they look in figures
study.py      data, networks, posteriors, order of the work, claims
report.py     the sections of the report
"""

from studies.engine.study import Kind
from studies.rotated_mnist.settings import PRESETS
from studies.rotated_mnist.study import build

ABOUT = """MNIST under rotation: calibration, its price, and the claims of the paper.

The preset quick takes about ten minutes, full takes hours."""
KIND = Kind("rotated-mnist", ABOUT, PRESETS, build)
