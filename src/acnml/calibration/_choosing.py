"""Choose α for a price, and write down what it was chosen from: table, notes and quantiles."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from acnml import metrics
from acnml._util.callers import callers_level
from acnml.calibration._search import PRICE_TOLERANCE, Search
from acnml.calibration._validation import ValidationData
from acnml.calibration.result import EQUAL_PRICE, Calibrated, CalibrationRow

# Mean total variation below which two methods give the same answers for practical purposes.
SAME_ANSWERS = 0.005

# The row of the default of `Acnml`.
AT_DEFAULT = "ACNML, alpha = 1"

# Quantiles of the validation scores that are kept for abstaining: 0.1 % apart.
QUANTILES = 1001


def chosen_result(search: Search, price: float) -> Calibrated:
    """Choose α for the price and two others, and write down what it was chosen from."""
    validation, temperature = search.validation, search.validation.temperature
    chosen = _chosen(search, price)
    log_probs, regret = chosen.log_probs, chosen.regret
    spent = metrics.nll(log_probs, validation.labels) - validation.best_nll
    is_spent = spent >= (1 - PRICE_TOLERANCE) * price
    # A fair rival costs what ACNML costs, also where something else than the price limits alpha.
    equal = validation.temperature_of_price(price if is_spent else max(spent, 0.0))
    cost = f"{price:g}" if is_spent else f"{max(spent, 0.0):.3g}"
    table = [
        _row("network", validation.tempered(1.0), validation, 1.0),
        _row("temperature", validation.tempered(temperature), validation, temperature),
        _row(f"{EQUAL_PRICE}{cost}", validation.tempered(equal), validation, equal),
        *chosen.rows,
    ]
    notes = _notes(search, table, price, chosen.alpha, equal, log_probs)
    quantiles = torch.linspace(0, 1, QUANTILES, dtype=torch.float64, device=regret.device)
    confidence = log_probs.amax(-1).exp()
    return Calibrated(
        replace(search.predictor, alpha=chosen.alpha),
        tuple(table),
        notes,
        price,
        torch.quantile(confidence, quantiles),
        torch.quantile(regret, quantiles),
    )


class _Chosen(NamedTuple):
    """The α of a price, ACNML with it on the validation data, and the rows of several α."""

    alpha: float
    log_probs: Tensor
    regret: Tensor
    rows: list[CalibrationRow]


def _chosen(search: Search, price: float) -> _Chosen:
    """Search α for three prices, and make the row of each while its solution is at hand."""
    validation, rows = search.validation, list[CalibrationRow]()
    chosen: _Chosen | None = None
    for each in (price / 3, price, 3 * price):
        alpha = search.largest_alpha(each)
        log_lik = search.log_lik(alpha)
        assert log_lik is not None  # it was solved during the search
        rows.append(_acnml_row(f"ACNML, +{each:.3g}", log_lik, validation, alpha))
        if each == price:
            log_probs, regret = torch.log_softmax(log_lik, -1), torch.logsumexp(log_lik, -1)
            chosen = _Chosen(alpha, log_probs, regret, rows)
    unchosen = search.log_lik(1.0)
    if unchosen is not None:
        rows.append(_acnml_row(AT_DEFAULT, unchosen, validation, 1.0))
    assert chosen is not None
    return chosen


def _row(
    method: str, log_probs: Tensor, validation: ValidationData, temperature: float
) -> CalibrationRow:
    scores = metrics.summary(log_probs, validation.labels)
    confidence = log_probs.amax(-1).exp().mean().item()
    return CalibrationRow(method, temperature, None, **scores, confidence=confidence, regret=None)


def _acnml_row(
    method: str, log_lik: Tensor, validation: ValidationData, alpha: float
) -> CalibrationRow:
    row = _row(method, torch.log_softmax(log_lik, -1), validation, validation.temperature)
    return replace(row, alpha=alpha, regret=torch.logsumexp(log_lik, -1).mean().item())


def _notes(
    search: Search,
    table: list[CalibrationRow],
    price: float,
    alpha: float,
    equal: float,
    log_probs: Tensor,
) -> tuple[str, ...]:
    validation, temperature = search.validation, search.validation.temperature
    plain = validation.tempered(temperature)
    of_label = validation.labels.unsqueeze(1)
    added = (plain - log_probs).gather(1, of_label).squeeze(1)
    error = added.std().item() / math.sqrt(len(added))
    layer = search.predictor.last_layer
    assert layer is not None
    notes = [
        f"Chosen: temperature {temperature:.3g}, then ACNML on layer {layer.name!r} with alpha = "
        f"{alpha:.4g}. On {len(added)} validation examples this costs {added.mean():.4f} ± "
        f"{error:.4f} nats of NLL; {_compared(validation, equal, added.mean().item())}."
    ]
    reason = search.why_not_larger(alpha, price)
    if reason is not None and added.mean() < (1 - PRICE_TOLERANCE) * price:
        notes.append(f"{reason}: only {added.mean():.3g} of {price:g} nats are spent.")
    if search.predictor.typicality is not None:
        reader = search.predictor.typicality.reader
        where = ", ".join(map(str, reader.places))
        notes.append(
            "Alpha is multiplied by a score of how atypical an input is (1 on average), computed "
            f"from {len(reader.shift)} features: {where}."
        )
    variation = (log_probs.exp() - validation.tempered(equal).exp()).abs().sum(-1).mean().item() / 2
    if variation < SAME_ANSWERS:
        notes.append(
            f"A plain temperature of {equal:.3g} gives nearly the same predictions here: its "
            f"probabilities differ from ACNML's by {variation:.4f} on average (total variation)."
        )
    if error > price:
        text = (
            f"The price of {price:g} nats is known only to ± {error:.4f} from {len(added)} "
            "validation examples: give more of them, or a higher price."
        )
        notes.append(text)
        warnings.warn(text, stacklevel=callers_level())
    unchosen = next((row for row in table if row.method == AT_DEFAULT), None)
    if unchosen is None or unchosen.nll > validation.best_nll + 10 * price:
        cost = "there is no solution" if unchosen is None else f"the NLL is {unchosen.nll:.3f}"
        notes.append(
            f"At alpha = 1, the default of `Acnml`, {cost}. Always choose alpha on validation data."
        )
    return tuple(notes)


def _compared(validation: ValidationData, equal: float, spent: float) -> str:
    """Say what the plain temperature of equal price costs, which may be impossible to equal."""
    cost = metrics.nll(validation.tempered(equal), validation.labels) - validation.best_nll
    if abs(cost - spent) <= 2 * PRICE_TOLERANCE * max(cost, spent):
        return f"a plain temperature of {equal:.3g} costs as much"
    return f"no plain temperature costs the same, and one of {equal:.3g} costs {cost:.4f}"
