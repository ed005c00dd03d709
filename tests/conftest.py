"""One torch thread, because the tensors are too small to benefit from more; no test by chance.

Hypothesis draws the same examples in every run. Random exploration belongs to `make fuzz`; examples
that fail there become explicit ones.
"""

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
settings.load_profile("repeatable")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup():
    """Let no test, nor a fixture that it sets up, draw other numbers behind other tests."""
    torch.manual_seed(0)
