"""`acnml.sklearn` on tables: calibration and conformal sets, in distribution and under shift.

Every table is split at random into training, conformal and test rows; the rows under shift are
others. Each classifier is calibrated on the training rows alone, by five-fold cross-validation:
by `AcnmlClassifier`, and by `CalibratedClassifierCV(ensemble=False)` with its three methods.
Conformal sets are then fitted on the conformal rows, from the probabilities of each method. Nothing
is chosen on test rows or on shifted rows.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, final

import numpy as np
import sklearn
import torch
from sklearn.base import clone
from sklearn.calibration import CalibratedClassifierCV
from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor

from acnml import conformal, metrics
from acnml.conformal import SetScore
from acnml.sklearn import LEAST_PROBABILITY as LEAST_OF_TREES
from acnml.sklearn import AcnmlClassifier
from studies.data.folder import DataError
from studies.data.tabular import TABLES, Tabular
from studies.engine.report import Numbers, Section, ShortReport
from studies.engine.tables import Table, mean, select
from studies.store import Content, Stage, Store

PLAIN, TEMPERATURE, SIGMOID, ISOTONIC = "classifier", "temperature", "sigmoid", "isotonic"
EQUAL, ACNML = "temperature of equal price", "ACNML"
METHODS = (PLAIN, TEMPERATURE, SIGMOID, ISOTONIC, EQUAL, ACNML)
IN_SETS = (PLAIN, TEMPERATURE, EQUAL, ACNML)  # methods whose conformal sets are compared
TEST, SHIFTED, CONFORMAL = "in distribution", "shifted", "conformal"
FOLDS = 5
NEEDED = (1, 8)  # version of scikit-learn
BINS = 10  # of the ECE: some test sets have only dozens of rows
# Isotonic regression returns zeros, for which the NLL is infinite. Every method's probabilities are
# raised to this.
LEAST_PROBABILITY = 1e-6
# Tables with fewer rows have no data to spare for conformal sets.
LEAST_ROWS = 500

Score: TypeAlias = Literal["accuracy", "nll", "brier", "ece"]
SHOWN: Mapping[Score, str] = {"ece": "ECE", "nll": "NLL", "brier": "Brier score"}


@final
@dataclass(frozen=True)
class TabularStudy:
    """The settings.

    Args:
        tables: some of `TABLES`.
        classifiers: some of "logistic", "mlp", "boosting" and "forest".
        most_rows: of a table that are used, and of its shift.
        price: in nats, over the best temperature.
        coverage: of the conformal sets.
        seeds: of splits and training.
    """

    tables: tuple[str, ...] = tuple(TABLES)
    classifiers: tuple[str, ...] = ("logistic", "mlp", "boosting", "forest")
    most_rows: int = 3000
    price: float = 0.01
    coverage: float = 0.9
    seeds: tuple[int, ...] = (0, 1, 2)


PRESETS: Mapping[str, TabularStudy] = {
    "quick": TabularStudy(tables=("breast-cancer", "party", "weather-winter"), seeds=(0, 1)),
    "full": TabularStudy(),
}


class Scored(NamedTuple):
    """A method on some rows of a table."""

    table: str
    classifier: str
    seed: int
    rows: str  # in distribution, or shifted
    method: str
    n: int
    accuracy: float
    nll: float
    brier: float
    ece: float


class Covered(NamedTuple):
    """The conformal sets of a method on some rows of a table."""

    table: str
    classifier: str
    seed: int
    rows: str
    method: str
    score: str  # LAC or APS
    thresholds: str  # marginal, or by class
    n: int
    coverage: float
    size: float


# The work ----------------------------------------------------------------------------------------


def classifier(name: str, seed: int) -> Any:
    """Return an untrained classifier."""
    last = {
        "logistic": LogisticRegression(max_iter=2000),
        "mlp": MLPClassifier((50,), max_iter=200, random_state=seed),
        "boosting": HistGradientBoostingClassifier(random_state=seed),
        "forest": RandomForestClassifier(random_state=seed),
    }[name]
    return make_pipeline(StandardScaler(), last)


def split(table: Tabular, study: TabularStudy, seed: int) -> dict[str, Any]:
    """Return the rows for training, for conformal sets (unless the table is small), and to test."""
    random = np.random.default_rng(seed)
    inside, shifted = (
        random.permutation(np.flatnonzero(m)) for m in (~table.shifted, table.shifted)
    )
    inside, shifted = inside[: study.most_rows], shifted[: study.most_rows]
    shares = [0.5, 0.75] if len(inside) >= LEAST_ROWS else [0.6, 0.6]
    train, held_out, test = np.split(inside, [round(share * len(inside)) for share in shares])
    return {"train": train, CONFORMAL: held_out, TEST: test, SHIFTED: shifted}


def predictions(
    table: Tabular, name: str, study: TabularStudy, seed: int
) -> dict[str, dict[str, Tensor]]:
    """Return the log-probabilities of all methods, by rows and method."""
    rows = split(table, study, seed)
    x, y = table.inputs[rows["train"]], table.labels[rows["train"]]
    base = classifier(name, seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of few data, and of training that did not converge
        acnml = AcnmlClassifier(clone(base), price=study.price, rule="acnml", cv=FOLDS).fit(x, y)
        methods: dict[str, Callable[[Any], Any]] = {
            PLAIN: clone(base).fit(x, y).predict_proba,
            **{
                method: CalibratedClassifierCV(clone(base), method=method, cv=FOLDS, ensemble=False)
                .fit(x, y)
                .predict_proba
                for method in (TEMPERATURE, SIGMOID, ISOTONIC)
            },
            EQUAL: lambda inputs: of_equal_price(acnml, inputs),
            ACNML: acnml.predict_proba,
        }
    parts = {part: own for part, own in rows.items() if part != "train" and len(own)}
    return {
        part: {method: log(predict(table.inputs[own])) for method, predict in methods.items()}
        for part, own in parts.items()
    }


def of_equal_price(acnml: AcnmlClassifier, inputs: Any) -> Any:
    """Return the classifier's probabilities at the temperature that costs as much as ACNML."""
    log_probs = np.log(np.maximum(acnml.estimator_.predict_proba(inputs), LEAST_OF_TREES))
    scaled = log_probs / acnml.calibrator_.temperature_of_equal_price
    return torch.softmax(torch.from_numpy(scaled), dim=1).numpy()


def log(probs: Any) -> Tensor:
    """Return the logarithm of probabilities, none of which is zero."""
    raised = torch.from_numpy(np.asarray(probs, dtype=np.float64)).clamp(min=LEAST_PROBABILITY)
    return (raised / raised.sum(1, keepdim=True)).log()


def require_temperature(version: str) -> None:
    """Refuse a version of scikit-learn that cannot calibrate by a temperature."""
    if tuple(map(int, version.split(".")[:2])) < NEEDED:
        raise DataError(
            f"the study needs scikit-learn {'.'.join(map(str, NEEDED))} or later, which calibrates "
            f"by a temperature, and this is {version}: pip install -U scikit-learn (Python 3.11)"
        )


def run(study: TabularStudy, out: Path, store: Store, command: str) -> Path:
    """Do everything that is missing and write the report."""
    require_temperature(sklearn.__version__)
    scored: list[Scored] = []
    covered: list[Covered] = []
    tables = {name: TABLES[name]() for name in study.tables}
    for name, table in tables.items():
        for kind in study.classifiers:
            for seed in study.seeds:
                found = stored(store, study, name, table, kind, seed)
                rows = split(table, study, seed)
                labels = {part: torch.from_numpy(table.labels[rows[part]]) for part in found}
                where = (name, kind, seed)
                for part in (TEST, SHIFTED):
                    for method, log_probs in found[part].items():
                        own = metrics.summary(log_probs, labels[part], BINS)
                        n = len(log_probs)
                        scored.append(Scored(name, kind, seed, part, method, n, **own))
                if CONFORMAL in found:
                    covered += sets(where, found, labels, study.coverage)
    about = {name: table.about for name, table in tables.items()}
    return write_pages(study, about, scored, covered, out, command)


def stored(
    store: Store, study: TabularStudy, name: str, table: Tabular, kind: str, seed: int
) -> dict[str, dict[str, Tensor]]:
    """Return the predictions for a table, as an artefact."""
    decided = (study.most_rows, study.price, sklearn.__version__)  # whose classifiers are fitted
    stage = Stage(f"{name} {kind}", decided, seed)

    def make(_: object) -> Content:
        found = predictions(table, kind, study, seed)
        return Content(
            {f"{p}/{m}": tensor for p, own in found.items() for m, tensor in own.items()}
        )

    flat = store.make(stage, make).load()
    parts = dict.fromkeys(key.split("/")[0] for key in flat)
    return {part: {m: flat[f"{part}/{m}"] for m in METHODS} for part in parts}


def sets(
    where: tuple[str, str, int],
    found: Mapping[str, Mapping[str, Tensor]],
    labels: Mapping[str, Tensor],
    coverage: float,
) -> list[Covered]:
    """Fit conformal sets on the conformal rows and measure them on the others."""
    fits = {"marginal": conformal.fit, "by class": conformal.fit_by_class}
    rows = []
    for method in IN_SETS:
        for score in SetScore:
            for thresholds, fit in fits.items():
                fitted = fit(found[CONFORMAL][method], labels[CONFORMAL], coverage, score)
                for part in (TEST, SHIFTED):
                    own = fitted.sets(found[part][method])
                    measured = conformal.coverage_of(own, labels[part]), conformal.mean_size(own)
                    place = (*where, part, method, score.value, thresholds, len(own))
                    rows.append(Covered(*place, *measured))
    return rows


# The report --------------------------------------------------------------------------------------


def overview(study: TabularStudy, scored: Sequence[Scored], score: Score) -> Table:
    """Return a score of all methods: means over seeds, for every table."""
    lines = []
    for rows in (TEST, SHIFTED):
        for kind in study.classifiers:
            for name in study.tables:
                own = select(scored, table=name, classifier=kind, rows=rows)
                values = [mean(select(own, method=m), score) for m in METHODS]
                best = min(values)
                cells = [f"**{v:.3f}**" if v == best else f"{v:.3f}" for v in values]
                lines.append([f"{name}, {kind}", rows, str(own[0].n), *cells])
    caption = f"{SHOWN[score]}: means over {len(study.seeds)} seeds. The lowest is in bold."
    return Table(caption, ("table", "rows", "n", *METHODS), lines)


def averages(study: TabularStudy, scored: Sequence[Scored]) -> Table:
    """Return the mean of every score over all tables and seeds."""
    lines = []
    for rows in (TEST, SHIFTED):
        for kind in study.classifiers:
            for method in METHODS:
                own = select(scored, classifier=kind, rows=rows, method=method)
                cells = [f"{mean(own, s):.3f}" for s in ("accuracy", *SHOWN)]
                lines.append([rows, kind, method, *cells])
    head = ("rows", "classifier", "method", "accuracy", *SHOWN.values())
    return Table("Means over all tables and seeds.", head, lines)


def differences(study: TabularStudy, scored: Sequence[Scored]) -> Table:
    """Return ACNML minus each rival, over tables and seeds, and how often it is lower."""
    lines = []
    for rows in (TEST, SHIFTED):
        for kind in study.classifiers:
            own = select(scored, classifier=kind, rows=rows)
            for rival in METHODS[:-1]:
                cells = [compared(own, rival, score) for score in SHOWN]
                lines.append([rows, kind, rival, *cells])
    caption = (
        "ACNML minus a rival: the mean over tables of the mean over seeds (negative: ACNML is "
        "better), and the number of tables at which ACNML is better."
    )
    return Table(caption, ("rows", "classifier", "rival", *SHOWN.values()), lines)


def by_table(rows: Sequence[Scored], rival: str, score: Score) -> list[float]:
    """Return ACNML minus a rival for every table, as means over seeds."""
    names = dict.fromkeys(row.table for row in rows)
    own, other = ({n: select(rows, table=n, method=m) for n in names} for m in (ACNML, rival))
    return [mean(own[n], score) - mean(other[n], score) for n in names]


def compared(rows: Sequence[Scored], rival: str, score: Score) -> str:
    """Say how ACNML compares with a rival."""
    found = by_table(rows, rival, score)
    won = sum(difference < 0 for difference in found)
    return f"{statistics.fmean(found):+.3f}, {won} of {len(found)}"


def coverages(study: TabularStudy, covered: Sequence[Covered]) -> Table:
    """Return coverage and size of conformal sets, as means over tables and seeds."""
    lines = []
    for kind in study.classifiers:
        for score in SetScore:
            for thresholds in ("marginal", "by class"):
                for method in IN_SETS:
                    own = select(
                        covered,
                        classifier=kind,
                        score=score.value,
                        thresholds=thresholds,
                        method=method,
                    )
                    cells = [
                        f"{mean(select(own, rows=rows), what):.3f}"
                        for rows in (TEST, SHIFTED)
                        for what in ("coverage", "size")
                    ]
                    lines.append([kind, score.value, thresholds, method, *cells])
    head = ("classifier", "score", "thresholds", "method")
    columns = ("coverage", "size", "coverage, shifted", "size, shifted")
    caption = f"Conformal sets for a coverage of {study.coverage:g}: means over tables and seeds."
    return Table(caption, (*head, *columns), lines)


def coverage_by_table(study: TabularStudy, covered: Sequence[Covered]) -> Table:
    """Return the coverage under shift for every table, of the sets from LAC scores."""
    lines = []
    for kind in study.classifiers:
        for name in study.tables:
            own = select(
                covered,
                table=name,
                classifier=kind,
                score="LAC",
                thresholds="marginal",
                rows=SHIFTED,
            )
            if own:
                parts = [select(own, method=method) for method in IN_SETS]
                cells = [f"{mean(p, 'coverage'):.3f} ({mean(p, 'size'):.2f})" for p in parts]
                lines.append([f"{name}, {kind}", *cells])
    caption = "Coverage under shift, and the mean size in brackets: LAC scores, one threshold."
    return Table(caption, ("table", *IN_SETS), lines)


def verdict(study: TabularStudy, scored: Sequence[Scored]) -> str:
    """Say in one sentence how often ACNML is better than a temperature."""
    parts = []
    for kind in study.classifiers:
        for rows in (TEST, SHIFTED):
            own = select(scored, classifier=kind, rows=rows)
            words = [
                f"{compared(own, EQUAL, s).split(', ')[1]} by {SHOWN[s]}" for s in ("ece", "nll")
            ]
            parts.append(f"{kind}, {rows}: {' and '.join(words)}")
    return (
        f"Tables at which ACNML is better than the temperature of equal price ({study.price:g} "
        f"nats): {'; '.join(parts)}."
    )


def write_pages(
    study: TabularStudy,
    about: Mapping[str, str],
    scored: Sequence[Scored],
    covered: Sequence[Covered],
    out: Path,
    command: str,
) -> Path:
    """Write the CSV files, results.md and report.html; return the path of the last."""
    text = (
        f"At most {study.most_rows} rows of a table. Half of them are for training and choosing by "
        f"{FOLDS}-fold cross-validation, a quarter for conformal sets, a quarter for testing; a "
        f"table with fewer than {LEAST_ROWS} rows has 60 % and 40 %, and no conformal sets. "
        f"Probabilities are raised to {LEAST_PROBABILITY:g} for all methods, because isotonic "
        f"regression returns zeros. ECE has {BINS} bins of equal mass."
    )
    described = [[name, words] for name, words in about.items()]
    sections = [
        Section("Tables", [text], [], [Table("", ("table", "what is predicted"), described)]),
        Section("Calibration", [], [], [differences(study, scored), averages(study, scored)]),
        Section("Every table", [], [], [overview(study, scored, score) for score in SHOWN]),
        Section(
            "Conformal sets",
            [],
            [],
            [coverages(study, covered), coverage_by_table(study, covered)] if covered else [],
        ),
    ]
    numbers: Mapping[str, Numbers] = {
        "metrics.csv": (Scored._fields, scored),
        "conformal.csv": (Covered._fields, covered),
    }
    return ShortReport("Tables", verdict(study, scored), sections, command, numbers).write(out)
