"""Where the time of a prediction goes: its parts, in forward passes.

python -m benchmarks.parts resnet20 diagonal 10                   network, posterior, inputs
python -m benchmarks.parts resnet20 diagonal 10 --operators       and torch's operators

CPU times of one thread, the fastest of three runs. The linearised network takes the parts up to the
solution in logit space. The network itself takes a displaced pass, and a step of the ascent a
recorded pass, a gradient and its displacement.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import torch
from torch.profiler import ProfilerActivity, profile

from acnml import Linearised
from acnml._engine.rows import Rows
from acnml.problem import Problem
from acnml.solve.logits import coefficients
from benchmarks.subjects import SUBJECTS, Subject
from benchmarks.timing import fastest

T = TypeVar("T")
ROUNDS = 3


def parts(subject: Subject, posterior: str, count: int) -> dict[str, float]:
    """Return the seconds of every part."""
    q, x = subject.posteriors[posterior], subject.data[0][:count]
    seconds: dict[str, float] = {}

    def timed(name: str, run: Callable[[], T]) -> T:
        result = run()
        seconds[name] = fastest({"": run}, ROUNDS)[""]
        return result

    rows = timed("pass at the mean", lambda: Rows.at_mean(subject.classifier, q, x, 1))
    logits = rows.start.logits
    one = torch.ones_like(logits)
    timed("backward pass of one class", lambda: rows.start.pulled_back(one))
    timed("Jacobian", lambda: replace(rows).jacobian)  # a copy has not cached it
    problem = Problem.of(logits[:, 0].detach(), timed("kernel", rows.kernel))
    labels = torch.arange(logits.shape[-1])
    timed("solution in logit space", lambda: Linearised().of(problem))
    weights = coefficients(problem.logits, problem.kernel, labels).to(q.dtype)
    v = timed("v of every label", lambda: rows.pulled(weights))
    timed("displaced pass", lambda: rows.logits(v, len(labels)))
    tape = timed("displaced pass, recorded", lambda: rows.recorded(v, len(labels)))
    gradient = timed("gradient there", lambda: rows.log_lik_gradient(tape, labels))
    timed("Σ applied to it", lambda: q.displacement(gradient))
    return seconds


def main() -> None:
    """Print the parts of one network."""
    parser = argparse.ArgumentParser("python -m benchmarks.parts")
    parser.add_argument("network", choices=SUBJECTS)
    parser.add_argument("posterior")
    parser.add_argument("inputs", type=int)
    parser.add_argument("--operators", action="store_true", help="torch's operators, too")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    subject = SUBJECTS[chosen.network]()
    images = subject.data[0][torch.arange(subject.forward_inputs) % len(subject.data[0])]
    with torch.no_grad():
        forward = fastest({"": lambda: subject.network(images)}, ROUNDS + 1)[""] / len(images)
        for name, seconds in parts(subject, chosen.posterior, chosen.inputs).items():
            print(f"{name:<30} {seconds / chosen.inputs / forward:8.2f}", flush=True)
        if chosen.operators:
            q, x = subject.posteriors[chosen.posterior], subject.data[0][: chosen.inputs]
            with profile(activities=[ProfilerActivity.CPU]) as profiled:
                Linearised().log_lik(subject.classifier, q, x)
            print(profiled.key_averages().table(sort_by="self_cpu_time_total", row_limit=15))


if __name__ == "__main__":
    main()
