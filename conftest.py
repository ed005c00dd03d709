"""What pytest does not collect: modules without their package, and POSIX-only tests on Windows."""

import importlib.util
import sys

OPTIONAL = {"laplace": "src/acnml/laplace_torch.py"}

# Tests of killed processes, file modes, pipes and links; studies lock their stores with `fcntl`.
POSIX_ONLY = [
    "tests/studies",
    "tests/test_files.py",
    "tests/test_killing.py",
    "tests/test_ray.py",
    "tests/test_scoring_files.py",
    "tests/test_scoring_resumed.py",
]

collect_ignore = [path for name, path in OPTIONAL.items() if importlib.util.find_spec(name) is None]
if sys.platform == "win32":
    collect_ignore += POSIX_ONLY
