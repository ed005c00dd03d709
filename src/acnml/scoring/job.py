"""What is scored, and how. The same job gives the same files."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass, field
from typing import Any, Literal, final

import pyarrow as pa

from acnml._util import checks

# Columns of answers and their types. All tables of a job have the same, also those without rows.
COLUMNS = {
    "label": pa.int64(),  # the likeliest class
    "confidence": pa.float32(),  # its probability
    "regret": pa.float32(),  # log C(x), of `Acnml` and `Calibrated`
    "score": pa.float32(),  # atypicality, of `Calibrated`
    "solved": pa.bool_(),  # whether the solver reached an optimum for all labels, of `Acnml`
    "abstain": pa.bool_(),  # whether there should be no answer, of `Calibrated`
    "log_probs": pa.list_(pa.float32()),  # of all classes, if asked for
}
REJECT = "reject"  # why a row has no answer

# A scheme has two letters at least, because C:/data is a path. `Path` makes one slash of two.
_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


@final
class ScoringError(ValueError):
    """Raised when a job cannot be run. The message says why, and what to do.

    >>> from acnml.scoring import Job, score
    >>> score(Job("network.py:build", "calibrated.safetensors", "nowhere.parquet", "scored"))
    Traceback (most recent call last):
    acnml.scoring.job.ScoringError: there are no files of nowhere.parquet: check --input
    """


def is_uri(path: str) -> bool:
    """Whether a path is a URI such as s3://bucket/folder."""
    return _URI.match(path) is not None


@final
@dataclass(frozen=True)
class Reading:
    """How rows become inputs of the model.

    Args:
        columns: the columns to pass to the model; by default the only one that can be an input. One
            column is passed as `model(x)`. Several are passed by name, as `model(a=…, b=…)`, and
            "argument=column" names the argument of a column.
        stack: join numeric columns into one vector per row, in this order, and pass it as
            `model(x)`.
        carry: the columns to copy to the output.
        shape: the shape of one input, for columns that are stored flat.
        as_float: convert integers to floating point numbers.
        image_mode: the mode to which 8-bit images are converted: "RGB", "L", ..., see Pillow.
        image_size: height and width to which images are resized; by default they are not.
        transform: "package.module:function" or "file.py:function" that makes an array of an image
            of Pillow; by default, one of shape (channels, height, width) from 0 to 1. Images with
            16 or 32 bits per channel need one. It gets them in their own mode, not clipped.

    >>> table = Reading(columns=("age", "income"), stack=True, carry=("id",))
    >>> images = Reading(image_mode="L", image_size=(28, 28))
    """

    columns: tuple[str, ...] = ()
    stack: bool = False
    carry: tuple[str, ...] = ()
    shape: tuple[int, ...] | None = None
    as_float: bool = False
    image_mode: str = "RGB"
    image_size: tuple[int, int] | None = None
    transform: str | None = None

    def __post_init__(self) -> None:
        if self.image_size is not None and len(self.image_size) != 2:
            raise ValueError(f"image_size must be (height, width), got {self.image_size}")


@final
@dataclass(frozen=True)
class Answers:
    """What the output has for every row, besides the columns that are carried over.

    Args:
        log_probs: write the log-probabilities of all classes.
        abstain_share: the share of validation data on which a `Calibrated` predictor would abstain.
        abstain_by: what abstaining looks at, see `Calibrated.abstains`.

    >>> Answers(log_probs=True).abstain_share
    0.05
    """

    log_probs: bool = False
    abstain_share: float = 0.05
    abstain_by: Literal["confidence", "regret"] = "confidence"


@final
@dataclass(frozen=True)
class Job:
    """A predictor, the rows to score with it, and a folder for the answers.

    Args:
        model: "package.module:build" or "file.py:build", a function that returns the network (an
            `nn.Module`, or a `Classifier` if its outputs are not logits).
        predictor: a file of `acnml.save`.
        input: a Parquet, .npy or .npz file, a folder of such files, a pattern such as
            `data/*.parquet`, or a folder of images; or a URI of Parquet files that Arrow can read,
            such as "s3://bucket/data".
        output: a new folder, or that of the same job, which then goes on.
        weights: a safetensors file with the network's state dict; by default the network keeps the
            weights that `model` gives it.
        reading: how rows become inputs.
        answers: what is written.
        part_rows: rows of a part of the output, which is done again if the run is killed in the
            middle of it. The answers of two parts are in memory at once.
        batch_rows: rows that are read and scored together.
        device: the device of the network, for example "cuda".
        threads: of torch, in every process. More help large networks on free cores; small ones use
            one in any case, because threads wait for each other on a busy machine.

    >>> Job("network.py:build", "calibrated.safetensors", "data.parquet", "scored").part_rows
    16384
    """

    model: str
    predictor: str
    input: str
    output: str
    weights: str | None = None
    reading: Reading = field(default_factory=Reading)
    answers: Answers = field(default_factory=Answers)
    part_rows: int = 16_384
    batch_rows: int = 1024
    device: str = "cpu"
    threads: int = 1

    def __post_init__(self) -> None:
        checks.settle_integers(self, part_rows=1, batch_rows=1, threads=1)
        for name in ("output", "predictor", "weights"):
            path = getattr(self, name)
            if path is not None and is_uri(path):
                raise ValueError(
                    f"{name} must be a local path, got {path!r}: copy or mount the files, because "
                    "renaming, which puts parts in their place, is not atomic on object stores"
                )

    def settings(self) -> dict[str, Any]:
        """Return what must be the same when a run goes on, as JSON data; not where files are."""
        free = ("predictor", "weights", "input", "output", "threads")
        return {n: v for n, v in dataclasses.asdict(self).items() if n not in free}
