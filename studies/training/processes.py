"""The processes that train one network together: mostly one, or those that `torchrun` starts.

Every process sees the same batches and learns from its own share of each, so that the settings and
not the number of processes decide what is learnt. Only batch norm differs: each process normalises
its share by itself, and the running statistics are those of the first process.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import final

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

# Others wait while the first process alone writes checkpoints and renews batch-norm statistics.
PATIENCE = timedelta(hours=1)
CPU = torch.device("cpu")


@final
@dataclass(frozen=True)
class Processes:
    """One of some processes.

    Attributes:
        rank: the number of this one; the first, 0, leads: it alone touches the disk.
        count: how many there are.
        device: where this one computes.
    """

    rank: int = 0
    count: int = 1
    device: torch.device = CPU

    @property
    def leads(self) -> bool:
        """Whether this process is the first."""
        return self.rank == 0

    @property
    def share(self) -> slice:
        """The rows of a batch that are this process's."""
        return slice(self.rank, None, self.count)

    def wrapped(self, network: nn.Module) -> nn.Module:
        """Return a network whose gradients are means over processes; all get the first's weights.

        The network itself stays the one that is trained.
        """
        if self.count == 1:
            return network
        devices = [self.device] if self.device.type == "cuda" else None
        return DistributedDataParallel(network, device_ids=devices)

    def as_leader(self, tensor: Tensor) -> Tensor:
        """Overwrite the tensor by the first process's, and return it."""
        if self.count > 1:
            distributed.broadcast(tensor, src=0)
        return tensor

    def summed(self, tensor: Tensor) -> Tensor:
        """Overwrite the tensor by its sum over processes, and return it."""
        if self.count > 1:
            distributed.all_reduce(tensor)
        return tensor

    def require_enough(self, data: int, batch_size: int) -> None:
        """Refuse batches in which a process would have no image."""
        smallest = min(data, data % batch_size or batch_size)
        if smallest < self.count:
            raise ValueError(
                f"{data} images in batches of {batch_size} have a batch of {smallest}, too small "
                f"for {self.count} processes: take another batch_size, or fewer processes"
            )


@contextmanager
def joined() -> Iterator[Processes]:
    """Join the processes that `torchrun` has started, or be the only one where it has not."""
    count = int(os.environ.get("WORLD_SIZE", "1"))
    device = _device(int(os.environ.get("LOCAL_RANK", "0")))
    if count == 1:
        yield Processes(device=device)
        return
    if not distributed.is_available():
        raise RuntimeError("this PyTorch has no torch.distributed: train in one process")
    backend = "nccl" if device.type == "cuda" else "gloo"
    distributed.init_process_group(backend, timeout=PATIENCE)
    try:
        yield Processes(distributed.get_rank(), count, device)
    finally:
        distributed.destroy_process_group()


def _device(local_rank: int) -> torch.device:
    """Return the GPU of a process on its machine, where there are GPUs."""
    if not torch.cuda.is_available():
        return CPU
    if local_rank >= (there := torch.cuda.device_count()):
        raise RuntimeError(f"every process needs a GPU of its own, here are {there}: start fewer")
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device
