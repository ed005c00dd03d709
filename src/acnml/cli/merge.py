"""`acnml merge`."""

from __future__ import annotations

import sys
from functools import reduce
from operator import add
from pathlib import Path
from typing import Annotated, Any

import typer

import acnml
from acnml.cli.options import one_line


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command()
    @one_line()
    def merge(
        parts: Annotated[list[Path], typer.Argument(help="Files of acnml.save, at least two.")],
        output: Annotated[Path, typer.Option(help="File for the sum.")],
    ) -> None:
        """Add up curvatures that were fitted on parts of the data.

        Save the curvature of every part with acnml.save. The sum is the curvature
        of all data, as if one process had fitted it. The parts must not overlap,
        and all must be of the same trained network.
        """
        if len({part.resolve() for part in parts}) < len(parts):
            raise ValueError("a file is named twice: its data would count twice")
        values: list[Any] = [acnml.load(part) for part in parts]
        for part, value in zip(parts, values, strict=True):
            if not isinstance(value, acnml.fit.Curvature):
                raise TypeError(f"{part} holds a {type(value).__name__}; only curvatures add up")
        total = reduce(add, values)
        acnml.save(total, output)
        sys.stdout.write(f"{output}: a {type(total).__name__} of {len(parts)} parts\n")
