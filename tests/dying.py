"""Functions in processes of their own, which may die: every state that files can be in is tried."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

CHANGES = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "fcntl.flock"}
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["acnml.scoring", "studies.store", "torch._dynamo"])  # slow


def start(target: Callable[..., object], *arguments: object) -> BaseProcess:
    """Start a function in a process of its own."""
    process = CONTEXT.Process(target=alone, args=(target, *arguments))
    process.start()
    return process


def alone(target: Callable[..., object], *arguments: object) -> None:
    """Run as the only thing that a process does."""
    torch.set_num_threads(1)
    target(*arguments)


def start_and_kill(
    step: int, folder: str | Path, target: Callable[..., object], *arguments: object
) -> BaseProcess:
    """Start a function that dies before the step-th change of files in a folder."""
    return start(until, step, str(folder), target, *arguments)


def until(step: int, folder: str, target: Callable[..., object], *arguments: object) -> None:
    """Run until a file is opened or moved or a lock taken for the step-th time, then die."""
    steps = 0

    def hook(event: str, details: tuple[object, ...]) -> None:
        nonlocal steps
        if (event == "open" and str(details[0]).startswith(folder)) or event in CHANGES:
            steps += 1
            if steps == step:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    target(*arguments)
