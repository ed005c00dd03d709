"""Run the study: every method at every price and shift, from recorded features."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias, final

import torch
from torch import Tensor

from studies.evidence import cifar10, clinc150, digits, settings, tabular_data
from studies.evidence.measures import DETECTION, Scored, is_missing, resampled, resamples, scores
from studies.evidence.methods import (
    PLAIN,
    TEMPERATURE,
    WITH_REGRET,
    Chosen,
    choose,
    usable,
)
from studies.evidence.settings import EvidenceStudy
from studies.evidence.subjects import Subject
from studies.evidence.views import View, Views
from studies.store import Content, Stage, Store

# Raise it when the methods change: predictions are computed again, recorded features are not.
VERSION = 4

# (network, seed, shift, price, method, score) -> its values in all resamples (R,).
Key: TypeAlias = tuple[str, int, str, float, str, str]


@final
@dataclass(frozen=True, eq=False)
class Evidence:
    """All results."""

    rows: list[Scored]
    resampled: dict[Key, Tensor]

    @cached_property
    def by_key(self) -> Mapping[tuple[str, int, str, float, str], Scored]:
        """Rows by network, seed, shift, price and method."""
        return {(r.network, r.seed, r.shift, r.price, r.method): r for r in self.rows}


def subjects(name: str, study: EvidenceStudy, out: Path, store: Store) -> list[Subject]:
    """Return the networks of a name, of all seeds."""
    if name in settings.GIVEN:
        return cifar10.given(name, study, out / "corruptions")
    makers = {
        settings.DIGITS: lambda: digits.digits(study, store),
        settings.DIGITS_200: lambda: digits.few_digits(study, store),
        settings.LETTERS: lambda: digits.letters(study, store),
        settings.OWN: lambda: cifar10.own(study, out / "corruptions"),
        settings.TEXT: lambda: clinc150.questions(study, store),
        settings.TABLES: lambda: tabular_data.tables(study),
    }
    return makers[name]()


def collect(study: EvidenceStudy, out: Path, store: Store) -> Evidence:
    """Do everything that is missing, network by network."""
    found = Evidence([], {})
    for name in study.networks:
        for subject in subjects(name, study, out, store):
            own = _compared(subject, study, store)
            found.rows.extend(own.rows)
            found.resampled.update(own.resampled)
    return found


def _compared(own: Subject, study: EvidenceStudy, store: Store) -> Evidence:
    """Return the results of a network, as an artefact."""
    same = replace(study, networks=(), seeds=())
    decided = (same, own.decided, [each.decided for each in own.members])
    stage = Stage(f"compared {own.name}", decided, own.seed, version=VERSION)

    def make(work: object) -> Content:
        del work
        found = _measured(own, study, store)
        tensors = {"\n".join(map(str, key)): values for key, values in found.resampled.items()}
        return Content(tensors, {"rows": [_plain(row) for row in found.rows]})

    artefact = store.make(stage, make)
    draws: dict[Key, Tensor] = {}
    for key, values in artefact.load().items():
        network, seed, shift, price, method, score = key.split("\n")
        draws[network, int(seed), shift, float(price), method, score] = values
    return Evidence([_row(row) for row in artefact.facts["rows"]], draws)


def _plain(row: Scored) -> dict[str, Any]:
    """Return a row as plain data; JSON has no NaN."""
    return {k: None if is_missing(v) else v for k, v in row._asdict().items()}


def _row(plain: Mapping[str, Any]) -> Scored:
    """Invert `_plain`."""
    values: dict[str, Any] = {k: math.nan if v is None else v for k, v in plain.items()}
    return Scored(**values)


@torch.no_grad()
def _measured(own: Subject, study: EvidenceStudy, store: Store) -> Evidence:
    views = Views(own, study, store)
    chosen = [
        one
        for method in usable(own.methods, views.held_out)
        for one in choose(method, study.prices, views.held_out, views.temperature)
    ]
    clean = views.of(own.clean)
    at_clean = {(one.method, one.price): one.log_lik(clean) for one in chosen}
    found = Evidence([], {})
    for shift, group in own.shifts.items():
        view = clean if shift == own.clean else views.of(shift)
        weights = resamples(len(view.labels), study.resamples, study.seed)
        measured: dict[tuple[str, float], tuple[dict[str, Any], dict[str, Tensor]]] = {}
        for one in chosen:
            # The price changes nothing for the network and its best temperature.
            key = one.method, 0.0 if one.method in (PLAIN, TEMPERATURE) else one.price
            if key not in measured:
                log_lik = at_clean[one.method, one.price] if view is clean else one.log_lik(view)
                log_probs = torch.log_softmax(log_lik, -1)
                measured[key] = (
                    {
                        **scores(log_probs, view.labels, own.bins),
                        **_detected(one, log_lik, view, at_clean[one.method, one.price], clean),
                    },
                    resampled(log_probs, view.labels, weights, own.bins),
                )
            values, draws = measured[key]
            place = (own.network, own.seed, shift)
            method = (one.price, one.method)
            n = len(view.labels)
            found.rows.append(Scored(*place, group, *method, one.knob, n, **values))
            for score, drawn in draws.items():
                found.resampled[(*place, *method, score)] = drawn.float()
    return found


def _detected(
    chosen: Chosen, log_lik: Tensor, view: View, at_clean: Tensor, clean: View
) -> dict[str, float]:
    """Tell clean inputs from shifted ones, or from those of no class where there are some."""
    unknown = view.labels < 0
    rows = unknown if unknown.any() else torch.ones_like(unknown)
    log_probs, clean_probs = (torch.log_softmax(each, -1) for each in (log_lik, at_clean))
    by = {
        "confidence": (-clean_probs.amax(-1).exp(), -log_probs.amax(-1).exp()),
        "regret": (torch.logsumexp(at_clean, -1), torch.logsumexp(log_lik, -1)),
        "typicality": (clean.score, view.score),
    }
    has_regret = chosen.method in WITH_REGRET and chosen.knob
    return {
        f"{metric}_{name}": math.nan
        if name == "regret" and not has_regret
        else measure(inside, outside[rows])
        for name, (inside, outside) in by.items()
        for metric, measure in DETECTION.items()
    }
