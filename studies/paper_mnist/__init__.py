"""The paper's MNIST experiments, as the paper states them.

settings.py   settings and presets
study.py      posteriors, methods, order of the work, claims
naive.py      ACNML and naive CNML for the same queries
report.py     the sections of the report
"""

from studies.engine.study import Kind
from studies.paper_mnist.settings import PRESETS
from studies.paper_mnist.study import build

ABOUT = """MNIST as in the paper: Bayes by Backprop, five exact steps, naive CNML.

The preset quick takes minutes, full takes hours; --set parts=... runs some of it."""
KIND = Kind("paper-mnist", ABOUT, PRESETS, build)
