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

from studies import tabular
from studies.data import Labelled
from studies.data.tabular import TABLES as TABULAR
from studies.evidence.recorded import Recorded, Source, recorded
from studies.evidence.settings import TABLES, EvidenceStudy
from studies.evidence.subjects import CLEAN, HELD_OUT, TRAIN, Subject
from studies.store import Store

KIND = "mlp"


def tables(study: EvidenceStudy, store: Store) -> list[Subject]:
    """Return a network for every table and seed."""
    return [
        found
        for name in TABULAR
        for seed in study.seeds
        if (found := _subject(name, seed, store)) is not None
    ]


def _subject(name: str, seed: int, store: Store) -> Subject | None:
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

    clean = f"{CLEAN}, {name}"
    which = {TRAIN: "train", HELD_OUT: tabular.CONFORMAL, clean: tabular.TEST}

    def record(part: str) -> Recorded:
        own = rows[which.get(part, tabular.SHIFTED)]
        data = Labelled(torch.from_numpy(table.inputs[own]), torch.from_numpy(table.labels[own]))
        decided = (settings.most_rows, KIND, sklearn.__version__, seed)
        source = Source.of(data, lambda x: inputs_of(fitted(), x))
        return recorded(
            f"{TABLES} {name} {part}", lambda: perceptron(fitted()), source, decided, store
        )

    shifts = {clean: CLEAN, name: "shifted rows"}
    return Subject(f"{TABLES} {name}", TABLES, seed, shifts, record, bins=tabular.BINS)


def perceptron(fitted: Any) -> nn.Module:
    """Return the network of a fitted pipeline that ends in an `MLPClassifier`.

    Two classes have one output there. Here they have two logits: 0 and that output.
    """
    last = fitted[-1]
    weights = [torch.from_numpy(w.T).float() for w in last.coefs_]
    biases = [torch.from_numpy(b).float() for b in last.intercepts_]
    if len(weights[-1]) == 1:
        weights[-1] = torch.cat([torch.zeros_like(weights[-1]), weights[-1]])
        biases[-1] = torch.cat([torch.zeros_like(biases[-1]), biases[-1]])
    layers: list[nn.Module] = []
    for weight, bias in zip(weights, biases, strict=True):
        layer = nn.Linear(*weight.T.shape)
        layer.weight.data, layer.bias.data = weight, bias
        layers += [layer, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def inputs_of(fitted: Any, x: torch.Tensor) -> torch.Tensor:
    """Return what the network of a pipeline receives."""
    return torch.from_numpy(fitted[:-1].transform(x.numpy())).float()
