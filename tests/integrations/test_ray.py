"""Scoring and fitting on a real Ray cluster equal one process, also if workers are lost."""

from __future__ import annotations

import doctest
import inspect
import os
import signal
import threading
import time
import warnings
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("pyarrow", reason="needs the extra `predict`")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("ray", reason="needs the extra `ray`")

import pyarrow as pa
import ray
import torch

from acnml import Classifier, Map
from acnml.fit import fit_curvature
from acnml.ray import Cluster, _Adding, _inputs, fit, score
from acnml.scoring import Answers, Job, Reading, ScoringError
from acnml.scoring import score as score_files
from acnml.scoring.scorer import Scorer
from cases import normal
from example_names import example_names
from scored import HERE, build, contents, predictor_of, rows, write_parquet

pytestmark = pytest.mark.filterwarnings("ignore")  # of Ray and the packages that it uses


@pytest.fixture(scope="module")
def pids(tmp_path_factory):
    return tmp_path_factory.mktemp("pids") / "pids"


@pytest.fixture(scope="module", autouse=True)
def cluster(pids):
    """A cluster of two CPUs on this machine; its workers find the modules of the tests."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # Ray's own name; else other tests on a busy machine come first.
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112
    paths = os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    env = {"PYTHONPATH": paths, "ACNML_TEST_PIDS": str(pids), "OMP_NUM_THREADS": "1"}
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=100 * 2**20,
        runtime_env={"env_vars": env},
    )
    yield
    ray.shutdown()


def test_all_workers_are_killed_in_the_middle(files, tmp_path, pids):
    x = rows(600)
    x[::50] = np.nan
    write_parquet(tmp_path / "data.parquet", x, group=20)
    names = {"input": str(tmp_path / "data.parquet"), "output": str(tmp_path / "alone")}
    job = Job(**files, **names, part_rows=10, batch_rows=8)
    expected = score_files(job)
    pids.unlink(missing_ok=True)
    killed: list[int] = []

    def kill_all_when_some_is_done(job, units):
        for part_rows in Cluster(actors=2)(job, units):
            if not killed:
                killed.extend({int(pid) for pid in pids.read_text().split()})
                for pid in killed:
                    os.kill(pid, signal.SIGKILL)
            yield part_rows

    job = replace(job, output=str(tmp_path / "cluster"))
    found = score_files(job, kill_all_when_some_is_done)
    assert killed
    builders = {int(pid) for pid in pids.read_text().split()}
    assert builders > set(killed)  # others have done the rest
    assert found == expected
    assert contents(tmp_path / "cluster") == contents(tmp_path / "alone")


def test_errors_in_workers_say_what_is_wrong(files, tmp_path):
    """In one line, as `acnml predict` prints it; the error occurs in workers alone."""
    write_parquet(tmp_path / "data.parquet", rows(30))
    (tmp_path / "network.py").write_text("""
import os
from scored import build as whole

def fail(*_):
    if "ACNML_TEST_PIDS" in os.environ:
        raise ValueError("broken in forward")

def build():
    network = whole()
    network.register_forward_pre_hook(fail)
    return network
""")
    paths = {"input": str(tmp_path / "data.parquet"), "output": str(tmp_path / "out")}
    job = Job(**{**files, **paths, "model": f"{tmp_path / 'network.py'}:build"})
    with pytest.raises(ValueError, match="broken in forward") as found:
        score_files(job, Cluster(actors=1))
    assert len(str(found.value).splitlines()) == 1


def test_answers_for_a_dataset(files, pids):
    x = rows(200)
    x[7] = np.inf
    flat = pa.FixedSizeListArray.from_arrays(pa.array(x.reshape(-1)), x.shape[1])
    table = pa.table({"x": flat, "id": np.arange(200)})
    # In ten blocks that exist already: the actors need both CPUs.
    dataset = ray.data.from_arrow([table.slice(start, 20) for start in range(0, 200, 20)])
    pids.unlink(missing_ok=True)
    scored = score(
        dataset, lambda: predictor_of(files), reading=Reading(carry=("id",)), batch_rows=32
    )

    def kill_one() -> None:
        while not pids.exists() or not pids.read_text().endswith("\n"):
            time.sleep(0.01)
        os.kill(int(pids.read_text().split()[0]), signal.SIGKILL)

    killer = threading.Thread(target=kill_one)
    killer.start()
    table = pa.concat_tables(ray.get(scored.to_arrow_refs())).sort_by("id")
    killer.join()
    assert table["id"].to_pylist() == list(range(200))
    reasons = dict(zip(table["id"].to_pylist(), table["reject"].to_pylist(), strict=True))
    expected = {7: "column 'x' has NaN or infinite entries"}
    assert {row: reason for row, reason in reasons.items() if reason} == expected
    fine = [row for row in range(200) if row != 7]
    answer = predictor_of(files)(torch.from_numpy(x[fine]))
    some = table.take(fine)
    assert some["label"].to_pylist() == answer.label.tolist()
    np.testing.assert_allclose(some["regret"], answer.regret, rtol=1e-5, atol=1e-6)
    assert table["label"].to_pylist()[7] is None


def test_fits_of_shards_add_up():
    def fitted(shard: list[int]):
        return fit_curvature(model, [data[shard]])

    torch.manual_seed(0)
    model, data = build().double(), normal(23, 6)
    shards = [list(range(start, min(start + 5, 23))) for start in range(0, 23, 5)]
    total, whole = fit(shards, fitted), fit_curvature(model, [data])
    for tau in (0.1, 10.0):
        assert total.log_evidence(tau) == pytest.approx(whole.log_evidence(tau), rel=1e-12)
    with pytest.raises(ValueError, match="there are no shards"):
        fit([], fitted)


@pytest.mark.parametrize("function", [score, fit])
def test_examples_run(function):
    """Doctests leave them out, because they need a cluster."""
    text = inspect.cleandoc(function.__doc__).replace("  # doctest: +SKIP", "")
    example = doctest.DocTestParser().get_doctest(
        text, example_names(), function.__name__, None, None
    )
    assert example.examples
    assert doctest.DocTestRunner().run(example).failed == 0


# Tables, without a cluster: each has the same columns ---------------------------------------------

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
        (table([None, None], pa.null()), [NULL, NULL]),
        (table([[], []], pa.list_(pa.null())), [SHAPE, SHAPE]),
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
