"""A contact sheet of every corruption at every severity."""

from __future__ import annotations

import os
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from studies.corruptions.base import SEVERITIES, Bytes
from studies.corruptions.catalogue import CORRUPTIONS
from studies.data import cifar10
from studies.files import write_file

SHOWN = (1, 6)  # the test images on the sheet: a ship and a car
SCALE = 2  # every pixel becomes 2 × 2
MARGIN, GAP, TOP = 150, 4, 22  # pixels left for names, between images, for severities


def write_sheet(path: str | os.PathLike[str]) -> None:
    """Write a PNG file with two images of the test set under all corruptions."""
    images = cifar10.load("test").inputs[list(SHOWN)].movedim(1, -1).numpy()
    file = BytesIO()
    contact_sheet(images, SHOWN, tuple(CORRUPTIONS)).save(file, "PNG", optimize=True)
    write_file(Path(path), file.getvalue())


def contact_sheet(images: Bytes, numbers: Sequence[int], names: Sequence[str]) -> Image.Image:
    """Show images (N, 32, 32, 3), a row for each named corruption.

    Beside each other are the first image at severities 0 to 5, then the second, and so on.
    """
    columns = [(i, severity) for i in range(len(images)) for severity in (0, *SEVERITIES)]
    cell = SCALE * images.shape[1] + GAP
    sheet = Image.new("RGB", (MARGIN + cell * len(columns), TOP + cell * len(names)), "white")
    _write(sheet, (GAP, TOP // 2), "severity", "lm")
    for column, (i, severity) in enumerate(columns):
        left = MARGIN + cell * column
        _write(sheet, (left + cell // 2, TOP // 2), str(severity), "mm")
        for row, name in enumerate(names):
            one = CORRUPTIONS[name](images[i : i + 1], severity, numbers[i : i + 1])
            sheet.paste(_enlarged(one[0]), (left, TOP + cell * row))
    for row, name in enumerate(names):
        _write(sheet, (GAP, TOP + cell * row + cell // 2), name.replace("_", " "), "lm")
    return sheet


def _write(sheet: Image.Image, where: tuple[int, int], text: str, anchor: str) -> None:
    font = ImageFont.load_default(14)
    ImageDraw.Draw(sheet).text(where, text, "black", font, anchor=anchor)


def _enlarged(image: Bytes) -> Image.Image:
    return Image.fromarray(np.repeat(np.repeat(image, SCALE, axis=0), SCALE, axis=1))
