"""`acnml predict`."""

from __future__ import annotations

import enum
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, final

import typer
from tqdm import tqdm

from acnml._util.messages import Lines
from acnml.cli.options import one_line, with_fields_of
from acnml.scoring import Job, Summary, score, verify
from acnml.scoring.run import Engine, locally

# Exit status if all rows were read, but some have no answer.
SOME_REJECTED = 3


class _Engine(str, enum.Enum):
    """Who computes."""

    LOCAL = "local"
    RAY = "ray"


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command()
    @one_line()
    @with_fields_of(Job)
    def predict(
        job: Job,
        *,
        engine: Annotated[_Engine, typer.Option(help="Who computes.")] = _Engine.LOCAL,
        address: Annotated[
            str | None, typer.Option(help="Address of a Ray cluster; by default a local one.")
        ] = None,
        actors: Annotated[
            int | None, typer.Option(min=1, help="Actors of Ray; by default one per free CPU.")
        ] = None,
        only_verify: Annotated[
            bool,
            typer.Option("--verify", help="Only check that the output is complete and undamaged."),
        ] = False,
    ) -> None:
        """Score many inputs with a saved predictor, in bounded memory.

        Writes Parquet files to the output folder: label, confidence, regret, solved,
        abstain and the columns to carry. Rows without an answer (NaN, wrong shape,
        damaged images) go to the folder _rejects with the reason. Run the same
        command again after an interruption: finished parts are kept, and every row
        occurs once. With --verify, the same command checks all hashes.

        Exit status: 0 if all rows have an answer, 3 if some were rejected, 1 for an
        error, 2 for wrong arguments.
        """
        if engine is _Engine.RAY:
            chosen = _cluster(address, actors)
        elif address or actors:
            raise ValueError("--address and --actors are for --engine ray")
        else:
            chosen = locally
        summary = run_predict(job, None if only_verify else chosen)
        raise typer.Exit(SOME_REJECTED if summary.n_rejected else 0)


def _cluster(address: str | None, actors: int | None) -> Engine:
    try:
        from acnml.ray import Cluster
    except ModuleNotFoundError as error:
        raise ValueError(f"--engine ray: {error}") from error
    return Cluster(address, actors)


def run_predict(job: Job, engine: Engine | None) -> Summary:
    """Score and show progress, or only verify; print how many rows were scored and rejected."""
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
