"""One and two threads of torch on a busy machine: `python -m benchmarks.busy`.

Small operations that share threads wait for each other as soon as another program takes a core.
Every case runs in a process of its own, beside one process per core that does nothing but count.
Wall and CPU seconds are printed, and kept if all cases are measured. Other programs change the wall
time; the ratio between the numbers of threads is what counts.

- solve: 1,024 inputs of an MLP 64-256-256-20, a posterior of its last layer.
- fit: `fit_laplace` over all layers of this MLP, 1,024 inputs.
- SWAG: two epochs of `fit_swag` on 4,096 inputs in batches of 64.
- all layers: `Acnml` over all layers, 256 inputs.
- calibrate: an MLP 784-300-300-10, 5,000 training and 1,000 validation inputs.
- score: `acnml predict` on 200,000 rows of 64 numbers, by the MLP of `solve`, calibrated.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import acnml
from acnml import Classifier
from acnml.scoring import Job, score
from benchmarks.recording import MEASUREMENTS, record

ROWS = 200_000
Row = dict[str, Any]


def mlp(*widths: int) -> nn.Module:
    """Return an untrained network with ReLU between its layers."""
    torch.manual_seed(0)
    layers = [part for a, b in pairwise(widths) for part in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def small_network() -> nn.Module:
    """Return the network of `solve` and `score`, which a job of scoring finds by this name."""
    return mlp(64, 256, 256, 20)


def data(model: nn.Module, inputs: int, features: int) -> tuple[Tensor, Tensor]:
    """Return random inputs, with labels that the network would draw if it were sharper."""
    x = torch.randn(inputs, features)
    return x, torch.distributions.Categorical(logits=10 * model(x).detach()).sample()


def solve() -> Callable[[], object]:
    """Return what is timed, after everything that is not."""
    model = small_network()
    x, y = data(model, 1024, 64)
    posterior = acnml.fit_laplace(Classifier(model), [(x, y)], layers="last", progress=False)
    predict = acnml.Acnml(Classifier(model), posterior)
    predict.solve(x[:8])
    return lambda: predict.solve(x)


def fit() -> Callable[[], object]:
    """Return a fit over all layers."""
    model = small_network()
    x, _ = data(model, 1024, 64)
    return lambda: acnml.fit_laplace(model, x, progress=False)


def swag() -> Callable[[], object]:
    """Return a fit by stochastic gradients."""
    model = small_network()
    x, y = data(model, 4096, 64)
    loader = list(zip(x.split(64), y.split(64), strict=True))
    return lambda: acnml.fit_swag(model, loader, epochs=2, learning_rate=0.1, progress=False)


def all_layers() -> Callable[[], object]:
    """Return a prediction over all layers."""
    model = small_network()
    x, _ = data(model, 1024, 64)
    predict = acnml.Acnml(Classifier(model), acnml.fit_laplace(model, x, progress=False), alpha=0.1)
    predict(x[:8])
    return lambda: predict(x[:256])


def calibrate() -> Callable[[], object]:
    """Return the calibration of a network for MNIST."""
    model = mlp(784, 300, 300, 10)
    (x, y), validation = data(model, 5000, 784), data(model, 1000, 784)
    return lambda: acnml.calibrate(model, (x, y), validation, progress=False)


def scoring() -> Callable[[], object]:
    """Return the scoring of a file."""
    folder, model = Path(tempfile.mkdtemp()), small_network()
    found = acnml.calibrate(model, data(model, 5000, 64), data(model, 1000, 64), progress=False)
    acnml.save(found, folder / "predictor")
    np.save(folder / "x.npy", torch.randn(ROWS, 64).numpy())
    predictor, x, out = (str(folder / name) for name in ("predictor", "x.npy", "out"))
    job = Job(f"{__name__}:small_network", predictor, x, out, threads=torch.get_num_threads())
    return lambda: score(job)


CASES = {
    "solve": solve,
    "fit": fit,
    "SWAG": swag,
    "all layers": all_layers,
    "calibrate": calibrate,
    "score": scoring,
}


def measure(case: str, threads: int) -> Row:
    """Return the seconds of a case, in this process."""
    torch.set_num_threads(threads)
    warnings.simplefilter("ignore")  # about few validation data
    run = CASES[case]()
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    print(f"{case:10} {threads} threads  {wall:7.2f} s  CPU {cpu:7.2f} s", flush=True)
    return {"case": case, "threads": threads, "wall": wall, "cpu": cpu}


def count() -> None:
    """Keep a core busy."""
    number = 0
    while True:
        number += 1


def main() -> None:
    """Measure the cases named on the command line, or all."""
    spawn = multiprocessing.get_context("spawn")
    others = [spawn.Process(target=count, daemon=True) for _ in range(os.cpu_count() or 1)]
    for other in others:
        other.start()
    rows = []
    for case in sys.argv[1:] or CASES:
        for threads in (1, 2):
            with ProcessPoolExecutor(1, spawn) as alone:
                rows.append(alone.submit(measure, case, threads).result())
    for other in others:
        other.terminate()
    if not sys.argv[1:]:
        record(MEASUREMENTS / "busy.csv", rows)


if __name__ == "__main__":
    main()
