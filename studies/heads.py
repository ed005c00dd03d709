"""Heads with several labels and with tokens, on real data, at equal price.

- Several labels: a small convolutional network says which digits are in an image that overlays two
  digits of MNIST, each moved by up to four pixels (MultiMNIST, Sabour et al. 2017). Test images are
  rotated.
- Tokens: parts of speech in English Web Treebank (Silveira et al. 2014). The first three layers of
  a frozen MiniLM turn every word into a vector, that of its first piece; a head with two layers is
  trained on weblogs and newsgroups. Test sentences are of other genres, too.

All knobs are chosen on other data like the training data. `examples/segmentation.py` is the same
for maps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple, final

import torch
from torch import Tensor, nn
from torch.nn import functional

from acnml import Calibrated, calibrate, metrics
from acnml._util.torch_state import seeded
from acnml.calibration.heads import IGNORED, Task
from studies.data import Labelled, shuffled
from studies.data.digits import CLASSES, load_mnist, rotate
from studies.data.folder import DataError, data_folder
from studies.engine.report import Section, ShortReport
from studies.engine.tables import Table, mean_std, select
from studies.store import Content, Stage, Store
from studies.text import ENCODER, WIDTH, load_minilm

LABELS, TOKENS = "several labels", "tokens"
NO_SHIFT, MOST_MOVED, SIDE = "none", 4, 36
SCORES = ("ece", "nll")

TREEBANK, LONGEST, BATCH = "UD_English-EWT", 48, 50  # words of a sentence, and sentences at once
LAYER = 3  # of MiniLM, that of the highest accuracy on held-out sentences
TAGS = (
    *("ADJ", "ADP", "ADV", "AUX", "CCONJ", "DET", "INTJ", "NOUN", "NUM"),
    *("PART", "PRON", "PROPN", "PUNCT", "SCONJ", "SYM", "VERB", "X"),
)
KNOWN, UNSEEN = ("weblog", "newsgroup"), ("answers", "email", "reviews")


@final
@dataclass(frozen=True)
class HeadsStudy:
    """The settings.

    Args:
        images: for training.
        sentences: for training.
        held_out: images and sentences, each, for choosing.
        test: images and sentences, each, under every shift.
        angles: of rotated images.
        epochs: of training.
        price: in nats; of labels, in mean binary NLL.
        seeds: of splits and training.
    """

    images: int = 20_000
    sentences: int = 1500
    held_out: int = 500
    test: int = 500
    angles: tuple[int, ...] = (30, 60, 90)
    epochs: int = 15
    price: float = 0.01
    seeds: tuple[int, ...] = (0, 1, 2)


PRESETS: Mapping[str, HeadsStudy] = {
    "quick": HeadsStudy(4000, 300, 200, 100, (60,), 10, seeds=(0,)),
    "full": HeadsStudy(),
}


class Scored(NamedTuple):
    """A method under one shift: means over labels, or over tokens."""

    data: str
    seed: int
    shift: str
    method: str
    n: int
    accuracy: float
    nll: float
    brier: float
    ece: float


class Subject(NamedTuple):
    """A trained network with its data."""

    network: nn.Module
    train: Labelled
    held_out: Labelled
    shifts: Mapping[str, Labelled]  # the first is none


# The data ----------------------------------------------------------------------------------------


def overlaid(digits: Labelled, count: int, seed: int) -> Labelled:
    """Return images (N, 1, 36, 36) of two different digits, and which are there (N, 10)."""
    generator = torch.Generator().manual_seed(seed)
    images, present = torch.zeros(count, 1, SIDE, SIDE), torch.zeros(count, CLASSES)
    for image, own in zip(images, present, strict=True):
        while own.sum() < 2:
            row = int(torch.randint(len(digits.labels), (), generator=generator))
            if own[digits.labels[row]]:
                continue
            own[digits.labels[row]] = 1
            y, x = torch.randint(2 * MOST_MOVED + 1, (2,), generator=generator).tolist()
            place = image[:, y : y + 28, x : x + 28]
            torch.maximum(place, digits.inputs[row], out=place)
    return Labelled(images, present.long())


class Word(NamedTuple):
    """A word with its part of speech, a number of `TAGS`."""

    form: str
    tag: int


@cache
def sentences(genre: str) -> list[list[Word]]:
    """Return the sentences of a genre of the treebank, each once."""
    files = sorted((data_folder() / TREEBANK).rglob("*.conllu"))
    if not files:
        raise DataError(
            f"{data_folder() / TREEBANK} has no .conllu file: get the treebank from "
            "https://github.com/UniversalDependencies/UD_English-EWT"
        )
    found: dict[str, list[Word]] = {}
    for path in files:
        for block in path.read_text(encoding="utf-8").split("\n\n"):
            lines = block.splitlines()
            name = next((li[12:] for li in lines if li.startswith("# sent_id = ")), "")
            if name.startswith(f"{genre}-"):
                found[name] = list(_words(lines))[:LONGEST]
    return [found[name] for name in sorted(found)]


def _words(lines: Sequence[str]) -> Iterator[Word]:
    for line in lines:
        cells = line.split("\t")
        if cells[0].isdigit() and cells[3] in TAGS:  # no ranges of words, and no empty nodes
            yield Word(cells[1], TAGS.index(cells[3]))


def encoded(texts: Sequence[Sequence[Word]], name: str, store: Store) -> Labelled:
    """Return vectors of words (N, T, 384), and their tags (N, T): -100 for padding."""

    @torch.no_grad()
    def make(_: object) -> Content:
        tokenizer, model = load_minilm()
        vectors = torch.zeros(len(texts), LONGEST, WIDTH)
        for start in range(0, len(texts), BATCH):
            words = [[word.form for word in text] for text in texts[start : start + BATCH]]
            pieces = tokenizer(
                words, is_split_into_words=True, padding=True, truncation=True, return_tensors="pt"
            )
            hidden = model(**pieces, output_hidden_states=True).hidden_states[LAYER]
            for i in range(len(words)):
                seen = set[int]()
                for at, word in enumerate(pieces.word_ids(i)):
                    if word is not None and word not in seen:
                        seen.add(word)
                        vectors[start + i, word] = hidden[i, at]
        return Content({"vectors": vectors})

    labels = torch.full((len(texts), LONGEST), IGNORED)
    for row, text in zip(labels, texts, strict=True):
        row[: len(text)] = torch.tensor([word.tag for word in text])
    forms = [" ".join(word.form for word in text) for text in texts]
    stage = Stage(f"words {name}", (ENCODER, LAYER, forms))
    return Labelled(store.make(stage, make).load()["vectors"], labels)


# The networks ------------------------------------------------------------------------------------


def labels_subject(study: HeadsStudy, seed: int, _: Store) -> Subject:
    """Train a network that says which digits are in an image."""
    known, test = load_mnist("train"), load_mnist("test")
    order = shuffled(len(known.labels), seed)
    half = len(order) - len(order) // 6  # held-out images show other digits
    train = overlaid(known.take(order[:half]), study.images, seed)
    held_out = overlaid(known.take(order[half:]), study.held_out, seed + 100)
    clean = overlaid(test, study.test, seed + 200)
    turned = {f"{a}°": Labelled(rotate(clean.inputs, a), clean.labels) for a in study.angles}
    with seeded(seed):
        network = nn.Sequential(
            *(nn.Conv2d(1, 16, 5, stride=2), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU()),
            *(nn.Flatten(), nn.Linear(32 * 7 * 7, 128), nn.ReLU(), nn.Linear(128, CLASSES)),
        )

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        return functional.binary_cross_entropy_with_logits(logits, labels.float())

    _train(network, train, loss, study.epochs, seed)
    return Subject(network, train, held_out, {NO_SHIFT: clean, **turned})


def tokens_subject(study: HeadsStudy, seed: int, store: Store) -> Subject:
    """Train a head for the parts of speech of words."""
    texts = [text for genre in KNOWN for text in sentences(genre)]
    order = shuffled(len(texts), 0).tolist()  # the same sentences for all seeds, encoded once
    ends = study.sentences, study.sentences + study.held_out
    parts = {
        "train": order[: ends[0]],
        "held out": order[ends[0] : ends[1]],
        NO_SHIFT: order[ends[1] : ends[1] + study.test],
    }
    found = {
        name: encoded([texts[row] for row in rows], name, store) for name, rows in parts.items()
    }
    for genre in UNSEEN:
        own = sentences(genre)
        rows = shuffled(len(own), 0)[: study.test].tolist()
        found[genre] = encoded([own[row] for row in rows], genre, store)
    with seeded(seed):
        network = nn.Sequential(nn.Linear(WIDTH, 256), nn.ReLU(), nn.Linear(256, len(TAGS)))

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    train, held_out = found.pop("train"), found.pop("held out")
    _train(network, train, loss, study.epochs, seed)
    return Subject(network, train, held_out, found)


SUBJECTS: Mapping[str, Callable[[HeadsStudy, int, Store], Subject]] = {
    LABELS: labels_subject,
    TOKENS: tokens_subject,
}


def _train(
    network: nn.Module,
    data: Labelled,
    loss: Callable[[Tensor, Tensor], Tensor],
    epochs: int,
    seed: int,
) -> None:
    """Train by Adam until the network is too sure of itself."""
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(seed)
    with torch.enable_grad():
        for _ in range(epochs):
            for rows in torch.randperm(len(data.labels), generator=generator).split(BATCH):
                optimizer.zero_grad()
                loss(network(data.inputs[rows]), data.labels[rows]).backward()
                optimizer.step()
    network.eval()


# The methods -------------------------------------------------------------------------------------


@torch.no_grad()
def answers(calibrated: Calibrated, x: Tensor) -> dict[str, Tensor]:
    """Return the log-probabilities of all methods of the table, in the layout of the logits."""
    core, found = calibrated.calibrator, {}
    logits, features = calibrated.classifier.model(x), calibrated.features(x)
    for row in core.table:
        if row.alpha is not None:
            own = replace(core, rule=row.method, alpha=row.alpha)  # type: ignore[arg-type]
            found[row.method] = own.log_probs(logits, features)
        elif logits.ndim == 2:  # labels
            found[row.method] = functional.logsigmoid(logits / row.temperature)
        else:
            found[row.method] = torch.log_softmax(logits / row.temperature, dim=-1)
    return found


def scores(log_probs: Tensor, labels: Tensor) -> dict[str, float]:
    """Return means over labels (N, K), or over tokens that count (N, T)."""
    if log_probs.shape == labels.shape:
        found = metrics.multilabel(log_probs.exp(), labels)
        return {name: found[name].mean().item() for name in ("accuracy", "nll", "brier", "ece")}
    counts = labels != IGNORED
    return metrics.summary(log_probs[counts], labels[counts])


def measured(study: HeadsStudy, data: str, seed: int, store: Store, _: object) -> Content:
    """Train, choose all knobs on held-out data, and evaluate under every shift."""
    own = SUBJECTS[data](study, seed, store)
    task: Task = "multilabel" if data == LABELS else "tokens"
    pairs = ([tuple(own.train)], [tuple(own.held_out)])
    calibrated = calibrate(own.network, *pairs, task=task, price=study.price, progress=False)
    rows = []
    for shift, (x, labels) in own.shifts.items():
        for method, log_probs in answers(calibrated, x).items():
            found = scores(log_probs, labels)
            four = found["accuracy"], found["nll"], found["brier"], found["ece"]
            count = int((labels != IGNORED).sum())
            rows.append(Scored(data, seed, shift, method, count, *four)._asdict())
    return Content({}, {"rows": rows})


def run(study: HeadsStudy, out: Path, store: Store, command: str) -> Path:
    """Do everything that is missing and write the report."""
    rows: list[Scored] = []
    settings = replace(study, seeds=())
    for data in SUBJECTS:
        for seed in study.seeds:
            stage = Stage(f"measure {data}", settings, seed)
            made = store.make(stage, partial(measured, study, data, seed, store))
            rows += [Scored(**row) for row in made.facts["rows"]]
    text = (
        "Means ± standard deviations over seeds. Scores of labels are means over the ten labels, "
        "each with two classes; scores of tokens are over words."
    )
    tables = [table(rows, data) for data in SUBJECTS]
    sections = [Section("Scores", [text], [], tables)]
    numbers = {"metrics.csv": (Scored._fields, rows)}
    title = "Several labels and tokens"
    return ShortReport(title, verdict(rows), sections, command, numbers).write(out)


def table(rows: Sequence[Scored], data: str) -> Table:
    """Return ECE and NLL of every method by shift."""
    own = select(rows, data=data)
    shifts, lines = list(dict.fromkeys(row.shift for row in own)), []
    for method in dict.fromkeys(row.method for row in own):
        cells = []
        for shift in shifts:
            its = select(own, method=method, shift=shift)
            pairs = [mean_std([getattr(row, score) for row in its]) for score in SCORES]
            cells.append(" / ".join(f"{middle:.4f} ± {std:.4f}" for middle, std in pairs))
        lines.append([method, *cells])
    accuracy = [f"{mean_std([r.accuracy for r in select(own, shift=s)])[0]:.3f}" for s in shifts]
    caption = f"{data}: ECE / NLL; accuracy {', '.join(accuracy)}."
    return Table(caption, ("method", *shifts), lines)


def verdict(rows: Sequence[Scored]) -> str:
    """Say how often every rule is better than the temperature of equal price under shift."""
    moved = [row for row in rows if row.shift != NO_SHIFT]
    base = {row[:3]: row for row in select(moved, method="temperature of equal price")}
    parts = []
    for data in SUBJECTS:
        for method in ("density-temperature", "closed-form", "acnml"):
            own = select(moved, data=data, method=method)
            won = [sum(getattr(r, s) < getattr(base[r[:3]], s) for r in own) for s in SCORES]
            parts.append(f"{data}, {method}: {won[0]} in ECE and {won[1]} in NLL of {len(own)}")
    return (
        "Shifts and seeds in which a rule is better than the temperature of equal price: "
        f"{'; '.join(parts)}."
    )
