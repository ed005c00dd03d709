"""Sums over several processes, each of which has its own part of the data.

The processes are those of the default group of `torch.distributed`, as `torchrun` starts them. A
fit asks for a `Group`, adds up its sums with it, and does not know whether it is alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import final

import torch
from torch import Tensor, distributed


class Group(ABC):
    """The processes that fit together."""

    rank: int

    @abstractmethod
    def add_up(self, tensors: Iterable[Tensor]) -> None:
        """Replace every tensor by its sum over the processes, in place."""

    @abstractmethod
    def share(self, tensor: Tensor) -> Tensor:
        """Return the tensor of the first process; all must have the same shape and type."""

    @final
    def total(self, count: int) -> int:
        """Return the sum of a count over the processes."""
        tensor = torch.tensor(count, dtype=torch.int64, device="cpu")
        self.add_up([tensor])
        return int(tensor)

    @final
    def agree(self, values: Tensor) -> bool:
        """Whether all processes have the same values; the shapes may differ."""
        count = torch.tensor(values.shape, dtype=torch.int64, device="cpu")
        dimensions = torch.tensor(values.ndim, dtype=torch.int64, device="cpu")
        for own in (dimensions, count, values):
            differs = self.total(int(not torch.equal(own, self.share(own))))
            if differs:
                return False
        return True


@final
class _Alone(Group):
    """A process that fits by itself."""

    rank = 0

    def add_up(self, tensors: Iterable[Tensor]) -> None:
        pass

    def share(self, tensor: Tensor) -> Tensor:
        return tensor


@final
class _Distributed(Group):
    """All processes of the default group of `torch.distributed`."""

    def __init__(self) -> None:
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
        for tensor in tensors:
            own = tensor.to(self._device).contiguous()
            distributed.all_reduce(own)
            tensor.copy_(own)

    def share(self, tensor: Tensor) -> Tensor:
        own = tensor.to(self._device, copy=True).contiguous()
        distributed.broadcast(own, src=0)
        return own.to(tensor.device)


def group(is_distributed: bool) -> Group:
    """Return the processes of `torch.distributed`, or this process alone."""
    return _Distributed() if is_distributed else _Alone()
