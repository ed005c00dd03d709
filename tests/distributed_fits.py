"""Fit in the processes that torchrun starts, and compare with a fit of all data by one process.

torchrun --standalone --nproc-per-node 2 distributed_fits.py
"""

from __future__ import annotations

import os
import warnings

import torch
from torch import distributed, nn

import acnml
from cases import normal, small_network


def main() -> None:
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    model = small_network(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    x = normal(1500, 5)
    labels = (model(x).detach() + normal(1500, 3, seed=1)).argmax(-1)
    train, validation = (x[:601], labels[:601]), (x[601:], labels[601:])
    own = slice(0, 128) if rank == 0 else slice(128, 601)  # of unequal size
    part = (train[0][own], train[1][own])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about few validation data
        whole = acnml.calibrate(model, train, validation, price=0.03)
        found = acnml.calibrate(model, part, validation, price=0.03, distributed=True)
    torch.testing.assert_close(found.alpha, whole.alpha, rtol=1e-9, atol=0)
    torch.testing.assert_close(found.probs(x), whole.probs(x), rtol=1e-6, atol=1e-6)
    answers = [torch.zeros_like(found.probs(x)) for _ in range(2)]
    distributed.all_gather(answers, found.probs(x))
    assert torch.equal(*answers)
    for data, message in (
        ((part, (x[601 + rank :], labels[601 + rank :])), "different validation data"),
        ((part, (x[601:], labels[601:].roll(rank))), "different validation data"),
    ):
        try:
            acnml.calibrate(model, *data, price=0.03, distributed=True)
        except ValueError as error:
            assert message in str(error), error  # noqa: PT017
        else:
            raise AssertionError("accepted")
    with torch.no_grad():
        model[2].bias += rank
    try:
        acnml.calibrate(model, part, validation, temperature=1.0, distributed=True)
    except ValueError as error:
        assert "different weights" in str(error), error  # noqa: PT017
    else:
        raise AssertionError("accepted")
    print(f"process {rank} agrees", flush=True)
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
    # Threads of gloo sometimes abort a process while Python shuts down (pytorch/pytorch#65231).
    os._exit(0)
