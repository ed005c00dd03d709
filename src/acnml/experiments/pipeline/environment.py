"""What a result was made with: the versions and the hardware that its header names."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path
from typing import Any

import torch

import acnml


def versions() -> dict[str, str]:
    """Return the versions of what computes."""
    return {
        "acnml": acnml.__version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }


def hardware() -> dict[str, Any]:
    """Return what the computation runs on."""
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def _processor() -> str:
    """Return the processor's name, which Python itself does not know on Linux."""
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text(errors="replace") if cpuinfo.is_file() else ""
    name = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return name[1] if name else platform.processor()
