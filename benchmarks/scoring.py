"""Measure scoring and fitting at scale: against a plain loop, with Ray, and in two processes.

python -m benchmarks.scoring                     all measurements
python -m benchmarks.scoring --only local,fit    some of: local, long, ray, fit
python -m benchmarks.scoring --rows 10000        fewer rows, for a trial; results are not written
python -m benchmarks.scoring --rounds 3          repetitions, of which the fastest counts

- local: `acnml predict` with one thread of torch, and a plain loop over the same rows in memory.
- long: ten times as many rows, once, and a loop over a tenth of them before and after.
- ray: two actors with a thread each, and one process with two threads, on four times as many rows.
- fit: a curvature of all layers in two processes with a thread each, and in one.

Rows have the size of MNIST images (784 numbers in single precision, in one Parquet file). Network,
images and calibrated predictor are those of examples/serving: `acnml.calibrate` of an MLP
784-256-10. All rows are different and from one distribution. Every measurement runs
in a process of its own, in turn with what it is compared to. It reports wall time, CPU time and
peak memory of the computation, without the start of Python and Ray. On a machine that others use as
well, CPU time is the fairer comparison. Results go to benchmarks/scoring.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, final

import pyarrow as pa
import pyarrow.parquet as pq
import safetensors.torch
import torch
from torch import Tensor, distributed

import acnml
from acnml.scoring import Job, score
from acnml.scoring.run import Engine, locally
from acnml.scoring.sources import Unit
from benchmarks.timing import bytes_of_status
from studies.files import write_file

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "examples"))
from serving import files  # noqa: E402

PIECE = 16_384  # rows that are made and written at once
BATCH = 1024
ROWS = 100_000
LONG, RAY = 10, 4  # times as many
FIT_PIECES = 12  # divided among processes; about 200,000 rows
RESULTS = Path(__file__).parent / "scoring.json"
Numbers = dict[str, float]


def piece_of_rows(index: int) -> Tensor:
    """Return one piece of the rows, (PIECE, 784)."""
    return files.images(PIECE, seed=100 + index)[0]


def rows_in_memory(rows: int) -> Tensor:
    """Return all rows of a small input."""
    return torch.cat([piece_of_rows(i) for i in range(-(-rows // PIECE))])[:rows]


def write_rows(path: Path, rows: int) -> None:
    """Write the rows to a Parquet file, a piece to a row group."""
    schema = pa.schema([("id", pa.int64()), ("x", pa.list_(pa.float32(), files.PIXELS))])
    with pq.ParquetWriter(path, schema, compression="none", use_dictionary=False) as writer:
        for index, start in enumerate(range(0, rows, PIECE)):
            some = piece_of_rows(index)[: rows - start].numpy()
            flat = pa.FixedSizeListArray.from_arrays(pa.array(some.reshape(-1)), files.PIXELS)
            writer.write_table(pa.table([range(start, start + len(some)), flat], schema=schema))


# What runs in processes of its own ---------------------------------------------------------------


def run_loop(settings: dict[str, Any]) -> Numbers:
    """Score rows in a plain loop over what is in memory."""
    predictor = acnml.load(_predictor(settings), acnml.Classifier(_model(settings)))
    assert isinstance(predictor, acnml.Calibrated)
    rows = rows_in_memory(settings["rows"])

    def run() -> None:
        for batch in rows.split(BATCH):
            answer = predictor(batch)
            _ = answer.probs.amax(-1), answer.regret

    return measured(run)


def run_local(settings: dict[str, Any]) -> Numbers:
    """Score a file in this process."""
    return _scored(settings, locally)


def run_ray(settings: dict[str, Any]) -> Numbers:
    """Score a file by two actors with a thread each; the start of the cluster is not counted."""
    import ray

    from acnml.ray import Cluster

    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    return _scored(settings, Cluster(actors=2))


def run_fit(settings: dict[str, Any]) -> Numbers:
    """Fit a curvature of all layers, together with other processes if there are any."""
    rank, processes = settings["rank"], settings["processes"]
    classifier = acnml.Classifier(_model(settings))
    data = torch.cat([piece_of_rows(index) for index in range(rank, FIT_PIECES, processes)])
    together = processes > 1
    if together:
        distributed.init_process_group(
            "gloo", f"file://{settings['meeting']}", rank=rank, world_size=processes
        )
        distributed.barrier()

    def run() -> None:
        curvature = acnml.fit.fit_curvature(classifier, data, progress=False)
        if together:
            curvature.with_sums(_summed)

    return measured(run)


def _summed(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of a tensor over all processes."""
    distributed.all_reduce(tensor)
    return tensor


def measured(run: Callable[[], object]) -> Numbers:
    """Return wall time, CPU time and peak memory of a computation."""
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    return {
        "wall": time.perf_counter() - wall,
        "cpu": time.process_time() - cpu,
        "peak_mb": bytes_of_status("VmHWM") / 2**20,
    }


@final
class Clock:
    """An engine that notes how many rows are done when, to tell the start from the steady state."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._noted = engine, list[tuple[float, int]]()

    def __call__(self, job: Job, units: Sequence[Unit]) -> Iterator[int]:
        """Score units, and note the beginning and every part that is done."""
        done = 0
        self._noted.append((time.perf_counter(), done))
        for rows in self._engine(job, units):
            done += rows
            self._noted.append((time.perf_counter(), done))
            yield rows

    def numbers(self) -> Numbers:
        """Return the rate from the first part that is done to the last, and the rest of the time.

        At that rate, all rows would have taken the whole time without the start.
        """
        (begin, _), (first, some), *_, (last, everything) = self._noted
        rate = (everything - some) / (last - first)
        return {"rows_per_s": rate, "start": last - begin - everything / rate}


def _scored(settings: dict[str, Any], engine: Engine) -> Numbers:
    weights = str(Path(settings["folder"]) / "weights.safetensors")
    job = Job(
        model=f"{files.__file__}:build",
        weights=weights,
        predictor=_predictor(settings),
        input=settings["input"],
        output=settings["output"],
        threads=torch.get_num_threads(),
    )
    clock = Clock(engine)
    return measured(lambda: score(job, clock, progress=False)) | clock.numbers()


def _model(settings: dict[str, Any]) -> torch.nn.Module:
    model = files.build()
    safetensors.torch.load_model(model, Path(settings["folder"]) / "weights.safetensors")
    return model


def _predictor(settings: dict[str, Any]) -> str:
    return str(Path(settings["folder"]) / "predictor.safetensors")


CHILDREN = {"loop": run_loop, "local": run_local, "ray": run_ray, "fit": run_fit}


def start(kind: str, threads: int, settings: dict[str, Any]) -> subprocess.Popen[str]:
    """Start a measurement in a process of its own."""
    env = {**os.environ, "OMP_NUM_THREADS": str(threads), "RAY_USAGE_STATS_ENABLED": "0"}
    env["RAY_worker_niceness"] = "0"  # Ray's own name
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), env.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "benchmarks.scoring", "--child", kind, json.dumps(settings)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)


def finish(process: subprocess.Popen[str]) -> Numbers:
    """Wait for a measurement and return its numbers."""
    output, _ = process.communicate()
    if process.returncode:
        sys.exit(f"a measurement failed with status {process.returncode}")
    numbers: Numbers = json.loads(output.splitlines()[-1])
    print({kind: round(value, 2) for kind, value in numbers.items()}, flush=True)
    return numbers


# Comparisons -------------------------------------------------------------------------------------


def best(runs: list[Numbers]) -> Numbers:
    """Return the least time of either kind, the highest rate, and the largest memory."""
    of = {"peak_mb": max, "rows_per_s": max}
    return {name: of.get(name, min)(run[name] for run in runs) for name in runs[0]}


def compare(kinds: dict[str, tuple[str, int]], job: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Run all kinds in turn, several times."""
    found: dict[str, list[Numbers]] = {name: [] for name in kinds}
    for _ in range(rounds):
        for name, (kind, threads) in kinds.items():
            with tempfile.TemporaryDirectory(dir=job["folder"]) as output:
                found[name].append(finish(start(kind, threads, {**job, "output": output})))
    return {"rows": job["rows"], **{name: best(runs) for name, runs in found.items()}}


def against_loop(job: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Compare the local engine with a plain loop, one thread each."""
    found = compare({"plain loop": ("loop", 1), "acnml predict": ("local", 1)}, job, rounds)
    loop, local = found["plain loop"], found["acnml predict"]
    ratios = {kind: loop[kind] / local[kind] for kind in ("wall", "cpu")}
    return {**found, "share of the loop's throughput": ratios}


def long_run(job: dict[str, Any], _: int) -> dict[str, Any]:
    """Score all rows once, and a tenth of them in a plain loop before and after."""
    tenth = {**job, "rows": job["rows"] // 10}
    before = finish(start("loop", 1, tenth))
    found = compare({"acnml predict": ("local", 1)}, job, rounds=1)
    loop = best([before, finish(start("loop", 1, tenth))])
    ratios = {kind: 10 * loop[kind] / found["acnml predict"][kind] for kind in ("wall", "cpu")}
    found["plain loop, a tenth of the rows"] = loop
    return {**found, "share of the loop's throughput": ratios}


def against_ray(job: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Compare two actors with one process that has two threads."""
    kinds = {"local, two threads": ("local", 2), "two Ray actors": ("ray", 1)}
    found = compare(kinds, job, rounds)
    local, ray = found["local, two threads"], found["two Ray actors"]
    ratios = {
        "whole run": local["wall"] / ray["wall"],
        "steady state": ray["rows_per_s"] / local["rows_per_s"],
    }
    return {**found, "share of the local throughput": ratios}


def parallel_fit(job: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Compare a fit in two processes, which add up their sums, with a fit in one."""
    runs: dict[int, list[Numbers]] = {1: [], 2: []}
    for index in range(rounds):
        for processes in runs:
            settings = {**job, "processes": processes, "meeting": f"{job['folder']}/fit-{index}"}
            ranks = [start("fit", 1, {**settings, "rank": rank}) for rank in range(processes)]
            numbers = [finish(process) for process in ranks]
            runs[processes].append({kind: max(n[kind] for n in numbers) for kind in numbers[0]})
    one, two = best(runs[1]), best(runs[2])
    speed = {kind: one[kind] / two[kind] for kind in ("wall", "cpu")}
    rows = FIT_PIECES * PIECE
    return {"rows": rows, "one process": one, "two processes": two, "speed-up": speed}


MEASUREMENTS = {
    "local": (against_loop, 1),
    "long": (long_run, LONG),
    "ray": (against_ray, RAY),
    "fit": (parallel_fit, 1),
}


def main() -> None:
    """Run the measurements that the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default=",".join(MEASUREMENTS))
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(CHILDREN[options.child[0]](json.loads(options.child[1]))))
        return
    before = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    results = {kind: before[kind] for kind in MEASUREMENTS if kind in before}
    with tempfile.TemporaryDirectory() as name:
        files.write_predictor(Path(name))
        for wanted in options.only.split(","):
            measure, times = MEASUREMENTS[wanted]
            rows, path = times * options.rows, Path(name) / "rows.parquet"
            if wanted != "fit":
                write_rows(path, rows)
            job = {"folder": name, "input": str(path), "rows": rows}
            load = os.getloadavg()[0]
            results[wanted] = {"load": load, **measure(job, options.rounds)}
    if options.rows == ROWS:
        write_file(RESULTS, (json.dumps(results, indent=1) + "\n").encode())
    print(json.dumps({wanted: results[wanted] for wanted in options.only.split(",")}, indent=1))


if __name__ == "__main__":
    main()
