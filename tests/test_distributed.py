"""Fits under torchrun equal those of one process; tests/distributed_fits.py compares them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import distributed, nn

import acnml
from cases import normal, small_network


@pytest.mark.skipif(not distributed.is_available(), reason="needs torch.distributed")
def test_two_processes_of_torchrun_agree_with_one():
    script = Path(__file__).with_name("distributed_fits.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    run = subprocess.run(
        [*command, str(script)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert run.returncode == 0, run.stderr
    # Not by lines: both processes write to one pipe, and their line breaks may come late.
    assert {"0", "1"} == set(re.findall(r"process (\d) agrees", run.stdout))


def test_without_processes_it_says_what_to_do():
    model = small_network(nn.Linear(4, 3))
    data = [(normal(5, 4, seed=seed), torch.arange(5) % 3) for seed in (0, 1)]
    with pytest.raises(RuntimeError, match="start the script with torchrun"):
        acnml.calibrate(model, *data, distributed=True)
