"""The paper's MNIST experiments."""

from studies.engine.study import Kind
from studies.paper_mnist.settings import PRESETS
from studies.paper_mnist.study import build

KIND = Kind("paper-mnist", "MNIST as in the paper.", PRESETS, build)
