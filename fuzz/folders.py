"""Folders of inputs: every file is scored, skipped by its name, or ends the run with an error."""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pyarrow.parquet as pq

from acnml.scoring import Job, score
from fuzz.outcome import Outcome, refused_or, require
from fuzz.scored import FEATURES, predictor_file


def _file(place: Path, rows: np.ndarray) -> None:
    np.save(place.with_suffix(".npy"), rows)


def _linked_file(place: Path, rows: np.ndarray) -> None:
    outside = place.parents[1] / f"of-{place.name}.npy"
    np.save(outside, rows)
    place.with_suffix(".npy").symlink_to(outside)


def _linked_folder(place: Path, rows: np.ndarray) -> None:
    outside = place.parents[1] / f"folder-of-{place.name}"
    outside.mkdir()
    np.save(outside / "x.npy", rows)
    place.symlink_to(outside)


Write: TypeAlias = Callable[[Path, np.ndarray], object]

# Each writes rows below a place, whose name they keep.
READ: dict[str, Write] = {
    "a file": _file,
    "a linked file": _linked_file,
    "a linked folder": _linked_folder,
}
SKIPPED: dict[str, Write] = {
    "a hidden file": lambda place, rows: np.save(place.with_name(f".{place.name}.npy"), rows),
    "an underscore": lambda place, rows: np.save(place.with_name(f"_{place.name}.npy"), rows),
    "a hidden folder": lambda place, rows: _linked_folder(place.with_name(f".{place.name}"), rows),
}


def _claiming(place: Path, shape: tuple[int, ...]) -> None:
    """Write a header that claims another shape than the file has."""
    with place.with_suffix(".npy").open("wb") as file:
        header = {"descr": "<f4", "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(file, header)
        file.write(bytes(64))


def _cut(place: Path, rows: np.ndarray) -> None:
    _file(place, rows)
    path = place.with_suffix(".npy")
    path.write_bytes(path.read_bytes()[:-3])


REFUSED: dict[str, Write] = {
    "a dangling link": lambda place, _: place.with_suffix(".npy").symlink_to("nowhere"),
    "a circle": lambda place, _: place.symlink_to(place.parent, target_is_directory=True),
    "a pipe": lambda place, _: os.mkfifo(place.with_suffix(".npy")),
    "an unknown suffix": lambda place, _: place.with_suffix(".jfif").write_bytes(b"\xff\xd8"),
    "no suffix": lambda place, _: place.write_bytes(b"text"),
    "an empty file": lambda place, _: place.with_suffix(".npy").write_bytes(b""),
    "a claim of many rows": lambda place, _: _claiming(place, (10**12, FEATURES)),
    "a claim of fewer rows than none": lambda place, _: _claiming(place, (-1, FEATURES)),
    "other columns": lambda place, rows: _file(place, rows[:, 1:]),
    "a cut file": _cut,
}


def listed_folder(seed: int) -> tuple[str, Outcome]:
    """Score a folder, and count what should be scored and skipped."""
    rng, random_rows = random.Random(seed), np.random.default_rng(seed)
    with tempfile.TemporaryDirectory() as temporary:
        data, out = Path(temporary) / "data", Path(temporary) / "scored"
        data.mkdir()
        rest = SKIPPED if rng.random() < 0.6 else SKIPPED | REFUSED
        kinds = [rng.choice([*READ, *READ, *rest]) for _ in range(rng.randrange(1, 6))]
        expected = []
        for number, kind in enumerate(kinds):
            rows = random_rows.normal(size=(rng.randrange(1, 9), FEATURES)).astype(np.float32)
            {**READ, **rest}[kind](data / f"{number}", rows)
            expected += [rows] if kind in READ else []
        name = ", ".join(kinds)

        def run() -> Outcome:
            found = score(Job("fuzz.scored:build", predictor_file(), str(data), str(out)))
            wrong = [kind for kind in kinds if kind in REFUSED]
            require(not wrong, f"scored in spite of {wrong}")
            counts = (len(expected), len(kinds) - len(expected))
            require((found.files, found.skipped) == counts, f"{found} instead of {counts}")
            labels = np.concatenate(expected)[:, :3].argmax(1)
            parts = [pq.read_table(path)["label"] for path in sorted(out.glob("*.parquet"))]
            answers = np.concatenate([part.to_numpy() for part in parts])
            require(np.array_equal(answers, labels), "other labels, or in another order")
            return Outcome.EQUAL

        try:
            outcome = refused_or(run)
        except AssertionError as error:
            raise type(error)(f"{name}: {error}") from error
        should = bool(expected) and not any(kind in REFUSED for kind in kinds)
        require((outcome is Outcome.EQUAL) == should, f"{name}: refused")
        return name, outcome
