"""The study's main numbers as a Markdown page, results.md: small enough to keep beside the code."""

from __future__ import annotations

from studies.rotated_mnist.fragments import label, scored
from studies.rotated_mnist.results import Results
from studies.rotated_mnist.tables import knob_text
from studies.rotated_mnist.verdict import verdicts
from studies.store import duration
from studies.study.tables import markdown_table, shown
from studies.study.verdict import verdicts_markdown


def markdown(results: Results) -> str:
    """Return the page."""
    parts = [
        "# Rotated MNIST: results",
        "Written by `acnml reproduce rotated-mnist`; its story is docs/rotated-mnist.md.",
        f"{results.data.note} Seeds: {len(results.study.seeds)}; networks are trained on "
        f"{len(results.data.train.labels):,} images.",
        *([f"**{len(results.missing)} pieces are not finished.**"] if results.missing else []),
        "## Does it hold?",
        verdicts_markdown(verdicts(results)),
        "## All methods: NLL upright, and ECE by shift",
        scores_table(results),
        "## Letters among the digits",
        detection_table(results),
        "## How far solvers are from convergence",
        agreement_table(results),
    ]
    return "\n\n".join(parts) + "\n"


def scores_table(results: Results) -> str:
    """Return NLL at 0°, ECE at some shifts, the knob and the time of every method."""
    shifts = [s for s in ("0°", "60°", "90°", "180°", "random") if s in results.study.shifts]
    rows = []
    for method in scored(results):
        ready = [row.method for row in results.rows if row.method.name == method.name]
        seconds = results.fastest(method)
        if ready:
            eces = [shown(results.values(method, "ece", shift)) for shift in shifts]
            nll = shown(results.values(method, "nll", "0°"))
            time = "–" if seconds is None else duration(seconds)
            count = f"{results.images([method]):,}"
            rows.append([label(method), knob_text(ready[0]), count, nll, *eces, time])
    head = (
        "method",
        "knob, first seed",
        "images",
        "NLL 0°",
        *(f"ECE {s}" for s in shifts),
        "per image",
    )
    return markdown_table(head, rows)


def agreement_table(results: Results) -> str:
    """Return the mean total variation to converged probabilities, over all shifts."""
    rows = [
        [f"{a.method.posterior}, {a.method.solver}", f"{a.total_variation:.4f}"]
        for a in results.agreements
    ]
    return markdown_table(("posterior, solver", "total variation"), rows)


def detection_table(results: Results) -> str:
    """Return AUROC and FPR95 of every method and score, for notMNIST against MNIST."""
    if not results.detections:
        return "There were no letters to detect."
    keys = dict.fromkeys((label(d.method), d.score) for d in results.detections)
    rows = []
    for name, score in keys:
        found = [d for d in results.detections if (label(d.method), d.score) == (name, score)]
        values = (shown([d.auroc for d in found]), shown([d.fpr95 for d in found]))
        rows.append([name, score, *values])
    return markdown_table(("method", "score", "AUROC", "FPR95"), rows)
