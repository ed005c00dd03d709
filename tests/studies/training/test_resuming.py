"""Averaging that is broken off anywhere and taken up, and what its artefact holds."""

from __future__ import annotations

import pytest
import torch

from studies.training import Nobody, Processes, load_trained, train

from .runs import BreakError, Fuse, assert_same_artefacts, make_in, raise_break
from .tiny import SEED, TRAINING, augment, task_of


def test_broken_off_anywhere_and_taken_up(tmp_path):
    """Every third call: first, middle and last batches of epochs, and the renewal of statistics."""
    whole, name = tmp_path / "whole", "vgg_dropout"
    count = Fuse(0, raise_break)
    make_in(whole, name, count, Processes())
    calls = -count.left
    assert calls >= 4 * TRAINING.epochs + 4  # all batches, and those for the statistics
    for step in range(1, calls + 1, 3):
        out = tmp_path / f"{step}"
        with pytest.raises(BreakError):
            make_in(out, name, Fuse(step, raise_break), Processes())
        again = Fuse(0, raise_break)
        make_in(out, name, again, Processes())
        assert_same_artefacts(out, whole)
        assert step - again.left <= calls + 4 + 2  # one epoch at most was done twice


def test_an_artefact_holds_all_of_the_result(tmp_path):
    made = train(task_of("vgg"), TRAINING, SEED, Processes(), Nobody())
    artefact = make_in(tmp_path, "vgg", augment, Processes())
    read = load_trained(artefact)
    exactly = {"rtol": 0, "atol": 0}
    torch.testing.assert_close(read.last, made.last, **exactly)
    torch.testing.assert_close(read.average, made.average, **exactly)
    torch.testing.assert_close(read.swag.diagonal().var, made.swag.diagonal().var, **exactly)
    ours, theirs = read.swag.low_rank().directions, made.swag.low_rank().directions
    torch.testing.assert_close(ours, theirs, **exactly)
    assert read.facts == made.facts
    assert read.swag.updates == TRAINING.collected
