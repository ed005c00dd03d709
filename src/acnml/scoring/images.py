"""Rows of a folder of images: every file is a row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import final

import numpy as np
import pyarrow as pa
from PIL import Image

from acnml.scoring.columns import ONLY, Array, Column, Read
from acnml.scoring.files import Files
from acnml.scoring.job import Reading, ScoringError
from acnml.scoring.models import load_function
from acnml.scoring.sources import Block, Part, Source, Span

# Modes of Pillow with more than 8 bits per channel. Its conversions to "L" and "RGB" clip them.
WIDE = {"I": "32-bit", "F": "floating point"}  # and I;16, I;16B, ...


@final
class ImageSource(Source):
    """All files below a folder, in the order of their names; those that are no images are rejected.

    The content decides, not the suffix.
    """

    def __init__(self, files: Files, reading: Reading) -> None:
        if reading.columns or reading.carry or reading.stack:
            raise ScoringError("images have no columns: leave out --columns, --stack and --carry")
        self.files, self.lengths, self._reading = files, [len(files.paths)], reading
        named = reading.transform
        self._transform = None if named is None else load_function(named, "--transform")
        self.carried = pa.schema([])
        shape = reading.shape or self._first_shape()
        self._column = Column("image", shape, shape, as_float=True)

    def _files_of(self, part: Part) -> Sequence[int]:
        return range(part.start, part.stop)

    def _read(self, file: int, spans: Sequence[Span]) -> Iterator[Block]:
        return (self._block(range(start, stop)) for _, start, stop in spans)

    def _block(self, rows: range) -> Block:
        arrays, reasons, shape = list[Array](), dict[int, str](), self._column.shape
        for index, row in enumerate(rows):
            found = self._decoded(row)
            if isinstance(found, str):
                reasons[index] = found
            elif found.shape != shape:
                reasons[index] = f"the image has shape {found.shape}, not {shape}"
            else:
                arrays.append(found)
        values = np.stack(arrays) if arrays else np.zeros((0, *shape), np.float32)
        values, reasons = self._column.checked(values, reasons)
        keys = pa.table({"file": [self.files.name(row) for row in rows], "row": np.array(rows)})
        kept = np.setdiff1d(np.arange(len(rows)), [*reasons])
        return Block(keys, Read({ONLY: values}, kept, reasons))

    def _decoded(self, index: int) -> Array | str:
        """Return an image as an array, or say why it cannot be decoded."""
        try:
            with Image.open(self.files.paths[index]) as file:
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

    def _first_shape(self) -> tuple[int, ...]:
        """Return the shape of inputs: that of the first image that can be decoded."""
        for index in range(len(self.files.paths)):
            found = self._decoded(index)
            if not isinstance(found, str):
                return found.shape
        raise ScoringError(
            f"{self.files.root} has no .parquet, .npy and .npz files, and none of its "
            f"{len(self.files.paths):,} files can be decoded as an image; {self.files.name(0)}: "
            f"{self._decoded(0)}"
        )
