"""Training networks: one loop for SGD with any schedule, SWAG's collection, and several processes.

settings.py     schedules as plain data: cosine, SWAG's, and Bayes by Backprop
loop.py         SGD from the last checkpoint on, with augmentation and collection of weights
mean_field.py   Bayes by Backprop, resumable
state.py        checkpoints and results as tensors
processes.py    one process, or several that `torchrun` has started
"""

from studies.training.loop import Keeper, Nobody, Task, make_together, train
from studies.training.mean_field import train_mean_field
from studies.training.processes import Processes, joined
from studies.training.settings import Averaging, BayesByBackprop, Descent, Schedule
from studies.training.state import Trained, load_trained

__all__ = [
    "Averaging",
    "BayesByBackprop",
    "Descent",
    "Keeper",
    "Nobody",
    "Processes",
    "Schedule",
    "Task",
    "Trained",
    "joined",
    "load_trained",
    "make_together",
    "train",
    "train_mean_field",
]
