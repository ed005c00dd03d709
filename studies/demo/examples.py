"""Some test digits at several angles, with every method's prediction."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import NamedTuple

from torch import Tensor

from studies.data import Labelled
from studies.data.digits import rotate


class View(NamedTuple):
    """One image at one angle, with every method's prediction and its confidence."""

    angle: int
    pixels: tuple[tuple[float, ...], ...]
    predictions: Mapping[str, tuple[int, float]]


class Example(NamedTuple):
    """One test image at several angles."""

    label: int
    views: tuple[View, ...]


def first_different(
    log_probs: Mapping[str, Mapping[int, Tensor]],
    test: Labelled,
    angles: Iterable[int],
    count: int = 3,
) -> tuple[Example, ...]:
    """Return the first test images of different digits, so that none is picked by hand.

    Args:
        log_probs: of all test images (N, K), by method and angle.
        test: the images, upright.
        angles: to show.
        count: of examples.
    """
    first = {int(label): index for index, label in reversed(list(enumerate(test.labels)))}

    def view(index: int, angle: int) -> View:
        pixels = rotate(test.inputs[index, 0], angle).tolist()
        rows = {method: by_angle[angle][index].exp() for method, by_angle in log_probs.items()}
        top = {method: (int(row.argmax()), row.max().item()) for method, row in rows.items()}
        return View(angle, tuple(map(tuple, pixels)), top)

    return tuple(
        Example(int(test.labels[index]), tuple(view(index, angle) for angle in angles))
        for index in islice(sorted(first.values()), count)
    )
