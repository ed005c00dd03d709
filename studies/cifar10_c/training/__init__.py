"""Training as in the SWAG paper: SGD, then SGD at a constant rate whose weights are collected.

    settings.py     what is done, as plain data, with the presets `paper` and `cpu`
    task.py         a network, the images it learns from, and their order
    processes.py    one process, or several that `torchrun` has started
    loop.py         SGD, from the last checkpoint on
    keeper.py       who keeps checkpoints
    state.py        all that the loop goes on from, as tensors
    result.py       what comes out of it, as an artefact's content and back
    stage.py        the stage of a study, made by all processes together

Several processes train one network by

    torchrun --nproc-per-node 2 -m studies.cifar10_c.training vgg16 --out OUT
"""

from studies.cifar10_c.training.keeper import Keeper, Nobody
from studies.cifar10_c.training.loop import train
from studies.cifar10_c.training.processes import Processes, joined
from studies.cifar10_c.training.result import Trained, load_trained
from studies.cifar10_c.training.settings import PRESETS, RECIPES, Recipe, Training
from studies.cifar10_c.training.stage import make_together, training_stage
from studies.cifar10_c.training.task import Task, prepare_task

__all__ = [
    "PRESETS",
    "RECIPES",
    "Keeper",
    "Nobody",
    "Processes",
    "Recipe",
    "Task",
    "Trained",
    "Training",
    "joined",
    "load_trained",
    "make_together",
    "prepare_task",
    "train",
    "training_stage",
]
