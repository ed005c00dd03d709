"""Tables that ship in installed packages, each with a shift that the data contain.

The shifted rows are a group, a season, a year or a range of one variable. They are taken out of
the data, so that neither training nor any choice sees them. Packages are not imported: only their
files are read.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray
from sklearn import datasets

# The share of rows that lie in the upper range of a variable.
UPPER = 0.8


@final
@dataclass(frozen=True, eq=False)
class Tabular:
    """A table for classification.

    Attributes:
        inputs: (N, d).
        labels: (N,) class indices.
        shifted: (N,) which rows are held out as a shift.
        about: what is predicted, and what the shift is.
    """

    inputs: NDArray[np.float64]
    labels: NDArray[np.int64]
    shifted: NDArray[np.bool_]
    about: str


def of_sklearn(load: Callable[[], Any], variable: int | None, about: str) -> Tabular:
    """Return a table of scikit-learn; the shift is the upper fifth of a variable or of the sum."""
    data = load()
    values = data.data.sum(1) if variable is None else data.data[:, variable]
    return Tabular(
        data.data, data.target.astype(np.int64), values > np.quantile(values, UPPER), about
    )


def affairs() -> Tabular:
    """Return Fair's survey of marriages (Redbook, 1974)."""
    rows = _columns("statsmodels", "datasets/fair/fair.csv")
    names = [name for name in rows if name != "affairs"]
    x = np.stack([rows[name].astype(float) for name in names], 1)
    y = rows["affairs"].astype(float) > 0
    about = "had an affair or not; shift: women of 37 and older"
    return Tabular(x, y.astype(np.int64), rows["age"].astype(float) >= 37, about)


def party() -> Tabular:
    """Return the American National Election Study of 1996."""
    rows = _columns("statsmodels", "datasets/anes96/anes96.csv", "\t", "'")
    names = ["TVnews", "selfLR", "ClinLR", "DoleLR", "age", "educ", "income"]
    size = np.log(rows["popul"].astype(float) + 0.1)
    x = np.stack([size, *(rows[name].astype(float) for name in names)], 1)
    y = np.digitize(rows["PID"].astype(float), [2.5, 3.5])  # Democrat, independent, Republican
    about = "party; shift: voters of 60 and older"
    return Tabular(x, y.astype(np.int64), rows["age"].astype(float) >= 60, about)


def doctor() -> Tabular:
    """Return the RAND health insurance experiment."""
    rows = _columns("statsmodels", "datasets/randhie/randhie.csv")
    names = ["lncoins", "idp", "lpi", "fmde", "physlm", "disea", "hlthg"]
    x = np.stack([rows[name].astype(float) for name in names], 1)
    ill = (rows["hlthf"].astype(float) + rows["hlthp"].astype(float)) > 0
    y = rows["mdvis"].astype(float) > 0
    return Tabular(x, y.astype(np.int64), ill, "saw a doctor or not; shift: fair or poor health")


def weather(shift: str) -> Tabular:
    """Return Seattle's weather from 2012 to 2015; the shift is "winter" or a year."""
    rows = _columns("vega_datasets", "_data/seattle-weather.csv")
    names = ["precipitation", "temp_max", "temp_min", "wind"]
    x = np.stack([rows[name].astype(float) for name in names], 1)
    kinds = {"sun": 0, "fog": 1, "rain": 2, "drizzle": 2, "snow": 2}
    y = np.array([kinds[each] for each in rows["weather"]])
    dates = [day.split("/") for day in rows["date"]]
    months, years = np.array([m for _, m, _ in dates]), np.array([year for year, _, _ in dates])
    held_out = np.isin(months, ["12", "01", "02"]) if shift == "winter" else years == shift
    about = f"sun, fog, or rain and snow; shift: {shift}"
    return Tabular(x, y.astype(np.int64), held_out, about)


TABLES: Mapping[str, Callable[[], Tabular]] = {
    "iris": lambda: of_sklearn(
        datasets.load_iris, 1, "species; shift: the widest fifth of the sepals"
    ),
    "wine": lambda: of_sklearn(
        datasets.load_wine, 4, "cultivar; shift: the fifth with most magnesium"
    ),
    "breast-cancer": lambda: of_sklearn(
        datasets.load_breast_cancer, 1, "malignant or not; shift: the fifth of the roughest texture"
    ),
    "digits": lambda: of_sklearn(
        datasets.load_digits, None, "digit; shift: the fifth with most ink"
    ),
    "affairs": affairs,
    "party": party,
    "doctor": doctor,
    "weather-winter": lambda: weather("winter"),
    "weather-2015": lambda: weather("2015"),
}


def _columns(
    package: str, path: str, delimiter: str = ",", quote: str = '"'
) -> dict[str, NDArray[Any]]:
    """Read a CSV file of an installed package by columns."""
    found = find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise FileNotFoundError(f"the data are in the package {package}: pip install {package}")
    file = Path(next(iter(found.submodule_search_locations))) / path
    with file.open(newline="") as lines:
        head, *rows = csv.reader(lines, delimiter=delimiter, quotechar=quote)
    return dict(zip(head, np.array(rows).T, strict=True))
