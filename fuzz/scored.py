"""Scored folders that are damaged or whose inputs are replaced: noticed, or made whole again."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import nn

import acnml
from acnml.scoring import Job, ScoringError, score, verify
from fuzz.outcome import Outcome, refused_or, require

ROWS, FEATURES = 23, 4


def build() -> nn.Module:
    """Return the network of all cases."""
    model = nn.Linear(FEATURES, 3)
    with torch.no_grad():
        model.weight.copy_(torch.eye(3, FEATURES))
        model.bias.zero_()
    return model


@lru_cache(maxsize=1)
def _stored() -> tuple[tempfile.TemporaryDirectory[str], str]:
    folder = tempfile.TemporaryDirectory()
    path = f"{folder.name}/map.safetensors"
    acnml.save(acnml.Map(acnml.Classifier(build())), path)
    return folder, path  # the folder lasts as long as the process


def predictor_file() -> str:
    """Return the file of the predictor of all cases."""
    return _stored()[1]


def scored_folder(seed: int) -> tuple[str, Outcome]:
    """Score rows, damage something, and ask for the answers again."""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        data, out = Path(folder) / "data", Path(folder) / "scored"
        data.mkdir()
        kind = rng.choice(["npy", "npz", "parquet"])
        _write(data / f"x.{kind}", np.random.default_rng(seed))
        job = Job("fuzz.scored:build", predictor_file(), str(data), str(out))
        job = replace(job, part_rows=rng.choice([5, 8, 30]), batch_rows=rng.choice([3, 7]))
        score(job)
        whole = _contents(out)
        what = rng.choice([_damaged, _damaged, _cut, _removed, _replaced, _exchanged])(rng, job)
        name = f"{kind}, parts of {job.part_rows}: {what}"

        def run() -> Outcome:
            is_whole = _contents(out) == whole
            try:
                verify(job)
                require(is_whole and not what.startswith("input"), "verify noticed nothing")
            except ScoringError:
                require(not is_whole or what.startswith("input"), "verify refuses what is whole")
            score(job)  # notices the damage, or repairs it
            require(_contents(out) == whole, "the run went on, and its files are others")
            return Outcome.EQUAL

        try:
            return name, refused_or(run)
        except AssertionError as error:
            raise type(error)(f"{name}: {error}") from error


def _write(path: Path, rng: np.random.Generator) -> None:
    x = rng.normal(size=(ROWS, FEATURES)).astype(np.float32)
    x[rng.integers(ROWS)] = np.nan  # a row without an answer
    if path.suffix == ".parquet":
        pq.write_table(pa.table({"x": list(x)}), path, row_group_size=int(rng.integers(1, 30)))
    else:
        writers: dict[str, Callable[..., None]] = {".npy": np.save, ".npz": np.savez}
        writers[path.suffix](path, x)


def _contents(folder: Path) -> dict[str, bytes]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


# What happens to a folder -------------------------------------------------------------------------


def _some_file(rng: random.Random, job: Job) -> Path:
    return rng.choice(sorted(path for path in Path(job.output).rglob("*") if path.is_file()))


def _damaged(rng: random.Random, job: Job) -> str:
    path = _some_file(rng, job)
    content = bytearray(path.read_bytes())
    place = rng.randrange(len(content))
    content[place] ^= 1 << rng.randrange(8)
    path.write_bytes(content)
    return f"a bit of byte {place} of {path.name} is flipped"


def _cut(rng: random.Random, job: Job) -> str:
    path = _some_file(rng, job)
    content = path.read_bytes()
    path.write_bytes(content[: rng.randrange(len(content))])
    return f"{path.name} is cut"


def _removed(rng: random.Random, job: Job) -> str:
    path = _some_file(rng, job)
    path.unlink()
    return f"{path.name} is removed"


def _exchanged(rng: random.Random, job: Job) -> str:
    first, second = _some_file(rng, job), _some_file(rng, job)
    first.write_bytes(second.read_bytes())
    return f"{first.name} becomes {second.name}"


def _replaced(rng: random.Random, job: Job) -> str:
    (path,) = Path(job.input).iterdir()
    _write(path, np.random.default_rng(rng.randrange(2**31, 2**32)))
    return "input is replaced"
