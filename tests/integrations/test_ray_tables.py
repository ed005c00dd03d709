"""Answers for the tables of a Ray Dataset, without a cluster: every table has the same columns."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

pytest.importorskip("pyarrow", reason="needs the extra `predict`")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("ray", reason="needs the extra `ray`")

import pyarrow as pa
import torch

from acnml import Classifier, Map
from acnml.ray import _Adding, _inputs
from acnml.scoring import Answers, Reading, ScoringError
from acnml.scoring.scorer import Scorer
from cases import normal

FLOATS = pa.list_(pa.float64())
NAN = "column 'x' has NaN or infinite entries"
NULL = "column 'x' is null or has null entries"
SHAPE = "column 'x' has another shape than (3,)"


def table(x: list, kind: pa.DataType = FLOATS) -> pa.Table:
    return pa.table({"x": pa.array(x, kind), "id": np.arange(len(x))})


def adding(reading: Reading | None = None) -> _Adding:
    """Answers for rows of three logits, of which the first rows are an example."""
    reading = reading or Reading()
    first = table([None, [np.nan] * 3, *normal(4, 3, seed=1).tolist()])
    shown = _inputs(first, reading)
    predictor = Map(Classifier(torch.nn.Identity()))
    return _Adding(lambda: Scorer(predictor, Answers(log_probs=True)), reading.carry, shown, 1)


GOOD = table(normal(3, 3, seed=2).tolist())


@pytest.mark.parametrize(
    ("rows", "reasons"),
    [
        (table([[np.nan] * 3, [0.0, np.inf, 0.0]]), [NAN, NAN]),
        (table([None, [None, 0.0, 1.0]]), [NULL, NULL]),
        (table([None, None], pa.null()), [NULL, NULL]),
        (table([[None] * 3, [None] * 3], pa.list_(pa.null())), [NULL, NULL]),
        (table([[], []], pa.list_(pa.null())), [SHAPE, SHAPE]),
        (table([[0.0], [0.0, 1.0, 2.0, 3.0]]), [SHAPE, SHAPE]),
    ],
)
def test_a_table_without_answers_has_the_columns_of_the_others(rows, reasons):
    add = adding()
    found, expected = add(rows), add(GOOD).schema
    assert found.schema.remove(0) == expected.remove(0)  # but for x, which is as it is given
    assert found["reject"].to_pylist() == reasons
    for name in ("label", "confidence", "log_probs"):
        assert found[name].null_count == len(rows)


def test_the_first_row_of_a_table_does_not_decide_the_shape():
    x = normal(3, 3, seed=2)
    found = adding()(table([[0.0], *x.tolist()]))
    assert found["reject"].to_pylist() == [SHAPE, None, None, None]
    assert found["label"].to_pylist() == [None, *x.argmax(1).tolist()]
    log_probs = np.array(found["log_probs"].to_pylist()[1:])
    np.testing.assert_allclose(log_probs, torch.log_softmax(x, 1), rtol=1e-6)


def test_columns_are_carried():
    assert adding(Reading(carry=("id",)))(GOOD).column_names[:2] == ["id", "label"]


@pytest.mark.parametrize(
    ("first", "reading", "message"),
    [
        (table([None, None]), Reading(), "none of the first 2 rows .* shows the shape of an input"),
        (
            GOOD.append_column("label", [[0, 1, 2]]),
            Reading(),
            "'label' cannot be carried .*: rename",
        ),
        (GOOD, Reading(carry=("label",)), "the dataset has no column 'label'"),
    ],
)
def test_what_cannot_be_scored_is_refused_before_the_job(first, reading, message):
    with pytest.raises(ScoringError, match=message):
        _inputs(first, reading)
