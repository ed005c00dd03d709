"""The study of tables: nothing is fitted on shifted rows, and pages follow the numbers."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from acnml import metrics
from stores import rows, twice
from studies import tabular
from studies.data.folder import DataError
from studies.data.tabular import TABLES, Tabular
from studies.tabular import ACNML, CONFORMAL, METHODS, SHIFTED, TEST, TabularStudy, run, split

STUDY = TabularStudy(tables=("noise",), classifiers=("logistic",), seeds=(0,), price=0.1)


def noise() -> Tabular:
    random = np.random.default_rng(0)
    x = random.normal(size=(800, 3))
    y = (x[:, 0] + random.normal(size=800) > 0).astype(np.int64)
    return Tabular(x, y, x[:, 1] > 1, "noise")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    pytest.importorskip("sklearn", "1.8", reason="needs a calibration by temperature")
    out = tmp_path_factory.mktemp("tabular")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tabular, "TABLES", {"noise": noise})
        twice(lambda store: run(STUDY, out, store, "command"), out, STUDY)
    return out


def test_every_method_is_measured_on_both_kinds_of_rows(finished):
    found = rows(finished / "metrics.csv")
    assert {(row["method"], row["rows"]) for row in found} == {
        (method, part) for method in METHODS for part in (TEST, SHIFTED)
    }
    sets = rows(finished / "conformal.csv")
    inside = [float(r["coverage"]) for r in sets if r["rows"] == TEST]
    assert np.mean(inside) == pytest.approx(STUDY.coverage, abs=0.06)
    page = (finished / "results.md").read_text()
    assert "| noise, logistic | shifted |" in page


def test_numbers_are_those_of_the_predictions(finished):
    table = noise()
    found = tabular.predictions(table, "logistic", STUDY, 0)
    labels = table.labels[split(table, STUDY, 0)[SHIFTED]]
    expected = metrics.nll(found[SHIFTED][ACNML].numpy(), labels)
    (row,) = (
        r for r in rows(finished / "metrics.csv") if (r["method"], r["rows"]) == (ACNML, SHIFTED)
    )
    assert float(row["nll"]) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_the_temperature_of_equal_price_tempers_the_classifiers_own_probabilities(temperature):
    given = np.array([[0.7, 0.2, 0.1], [1.0, 0.0, 0.0]])
    acnml = SimpleNamespace(
        estimator_=SimpleNamespace(predict_proba=lambda _: given),
        calibrator_=SimpleNamespace(temperature_of_equal_price=temperature),
    )
    powers = np.maximum(given, tabular.LEAST_OF_TREES) ** (1 / temperature)
    expected = powers / powers.sum(1, keepdims=True)
    np.testing.assert_allclose(tabular.of_equal_price(acnml, None), expected, atol=1e-12)


def test_an_old_scikit_learn_is_refused():
    tabular.require_temperature("1.8.0")
    tabular.require_temperature("1.10.dev0")
    with pytest.raises(DataError, match=r"needs scikit-learn 1.8 or later, .* this is 1.7.2"):
        tabular.require_temperature("1.7.2")


@pytest.mark.parametrize("name", TABLES)
def test_tables_have_rows_inside_and_outside(name):
    for package in ("statsmodels", "vega_datasets"):
        pytest.importorskip(package, reason="the data are in this package")
    table = TABLES[name]()
    assert len(table.inputs) == len(table.labels) == len(table.shifted)
    assert np.isfinite(table.inputs).all()
    parts = split(table, TabularStudy(), 0)
    classes = set(range(table.labels.max() + 1))
    assert set(table.labels[parts["train"]]) == classes
    assert not table.shifted[np.concatenate([parts[p] for p in ("train", CONFORMAL, TEST)])].any()
    assert table.shifted[parts[SHIFTED]].all()
    together = np.concatenate(list(parts.values()))
    assert len(set(together)) == len(together)
