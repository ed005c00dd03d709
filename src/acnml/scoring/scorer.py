"""What a predictor says about a batch, and why it says nothing for some rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import final

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from acnml._util.checks import RowsError
from acnml.calibration import Calibrated
from acnml.predictors import Acnml, Predictor
from acnml.scoring.columns import ONLY, Array, Read
from acnml.scoring.job import COLUMNS, REJECT, Answers


@final
class Scorer:
    """Answers of a predictor, as tables with those of `COLUMNS` that it has.

    An `Acnml` predictor that warns of unsolved labels does not warn here: the column says it.
    """

    def __init__(self, predictor: Predictor | Calibrated, answers: Answers) -> None:
        if isinstance(predictor, Acnml) and predictor.on_unsolved == "warn":
            predictor = dataclasses.replace(predictor, on_unsolved="ignore")
        if isinstance(predictor, Calibrated):
            predictor.calibrator.head.require_one_row("a table with one answer per row")
        self._predictor, self._answers_wanted = predictor, answers
        has = {"label", "confidence"} | ({"log_probs"} if answers.log_probs else set())
        has |= {"regret", "solved"} if isinstance(predictor, Acnml) else set()
        has |= {"regret", "score", "abstain"} if isinstance(predictor, Calibrated) else set()
        self.schema = pa.schema([(name, kind) for name, kind in COLUMNS.items() if name in has])

    def __call__(self, read: Read) -> pa.Table:
        """Return a row of answers for every row of a table, with the reason if there are none."""
        why, answers = read.reasons, self.schema.empty_table()
        places = np.full(len(next(iter(read.inputs.values()))), -1)
        left = np.setdiff1d(np.arange(len(places)), [*why])
        while len(left):
            try:
                answers = self._answers({name: array[left] for name, array in read.inputs.items()})
                break
            except RowsError as error:  # score the other rows
                if not error.rows:
                    raise
                bad = left[list(error.rows)]
                why, left = why | dict.fromkeys(bad.tolist(), error.what), np.setdiff1d(left, bad)
        places[left] = np.arange(len(left))
        texts = pa.array([why.get(row) for row in range(len(places))], pa.string())
        answers = answers.take(pa.array(places, mask=places < 0)) if why else answers
        return answers.append_column(REJECT, texts)

    def _answers(self, inputs: Mapping[str, Array]) -> pa.Table:
        """Return the answers for a batch that has answers throughout."""
        tensors = {name: torch.from_numpy(array) for name, array in inputs.items()}
        x = tensors[ONLY] if set(tensors) == {ONLY} else tensors
        found: dict[str, Tensor] = {}
        if isinstance(self._predictor, Calibrated):
            wanted = self._answers_wanted
            found = self._predictor(x, wanted.abstain_share, wanted.abstain_by)._asdict()
        elif isinstance(self._predictor, Acnml):
            solution = self._predictor.solve(x)
            found = {"log_probs": solution.log_probs, "regret": solution.regret}
            found["solved"] = solution.solved.all(-1)
        else:
            found["log_probs"] = self._predictor(x)
        arrays = {name: _array(values) for name, values in found.items()}
        log_probs = arrays["log_probs"]
        failed = np.flatnonzero(np.isnan(log_probs).any(-1))
        if len(failed):
            raise RowsError("the predictor has no answer", failed.tolist(), len(log_probs))
        own = {"label": log_probs.argmax(-1), "confidence": np.exp(log_probs.max(-1))}
        columns = own | arrays
        return pa.table([_column(columns[f.name], f.type) for f in self.schema], self.schema)


def _array(values: Tensor) -> Array:
    """Return an array. What follows is little work, for which NumPy takes one thread.

    Threads of torch would wait for each other on a busy machine, longer than the work takes.
    """
    values = values.cpu()
    is_half = values.dtype in (torch.float16, torch.bfloat16)  # which NumPy does not have
    return (values.float() if is_half else values).numpy()


def _column(values: Array, kind: pa.DataType) -> pa.Array:
    if values.ndim == 1:
        return pa.array(values, kind)
    offsets = np.arange(0, values.size + 1, values.shape[1], dtype=np.int32)
    return pa.ListArray.from_arrays(offsets, pa.array(values.reshape(-1), kind.value_type))


def beside(left: pa.Table, right: pa.Table) -> pa.Table:
    """Return the columns of two tables as one."""
    schema = pa.schema([*left.schema, *right.schema])
    return pa.Table.from_arrays([*left.columns, *right.columns], schema=schema)
