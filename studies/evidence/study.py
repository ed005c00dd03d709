"""Run the study: every method at every price and shift, from recorded features."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TypeAlias, final

import torch
from torch import Tensor

from acnml import last_linear, metrics
from studies.evidence.measures import COMPARED, Scored, detection, resampled, resamples
from studies.evidence.methods import METHODS, OWN_CHOICE, WITH_REGRET, Chosen, Fitted, View, choose
from studies.evidence.recorded import recorded
from studies.evidence.settings import EvidenceStudy
from studies.evidence.subjects import CLEAN, HELD_OUT, TRAIN, Subject, subject
from studies.store import Content, Stage, Store

# Raise it when the methods change: predictions are computed again, recorded features are not.
VERSION = 1

# (network, shift, price, method, score) -> its values in all resamples (R,).
Resampled: TypeAlias = dict[tuple[str, str, float, str, str], Tensor]


@final
@dataclass(frozen=True, eq=False)
class Evidence:
    """All results."""

    rows: list[Scored]
    resampled: Resampled

    @cached_property
    def by_key(self) -> Mapping[tuple[str, str, float, str], Scored]:
        """Rows by network, shift, price and method."""
        return {(row.network, row.shift, row.price, row.method): row for row in self.rows}


def collect(study: EvidenceStudy, out: Path, store: Store) -> Evidence:
    """Do everything that is missing, network by network."""
    found = Evidence([], {})
    for name in study.networks:
        own = _of_network(subject(name, study, out / "corruptions", store), study, store)
        found.rows.extend(own.rows)
        found.resampled.update(own.resampled)
    return found


def _of_network(own: Subject, study: EvidenceStudy, store: Store) -> Evidence:
    """Return the results of a network, as an artefact."""
    decided = replace(study, networks=())
    stage = Stage(f"compared {own.name}", decided, study.seed, version=VERSION)

    def make(work: object) -> Content:
        del work
        found = _measured(own, study, store)
        tensors = {"\n".join(map(str, key)): values for key, values in found.resampled.items()}
        return Content(tensors, {"rows": [row._asdict() for row in found.rows]})

    artefact = store.make(stage, make)
    draws: Resampled = {}
    for key, values in artefact.load().items():
        network, shift, price, method, score = key.split("\n")
        draws[network, shift, float(price), method, score] = values
    return Evidence([Scored(**row) for row in artefact.facts["rows"]], draws)


@torch.no_grad()
def _measured(own: Subject, study: EvidenceStudy, store: Store) -> Evidence:
    train, held_out = (recorded(own, study, part, store) for part in (TRAIN, HELD_OUT))
    fitted = Fitted.of(own.network, last_linear(own.network), train, held_out, study.neighbours)
    known = fitted.view(held_out)
    chosen = [
        choose(method, price, known, fitted.temperature)
        for price in (*study.prices, OWN_CHOICE)
        for method in METHODS
    ]
    clean = fitted.view(recorded(own, study, CLEAN, store))
    clean_lik = {(one.method, one.price): one.log_lik(clean) for one in chosen}
    weights = resamples(study.test, study.resamples, study.seed)
    found = Evidence([], {})
    for shift, group in own.shifts.items():
        view = clean if shift == CLEAN else fitted.view(recorded(own, study, shift, store))
        for one in chosen:
            log_lik = one.log_lik(view)
            at_clean = clean_lik[one.method, one.price]
            scores = _scores(one, log_lik, view, at_clean, clean)
            n = len(view.labels)
            row = Scored(own.name, shift, group, one.price, one.method, one.knob, n, **scores)
            found.rows.append(row)
            log_probs = torch.log_softmax(log_lik, -1)
            for score, values in resampled(log_probs, view.labels, weights).items():
                assert score in COMPARED
                found.resampled[own.name, shift, one.price, one.method, score] = values.float()
    return found


def _scores(
    chosen: Chosen, log_lik: Tensor, view: View, at_clean: Tensor, clean: View
) -> Mapping[str, float]:
    log_probs, clean_probs = (torch.log_softmax(each, -1) for each in (log_lik, at_clean))
    by = {
        "confidence": (-clean_probs.amax(-1).exp(), -log_probs.amax(-1).exp()),
        "regret": (torch.logsumexp(at_clean, -1), torch.logsumexp(log_lik, -1)),
        "typicality": (clean.score, view.score),
    }
    scores = {
        **metrics.summary(log_probs, view.labels),
        "aurc": metrics.aurc(log_probs, view.labels),
    }
    for name, (inside, outside) in by.items():
        scores[f"auroc_{name}"], scores[f"fpr95_{name}"] = detection(inside, outside)
    if not (chosen.method in WITH_REGRET and chosen.knob):
        scores["auroc_regret"] = scores["fpr95_regret"] = math.nan
    return scores
