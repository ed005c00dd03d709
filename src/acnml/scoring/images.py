"""Rows of a folder of images: every file is a row."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, final

import numpy as np
import pyarrow as pa
from PIL import Image

from acnml.scoring.columns import ONLY, Array, Column, checked
from acnml.scoring.job import Reading
from acnml.scoring.models import ScoringError, load_function
from acnml.scoring.sources import Block, Source, identity_of

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm")

# Modes of Pillow with more than 8 bits per channel. Its conversions to "L" and "RGB" clip them.
WIDE = {"I": "32-bit", "F": "floating point"}  # and I;16, I;16B, ...


@final
class ImageSource(Source):
    """All images below a folder, in the order of their names."""

    def __init__(self, root: Path, files: list[Path], reading: Reading) -> None:
        if reading.columns or reading.carry or reading.stack:
            raise ScoringError("images have no columns: leave out --columns, --stack and --carry")
        self._root, self._files = root, files
        self._reading = reading
        self._transform: Callable[[Any], Any] | None = None
        if reading.transform is not None:
            self._transform = load_function(reading.transform, "--transform")
        self.lengths = (len(files),)
        self.carried = pa.schema([])
        self._column = self._first_column()

    def identity(self) -> list[tuple[str, int, int]]:
        """Return name, size and time of change of every file."""
        return identity_of(self._root, self._files)

    def stretch(self, file: int, row: int) -> int:
        """Return the row itself: reading can begin with any image."""
        return row

    def blocks(self, file: int, start: int, stop: int, size: int) -> Iterator[Block]:
        """Yield images `start` to `stop`."""
        for first in range(start, stop, size):
            paths = self._files[first : min(first + size, stop)]
            arrays, kept, reasons = list[Array](), list[int](), dict[int, str]()
            for index, path in enumerate(paths):
                found = self._decoded(path)
                if isinstance(found, str):
                    reasons[index] = found
                elif found.shape != self._column.shape:
                    reasons[index] = f"the image has shape {found.shape}, not {self._column.shape}"
                else:
                    arrays.append(found)
                    kept.append(index)
            empty = np.zeros((0, *self._column.shape), np.float32)
            values = np.stack(arrays) if arrays else empty
            read = checked(self._column, values, np.array(kept, dtype=np.int64), reasons)
            names = pa.array([path.relative_to(self._root).as_posix() for path in paths])
            rows = np.arange(first, first + len(paths))
            inputs = {ONLY: read.values}
            yield Block(names, rows, pa.table({}), inputs, read.kept, read.reasons)

    def close(self) -> None:
        """Do nothing: images are closed as soon as they are decoded."""

    def _decoded(self, path: Path) -> Array | str:
        """Return an image as an array, or say why it cannot be decoded."""
        try:
            with Image.open(path) as file:
                depth = "16-bit" if file.mode.startswith("I;16") else WIDE.get(file.mode)
                if depth is not None and self._transform is None:
                    return f"{depth} image: pass --transform with a function that scales it"
                image = file.copy() if depth else file.convert(self._reading.image_mode)
        except Exception as error:  # decoders raise many kinds of errors for damaged files
            return f"the image cannot be decoded: {type(error).__name__}"
        if self._reading.image_size is not None:
            height, width = self._reading.image_size
            image = image.resize((width, height), Image.Resampling.BILINEAR)
        if self._transform is not None:
            return np.asarray(self._transform(image))
        pixels = np.asarray(image, dtype=np.float32) / 255
        return pixels[None] if pixels.ndim == 2 else np.moveaxis(pixels, -1, 0)

    def _first_column(self) -> Column:
        """Return the shape of inputs: that of the first image that can be decoded."""
        if self._reading.shape is not None:
            return Column("image", self._reading.shape, self._reading.shape, True)
        reasons = list[str]()
        for path in self._files:
            found = self._decoded(path)
            if not isinstance(found, str):
                return Column("image", found.shape, found.shape, True)
            reasons.append(f"{path.name}: {found}")
        raise ScoringError(
            f"none of the {len(reasons):,} images in {self._root} can be decoded; {reasons[0]}"
        )
