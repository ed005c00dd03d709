"""Sums over several processes, each of which has its own part of the data."""

from __future__ import annotations

from collections.abc import Iterable
from typing import final

import torch
from torch import Tensor, distributed


@final
class Group:
    """The processes that fit together: this one alone, or all that `torchrun` has started.

    A fit adds up its sums with it, and does not know whether it is alone.
    """

    def __init__(self, is_distributed: bool) -> None:
        self._is_alone, self.rank = not is_distributed, 0
        if self._is_alone:
            return
        if not (distributed.is_available() and distributed.is_initialized()):
            raise RuntimeError(
                "distributed=True needs a process group: start the script with torchrun, and call "
                "torch.distributed.init_process_group() first"
            )
        self.rank = distributed.get_rank()
        # NCCL exchanges tensors of the process's own GPU only.
        on_gpu = distributed.get_backend() == "nccl"
        self._device = torch.device("cuda" if on_gpu else "cpu")

    def add_up(self, tensors: Iterable[Tensor]) -> None:
        """Replace every tensor by its sum over the processes, in place."""
        if self._is_alone:
            return
        for tensor in tensors:
            own = tensor.to(self._device).contiguous()
            distributed.all_reduce(own)
            tensor.copy_(own)

    def share(self, tensor: Tensor) -> Tensor:
        """Return the tensor of the first process; all must have the same shape and type."""
        if self._is_alone:
            return tensor
        own = tensor.to(self._device, copy=True).contiguous()
        distributed.broadcast(own, src=0)
        return own.to(tensor.device)

    def total(self, count: int) -> int:
        """Return the sum of a count over the processes."""
        tensor = torch.tensor(count, dtype=torch.int64, device="cpu")
        self.add_up([tensor])
        return int(tensor)

    def agree(self, values: Tensor) -> bool:
        """Whether all processes have the same values; the shapes may differ."""
        count = torch.tensor(values.shape, dtype=torch.int64, device="cpu")
        dimensions = torch.tensor(values.ndim, dtype=torch.int64, device="cpu")
        same = (torch.equal(own, self.share(own)) for own in (dimensions, count, values))
        # One after the other: only tensors of the same shape can be shared.
        return all(self.total(int(not is_same)) == 0 for is_same in same)
