"""Run the fuzz, `python -m fuzz --cases 10000`; or one case, with `--kind files --seed 7`.

With `--record`, how the cases ended is written to docs/results/measurements/fuzz.csv, from which
docs/reliability.md is filled.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections import Counter
from pathlib import Path

import torch

import acnml
from benchmarks.recording import MEASUREMENTS, record
from fuzz.cases import KINDS, SHARES, Case, cases, run

ENDS = ("equal", "flagged", "refused", "WRONG")


def main() -> None:
    """Run cases, print those that end badly, and exit with an error if there are any."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=10_000, help="their number")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--kind", choices=list(KINDS), help="only this kind")
    parser.add_argument("--seed", type=int, help="only this case, with --kind")
    parser.add_argument("--record", action="store_true", help="write the counts to docs/results")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    kinds = [arguments.kind] if arguments.kind else list(KINDS)
    if arguments.seed is not None:
        chosen = [Case(kind, arguments.seed) for kind in kinds]
    else:
        chosen = list(cases(arguments.cases, arguments.first, kinds))
    print(f"{len(chosen)} cases, seeds from {chosen[0].seed}: {SHARES}", flush=True)
    ends: Counter[tuple[str, str]] = Counter()
    for case in chosen:
        result = run(case)
        ends[case.kind, result.end] += 1
        if result.end == "WRONG" or arguments.seed is not None:
            repeat = f"python -m fuzz --kind {case.kind} --seed {case.seed}"
            print(f"{result.end}: {result.text}\n    {repeat}", flush=True)
    for (kind, end), count in sorted(ends.items()):
        print(f"{kind:10} {end:8} {count:6}")
    if arguments.record:
        keep(ends, kinds)
    sys.exit(any(end == "WRONG" for _, end in ends))


def keep(ends: Counter[tuple[str, str]], kinds: list[str]) -> None:
    """Write how many cases of every kind ended how, with the version of the library."""
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    version = {"version": acnml.__version__, "commit": commit}
    counts = ({end.lower(): ends[kind, end] for end in ENDS} for kind in kinds)
    rows = [{"kind": kind, **own, **version} for kind, own in zip(kinds, counts, strict=True)]
    record(MEASUREMENTS / "fuzz.csv", rows)


if __name__ == "__main__":
    main()
