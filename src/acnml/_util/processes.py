"""Sums over several processes, each of which has its own part of the data."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor, distributed


@final
class Group:
    """The processes that fit together: this one alone, or all that `torchrun` has started.

    A fit adds up its sums with it, and does not know whether it is alone.
    """

    def __init__(self, is_distributed: bool) -> None:
        self._is_alone = not is_distributed
        if self._is_alone:
            return
        if not (distributed.is_available() and distributed.is_initialized()):
            raise RuntimeError(
                "distributed=True needs a process group: start the script with torchrun, and call "
                "torch.distributed.init_process_group() first"
            )
        # NCCL exchanges tensors of the process's own GPU only.
        on_gpu = distributed.get_backend() == "nccl"
        self._device = torch.device("cuda" if on_gpu else "cpu")

    def summed(self, tensor: Tensor) -> Tensor:
        """Return the sum of a tensor over the processes."""
        if self._is_alone:
            return tensor
        own = tensor.to(self._device, copy=True).contiguous()
        distributed.all_reduce(own)
        return own.to(tensor.device)

    def share(self, tensor: Tensor) -> Tensor:
        """Return the tensor of the first process; all must have the same shape and type."""
        if self._is_alone:
            return tensor
        own = tensor.to(self._device, copy=True).contiguous()
        distributed.broadcast(own, src=0)
        return own.to(tensor.device)

    def agree(self, values: Tensor) -> bool:
        """Whether all processes have the same values; the shapes may differ."""
        shape = torch.tensor([values.ndim, *values.shape], device="cpu")
        # One after the other: only tensors of the same shape can be shared.
        for own in (shape[:1], shape, values):
            differs = not torch.equal(own, self.share(own))
            if int(self.summed(torch.tensor(differs, dtype=torch.int64, device="cpu"))):
                return False
        return True
