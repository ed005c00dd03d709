"""What is made again: exactly what a change or a damage concerns."""

from __future__ import annotations

from itertools import count

import pytest
import torch

from studies.settings import override
from studies.store import Content, Stage
from studies.store.record import read_header
from tiny_study import Run, TinyStudy

from .parts import ALL, DAMAGES, made


@pytest.mark.parametrize(
    ("assignment", "again"),
    [
        ("seed=1", ALL),
        ("training.epochs=3", ALL),
        ("training.learning_rate=0.2", ALL),
        ("prior_std=0.25", {"fit", "bma"}),
        ("samples=4", {"bma"}),
        ("temperature=3", {"map"}),
        ("inputs=6", {"bma", "map"}),
        ("block=3", set()),
        ("temperature=2.0", set()),
    ],
)
def test_a_changed_setting_makes_again_exactly_what_depends_on_it(tmp_path, assignment, again):
    assert made(tmp_path, TinyStudy()) == ALL
    assert made(tmp_path, override(TinyStudy(), [assignment])) == again
    assert made(tmp_path, TinyStudy()) == set()  # going back costs nothing


@pytest.mark.parametrize("name", sorted(ALL))
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_artefact_is_made_again_and_nothing_else(tmp_path, name, damage):
    before = Run(tmp_path)()
    DAMAGES[damage](before[name].path)
    # What comes out is the same, so that what was made from it stays right.
    assert made(tmp_path, TinyStudy()) == {name}
    after = read_header(before[name].path)
    assert after["content_hash"] == before[name].header["content_hash"]


def test_what_was_made_from_something_else_is_made_again(store):
    numbers_of_run, train = count(), Stage("train")
    fit = Stage("fit", needs=(train,))

    def random_numbers(_) -> Content:
        return Content({"a": torch.tensor([next(numbers_of_run)])})

    first = store.make(train, random_numbers)
    second = store.make(fit, lambda _: Content(first.load()))
    assert store.find(fit) == second
    first.path.write_bytes(b"")
    assert store.find(fit) is None
    first = store.make(train, random_numbers)
    assert store.find(fit) is None
    assert torch.equal(store.make(fit, lambda _: Content(first.load())).load()["a"], torch.ones(1))


def test_parts_of_another_origin_are_not_used(store, tmp_path):
    """A half finished prediction, and then another network to predict with."""
    train = Stage("train")
    predict = Stage("predict", needs=(train,))
    for value in (1.0, 2.0):
        network = store.make(train, lambda _, value=value: Content({"a": torch.tensor(value)}))
        if value == 1:
            with pytest.raises(ZeroDivisionError):
                store.predict(
                    predict, 2, 1, lambda rows: {"p": torch.full((1,), 1 / (1 - rows.start))}
                )
            network.path.unlink()
    result = store.predict(predict, 2, 1, lambda rows: {"p": network.load()["a"].expand(1)})
    assert torch.equal(result.load()["p"], torch.tensor([2.0, 2.0]))
