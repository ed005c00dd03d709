"""Measure the run time per input, and the quality of the solutions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from acnml import Bma, Gradient, Linearised
from acnml._algebra.dual import Dual
from acnml._engine.rows import Rows, inner_product, row_chunks
from acnml.posteriors import Posterior
from acnml.problem import Problem
from acnml.solve import Reference
from acnml.solve.gradient import ascended
from acnml.solve.logits import solve
from benchmarks.subjects import Subject
from benchmarks.timing import fastest, peak

ONE_PASS = "one input: forward pass"
ONE_INPUT = "one input: diagonal, linearised"
LABELS = 10  # of all subjects
BATCH = 128  # batch size in the training of naive CNML
Run = Callable[[], object]


def costs(subject: Subject) -> list[dict[str, Any]]:
    """Return one row per method: seconds per input, the ratio to a forward pass, peak memory."""
    runs, inputs = {"forward pass": _forward(subject)}, {"forward pass": subject.forward_inputs}
    if subject.inputs > 1:
        one = _repeated(subject.data[0], 1)
        alone = subject.posteriors["diagonal"]
        runs[ONE_PASS] = _forward(subject, 1)
        runs[ONE_INPUT] = _solving(Linearised(), subject, alone, one)
        inputs |= {ONE_PASS: 1, ONE_INPUT: 1}
    keys = [(p, m) for p, methods in subject.solvers.items() for m in methods]
    for posterior, method in keys:
        name = f"{posterior}: {method}"
        runs[name], inputs[name] = _method(subject, subject.posteriors[posterior], method)
    slow = {name: run for name, run in runs.items() if "paper" in name}
    quick = {name: run for name, run in runs.items() if name not in slow}
    device = subject.device
    quick["forward pass"]()  # so that torch has its buffers and kernels
    # The first run of every method is also a warm-up.
    peaks = {name: peak(run, device) / 1e6 for name, run in quick.items()}
    times = fastest(quick, subject.rounds, device) | fastest(slow, 1, device)
    per_input = {name: seconds / inputs[name] for name, seconds in times.items()}
    per_input |= _naive_cnml(subject)
    forward = per_input["forward pass"]
    return [
        {
            "subject": subject.name,
            "method": name,
            "seconds": seconds,
            "forwards": seconds / (per_input[ONE_PASS] if name == ONE_INPUT else forward),
            "megabytes": peaks.get(name),
        }
        for name, seconds in per_input.items()
    ]


def gaps(subject: Subject, posterior: str, inputs: int = 8) -> dict[str, Any]:
    """Return the mean gap of each solver to the best objective found, in nats.

    The mean is over all rows, that is over all labels of all inputs.

    The objective is log p_θ(y|x) + log q(θ) - log q(μ) = log p_θ(y|x) - ½ vᵀΣv.
    """
    q = subject.posteriors[posterior]
    x = subject.data[0][:inputs]
    kronecker = posterior.startswith("Kronecker")
    steps, size = (10, 0.25) if kronecker else (5, 0.5)
    found: dict[str, list[Tensor]] = {}
    for rows, labels in row_chunks(subject.classifier, q, x, n_gradients=steps, memory=None):
        for some in labels:
            for name, v in _points(rows, some, steps, size).items():
                found.setdefault(name, []).append(_objective(rows, v, some).flatten())
    values = {name: torch.cat(parts).double() for name, parts in found.items()}
    best = torch.stack(list(values.values())).amax(0)
    means = {name: float((best - value).mean()) for name, value in values.items()}
    return {"subject": subject.name, "posterior": posterior, "steps": steps, "gap": means}


def _points(rows: Rows, labels: Tensor, steps: int, size: float) -> dict[str, Dual]:
    problem = Problem.of(rows.start.logits[:, 0].detach(), rows.kernel())
    found = solve(problem.logits, problem.kernel, labels, 1e-5).u
    linearised = rows.pulled(found)
    first = rows.pulled(size * rows.logit_gradient(rows.start.logits, labels))
    return {
        "the paper's steps": ascended(rows, first, labels, steps - 1, size),
        "linearised": linearised,
        "polished": ascended(rows, linearised, labels, 2, 0.5),
        "converged": ascended(rows, linearised, labels, 40, 0.3),
    }


def _objective(rows: Rows, v: Dual, labels: Tensor) -> Tensor:
    log_lik = rows.log_lik(rows.logits(v, len(labels)), labels)
    return log_lik - inner_product(v, rows.moved(v)) / 2


def _forward(subject: Subject, count: int | None = None) -> Run:
    images = _repeated(subject.data[0], count or subject.forward_inputs)
    network = subject.network

    def run() -> object:
        with torch.no_grad():
            return network(images)

    return run


def _method(subject: Subject, posterior: Posterior, method: str) -> tuple[Run, int]:
    """Return a function that runs a method, and the number of inputs that it processes."""
    classifier, images = subject.classifier, subject.data[0]
    if method.startswith("BMA"):
        bma, many = Bma(classifier, posterior), _repeated(images, subject.inputs)
        return lambda: bma(many), len(many)
    if method == "one step of the paper's loop":
        one = images[:1]
        return lambda: Reference(1, 0.5, rows_at_once=1).log_lik(classifier, posterior, one), 1
    kronecker = "Kronecker" in type(posterior).__name__
    steps, size = (10, 0.25) if kronecker else (5, 0.5)
    solver = {
        "linearised": Linearised(),
        "network": Linearised("network"),
        "polished": Linearised("network", polish=2),
        "the paper's loop": Reference(steps, size, rows_at_once=1),
    }.get(method, Gradient(steps, size))
    count = 1 if method == "the paper's loop" else subject.inputs
    if "steps" in method or method in ("network", "polished"):
        count = subject.climbing
    if method == "linearised" and len(posterior.mean) <= 2:
        count = subject.forward_inputs if subject.inputs > 1 else 5  # a last layer is cheap
    x = _repeated(images, count)
    return _solving(solver, subject, posterior, x), count


def _solving(solver: Any, subject: Subject, posterior: Posterior, x: Tensor) -> Run:
    classifier = subject.classifier

    def run() -> object:
        with torch.no_grad():
            return solver.log_lik(classifier, posterior, x)

    return run


def _naive_cnml(subject: Subject) -> dict[str, float]:
    """Extrapolate one epoch of naive CNML for all labels of an input from one training step."""
    images, labels = (_repeated(tensor, BATCH) for tensor in subject.data)
    network = subject.classifier.copy_module()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.0)

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(images), labels).backward()
        optimizer.step()

    seconds = fastest({"step": step}, 2, subject.device)["step"]
    steps = subject.training_images / BATCH
    return {"naive CNML, an epoch (computed)": seconds * LABELS * steps}


def _repeated(tensor: Tensor, count: int) -> Tensor:
    return tensor[torch.arange(count) % len(tensor)]
