"""Choose α for a price, and write down what it was chosen from: table, notes and quantiles."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace

import torch
from torch import Tensor

from acnml import metrics
from acnml._util.callers import callers_level
from acnml.calibration._search import Search
from acnml.calibration._validation import ValidationData
from acnml.calibration.result import EQUAL_PRICE, Calibrated, CalibrationRow

# Mean total variation below which two methods give the same answers for practical purposes.
SAME_ANSWERS = 0.005

# Quantiles of the validation scores that are kept for abstaining: 0.1 % apart.
QUANTILES = 1001


def chosen_result(search: Search, price: float) -> Calibrated:
    """Choose α for the price and two others, and write down what it was chosen from."""
    found = {each: search.largest_alpha(each) for each in (price / 3, price, 3 * price)}
    validation, temperature = search.validation, search.validation.temperature
    chosen = found[price]
    log_lik = search.log_lik(chosen)
    assert log_lik is not None  # it was solved during the search
    log_probs, regret = torch.log_softmax(log_lik, -1), torch.logsumexp(log_lik, -1)
    equal = validation.temperature_of_price(price)
    table = [
        _row("network", validation.tempered(1.0), validation, 1.0),
        _row("temperature", validation.tempered(temperature), validation, temperature),
        _row(f"{EQUAL_PRICE}{price:g}", validation.tempered(equal), validation, equal),
    ]
    for each, alpha in (*found.items(), (None, 1.0)):
        own = search.log_lik(alpha)
        name = "ACNML, alpha = 1" if each is None else f"ACNML, +{each:.3g}"
        if own is not None:
            table.append(_acnml_row(name, own, validation, temperature, alpha))
    notes = _notes(search, table, price, chosen, equal, log_probs)
    quantiles = torch.linspace(0, 1, QUANTILES, dtype=torch.float64)
    confidence = log_probs.amax(-1).exp()
    return Calibrated(
        replace(search.predictor, alpha=chosen),
        tuple(table),
        notes,
        price,
        torch.quantile(confidence, quantiles),
        torch.quantile(regret, quantiles),
    )


def _row(
    method: str, log_probs: Tensor, validation: ValidationData, temperature: float
) -> CalibrationRow:
    scores = metrics.summary(log_probs, validation.labels)
    confidence = log_probs.amax(-1).exp().mean().item()
    return CalibrationRow(method, temperature, None, **scores, confidence=confidence, regret=None)


def _acnml_row(
    method: str, log_lik: Tensor, validation: ValidationData, temperature: float, alpha: float
) -> CalibrationRow:
    row = _row(method, torch.log_softmax(log_lik, -1), validation, temperature)
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
        f"{error:.4f} nats of NLL; a plain temperature of {equal:.3g} costs as much."
    ]
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
            f"A plain temperature of {equal:.3g} would do as well here: its probabilities differ "
            f"from ACNML's by {variation:.4f} on average (total variation)."
        )
    if error > price:
        text = (
            f"The price of {price:g} nats is known only to ± {error:.4f} from {len(added)} "
            "validation examples: give more of them, or a higher price."
        )
        notes.append(text)
        warnings.warn(text, stacklevel=callers_level())
    unchosen = next((row for row in table if row.method == "ACNML, alpha = 1"), None)
    if unchosen is None or unchosen.nll > validation.best_nll + 10 * price:
        cost = "has no solution" if unchosen is None else f"has an NLL of {unchosen.nll:.3f}"
        notes.append(f"Without a choice, at alpha = 1, ACNML {cost}: always choose alpha.")
    return tuple(notes)
