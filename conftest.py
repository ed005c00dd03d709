"""Doctests of modules whose optional package is not installed are not collected."""

import importlib.util

OPTIONAL = {"laplace": "src/acnml/laplace_torch.py"}

collect_ignore = [path for name, path in OPTIONAL.items() if importlib.util.find_spec(name) is None]
