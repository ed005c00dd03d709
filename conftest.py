"""Doctests of modules whose optional package is not installed are not collected; a line says so."""

import importlib.util

# A package -> the parts of the library that are for it.
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

collect_ignore = [f"src/acnml/{OPTIONAL[name]}" for name in MISSING]


def pytest_report_header():
    """Name the packages that are missing."""
    return f"without doctests for: {', '.join(MISSING)}" if MISSING else None
