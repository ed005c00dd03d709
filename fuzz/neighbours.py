"""Calibrated networks that could mix inputs: texts of different lengths, and models with a memory.

The answer for an input may depend on nothing but this input: not on the texts that it is padded
with, not on the rest of the batch, not on what the model has seen before.
"""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, nn

import acnml
from acnml import Acnml, Classifier
from fuzz.outcome import Outcome, refused_or, require

WORDS, WIDTH, CLASSES, LONGEST = 11, 6, 3, 7
TRAINING, VALIDATION, QUERIES = 60, 60, 6

Data: TypeAlias = list[Any]


@final
class Texts(nn.Module):
    """Logits of texts; 0 is padding.

    Args:
        mixing: how words see each other.
        masks: whether places with padding are left out of the mean over words.
        asks_for_mask: whether the mask is an input; otherwise the model finds it out.
    """

    def __init__(self, mixing: str, masks: bool, asks_for_mask: bool) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, CLASSES)
        mixers: dict[str, Callable[[], nn.Module]] = {
            "none": nn.Identity,
            "layer norm": lambda: nn.LayerNorm(WIDTH),
            "linear": lambda: nn.Linear(WIDTH, WIDTH),
            "convolution": lambda: nn.Conv1d(WIDTH, WIDTH, 3, padding=1),
            "recurrent": lambda: nn.GRU(WIDTH, WIDTH, batch_first=True),
        }
        self.mixing, self.masks, self.asks_for_mask = mixing, masks, asks_for_mask
        self.mixer = mixers[mixing]()

    def forward(self, ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Return logits (B, K) of words (B, T)."""
        is_word = (ids > 0) if attention_mask is None else attention_mask.bool()
        words = self.embed(ids)
        if self.mixing == "convolution":
            words = self.mixer((words * is_word[..., None]).mT).mT
        elif self.mixing == "recurrent":
            words = self.mixer(words)[0]
        else:
            words = self.mixer(words)
        if not self.masks:
            return self.head(torch.tanh(words).mean(1))
        kept = torch.tanh(words) * is_word[..., None]
        return self.head(kept.sum(1) / is_word.sum(1, keepdim=True))


def _texts(count: int, longest: int = LONGEST) -> list[Tensor]:
    """Texts of different lengths."""
    return [
        torch.randint(1, WORDS, (int(torch.randint(1, longest + 1, ())),)) for _ in range(count)
    ]


def _padded(model: Texts, texts: list[Tensor]) -> Any:
    ids = nn.utils.rnn.pad_sequence(texts, batch_first=True)
    return {"ids": ids, "attention_mask": (ids > 0).long()} if model.asks_for_mask else ids


# Models with a memory, or with an eye on the rest of the batch ------------------------------------


@final
class Recurrent(nn.Module):
    """Keeps the state of a GRU from call to call."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.state: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        state = self.cell(x, None if self.state is None else self.state.mean(0).expand(len(x), -1))
        self.state = state.detach()
        return self.head(state)


@final
class FirstSeen(nn.Module):
    """Takes away the mean of the first batch that it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, CLASSES)
        self.mean: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        if self.mean is None:
            self.mean = x.mean(0)
        return self.head(x - self.mean)


@final
class Odd(nn.Module):
    """A linear model whose features go through a function."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.body, self.head, self.function = nn.Linear(WIDTH, 8), nn.Linear(8, CLASSES), function

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        return self.head(self.function(torch.tanh(self.body(x))))


@final
class High(nn.Module):
    """Adds the same large number to all logits, beside which their differences are small."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        return self.model(x) + 1e4


@final
class Counting(nn.Module):
    """Grows more confident with every call."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.calls = nn.Linear(WIDTH, CLASSES), 0

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        self.calls += 1
        return self.head(x) * (1 + 0.1 * self.calls)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: Odd(torch.relu),
    "a GRU with a state": Recurrent,
    "the first mean": FirstSeen,
    "a counter": Counting,
    "the batch's mean": lambda: Odd(lambda h: h - h.mean(0)),
    "the batch's largest": lambda: Odd(lambda h: h / h.abs().amax()),
    "the batch's spread": lambda: Odd(lambda h: h / h.std()),
    "the batch's mean, with high logits": lambda: High(Odd(lambda h: h - h.mean(0))),
    "high logits": lambda: High(Odd(torch.relu)),
    "the row before": lambda: Odd(lambda h: h + h.roll(1, 0)),
    "dropout that stays on": lambda: Odd(lambda h: nn.functional.dropout(h, 0.5, training=True)),
}


# Cases -------------------------------------------------------------------------------------------


def neighbours(seed: int) -> tuple[str, Outcome]:
    """Calibrate a network, or give it a posterior, and ask twice, together and one by one."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    name, run = rng.choice([_text_case, _memory_case])(rng)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return name, refused_or(run)
    except AssertionError as error:
        raise type(error)(f"{name}: {error}") from error


def _text_case(rng: random.Random) -> tuple[str, Callable[[], Outcome]]:
    mixing = rng.choice(["none", "layer norm", "linear", "convolution", "recurrent"])
    masks, asks = rng.random() < 0.7, rng.random() < 0.5
    model = Texts(mixing, masks, asks).eval()
    rows = [_texts(n) for n in (TRAINING, VALIDATION, QUERIES)]
    name = f"texts, {mixing}, {'' if masks else 'not '}masked, {'mask' if asks else 'ids'} given"

    def run() -> Outcome:
        train, validation = (_batches(model, some) for some in rows[:2])
        found = acnml.calibrate(model, train, validation, price=0.05, progress=False)
        together = _padded(model, rows[2])
        with torch.no_grad():
            own = model(**together) if asks else model(together)
        probs, scores = found.probs(together), found.score(together)
        for index, text in enumerate(rows[2]):
            alone = _padded(model, [text])
            with torch.no_grad():
                logits = model(**alone) if asks else model(alone)
            if not torch.allclose(logits[0], own[index], atol=1e-5):
                continue  # for this model, padding is a part of the text
            _require_equal(found.score(alone)[0], scores[index], "scores")
            _require_equal(found.probs(alone)[0], probs[index], "probabilities")
        return Outcome.EQUAL

    return name, run


def _batches(model: Texts, texts: list[Tensor]) -> Data:
    batches: Data = []
    for start in range(0, len(texts), 20):
        x = _padded(model, texts[start : start + 20])
        labels = _labels(model, x)
        batches.append({**x, "labels": labels} if model.asks_for_mask else (x, labels))
    return batches


@torch.no_grad()
def _labels(model: nn.Module, x: Any) -> Tensor:
    """Draw labels that the model is somewhat unsure of; the model does not notice."""
    own = copy.deepcopy(model)
    logits = own(**x) if isinstance(x, dict) else own(x)
    return torch.multinomial((2 * logits).softmax(-1), 1).squeeze(-1)


def _memory_case(rng: random.Random) -> tuple[str, Callable[[], Outcome]]:
    kind, is_calibrated = rng.choice(list(MODELS)), rng.random() < 0.6
    model = MODELS[kind]().eval()
    x = torch.randn(TRAINING + VALIDATION + QUERIES, WIDTH) + 0.3
    y = _labels(model, x)
    layers = rng.choice([None, "last"])

    def run() -> Outcome:
        predict = (
            _calibrated(model, x, y) if is_calibrated else _with_posterior(model, x, y, layers)
        )
        queries = x[-QUERIES:]
        first, again = predict(queries), predict(queries)
        _require_equal(first, again, "the same call twice")
        _require_equal(predict(queries[2:3])[0], first[2], "alone and in its batch")
        return Outcome.EQUAL

    return f"{kind}, {'calibrate' if is_calibrated else 'fit_laplace'}", run


def _calibrated(model: nn.Module, x: Tensor, y: Tensor) -> Callable[[Tensor], Tensor]:
    parts = (slice(TRAINING), slice(TRAINING, TRAINING + VALIDATION))
    data = ((x[part], y[part]) for part in parts)
    return acnml.calibrate(model, *data, price=0.05, progress=False).probs


def _with_posterior(
    model: nn.Module, x: Tensor, y: Tensor, layers: str | None
) -> Callable[[Tensor], Tensor]:
    posterior = acnml.fit_laplace(model, (x[:TRAINING], y[:TRAINING]), layers=layers)
    predict = Acnml(Classifier(model), posterior, alpha=0.1, on_unsolved="ignore")
    return lambda queries: predict(queries).exp()


def _require_equal(one: Tensor, other: Tensor, what: str) -> None:
    difference = float((one - other).abs().max())
    require(
        difference < 1e-3 * (1 + float(other.abs().max())), f"{what} differ by {difference:.2g}"
    )
