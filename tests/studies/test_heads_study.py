"""The study of several labels and tokens, on tiny data."""

from __future__ import annotations

import pytest
import torch

from acnml.calibration.heads import IGNORED
from cases import normal
from stores import store_in
from studies import heads
from studies.data import Labelled
from studies.heads import NO_SHIFT, SUBJECTS, TAGS, WIDTH, HeadsStudy, Word, run, scores, sentences

TINY = HeadsStudy(600, 100, 80, 10, (90,), 8, price=0.05, seeds=(0,))

TREE = """# sent_id = weblog-a-0002
1-2\tDon't\t_\t_
1\tDo\tdo\tAUX
2\tn't\tnot\tPART
2.1\tgo\tgo\tVERB

# sent_id = email-b-0001
1\tYes\tyes\tINTJ
"""


def digits() -> Labelled:
    labels, images = torch.arange(600) % 10, 0.1 * normal(600, 1, 28, 28).float().abs()
    for image, label in zip(images, labels.tolist(), strict=True):
        image[:, 8 + label, 2 * label : 2 * label + 8] = 1
    return Labelled(images, labels)


def test_two_digits_are_in_an_image():
    bright = Labelled(torch.ones(20, 1, 28, 28), torch.arange(20) % 10)
    images, present = heads.overlaid(bright, 6, seed=1)
    assert (present.sum(1) == 2).all()
    assert images.shape == (6, 1, 36, 36)
    for image in images:
        assert 28**2 <= image.sum() <= 2 * 28**2
    assert torch.equal(images, heads.overlaid(bright, 6, seed=1).inputs)


def test_sentences_of_a_genre_have_words_only(tmp_path, monkeypatch):
    for name in ("first", "again"):  # a sentence in two files counts once
        path = tmp_path / heads.TREEBANK / name / "trees.conllu"
        path.parent.mkdir(parents=True)
        path.write_text(TREE)
    monkeypatch.setattr(heads, "data_folder", lambda: tmp_path)
    sentences.cache_clear()
    assert sentences("weblog") == [[Word("Do", TAGS.index("AUX")), Word("n't", TAGS.index("PART"))]]
    assert sentences("email") == [[Word("Yes", TAGS.index("INTJ"))]]
    sentences.cache_clear()


def test_padding_does_not_count():
    log_probs = torch.tensor([[[0.8, 0.2], [0.1, 0.9]]]).log()
    found = scores(log_probs, torch.tensor([[0, IGNORED]]))
    assert found["nll"] == pytest.approx(-torch.tensor(0.8).log().item())
    assert found["accuracy"] == 1


def test_a_tiny_study_end_to_end(tmp_path, monkeypatch):
    def encoded(texts, name, store):
        labels = torch.tensor([[word.tag for word in text] for text in texts])
        vectors = torch.eye(WIDTH)[labels] + 0.3 * normal(*labels.shape, WIDTH).float()
        return Labelled(vectors, labels)

    monkeypatch.setattr(heads, "load_mnist", lambda part: digits())
    words = [Word("a", tag) for tag in range(len(TAGS))]
    monkeypatch.setattr(heads, "sentences", lambda genre: [words[i % 10 :][:8] for i in range(200)])
    monkeypatch.setattr(heads, "encoded", encoded)
    assert run(TINY, tmp_path, store_in(tmp_path, TINY), "the command").exists()
    text = (tmp_path / "results.md").read_text()
    assert all(f"{data}: ECE / NLL" in text for data in SUBJECTS)
    lines = (tmp_path / "metrics.csv").read_text().splitlines()
    shifts = {line.split(",")[2] for line in lines[1:]}
    assert shifts == {NO_SHIFT, "90°", *heads.UNSEEN}
    assert len(lines) == 1 + 6 * (2 + 4)
