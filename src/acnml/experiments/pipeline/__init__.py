"""The pipeline that studies share: train → fit → predict → report, resumable at any moment.

See docs/pipeline.md for how a study is put together.
"""

from acnml.experiments.pipeline.artefact import Artefact
from acnml.experiments.pipeline.overrides import SettingError, override, preset, setting_names
from acnml.experiments.pipeline.record import Content, DamagedError
from acnml.experiments.pipeline.reporter import Reporter, duration
from acnml.experiments.pipeline.stage import Stage
from acnml.experiments.pipeline.store import Store
from acnml.experiments.pipeline.training_state import restore_training, training_state
from acnml.experiments.pipeline.work import Work

__all__ = [
    "Artefact",
    "Content",
    "DamagedError",
    "Reporter",
    "SettingError",
    "Stage",
    "Store",
    "Work",
    "duration",
    "override",
    "preset",
    "restore_training",
    "setting_names",
    "training_state",
]
