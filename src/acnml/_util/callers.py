"""Who called the library, for warnings that point to the line of the user's program."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

# The folders of this library and of torch, whose decorators lie between it and its callers.
FOLDERS = Path(__file__).parents[1], Path(torch.__file__).parent
INSIDE = tuple(f"{folder}{os.sep}" for folder in FOLDERS)


def callers_level() -> int:
    """Return the `stacklevel` with which the calling function warns at the library's caller.

    Python 3.12 has `skip_file_prefixes` of `warnings.warn` for this.
    """
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(INSIDE):
        frame, level = frame.f_back, level + 1
    return level
