"""A stage's settings and content, the tiny study run again, and ways to damage a file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from studies.store import Content
from tiny_study import Run, TinyStudy, calls

ALL = {"train", "fit", "bma", "map"}


@dataclass(frozen=True)
class Linear:
    slope: float = 1.0


def numbers(work) -> Content:
    return Content({"numbers": torch.arange(3.0)})


def made(out: Path, study: TinyStudy) -> set[str]:
    """Run the study and return the stages that did any work."""
    before = len(calls(out))
    Run(out, study)()
    return {call.split()[0] for call in calls(out)[before:]}


def damage_truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def damage_flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


DAMAGES = {
    "truncated": damage_truncate,
    "a flipped bit": damage_flip,
    "empty": lambda path: path.write_bytes(b""),
    "removed": Path.unlink,
}
