"""The sections of the CIFAR-10-C report."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean

from matplotlib.figure import Figure

from studies.cifar10_c import methods as ms
from studies.cifar10_c.settings import CLEAN, Cifar10CStudy
from studies.engine.figures import Axis, boxes, frontier, lines
from studies.engine.method import Method
from studies.engine.report import Panels, Section
from studies.engine.results import Results
from studies.engine.sections import diagrams, knobs, solvers, timing
from studies.engine.tables import TITLES, Table, scored, shown

HARD = (4, 5)  # the severities of the paper's claim
CLEAN_SCORES = ("nll", "accuracy", "ece")  # those of the paper's Table 2


# The paper's Table 2: NLL, accuracy in percent, and ECE, ± over three seeds. Those of SWA-Temp and
# SGD are from Maddox et al.
TABLE_2 = Path(__file__).parents[2] / "docs/results/zhou-levine-2021/table-2.csv"


def papers_table() -> Table:
    """Return the paper's Table 2; a dash stands for what it does not have."""
    with TABLE_2.open(encoding="utf-8") as file:
        found = {(row["network"], row["method"]): row for row in csv.DictReader(file)}
    networks, methods = (dict.fromkeys(names) for names in zip(*found, strict=True))

    def cell(network: str, method: str, score: str) -> str:
        row = found.get((network, method))
        if row is None:
            return "–"
        spread = row[f"{score}_std"]
        return f"{row[score]} ± {spread}" if spread else row[score]

    return Table(
        "The paper’s Table 2 for comparison: VGG16 and WideResNet-28-10, 300 epochs, all test "
        "images.",
        ("method", "VGG16: NLL", "accuracy", "ECE", "WRN-28-10: NLL", "accuracy", "ECE"),
        [
            [
                "MAP (SWA)" if method == "SWA" else method,
                *(cell(network, method, score) for network in networks for score in CLEAN_SCORES),
            ]
            for method in methods
        ],
    )


def hard(settings: Cifar10CStudy) -> list[int]:
    """Return the severities of the paper's claim that the study has, or else its highest."""
    there = [severity for severity in HARD if severity in settings.severities]
    return there or [max(settings.severities)]


def hard_groups(settings: Cifar10CStudy) -> Mapping[str, tuple[str, ...]]:
    """Return the shifts of the severities of the paper's claim."""
    return {f"severity {severity}": settings.scored_at(severity) for severity in hard(settings)}


def headline(results: Results) -> str:
    """Say in one sentence what the numbers show; nothing while they are not finished."""
    compared = {
        "SWA": ms.MAP_SWA,
        "SWA-Temp": ms.TEMPERED,
        "SWAG-D": ms.BMA_SWAG_D,
        "ACNML-SWAGD": ms.ACNML_SWAG_D_PAPERS,
        "ACNML-KFAC": ms.ACNML_KFAC_PAPERS,
        "last-layer ACNML": ms.ACNML_HEAD,
    }
    compared = {name: m for name, m in compared.items() if m in results.study.methods}
    n, means = results.inputs(compared.values()), []
    groups = hard_groups(results.study.settings).values()
    for name, method in compared.items():
        found = [results.mean(method, "ece", shifts, n) for shifts in groups]
        known = [value for value in found if value is not None]
        if len(known) < len(found):
            return ""
        means.append(f"{name} {fmean(known):.3f}")
    severities = " and ".join(str(severity) for severity in hard(results.study.settings))
    where = f"Under strong corruption ({severities})"
    return f"{where} the mean calibration error is: {', '.join(means)}."


def sections(results: Results) -> list[Section]:
    """Return all sections."""
    settings: Cifar10CStudy = results.study.settings
    names = {shift: _shown_blur(shift) for shift in settings.blurred_shifts}
    steps = (
        "The paper’s gradient steps against the linearised solution with the same α: mean total "
        "variation between their probabilities, and how often both predict the same class."
    )
    return [
        what_was_done(results),
        in_distribution(results),
        corrupted(results),
        at_equal_nll(results),
        trade_off(results),
        diagrams(
            results,
            ms.paper_group(settings),
            names,
            "Gaussian blur. Points are groups of equally many images with similar confidence.",
        ),
        knobs(results),
        solvers(results, steps),
        timing(results),
    ]


def _shown_blur(shift: str) -> str:
    return "clean" if shift == CLEAN else f"blur {shift.split()[-1]}"


def setting(results: Results) -> str:
    """Say which network it is, and what differs from the paper's protocol."""
    settings, data = results.study.settings, results.data
    weights = {
        "given": "starts from published weights that were trained on all training images",
        "random": "is trained from random weights",
    }[settings.recipe.start]
    source = {"test": "test set, and are left out of the evaluation", "train": "training set"}[
        settings.choice.source
    ]
    absent = ["no SWA-Ensemble (one member)"] if settings.members == 1 else []
    absent += [] if settings.dropout_model else ["no SWA-Dropout (the network has no dropout)"]
    only = f"Only methods on {', '.join(settings.grounds)} take part." if settings.grounds else ""
    sentences = (
        f"{settings.model} {weights}; SWAG collects {settings.recipe.training.collected} epochs.",
        f"{len(data.held_out.labels):,} held-out images for the knobs come from the {source}.",
        f"There is {' and '.join(absent)}." if absent else "",
        only,
    )
    return " ".join(filter(None, sentences))


def what_was_done(results: Results) -> Section:
    """Explain data, networks and how knobs were chosen."""
    settings, count = results.study.settings, results.data.count
    rules, images = settings.choice, settings.images
    return Section(
        "What was done",
        [
            setting(results),
            "Evaluation images are the first of one random order of the test set: "
            f"{count(images.in_distribution):,} clean ones for cheap methods; of each of "
            f"{len(settings.corruptions)} corruptions at {len(settings.severities)} severities "
            f"{count(images.cheap):,} for cheap methods, {count(images.network_wide):,} for "
            f"methods over the whole network, {count(images.beside):,} for secondary ones, and "
            f"{count(images.paper_steps):,} for the paper’s gradient steps. Methods are compared "
            "on the same images only.",
            "Each family has one knob, set on clean held-out images by one of these rules. *The "
            f"paper’s α*: the largest of its grid that costs at most {rules.accuracy:.1%} accuracy "
            f"and {rules.nll:g} nats against SWA. *The price of SWA*: the most cautious value "
            f"whose NLL is at most {rules.tolerance:g} nats above SWA’s. *Near SWA-Temp*: the most "
            f"cautious value whose NLL is at most {rules.near:g} nats above that of SWA with the "
            "temperature of least NLL. "
            "*The price of ACNML-SWAGD*: the temperature with the NLL of ACNML-SWAGD at the "
            "paper’s α. *Least NLL*, for baselines. No corrupted image was used to set a value; "
            "that the last layer also has α as a knob was decided after the results at severity 5 "
            "were known.",
        ],
    )


# Clean images ----------------------------------------------------------------------------------


def in_distribution(results: Results) -> Section:
    """Show the tables of clean images."""
    seeds = results.study.seeds
    spread = (
        f"± is the standard deviation over {len(seeds)} seeds."
        if len(seeds) > 1
        else "There is one seed: ± is the standard error over images, by "
        f"{results.study.resamples} bootstrap draws. It does not cover other networks."
    )
    caption = f"Clean test images, the same for all methods that see so many. {spread}"
    common, everything = [], []
    for method in scored(results):
        n = _common(results, method)
        cells = [_with_error(results, method, score, n) for score in CLEAN_SCORES]
        common.append([results.study.label(method), f"{n:,}", *cells])
    for method in results.study.methods:
        n = results.inputs([method], CLEAN)
        if n > _common(results, method):
            cells = [shown(results.values(method, score, CLEAN, n)) for score in CLEAN_SCORES]
            everything.append([results.study.label(method), f"{n:,}", *cells])
    head = ("method", "images", "NLL", "accuracy", "ECE")
    more = "The same on all clean images, for the cheap methods."
    return Section(
        "Clean images",
        tables=[
            Table(caption, head, [row for row in common if row[2] != "–"]),
            Table(more, head, [row for row in everything if row[2] != "–"]),
            papers_table(),
        ],
    )


def _common(results: Results, method: Method) -> int:
    """Return how many images of every shift a method shares with most others."""
    most = results.data.count(results.study.settings.images.network_wide)
    return min(most, results.inputs([method]))


def _with_error(results: Results, method: Method, score: str, n: int) -> str:
    """Return mean ± std over seeds, or ± the bootstrap's error over images where there is one."""
    values = results.values(method, score, CLEAN, n)
    error = results.errors.get((method.name, score))
    if len(values) != 1 or error is None:
        return shown(values)
    return f"{values[0]:.3f} ± {error:.3f}"


# Corruptions -----------------------------------------------------------------------------------


def _axis(settings: Cifar10CStudy, *more: int) -> Axis:
    severities = sorted({*more, *settings.severities})
    return Axis({float(s): settings.scored_at(s) for s in severities}, "severity")


def _lines(
    results: Results, prefix: str, methods: list[Method] | tuple[Method, ...], scores: list[str]
) -> dict[str, Figure]:
    counts = dict.fromkeys(methods, results.inputs(methods))
    axis = _axis(results.study.settings, 0)
    return {f"{prefix}-{s}": lines(results, counts, s, TITLES[s], axis) for s in scores}


def corrupted(results: Results) -> Section:
    """Show the paper's comparison under corruptions."""
    settings = results.study.settings
    group = ms.paper_group(settings)
    n = results.inputs(group)

    axis = _axis(settings)

    def boxed(score: str, title: str) -> Figure:
        scores = {
            method: {
                place: values
                for place, shifts in axis.places.items()
                if (values := results.each(method, score, shifts, n))
            }
            for method in group
        }
        return boxes(scores, results.study.look, title, axis)

    drawn = {f"boxes-{score}": boxed(score, title) for score, title in TITLES.items()}
    over = (
        f"Each box is over the corruptions, {n:,} images each. ACNML over all weights has the "
        "paper’s α."
    )
    medians = (
        "Medians over the corruptions, with 95 % intervals from drawing corruptions with "
        "replacement."
    )
    caption = (
        "by severity. Few images increase the ECE by themselves: compare rows with equally many. "
        "metrics.csv has all scores."
    )
    return Section(
        "Corrupted images",
        panels=[
            Panels(drawn, over, "scroll"),
            Panels(_lines(results, "paper-lines", group, list(TITLES)), medians),
        ],
        tables=[
            severity_table(results, "ece", f"Mean ECE over all corruptions, {caption}"),
            severity_table(results, "nll", "Mean NLL over all corruptions, by severity."),
        ],
    )


def severity_table(results: Results, score: str, caption: str) -> Table:
    """Return the mean of a score over all corruptions, by severity, for every method."""
    settings = results.study.settings
    severities, rows = sorted(settings.severities), []
    for method in scored(results):
        n = _common(results, method)
        means = [results.mean(method, score, settings.scored_at(s), n) for s in severities]
        if any(mean is not None for mean in means):
            cells = ["–" if mean is None else f"{mean:.3f}" for mean in means]
            rows.append([results.study.label(method), f"{n:,}", *cells])
    return Table(caption, ("method", "images", *map(str, severities)), rows)


def at_equal_nll(results: Results) -> Section:
    """Show methods whose knobs cost the same on clean images."""
    if not {*ms.BUDGET_GROUP, *ms.NEAR_GROUP} <= set(results.study.methods):
        return Section("Comparison at equal held-out NLL")
    budget, near = (f"{results.inputs(group):,}" for group in (ms.BUDGET_GROUP, ms.NEAR_GROUP))
    scores = ["ece", "nll"]
    text = (
        "A temperature can lower all confidences at no cost in accuracy. For a fair comparison "
        "knobs are set to equal held-out NLL: first that of SWA, then nearly that of SWA-Temp, the "
        "least that a temperature can reach."
    )
    return Section(
        "Comparison at equal held-out NLL",
        [text],
        [
            Panels(
                _lines(results, "budget-lines", ms.BUDGET_GROUP, scores),
                f"All methods at the NLL of SWA; {budget} images of each corruption.",
            ),
            Panels(
                _lines(results, "near-lines", ms.NEAR_GROUP, scores),
                f"SWA-Temp, and methods that pay {results.study.settings.choice.near:g} nats for "
                "more caution: a higher temperature, or ACNML over the tempered likelihood; "
                f"{near} images of each corruption.",
            ),
        ],
    )


def trade_off(results: Results) -> Section:
    """Show held-out NLL against calibration under corruption, for all values of the knobs."""
    study, heading = results.study, "Held-out NLL against calibration under corruption"
    if not results.sweep or study.frontier is None:
        return Section(heading)
    settings, shifts = study.settings, study.frontier.shifts
    title = f"Mean ECE at severity {settings.frontier.severity}"
    drawn = frontier(results, ms.FAMILIES, shifts, title, span=2.5, size=(8.0, 5.4))
    caption = (
        "Each path is a family whose knob is swept; the first "
        f"{results.data.count(study.frontier.inputs):,} images of {len(shifts)} corruptions, seed "
        f"{study.seeds[0]}. Further left is better on clean images, lower is better on corrupted "
        "ones; the dashed line is SWA’s NLL, and paths end at 2.5 times of it. A method that only "
        "lowers confidences lies on the path of SWA-Temp."
    )
    return Section(heading, panels=[Panels({"frontier": drawn}, caption, "scroll")])
