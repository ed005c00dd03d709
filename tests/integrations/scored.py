"""A tiny calibrated network, and rows to score with it, for the tests of scoring."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import safetensors.torch
import torch
from torch import nn

import acnml
from acnml.scoring import Job

FEATURES, CLASSES = 6, 3
HERE = Path(__file__)


def build() -> nn.Module:
    """The network of the tests; a file beside it collects the processes that build it."""
    pids = os.environ.get("ACNML_TEST_PIDS")
    if pids is not None:
        with Path(pids).open("a") as file:
            file.write(f"{os.getpid()}\n")
    layers = nn.Linear(FEATURES, 5), nn.ReLU(), nn.Linear(5, CLASSES)
    return nn.Sequential(nn.Flatten(), *layers)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    """As in `cases`, which other processes that import this file do not find."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rows(count: int, seed: int = 0) -> np.ndarray:
    return normal(count, FEATURES, seed=seed).float().numpy()


def calibrated_files(folder: Path) -> dict[str, str]:
    """Write weights and a calibrated predictor; return what a `Job` needs of them."""
    model, generator = build(), torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, generator=generator)
    x = torch.from_numpy(rows(1500, seed=1))
    with torch.no_grad():
        noisy = model(x) + 0.7 * normal(1500, CLASSES, seed=2).float()
    labels = noisy.argmax(-1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about few validation data
        found = acnml.calibrate(
            model, (x[:700], labels[:700]), (x[700:], labels[700:]), price=0.03, progress=False
        )
    safetensors.torch.save_model(model, str(folder / "weights.safetensors"))
    acnml.save(found, folder / "predictor.safetensors")
    return {
        "model": f"{HERE}:build",
        "weights": str(folder / "weights.safetensors"),
        "predictor": str(folder / "predictor.safetensors"),
    }


def predictor_of(files: dict[str, str]) -> acnml.Calibrated:
    model = build()
    safetensors.torch.load_model(model, files["weights"])
    found = acnml.load(files["predictor"], acnml.Classifier(model))
    assert isinstance(found, acnml.Calibrated)
    return found


def write_parquet(path: Path, x: np.ndarray, group: int = 64, **columns: Any) -> None:
    flat = pa.array(np.ascontiguousarray(x).reshape(-1))
    inputs = pa.FixedSizeListArray.from_arrays(flat, x.shape[1])
    pq.write_table(pa.table({"x": inputs, **columns}), path, row_group_size=group)


def read(job: Job) -> pa.Table:
    """The answers of a job, as any reader of Parquet folders finds them."""
    return pq.read_table(job.output)


def rejects(job: Job) -> list[dict[str, Any]]:
    found = sorted((Path(job.output) / "_rejects").glob("*.parquet"))
    return [row for path in found for row in pq.read_table(path).to_pylist()]


def contents(folder: str | Path) -> dict[str, bytes]:
    """All files of a folder."""
    found = sorted(path for path in Path(folder).rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}
