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
        tensors, why = {name: _tensor(array) for name, array in read.inputs.items()}, read.reasons
        left, answers = np.arange(len(read.kept)), self.schema.empty_table()
        while len(left):
            try:
                answers = self._answers({name: tensor[left] for name, tensor in tensors.items()})
                break
            except RowsError as error:  # score the other rows
                if not error.rows:
                    raise
                bad = list(error.rows)
                why = why | dict.fromkeys(read.kept[left[bad]].tolist(), error.what)
                left = np.delete(left, bad)
        places = np.full(len(read.kept) + len(read.reasons), -1)
        places[read.kept[left]] = np.arange(len(left))
        texts = pa.array([why.get(row) for row in range(len(places))], pa.string())
        answers = answers.take(pa.array(places, mask=places < 0)) if why else answers
        return answers.append_column(REJECT, texts)

    def _answers(self, tensors: Mapping[str, Tensor]) -> pa.Table:
        """Return the answers for a batch that has answers throughout."""
        x = tensors[ONLY] if set(tensors) == {ONLY} else dict(tensors)
        columns: dict[str, Tensor] = {}
        if isinstance(self._predictor, Calibrated):
            wanted = self._answers_wanted
            columns = self._predictor(x, wanted.abstain_share, wanted.abstain_by)._asdict()
            log_probs = columns["log_probs"]
        elif isinstance(self._predictor, Acnml):
            solution = self._predictor.solve(x)
            log_probs = solution.log_probs
            columns = {"regret": solution.regret, "solved": solution.solved.all(-1)}
        else:
            log_probs = self._predictor(x)
        if bool((failed := log_probs.isnan().any(-1)).any()):
            rows = failed.nonzero().flatten().tolist()
            raise RowsError("the predictor has no answer", rows, len(failed))
        largest, label = log_probs.max(-1)
        columns = {"label": label, **columns, "confidence": largest.exp(), "log_probs": log_probs}
        return pa.table([_column(columns[f.name], f.type) for f in self.schema], self.schema)


def _tensor(array: Array) -> Tensor:
    """Return an array as a tensor; arrays of Arrow cannot be written to, so they are copied."""
    return torch.from_numpy(np.require(array, requirements=["C_CONTIGUOUS", "WRITEABLE"]))


def _column(values: Tensor, kind: pa.DataType) -> pa.Array:
    array = (values.float() if values.is_floating_point() else values).cpu().numpy()
    if array.ndim == 1:
        return pa.array(array)
    lists = pa.FixedSizeListArray.from_arrays(pa.array(array.reshape(-1)), array.shape[1])
    return lists.cast(kind)


def beside(left: pa.Table, right: pa.Table) -> pa.Table:
    """Return the columns of two tables as one."""
    schema = pa.schema([*left.schema, *right.schema])
    return pa.Table.from_arrays([*left.columns, *right.columns], schema=schema)
