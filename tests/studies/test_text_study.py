"""The study of questions: the intents, the tasks and the pages, with an encoder of random words."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from acnml import metrics
from cases import normal
from stores import made, rows, store_in, twice
from studies import text as study_module
from studies.text import DOMAINS, PRESETS, TWO, Question, TextStudy, run

pytestmark = pytest.mark.filterwarnings("ignore:The price of")  # few validation data
STUDY = TextStudy(heads=(TWO,), hidden=16, epochs=3, price=0.05, folds=1, seeds=(0,))
FEW = {domain: " ".join(intents.split()[:2]) for domain, intents in DOMAINS.items()}
INTENTS = sorted(intent for intents in FEW.values() for intent in intents.split())


def test_the_domains_divide_the_intents():
    every = [intent for intents in DOMAINS.values() for intent in intents.split()]
    assert len(every) == len(set(every)) == 150
    assert {len(intents.split()) for intents in DOMAINS.values()} == {15}


def questions(split: str) -> tuple[Question, ...]:
    """Questions whose words say the intent, most of the time."""
    if split == "oos_test":
        return tuple(Question(f"nothing {number}", "oos") for number in range(40))
    repeats = {"train": 20, "val": 10, "test": 5}[split]
    rows = [(intent, number) for number in range(repeats) for intent in INTENTS]
    return tuple(Question(f"{intent} {split} {number}", intent) for intent, number in rows)


def encoder():
    """Return vectors that are random for every text, around one of its first word."""

    def vector(word: str) -> torch.Tensor:
        seed = sum(ord(letter) * 31**place for place, letter in enumerate(word)) % 2**31
        return torch.randn(384, generator=torch.Generator().manual_seed(seed))

    def encode(texts):
        vectors = [vector(each.split()[0]) + 2 * vector(each) for each in texts]
        return torch.nn.functional.normalize(torch.stack(vectors), dim=-1)

    return encode


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("text")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(study_module, "DOMAINS", FEW)
        patch.setattr(study_module, "questions", questions)
        patch.setattr(study_module, "load_encoder", encoder)
        twice(lambda store: run(STUDY, out, store, "command"), out, STUDY)
        assert len(made(out)) == 4 + 2  # the embeddings of four splits, two tasks
        store = store_in(out, STUDY)
        task = study_module.tasks(STUDY, store)[0]
        return out, task, *study_module.outcome(STUDY, TWO, task, 0, store)


def test_every_score_is_measured(finished):
    out = finished[0]
    found = rows(out / "detection.csv")
    per_task = 2 * (3 + 6) + 2 + 1 + 6  # two scores of nine methods, distances, energy, regrets
    assert len(found) == 2 * per_task
    assert {row["fold"] for row in found} == {"", "banking, credit cards"}
    (energy,) = (row for row in found if row["score"] == "energy" and row["fold"] == "")
    assert float(energy["auroc"]) > 0.5
    same = {(r["method"], r["score"]): r["auroc"] for r in found if r["fold"] == ""}
    assert len(set(same.values())) > 3
    calibrated = rows(out / "calibration.csv")
    assert [row["method"] for row in calibrated][:2] == ["network", "temperature"]
    text = (out / "results.md").read_text()
    assert "Domains left out" in text
    assert "ACNML, +0.05 | regret" in text
    assert "closed-form NML, +0.05 | regret" in text


def test_scores_are_those_of_the_stored_predictions(finished):
    out, task, tensors, facts = finished
    inside, outside = (tensors[f"logits {kind}"].double() for kind in ("in", "out"))
    expected = metrics.auroc(-inside.softmax(-1).amax(-1), -outside.softmax(-1).amax(-1))
    (found,) = (
        row
        for row in rows(out / "detection.csv")
        if (row["fold"], row["method"], row["score"]) == ("", "network", "max. probability")
    )
    assert float(found["auroc"]) == pytest.approx(expected, abs=1e-9)
    assert facts["temperature"] > 0
    assert len(task.beyond) == 40


def test_the_presets_name_heads_that_exist():
    for study in PRESETS.values():
        for head in study.heads:
            study_module.build(study, head, 3)
    with pytest.raises(ValueError, match="there is no head 'three layers'"):
        study_module.build(replace(STUDY), "three layers", 3)


def test_answers_to_questions_out_of_scope_count_as_wrong(monkeypatch):
    asked = {"in": normal(30, 4).log_softmax(-1), "out": normal(20, 4, seed=1).log_softmax(-1)}
    monkeypatch.setattr(study_module, "log_probs_of", lambda *_: {"network": asked[_[-1]]})
    labels = torch.arange(30) % 4
    task = SimpleNamespace(test=SimpleNamespace(labels=labels))
    (found,) = study_module.calibrations(task, "linear", 0, {}, {})
    everything = torch.cat([asked["in"], asked["out"]])
    wrong = torch.cat([labels, asked["out"].argmin(-1)])
    assert found.ece == pytest.approx(metrics.ece(asked["in"], labels))
    assert found.ece_with_oos == pytest.approx(metrics.ece(everything, wrong))
    assert found.aurc_with_oos == pytest.approx(metrics.aurc(everything, wrong))
