"""Run the study: every method at every price and shift, from recorded logits and features."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, final

import torch
from torch import Tensor

from acnml import metrics
from studies.evidence import (
    cifar,
    clinc150,
    letters,
    pictures,
    reviews,
    settings,
    streams,
    tabular_data,
)
from studies.evidence.measures import (
    Detected,
    Scored,
    detection,
    is_missing,
    resampled,
    resamples,
    scores,
)
from studies.evidence.methods import (
    ACNML,
    AT_ALL_PRICES,
    BLOCKS,
    ENSEMBLES,
    HEAD,
    OWN_CHOICE,
    PLAIN,
    PUBLISHED,
    TEMPERATURE,
    TRIED,
    WITH_REGRET,
    Chosen,
    choose,
)
from studies.evidence.settings import EvidenceStudy
from studies.evidence.subjects import Subject
from studies.evidence.views import AS_THEY_ARE, BY_CLASS, FEW, View, Views
from studies.store import Content, Stage, Store

# Raise it when the methods change: predictions are computed again, recorded features are not.
VERSION = 8

# (subject, seed, shift, method) -> ECE and NLL at `settings.PRICE` in all resamples (2, R).
Key: TypeAlias = tuple[str, int, str, str]


class Known(NamedTuple):
    """What is known of a network from clean data alone, and might predict the gain."""

    subject: str
    network: str
    seed: int
    classes: int
    temperature: float
    accuracy: float  # on held-out data
    spread: float  # deviation of log m on held-out data
    errors: float  # AUROC of m for wrong answers on held-out data
    errors_as_they_are: float  # of the score of features as they are
    alpha: float  # of the default at `settings.PRICE`


@final
@dataclass(frozen=True, eq=False)
class Evidence:
    """All results."""

    rows: list[Scored]
    detected: list[Detected]
    known: list[Known]
    resampled: dict[Key, Tensor]

    @cached_property
    def by_key(self) -> Mapping[tuple[str, int, str, float, str], Scored]:
        """Rows by subject, seed, shift, price and method."""
        return {(r.subject, r.seed, r.shift, r.price, r.method): r for r in self.rows}

    def extend(self, other: Evidence) -> None:
        """Add other results."""
        self.rows.extend(other.rows)
        self.detected.extend(other.detected)
        self.known.extend(other.known)
        self.resampled.update(other.resampled)


def subjects(name: str, study: EvidenceStudy, out: Path, store: Store) -> list[Subject]:
    """Return the networks of a name, of all seeds."""
    if name in settings.GIVEN:
        return cifar.given(name, study, out / "corruptions", store)
    makers: Mapping[str, Callable[[EvidenceStudy, Store], list[Subject]]] = {
        settings.LETTERS: letters.letters,
        settings.OWN: lambda *own: cifar.own(own[0], out / "corruptions", own[1]),
        settings.TEXT: clinc150.questions,
        settings.TABLES: tabular_data.tables,
        settings.CIFAR100: cifar.cifar100,
        settings.TINY_IMAGENET: pictures.tiny_imagenet,
        settings.IMAGENET: pictures.imagenet,
        settings.CALTECH: pictures.caltech101,
        settings.REVIEWS: reviews.reviews,
        settings.STREAMS: streams.streams,
    }
    return makers[name](study, store)


def collect(study: EvidenceStudy, out: Path, store: Store) -> Evidence:
    """Do everything that is missing, network by network."""
    found = Evidence([], [], [], {})
    for name in study.networks:
        for subject in subjects(name, study, out, store):
            found.extend(_compared(subject, study, store))
    return found


def _compared(own: Subject, study: EvidenceStudy, store: Store) -> Evidence:
    """Return the results of a network, as an artefact."""
    seen = [one for each in (own, *own.members) for one in each.checksums()]
    decided = (study.prices, study.resamples, study.seed, list(own.shifts.items()), seen)
    stage = Stage(f"compared {own.name}", decided, own.seed, version=VERSION)

    def make(work: object) -> Content:
        del work
        found = _measured(own, study)
        tensors = {"\n".join(map(str, key)): values for key, values in found.resampled.items()}
        plain = {
            "rows": [_plain(row) for row in found.rows],
            "detected": [row._asdict() for row in found.detected],
            "known": [row._asdict() for row in found.known],
        }
        return Content(tensors, plain)

    artefact = store.make(stage, make)
    draws: dict[Key, Tensor] = {}
    for key, values in artefact.load().items():
        subject, seed, shift, method = key.split("\n")
        draws[subject, int(seed), shift, method] = values
    facts = artefact.facts
    return Evidence(
        [_row(row) for row in facts["rows"]],
        [Detected(**row) for row in facts["detected"]],
        [Known(**row) for row in facts["known"]],
        draws,
    )


def _plain(row: Scored) -> dict[str, Any]:
    """Return a row as plain data; JSON has no NaN."""
    return {k: None if is_missing(v) else v for k, v in row._asdict().items()}


def _row(plain: Mapping[str, Any]) -> Scored:
    """Invert `_plain`."""
    values: dict[str, Any] = {k: math.nan if v is None else v for k, v in plain.items()}
    return Scored(**values)


@torch.no_grad()
def _measured(own: Subject, study: EvidenceStudy) -> Evidence:
    views = Views(own)
    chosen = _chosen(views, study)
    found = Evidence([], [], [_known(own, views, chosen)], {})
    clean = views.of(own.clean)
    at_clean = {one.method: one.log_lik(clean) for one in chosen if one.price == settings.PRICE}
    for shift, group in own.shifts.items():
        view = clean if shift == own.clean else views.of(shift)
        place = (own.name, own.seed, shift)
        weights = resamples(len(view.labels), study.resamples, study.seed)
        regrets: dict[str, tuple[Tensor, Tensor]] = {}
        for one in chosen:
            log_lik = one.log_lik(view)
            log_probs = torch.log_softmax(log_lik, -1)
            found.rows.append(
                Scored(
                    *(own.network, own.seed, own.name, shift, group, one.price, one.method),
                    *(one.knob, len(view.labels)),
                    *_four(scores(log_probs, view.labels, own.bins)),
                )
            )
            if one.price != settings.PRICE:
                continue
            drawn = resampled(log_probs, view.labels, weights, own.bins)
            found.resampled[(*place, one.method)] = drawn.float()
            if one.method in WITH_REGRET:
                inside = torch.logsumexp(at_clean[one.method], -1)
                regrets[f"regret, {one.method}"] = inside, torch.logsumexp(log_lik, -1)
        if shift != own.clean:
            found.detected.extend(_detected(own, shift, group, clean, view, regrets))
    return found


def _four(measured: Mapping[str, float]) -> tuple[float, float, float, float]:
    return measured["accuracy"], measured["nll"], measured["brier"], measured["ece"]


def _chosen(views: Views, study: EvidenceStudy) -> list[Chosen]:
    """Choose all knobs: ours and temperatures at all prices, published ones at one."""
    held_out, temperature = views.held_out, views.temperature
    own = (settings.PRICE, OWN_CHOICE)
    left_out = {HEAD, BLOCKS} if held_out.logits.shape[1] > FEW else set[str]()
    tried = [method for method in TRIED if method not in left_out]
    prices: dict[str, Sequence[float]] = {
        **dict.fromkeys((PLAIN, TEMPERATURE), (settings.PRICE,)),
        **dict.fromkeys(AT_ALL_PRICES, (*study.prices, OWN_CHOICE)),
        **dict.fromkeys((*PUBLISHED, *(ENSEMBLES if held_out.members else ())), own),
        **dict.fromkeys(tried, (settings.PRICE,)),
    }
    return [one for m, some in prices.items() for one in choose(m, some, held_out, temperature)]


def _known(own: Subject, views: Views, chosen: list[Chosen]) -> Known:
    held_out = views.held_out
    score, is_right = held_out.scores[BY_CLASS], held_out.logits.argmax(-1) == held_out.labels
    by_form = {
        form: metrics.auroc(m[is_right], m[~is_right]) for form, m in held_out.scores.items()
    }
    alpha = next(c.knob for c in chosen if (c.method, c.price) == (ACNML[2], settings.PRICE))
    return Known(
        *(own.name, own.network, own.seed, held_out.logits.shape[1], views.temperature),
        accuracy=float(is_right.double().mean()),
        spread=float(score.clamp(min=1e-6).log().std()),
        errors=by_form[BY_CLASS],
        errors_as_they_are=by_form[AS_THEY_ARE],
        alpha=alpha,
    )


def _detected(
    own: Subject,
    shift: str,
    group: str,
    clean: View,
    view: View,
    regrets: Mapping[str, tuple[Tensor, Tensor]],
) -> list[Detected]:
    """Tell clean inputs from shifted ones, or from those of no class where there are some."""
    unknown = view.labels < 0
    rows = unknown if unknown.any() else torch.ones_like(unknown)
    plain = {name: (clean.detectors[name], view.detectors[name]) for name in view.detectors}
    return [
        Detected(own.network, own.seed, shift, group, name, *detection(inside, outside[rows]))
        for name, (inside, outside) in {**plain, **regrets}.items()
    ]
