"""Train one network of a preset, in as many processes as `torchrun` starts.

    torchrun --nproc-per-node 2 -m studies.cifar10_c.training vgg16 --out OUT \
        --held-out 5000

The study finds the network in the folder OUT. Run the same command again after a break.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from studies.cifar10_c.data import without_held_out
from studies.cifar10_c.training import (
    RECIPES,
    Recipe,
    joined,
    make_together,
    prepare_task,
    training_stage,
)
from studies.data import cifar10
from studies.data.cifar10 import LabelledBytes
from studies.data.folder import DataError
from studies.models import WeightsError
from studies.store import Reporter, SettingError, Store, override


def main(
    model: Annotated[str, typer.Argument(help=f"One of {', '.join(RECIPES)}.")],
    out: Annotated[Path, typer.Option(help="Folder of the study.")],
    seed: Annotated[int, typer.Option(min=0)] = 0,
    settings: Annotated[list[str] | None, typer.Option("--set", help="training.rank=10")] = None,
    held_out: Annotated[int, typer.Option(min=0, help="5000 for the preset `paper`.")] = 0,
) -> None:
    """Train a network on the training images of CIFAR-10, but for those that are held out."""
    try:
        recipe = override(_recipe(model), settings or [])
        data = without_held_out(cifar10.load("train"), held_out)
        _train(recipe, data, seed, out)
    except (SettingError, DataError, WeightsError, FileNotFoundError) as error:
        sys.exit(str(error))


def _recipe(model: str) -> Recipe:
    if model not in RECIPES:
        raise SettingError(f"there is no network {model!r}, only {', '.join(RECIPES)}")
    return RECIPES[model]


def _train(recipe: Recipe, data: LabelledBytes, seed: int, out: Path) -> None:
    stage = training_stage(recipe, data, seed)
    with joined() as processes:
        store = Store(out, recipe, Reporter(Console(quiet=not processes.leads), out / "run.log"))
        prepare = partial(prepare_task, recipe, data, seed)
        make_together(store, stage, recipe.training, prepare, processes)


if __name__ == "__main__":
    typer.run(main)
