"""Tables with a shift that the data contain: multilayer perceptrons of scikit-learn.

Half of the rows are for training, a quarter is held out, a quarter is for testing. Tables with too
few rows for that are left out; the study `tabular` has them, by cross-validation.
"""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import sklearn
import torch
from torch import nn

from acnml.sklearn import to_module
from studies import tabular
from studies.data import Labelled
from studies.data.tabular import TABLES as TABULAR
from studies.evidence.methods import METHODS
from studies.evidence.settings import TABLES, EvidenceStudy
from studies.evidence.subjects import CLEAN, Subject

KIND = "mlp"


def tables(study: EvidenceStudy) -> list[Subject]:
    """Return a network for every table and seed."""
    return [
        found
        for name in TABULAR
        for seed in study.seeds
        if (found := _subject(name, seed)) is not None
    ]


def _subject(name: str, seed: int) -> Subject | None:
    settings, table = tabular.TabularStudy(), TABULAR[name]()
    rows = tabular.split(table, settings, seed)
    if not len(rows[tabular.CONFORMAL]):
        return None

    @cache
    def fitted() -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of training that did not converge
            pipeline = tabular.classifier(KIND, seed)
            return pipeline.fit(table.inputs[rows["train"]], table.labels[rows["train"]])

    def part(which: str) -> Labelled:
        own = rows[which]
        return Labelled(torch.from_numpy(table.inputs[own]), torch.from_numpy(table.labels[own]))

    def prepare(x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(fitted()[:-1].transform(x.numpy()))

    def build() -> nn.Module:
        return to_module(fitted())

    clean = f"{CLEAN}, {name}"
    return Subject(
        name=f"{TABLES} {name}",
        network=TABLES,
        seed=seed,
        build=build,
        prepare=prepare,
        train=part("train"),
        held_out=part(tabular.CONFORMAL),
        shifts={clean: CLEAN, name: "shifted rows"},
        load=lambda shift: part(tabular.TEST if shift == clean else tabular.SHIFTED),
        decided=(settings.most_rows, KIND, sklearn.__version__),
        methods=METHODS,
        bins=tabular.BINS,
    )
