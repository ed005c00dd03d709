"""The store of resumable artefacts: stages, records, checkpoints and blocks of predictions.

docs/howto/write-a-study.md explains stages, artefacts and resuming.
"""

from studies.store.record import Content, DamagedError
from studies.store.reporter import Reporter, duration
from studies.store.stage import Artefact, Stage
from studies.store.store import Store
from studies.store.work import Work

__all__ = [
    "Artefact",
    "Content",
    "DamagedError",
    "Reporter",
    "Stage",
    "Store",
    "Work",
    "duration",
]
