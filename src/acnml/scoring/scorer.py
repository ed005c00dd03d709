"""From inputs to answers: what a predictor says about a batch, and why it says nothing for some."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from acnml._util.batches import CHUNK
from acnml._util.checks import RowsError
from acnml.calibration import Calibrated, Score
from acnml.calibration.result import lenient_limit
from acnml.predictors import Acnml, Predictor
from acnml.scoring.columns import ONLY, Array
from acnml.scoring.job import Answers
from acnml.solvers import UnsolvedWarning


class Scored(NamedTuple):
    """Answers for the rows of a batch that have one."""

    columns: dict[str, Array]  # (m,), and (m, K) for log_probs
    kept: Array  # (m,) which rows they are of
    reasons: dict[int, str]  # why the others have none


@final
class Scorer:
    """Answers of a predictor as columns: label, confidence and, where it has them, more.

    - `label`: the likeliest class.
    - `confidence`: its probability.
    - `regret`: log C(x), of `Acnml` and `Calibrated` predictors.
    - `solved`: whether the solver reached an optimum for all labels, of the same predictors.
    - `abstain`: whether the predictor should not answer, of `Calibrated` predictors.
    - `log_probs`: of all classes, if asked for.

    Args:
        predictor: any predictor.
        answers: what is asked for.

    >>> import acnml, numpy, torch
    >>> from acnml.scoring import Answers, Scorer
    >>> scorer = Scorer(acnml.Map(acnml.Classifier(torch.nn.Identity())), Answers())
    >>> scorer({"x": numpy.array([[0.0, 2.0], [1.0, 0.0]], "float32")}).columns["label"]
    array([1, 0])
    """

    def __init__(self, predictor: Predictor, answers: Answers) -> None:
        self._predictor, self._answers = predictor, answers
        self._score, self._limit = Score(answers.abstain_by), None
        if isinstance(predictor, Calibrated):
            self._limit = lenient_limit(predictor, answers.abstain_share, self._score)

    def __call__(self, inputs: Mapping[str, Array]) -> Scored:
        """Score a batch of inputs, given by name."""
        size = len(next(iter(inputs.values())))
        tensors = {name: _tensor(array) for name, array in inputs.items()}
        kept, reasons, parts = np.arange(size), dict[int, str](), list[dict[str, Tensor]]()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UnsolvedWarning)  # the column `solved` says it
            try:
                parts = [self._columns(tensors)] if size else []
            except RowsError:  # score the other rows
                parts, kept, reasons = self._one_chunk_at_a_time(tensors, size)
        names = parts[0] if parts else ()
        columns = {name: torch.cat([part[name] for part in parts]).numpy() for name in names}
        return Scored(columns, kept, reasons)

    def _one_chunk_at_a_time(
        self, tensors: Mapping[str, Tensor], size: int
    ) -> tuple[list[dict[str, Tensor]], Array, dict[int, str]]:
        """Score chunks, each without the rows that raise an error."""
        parts, kept, reasons = list[dict[str, Tensor]](), list[Array](), dict[int, str]()
        for start in range(0, size, CHUNK):
            rows = np.arange(start, min(start + CHUNK, size))
            while len(rows):
                try:
                    parts.append(self._columns({n: t[rows] for n, t in tensors.items()}))
                    break
                except RowsError as error:
                    if not error.rows:
                        raise
                    bad = rows[list(error.rows)]
                    reasons |= dict.fromkeys(bad.tolist(), error.what)
                    rows = np.delete(rows, list(error.rows))
            kept.append(rows)
        return parts, np.concatenate(kept), reasons

    def _columns(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the columns for a batch that has answers throughout."""
        x = tensors[ONLY] if set(tensors) == {ONLY} else dict(tensors)
        regret = solved = None
        if isinstance(self._predictor, (Acnml, Calibrated)):
            solution = self._predictor.solve(x)
            log_probs, regret = solution.log_probs, solution.regret
            solved = solution.solved.all(-1)
        else:
            log_probs = self._predictor(x)
        failed = log_probs.isnan().any(-1)
        if bool(failed.any()):
            rows = failed.nonzero().flatten().tolist()
            raise RowsError("the predictor has no answer", rows, len(failed), "")
        largest, label = log_probs.max(-1)
        columns = {"label": label, "confidence": largest.exp()}
        if regret is not None and solved is not None:
            columns |= {"regret": regret, "solved": solved}
            if self._limit is not None and self._score is Score.CONFIDENCE:
                columns["abstain"] = ~(columns["confidence"] >= self._limit)
            elif self._limit is not None:
                columns["abstain"] = ~(regret <= self._limit)
        if self._answers.log_probs:
            columns["log_probs"] = log_probs
        return {name: column.cpu() for name, column in columns.items()}


def _tensor(array: Array) -> Tensor:
    """Return an array as a tensor; arrays of Arrow cannot be written to, so they are copied."""
    return torch.from_numpy(np.require(array, requirements=["C_CONTIGUOUS", "WRITEABLE"]))
