"""Measure how many labels the default solver solves (`python -m benchmarks.solved`).

Writes solved.csv and residuals.csv in docs/results/measurements.

A ReLU network with layers of 20, 64, 64 and 10 units, trained on clusters until it makes no error,
with a KFAC posterior over all layers. Its optima are often at kinks. Times are CPU times of one
thread.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn
from torch.nn import functional

from acnml import Acnml, Classifier, Linearised, fit_laplace
from acnml._util.torch_state import seeded
from benchmarks.recording import MEASUREMENTS, record

ALPHAS = (0.01, 0.1, 1.0)
STEPS = (0, 10, 20, 30)
REPEATS = 5  # of the cost of residuals
QUERIES = 50


def trained() -> tuple[nn.Module, Tensor, Tensor, Tensor]:
    """Return a network, its training data and queries."""
    with seeded(0):
        centres, labels = torch.randn(10, 20), torch.arange(2000) % 10
        x = centres[labels] + torch.randn(2000, 20)
        queries = centres[torch.arange(QUERIES) % 10] + torch.randn(QUERIES, 20)
        hidden = nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU()
        model = nn.Sequential(*hidden, nn.Linear(64, 10))
        optimiser = torch.optim.Adam(model.parameters(), 1e-3)
        for _ in range(60):
            for some in torch.randperm(len(x)).split(100):
                optimiser.zero_grad()
                functional.cross_entropy(model(x[some]), labels[some]).backward()
                optimiser.step()
    return model, x, labels, queries


def cost_of_residuals(predict: Acnml, queries: Tensor) -> float:
    """Return what residuals add to the time of a solution, as a share of it."""
    runs = {"without": predict.log_lik, "with": predict.solve}
    best = dict.fromkeys(runs, float("inf"))
    for _ in range(REPEATS):
        for name, run in runs.items():
            start = time.process_time()
            run(queries)
            best[name] = min(best[name], time.process_time() - start)
    return best["with"] / best["without"] - 1


def main() -> None:
    """Measure every α and number of steps, and what residuals cost without any step."""
    torch.set_num_threads(1)
    model, x, labels, queries = trained()
    classifier = Classifier(model)
    posterior = fit_laplace(classifier, [(x, labels)], prior_precision=1.0, progress=False)
    rows: list[dict[str, object]] = []
    costs: list[dict[str, object]] = []
    for alpha in ALPHAS:
        for steps in STEPS:
            solver = Linearised("network", polish=steps)
            predict = Acnml(classifier, posterior, solver, alpha, on_unsolved="ignore")
            predict.solve(queries[:2])
            start = time.process_time()
            solution = predict.solve(queries)
            took = time.process_time() - start
            found: dict[str, object] = {
                "alpha": alpha,
                "steps": steps,
                "solved": float(solution.solved.double().mean()),
                "residual": float(solution.residual.median()),
                "log_lik": float(solution.log_lik.mean()),
                "seconds": took,
            }
            print(found, flush=True)
            rows.append(found)
        plain = Acnml(classifier, posterior, Linearised("network"), alpha, on_unsolved="ignore")
        costs.append({"alpha": alpha, "added": cost_of_residuals(plain, queries)})
        print(costs[-1], flush=True)
    record(MEASUREMENTS / "solved.csv", rows)
    record(MEASUREMENTS / "residuals.csv", costs)


if __name__ == "__main__":
    main()
