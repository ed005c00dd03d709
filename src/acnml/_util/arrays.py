"""NumPy arrays as tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor


def as_tensor(value: Any, what: str) -> Any:
    """Turn an array into a tensor; whatever is no array is returned as it is."""
    if not isinstance(value, np.ndarray):
        return value
    # torch takes neither views with negative strides nor foreign byte orders, and warns of arrays
    # that cannot be written to.
    own = np.require(value, value.dtype.newbyteorder("="), ["C_CONTIGUOUS", "WRITEABLE"])
    try:
        return torch.from_numpy(own)
    except TypeError as error:
        raise TypeError(
            f"{what} is an array of {value.dtype}, which torch has no type for; convert it first, "
            "e.g. x.astype('float32') or labels.astype('int64')"
        ) from error


def as_values(values: Any) -> Tensor:
    """Return a tensor as it is, and an array or a list as a tensor on the CPU."""
    found = as_tensor(values, "an array")
    # `torch.as_tensor` would move a tensor to the default device.
    return found if isinstance(found, Tensor) else torch.as_tensor(found, device="cpu")
