"""The digits that studies learn: MNIST where it is to be had, else those of scikit-learn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from acnml.experiments.data import mnist
from acnml.experiments.data.catalogue import MNIST
from acnml.experiments.data.digits import SIDE, SIZE, all_digits
from acnml.experiments.data.folder import data_folder, locate, remedy
from acnml.experiments.data.labelled import Labelled, split

TEST_DIGITS = 400  # of scikit-learn's


@final
@dataclass(frozen=True, eq=False)
class HandwrittenDigits:
    """Digits to train on and to test with, their name, and a sentence that says what they are."""

    name: str
    note: str
    train: Labelled
    test: Labelled


def handwritten_digits() -> HandwrittenDigits:
    """Return MNIST, or scikit-learn's 8x8 digits where the data folder has nothing of MNIST.

    Whoever has some of MNIST means to use it: if files of it are missing or corrupt, that is an
    error. The network is never asked.
    """
    if not any(locate(file) for file in MNIST.files):
        return _scikit_learn()
    train, test = mnist.load("train"), mnist.load("test")
    note = f"MNIST: {len(train.labels):,} digits to train on, {len(test.labels):,} to test."
    return HandwrittenDigits("MNIST", note, train, test)


def _scikit_learn() -> HandwrittenDigits:
    train, test = split(all_digits(), (SIZE - TEST_DIGITS, TEST_DIGITS), seed=0)
    note = (
        f"There is no MNIST in the folder {data_folder()}, {remedy(MNIST)}: "
        f"taking scikit-learn's {SIDE}x{SIDE} digits, {len(train.labels):,} to train on and "
        f"{len(test.labels):,} to test, a smaller and easier problem."
    )
    return HandwrittenDigits("scikit-learn digits", note, train, test)
