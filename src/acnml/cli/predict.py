"""`acnml predict`."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Literal

import typer

from acnml.cli.options import one_line, with_fields_of
from acnml.scoring import Job, Summary, score, verify
from acnml.scoring.run import Engine, locally

# Exit status if all rows were read, but some have no answer.
SOME_REJECTED = 3


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command()
    @one_line()
    @with_fields_of(Job)
    def predict(
        job: Job,
        *,
        engine: Annotated[Literal["local", "ray"], typer.Option(help="Who computes.")] = "local",
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
        if engine == "local" and (address or actors):
            raise ValueError("--address and --actors are for --engine ray")
        compute: Engine = locally
        if engine == "ray":
            from acnml.ray import Cluster

            compute = Cluster(address, actors)
        start = time.perf_counter()
        with _log_to_stderr():
            summary = verify(job) if only_verify else score(job, compute)
        end = "complete and undamaged" if only_verify else f"{time.perf_counter() - start:.1f} s"
        sys.stdout.write(f"{_text(summary)}\nOutput: {job.output}, {end}\n")
        raise typer.Exit(SOME_REJECTED if summary.n_rejected else 0)


def _text(summary: Summary) -> str:
    """Say how many rows were scored and rejected, and why."""
    lines = [f"{summary.scored:,} of {summary.rows:,} rows scored in {summary.parts} parts."]
    if summary.found:
        lines.append(f"{summary.found} parts were complete before this run.")
    if summary.abstained:
        lines.append(f"{summary.abstained:,} rows should not be answered (abstain).")
    if summary.unsolved:
        lines.append(f"{summary.unsolved:,} rows are not solved: their answers are inaccurate.")
    lines += [f"{count:,} rows rejected: {reason}." for reason, count in summary.rejected.items()]
    if summary.skipped:
        lines.append(f"{summary.skipped:,} files skipped: their names begin with . or _.")
    return "\n".join(lines)


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
