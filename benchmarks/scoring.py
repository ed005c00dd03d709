"""Measure scoring and fitting at scale: against a plain loop, with Ray, and in two processes.

python -m benchmarks.scoring                     all measurements on 100,000 rows
python -m benchmarks.scoring --only local,fit    some of: local, ray, fit, long
python -m benchmarks.scoring --only long --rows 1000000
                                                 one long run, and a loop over a tenth of its rows
python -m benchmarks.scoring --rounds 3          repetitions, of which the fastest counts

Rows have the size of MNIST images (784 numbers in single precision, in one Parquet file), the
network is an MLP 784-256-10, and the predictor is ACNML on its last layer with typicality, from
`calibrate`. Every measurement runs in a process of its own, in turn with what it is compared to.
It reports wall time, CPU time and peak memory of the computation, without the start of Python. On a
machine that others use as well, CPU time is the fairer comparison. Results go to
benchmarks/scoring.json.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import safetensors.torch
import torch
from torch import Tensor, nn

import acnml
from acnml._util.seeding import seeded
from acnml.cli._shared.files import write_file
from acnml.scoring import Job, score

PIXELS, HIDDEN, CLASSES = 784, 256, 10
PIECE = 16_384  # rows that are made or held in memory at once
BATCH = 1024
RESULTS = Path(__file__).parent / "scoring.json"
Numbers = dict[str, float]


def build() -> nn.Module:
    """Return the network."""
    layers = nn.Linear(PIXELS, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES)
    return nn.Sequential(nn.Flatten(), *layers)


def images(count: int, seed: int) -> Tensor:
    """Return random sparse images: prototypes of ten classes with noise."""
    generator = torch.Generator().manual_seed(seed)
    prototypes = torch.rand(CLASSES, PIXELS, generator=torch.Generator().manual_seed(0)) ** 3
    noise = 0.6 * torch.rand(count, PIXELS, generator=generator)
    chosen = torch.randint(CLASSES, (count,), generator=generator)
    return (prototypes[chosen] + noise).clamp(0, 1)


def prepare(folder: Path, rows: int) -> dict[str, str]:
    """Train and calibrate the network, and write the rows; return the settings of a job."""
    with seeded(0):
        model = build()
    x = images(6000, seed=1)
    prototypes = torch.rand(CLASSES, PIXELS, generator=torch.Generator().manual_seed(0)) ** 3
    labels = (x @ prototypes.T - prototypes.square().sum(1) / 2).argmax(1)
    wrong = torch.rand(len(x), generator=torch.Generator().manual_seed(4)) < 0.1
    labels = torch.where(wrong, (labels + 1) % CLASSES, labels)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for some in torch.arange(4000).split(200):
        loss = nn.functional.cross_entropy(model(x[some]), labels[some])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = acnml.calibrate(
            model, (x[:4000], labels[:4000]), (x[4000:], labels[4000:]), progress=False
        )
    safetensors.torch.save_model(model, str(folder / "weights.safetensors"))
    acnml.save(found, folder / "predictor.safetensors")
    _write_rows(folder / "rows.parquet", rows)
    return {
        "model": "benchmarks.scoring:build",
        "weights": str(folder / "weights.safetensors"),
        "predictor": str(folder / "predictor.safetensors"),
        "input": str(folder / "rows.parquet"),
    }


def _write_rows(path: Path, rows: int) -> None:
    schema = pa.schema([("id", pa.int64()), ("x", pa.list_(pa.float32(), PIXELS))])
    piece = images(PIECE, seed=2).numpy()
    with pq.ParquetWriter(path, schema, compression="none", use_dictionary=False) as writer:
        for start in range(0, rows, PIECE):
            some = np.roll(piece[: min(PIECE, rows - start)], start // PIECE, axis=1)
            flat = pa.FixedSizeListArray.from_arrays(pa.array(some.reshape(-1)), PIXELS)
            ids = pa.array(np.arange(start, start + len(some)))
            writer.write_table(pa.table([ids, flat], schema=schema))


# What runs in processes of its own ---------------------------------------------------------------


def run_loop(settings: dict[str, Any]) -> Numbers:
    """Score as many rows as the job has in a plain loop, over a piece of them in memory."""
    model = build()
    safetensors.torch.load_model(model, settings["weights"])
    predictor = acnml.load(settings["predictor"], acnml.Classifier(model))
    assert isinstance(predictor, acnml.Calibrated)
    piece = images(min(PIECE, settings["rows"]), seed=2)

    def run() -> None:
        done = 0
        while done < settings["rows"]:
            for batch in piece[: settings["rows"] - done].split(BATCH):
                solution = predictor.solve(batch)
                largest, _ = solution.log_probs.max(-1)
                _ = largest.exp(), solution.regret
            done += len(piece)

    return measured(run)


def run_local(settings: dict[str, Any]) -> Numbers:
    """Score a job in this process."""
    names = ("model", "weights", "predictor", "input", "output")
    return measured(lambda: score(Job(**{name: settings[name] for name in names})))


def run_ray(settings: dict[str, Any]) -> Numbers:
    """Score a job by two actors with a thread each; the start of the cluster is not counted."""
    import ray

    from acnml.ray import Cluster

    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    names = ("model", "weights", "predictor", "input", "output")
    engine = Cluster(actors=2, threads=1)
    return measured(lambda: score(Job(**{name: settings[name] for name in names}), engine))


def run_fit(settings: dict[str, Any]) -> Numbers:
    """Fit a curvature of all layers on a share of the data."""
    model = build()
    safetensors.torch.load_model(model, settings["weights"])
    data = images(settings["rows"], seed=3)[settings["share"] :: settings["shares"]]
    return measured(
        lambda: acnml.kronecker_curvature(acnml.Classifier(model), data, progress=False)
    )


def measured(run: Callable[[], object]) -> Numbers:
    """Return wall time, CPU time and peak memory of a computation."""
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # kilobytes on Linux
    return {
        "wall": time.perf_counter() - wall,
        "cpu": time.process_time() - cpu,
        "peak_mb": peak,
    }


CHILDREN = {"loop": run_loop, "local": run_local, "ray": run_ray, "fit": run_fit}


def start(kind: str, threads: int, settings: dict[str, Any]) -> subprocess.Popen[str]:
    """Start a measurement in a process of its own."""
    env = {**os.environ, "OMP_NUM_THREADS": str(threads), "RAY_USAGE_STATS_ENABLED": "0"}
    env["RAY_worker_niceness"] = "0"  # Ray's own name
    root = str(Path(__file__).parent.parent)
    env["PYTHONPATH"] = os.pathsep.join([root, env.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "benchmarks.scoring", "--child", kind, json.dumps(settings)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)


def finish(process: subprocess.Popen[str]) -> Numbers:
    """Wait for a measurement and return its numbers."""
    output, _ = process.communicate()
    if process.returncode:
        sys.exit(f"a measurement failed with status {process.returncode}")
    numbers: Numbers = json.loads(output.splitlines()[-1])
    return numbers


# Comparisons -------------------------------------------------------------------------------------


def fastest(runs: list[Numbers]) -> Numbers:
    """Return the least time of either kind, and the largest memory."""
    return {
        "wall": min(run["wall"] for run in runs),
        "cpu": min(run["cpu"] for run in runs),
        "peak_mb": max(run["peak_mb"] for run in runs),
    }


def compare(kinds: dict[str, tuple[str, int]], job: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Run all kinds in turn, several times."""
    found: dict[str, list[Numbers]] = {name: [] for name in kinds}
    for index in range(rounds):
        for name, (kind, threads) in kinds.items():
            folder = Path(job["folder"]) / f"{name}-{index}".replace(" ", "-")
            numbers = finish(start(kind, threads, {**job, "output": str(folder)}))
            print(f"{name:<24}", {k: round(v, 1) for k, v in numbers.items()}, flush=True)
            found[name].append(numbers)
    return {name: fastest(runs) for name, runs in found.items()}


def against_loop(job: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Compare the local engine with a plain loop, one thread each."""
    found = compare({"plain loop": ("loop", 1), "acnml predict": ("local", 1)}, job, rounds)
    loop, local = found["plain loop"], found["acnml predict"]
    ratios = {kind: loop[kind] / local[kind] for kind in ("wall", "cpu")}
    return {"rows": job["rows"], **found, "share of the loop's throughput": ratios}


def long_run(job: dict[str, Any]) -> dict[str, Any]:
    """Score all rows once, and a tenth of them in a plain loop before and after."""
    tenth = {**job, "rows": job["rows"] // 10}
    before = finish(start("loop", 1, tenth))
    local = finish(start("local", 1, {**job, "output": str(Path(job["folder"]) / "long")}))
    loop = fastest([before, finish(start("loop", 1, tenth))])
    ratios = {kind: 10 * loop[kind] / local[kind] for kind in ("wall", "cpu")}
    found = {"plain loop, a tenth of the rows": loop, "acnml predict": local}
    return {"rows": job["rows"], **found, "share of the loop's throughput": ratios}


def against_ray(job: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Compare two actors with one process that has two threads."""
    kinds = {"local, two threads": ("local", 2), "two Ray actors": ("ray", 1)}
    found = compare(kinds, job, rounds)
    ratio = found["local, two threads"]["wall"] / found["two Ray actors"]["wall"]
    return {"rows": job["rows"], **found, "share of the local throughput": {"wall": ratio}}


def parallel_fit(job: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Compare the fit of two halves in two processes with a fit of all data in one."""
    one, two = list[Numbers](), list[Numbers]()
    for _ in range(rounds):
        one.append(finish(start("fit", 1, {**job, "share": 0, "shares": 1})))
        both = [start("fit", 1, {**job, "share": share, "shares": 2}) for share in range(2)]
        halves = [finish(process) for process in both]
        two.append({kind: max(half[kind] for half in halves) for kind in halves[0]})
    single, pair = fastest(one), fastest(two)
    speed = {kind: single[kind] / pair[kind] for kind in ("wall", "cpu")}
    return {"rows": job["rows"], "one process": single, "two processes": pair, "speed-up": speed}


def main() -> None:
    """Run the measurements that the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="local,ray,fit")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(CHILDREN[options.child[0]](json.loads(options.child[1]))))
        return
    wanted = options.only.split(",")
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    with tempfile.TemporaryDirectory() as name:
        job = {**prepare(Path(name), options.rows), "rows": options.rows, "folder": name}
        load = os.getloadavg()[0]
        if "local" in wanted:
            results[f"local, {options.rows:,} rows"] = against_loop(job, options.rounds)
        if "long" in wanted:
            results[f"long, {options.rows:,} rows"] = long_run(job)
        if "ray" in wanted:
            results[f"ray, {options.rows:,} rows"] = against_ray(job, options.rounds)
        if "fit" in wanted:
            fit_rows = min(options.rows, 20_000)
            results["fit"] = parallel_fit({**job, "rows": fit_rows}, options.rounds)
        results["load of the machine at the start"] = load
    write_file(RESULTS, (json.dumps(results, indent=1) + "\n").encode())
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
