"""`acnml predict`."""

from __future__ import annotations

import enum
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, final

import typer
from tqdm import tqdm

from acnml._util.progress import Lines
from acnml.cli.options import grouped

if TYPE_CHECKING:
    from acnml.scoring import Answers, Job, Reading, Summary
    from acnml.scoring.run import Engine

# Exit status if all rows were read, but some have no answer.
SOME_REJECTED = 3


class _Engine(str, enum.Enum):
    """Who computes."""

    LOCAL = "local"
    RAY = "ray"


class _Score(str, enum.Enum):
    """What abstaining looks at."""

    CONFIDENCE = "confidence"
    REGRET = "regret"


@final
@dataclass(frozen=True)
class _Files:
    """The predictor, and where rows come from and answers go to."""

    model: Annotated[
        str,
        typer.Option(
            help="Function that returns the network: package.module:build or file.py:build."
        ),
    ]
    predictor: Annotated[Path, typer.Option(help="File of acnml.save.")]
    input: Annotated[
        str,
        typer.Option(
            help="Parquet, .npy or .npz file, folder or pattern of such files, folder of images, "
            "or URI of Parquet files, such as s3://bucket/data."
        ),
    ]
    output: Annotated[Path, typer.Option(help="Folder for the answers.")]
    weights: Annotated[
        Path | None, typer.Option(help="Safetensors file with the network's state dict.")
    ] = None


@final
@dataclass(frozen=True)
class _Inputs:
    """How rows become inputs of the model."""

    columns: Annotated[
        str, typer.Option(help="Inputs of the model: a,b or argument=column, by commas.")
    ] = ""
    stack: Annotated[
        bool, typer.Option("--stack", help="Join columns of numbers into one vector.")
    ] = False
    carry: Annotated[
        str, typer.Option(help="Columns to copy to the output, separated by commas.")
    ] = ""
    shape: Annotated[
        str, typer.Option(help="Shape of an input that is stored flat, for example 1,28,28.")
    ] = ""
    as_float: Annotated[
        bool, typer.Option("--as-float", help="Convert integers to floating point numbers.")
    ] = False
    image_mode: Annotated[
        str, typer.Option(help="Mode to which 8-bit images are converted: RGB, L, ...")
    ] = "RGB"
    image_size: Annotated[
        str, typer.Option(help="Resize images to height,width, for example 32,32.")
    ] = ""
    transform: Annotated[
        str | None,
        typer.Option(
            help="Function that makes an array of an image of Pillow. Images with 16 or 32 bits "
            "per channel need one."
        ),
    ] = None

    def reading(self) -> Reading:
        from acnml.scoring import Reading

        return Reading(
            columns=_names(self.columns),
            stack=self.stack,
            carry=_names(self.carry),
            shape=_sizes(self.shape, "shape"),
            as_float=self.as_float,
            image_mode=self.image_mode,
            image_size=_pair(self.image_size),
            transform=self.transform,
        )


@final
@dataclass(frozen=True)
class _Answers:
    """What is written for every row."""

    log_probs: Annotated[
        bool, typer.Option("--log-probs", help="Write the log-probabilities of all classes.")
    ] = False
    abstain_share: Annotated[
        float, typer.Option(min=0, max=1, help="Share of the validation data on which to abstain.")
    ] = 0.05
    abstain_by: Annotated[_Score, typer.Option(help="What abstaining looks at.")] = (
        _Score.CONFIDENCE
    )

    def answers(self) -> Answers:
        from acnml.scoring import Answers

        return Answers(self.log_probs, self.abstain_share, self.abstain_by.value)


@final
@dataclass(frozen=True)
class _Running:
    """Who computes, and how much at once."""

    part_rows: Annotated[int, typer.Option(min=1, help="Rows of a file of the output.")] = 16384
    batch_rows: Annotated[int, typer.Option(min=1, help="Rows scored together.")] = 1024
    device: Annotated[str, typer.Option(help="Device of the network: cpu or cuda.")] = "cpu"
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads of torch, for every actor of Ray.")
    ] = None
    engine: Annotated[_Engine, typer.Option(help="Who computes.")] = _Engine.LOCAL
    address: Annotated[
        str | None, typer.Option(help="Address of a Ray cluster; by default a local one.")
    ] = None
    actors: Annotated[
        int | None, typer.Option(min=1, help="Actors of Ray; by default one per free CPU.")
    ] = None
    verify: Annotated[
        bool, typer.Option("--verify", help="Only check that the output is complete and undamaged.")
    ] = False

    def chosen_engine(self) -> Engine:
        if self.engine is _Engine.RAY:
            return self._cluster()
        if self.address or self.actors:
            raise ValueError("--address and --actors are for --engine ray")
        import torch

        from acnml.scoring.run import locally

        if self.threads is not None:
            torch.set_num_threads(self.threads)
        return locally

    def _cluster(self) -> Engine:
        try:
            from acnml.ray import Cluster
        except ModuleNotFoundError as error:
            raise ValueError(f"--engine ray: {error}") from error
        return Cluster(self.address, self.actors, self.threads)


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command()
    @grouped
    def predict(files: _Files, inputs: _Inputs, answers: _Answers, running: _Running) -> None:
        """Score many inputs with a saved predictor, in bounded memory.

        Writes Parquet files to the output folder: label, confidence, regret, solved,
        abstain and the columns to carry. Rows without an answer (NaN, wrong shape,
        damaged images) go to the folder _rejects with the reason. Run the same
        command again after an interruption: finished parts are kept, and every row
        occurs once. With --verify, the same command checks all hashes.

        Exit status: 0 if all rows have an answer, 3 if some were rejected, 1 for an
        error, 2 for wrong arguments.
        """
        with _one_line():
            job = _job(files, inputs, answers, running)
            summary = run_predict(job, None if running.verify else running.chosen_engine())
        raise typer.Exit(SOME_REJECTED if summary.n_rejected else 0)


def _job(files: _Files, inputs: _Inputs, answers: _Answers, running: _Running) -> Job:
    from acnml.scoring import Job

    return Job(
        model=files.model,
        predictor=str(files.predictor),
        input=files.input,
        output=str(files.output),
        weights=None if files.weights is None else str(files.weights),
        reading=inputs.reading(),
        answers=answers.answers(),
        part_rows=running.part_rows,
        batch_rows=running.batch_rows,
        device=running.device,
    )


def run_predict(job: Job, engine: Engine | None) -> Summary:
    """Score and show progress, or only verify; print how many rows were scored and rejected."""
    from acnml.scoring import score, verify

    start = time.perf_counter()
    with _log_to_stderr(), _Progress() as progress:
        summary = verify(job) if engine is None else score(job, engine, progress.show)
    seconds, fresh = time.perf_counter() - start, progress.fresh
    lines = [f"{summary.scored:,} of {summary.rows:,} rows scored in {summary.parts} parts."]
    if summary.found:
        lines.append(f"{summary.found} parts were complete before this run.")
    if fresh:
        lines.append(f"{fresh:,} rows in {seconds:.1f} s: {fresh / seconds:,.0f} rows/s.")
    if summary.abstained:
        lines.append(f"{summary.abstained:,} rows should not be answered (abstain).")
    if summary.unsolved:
        lines.append(f"{summary.unsolved:,} rows are not solved: their answers are inaccurate.")
    lines += [f"{count:,} rows rejected: {reason}." for reason, count in summary.rejected.items()]
    if skipped := summary.files["skipped"]:
        lines.append(f"{skipped:,} files and folders skipped: their names begin with . or _.")
    lines.append(f"Output: {job.output}{'' if engine else ', complete and undamaged'}")
    sys.stdout.write("\n".join(lines) + "\n")
    return summary


@contextmanager
def _log_to_stderr() -> Iterator[None]:
    """Write what the library logs, with the time of each line, to the standard error."""
    logger, handler = logging.getLogger("acnml"), logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)


@final
class _Progress:
    """A progress bar over rows in a terminal, lines in the log elsewhere."""

    def __init__(self) -> None:
        self._bar = tqdm(unit=" rows", unit_scale=True, disable=None, leave=False)
        self._lines: Lines | None = None
        self._found = 0  # rows of earlier runs
        self.fresh = 0  # rows of this run

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def show(self, done: int, total: int) -> None:
        """Show how far the run is; the rate is that of this run."""
        if self._lines is None:
            self._found, self._lines = done, Lines("predict", total, done, " rows")
            self._bar.total, self._bar.initial, self._bar.n = total, done, done
            self._bar.refresh()
            return
        self._bar.update(done - self._found - self.fresh)
        self.fresh = done - self._found
        if self._bar.disable:
            self._lines.reached(done)


@contextmanager
def _one_line() -> Iterator[None]:
    """Turn errors about files and settings into one line and exit status 1."""
    try:
        yield
    except (OSError, ValueError, TypeError) as error:
        sys.exit(f"{type(error).__name__}: {error}")
    except KeyboardInterrupt:
        sys.stderr.write("Interrupted. Run the same command again to go on.\n")
        sys.exit(130)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _sizes(text: str, what: str) -> tuple[int, ...] | None:
    try:
        return tuple(int(size) for size in text.split(",")) if text else None
    except ValueError as error:
        raise ValueError(f"--{what} must be numbers separated by commas, got {text!r}") from error


def _pair(text: str) -> tuple[int, int] | None:
    sizes = _sizes(text, "image-size")
    if sizes is not None and len(sizes) != 2:
        raise ValueError(f"--image-size must be height,width, got {text!r}")
    return None if sizes is None else (sizes[0], sizes[1])
