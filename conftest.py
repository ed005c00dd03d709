"""What pytest does not collect, and the names that all examples in docstrings may use."""

import importlib.util
import os
import sys

import pytest

os.environ.setdefault("MPLBACKEND", "Agg")  # figures in examples need no screen

# A package -> the part of the library that is for it; its doctests are not collected without it.
OPTIONAL = {
    "laplace": "laplace_torch.py",
    "lightning": "lightning.py",
    "matplotlib": "plots.py",
    "pyarrow": "scoring",
    "ray": "ray.py",
    "torchmetrics": "torchmetrics.py",
    "transformers": "transformers.py",
    "typer": "cli",
}
MISSING = sorted(name for name in OPTIONAL if importlib.util.find_spec(name) is None)

# Tests of killed processes, file modes, pipes and links; studies lock their stores with `fcntl`.
POSIX_ONLY = [
    "tests/integrations/test_ray.py",
    "tests/integrations/test_scoring_files.py",
    "tests/integrations/test_scoring_resumed.py",
    "tests/studies",
    "tests/test_files.py",
]

# They have no examples, and modules of one name cannot be imported beside each other.
collect_ignore_glob = ["*/conftest.py"]

collect_ignore = [f"src/acnml/{OPTIONAL[name]}" for name in MISSING]
if sys.platform == "win32":
    collect_ignore += POSIX_ONLY


def pytest_report_header():
    """Name the packages that are missing."""
    return f"no doctests of the parts for: {', '.join(MISSING)}" if MISSING else None


@pytest.fixture(autouse=True)
def names_of_examples(request, doctest_namespace):
    """Let examples in docstrings begin with a network, as the reference says."""
    if isinstance(request.node, pytest.DoctestItem):
        from example_names import example_names

        doctest_namespace.update(example_names())
