"""The tables of the pages, computed from docs/results. `TABLES` lists them by name."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import benchmark_tables
import decision_tables
import paper_tables
from results import Row, lowest_bold, markdown, read, select
from studies.evidence.settings import TITLES
from values import by_table

EVIDENCE = "evidence/metrics.csv"
CASES = "evidence/cases.csv"
SEEN = "evidence/detection.csv"
CONFORMAL = "tabular/conformal.csv"
DETECTION = "text/detection.csv"
THEORY = "theory/results.csv"
FIDELITY = "fidelity/metrics.csv"
LABEL_NOISE = "label-noise/metrics.csv"
IF_COMP_STUDY = "if-comp/metrics.csv"
LINEARISED = "linearised/metrics.csv"

PRICE = 0.01
TEMPERATURE, EQUAL = "temperature", "temperature of equal price"
DAC, DENSITY = "density-aware calibration", "density temperature, m²"
ACNML, CLOSED = "ACNML, m²", "closed form, m²"
AS_THEY_ARE = "closed form, m², features as they are"
OURS = "ACNML"  # in the study of tables

# Names of groups as readers know them; others are printed as they are in the file.
GROUPS = {"rotated by 45° or more": "rotated", "changed reviews": "changed words"}


def mean(rows: Iterable[Row], column: str) -> float:
    """Return the mean of a column."""
    return statistics.fmean(float(row[column]) for row in rows)


# The columns of the tables of evidence: methods, and how readers know them.
METHODS = {
    EQUAL: "temperature of equal price",
    DAC: "density-aware",
    DENSITY: "density temperature",
    ACNML: "ACNML",
    CLOSED: "closed-form NML, the default",
    AS_THEY_ARE: "closed-form NML, features as they are",
}


def strongest() -> list[tuple[str, str]]:
    """Return every network with the labelled group of shifts at which its NLL is highest."""
    plain = [r for r in select(EVIDENCE, method="network", price=PRICE) if r["nll"]]
    shifted = [row for row in plain if row["group"] != "clean"]
    worst = {r["network"]: r for r in sorted(shifted, key=lambda r: float(r["nll"]))}
    return [(n, worst[n]["group"]) for n in TITLES if n in worst]


def scored(network: str, group: str, method: str) -> Row:
    """Return the means of a method at the price of all tables here."""
    (row,) = select(EVIDENCE, network=network, group=group, method=method, price=PRICE)
    return row


def evidence() -> str:
    """ECE / NLL under the strongest shift of every network."""
    return _evidence(strongest(), METHODS)


def gain() -> str:
    """Six rows of the table of evidence with three methods: the table of the README."""
    shown = ("resnet20", "resnet14-cifar100", "tiny-imagenet", "letters", "streams", "tables")
    places = [place for place in strongest() if place[0] in shown]
    return _evidence(places, {EQUAL: "temperature", DAC: METHODS[DAC], CLOSED: "`calibrate`"})


def _evidence(places: Sequence[tuple[str, str]], methods: Mapping[str, str]) -> str:
    lines = []
    for network, group in places:
        rows = [scored(network, group, method) for method in methods]
        pairs = zip(
            *(lowest_bold([float(r[s]) for r in rows]) for s in ("ece", "nll")), strict=True
        )
        name = f"{TITLES[network]}, {GROUPS.get(group, group)}"
        lines.append([name, *(" / ".join(pair) for pair in pairs)])
    return markdown(["ECE / NLL", *methods.values()], lines)


def won() -> str:
    """In how many cases a method is better than its rivals: ECE, NLL."""
    rivals = {method: METHODS[method] for method in (EQUAL, DAC, DENSITY, ACNML, AS_THEY_ARE)}
    shown = {CLOSED: "closed-form NML, the default", ACNML: "ACNML"}
    lines = []
    for method, name in shown.items():
        cells = []
        for rival in rivals:
            rows = [] if method == rival else select(CASES, method=method, rival=rival)
            own = {row["score"]: f"{row['won']} : {row['lost']}" for row in rows}
            cells.append(", ".join(own[score] for score in ("ece", "nll") if own))
        lines.append([name, *cells])
    return markdown(["won : lost in ECE, in NLL", *rivals.values()], lines)


def unknown() -> str:
    """AUROC for inputs of no known class."""
    rows = read(SEEN)
    places = list(dict.fromkeys((row["network"], row["group"]) for row in rows))
    shown = {
        "maximum probability": "maximum probability",
        "energy": "energy",
        "k-NN": "k-NN",
        "ViM": "ViM",
        "Mahalanobis": "score m(x)",
        "relative Mahalanobis": "relative Mahalanobis",
        f"regret, {CLOSED}": "regret, closed form",
        f"regret, {ACNML}": "regret, ACNML",
    }
    by_place = {(r["network"], r["group"], r["score"]): float(r["auroc"]) for r in rows}
    lines = []
    for network, group in places:
        values = [by_place[network, group, score] for score in shown]
        best = max(f"{value:.3f}" for value in values)
        cells = [f"**{v:.3f}**" if f"{v:.3f}" == best else f"{v:.3f}" for v in values]
        lines.append([f"{TITLES[network]}, {GROUPS.get(group, group)}", *cells])
    return markdown(["AUROC", *shown.values()], lines)


def tabular() -> str:
    """Tables under shift: all calibrators of scikit-learn, temperatures, and ACNML."""
    kinds = {
        "logistic": "logistic regression",
        "mlp": "MLP",
        "forest": "random forest",
        "boosting": "gradient boosting",
    }
    lines = []
    for method in ("classifier", TEMPERATURE, "sigmoid", "isotonic", EQUAL, OURS):
        cells = [method]
        for kind in kinds:
            scores = (by_table(kind, method, score).values() for score in ("ece", "nll"))
            cells.append(" / ".join(f"{statistics.fmean(values):.3f}" for values in scores))
        lines.append(cells)
    return markdown(["ECE / NLL under shift", *kinds.values()], lines)


def conformal() -> str:
    """Coverage and size of conformal sets, in distribution and under shift."""
    lines = []
    for classifier, name in (("logistic", "logistic regression"), ("mlp", "MLP")):
        for method in (TEMPERATURE, EQUAL, OURS):
            cells = []
            for rows in ("in distribution", "shifted"):
                own = select(
                    CONFORMAL,
                    classifier=classifier,
                    method=method,
                    rows=rows,
                    score="LAC",
                    thresholds="marginal",
                )
                cells += [f"{mean(own, 'coverage'):.3f}", f"{mean(own, 'size'):.3f}"]
            lines.append([name, method, *cells])
    head = ["classifier", "probabilities", "coverage", "size", "coverage under shift"]
    return markdown([*head, "size under shift"], lines, left=2)


def text() -> str:
    """Detection of questions that belong to no class, by the scores of every method."""
    methods = {
        "network": "network",
        TEMPERATURE: "best temperature",
        EQUAL: "temperature of equal price (+0.01 nats)",
        "ACNML, +0.01": "ACNML (+0.01 nats)",
        "closed-form NML, +0.01": "closed-form NML (+0.01 nats)",
    }
    questions = {
        "out-of-scope questions": "1,000 out-of-scope questions",
        "domains left out": "two domains left out of training",
    }
    columns = ("max. probability", "entropy", "energy", "regret")
    lines = []
    for experiment, asked in questions.items():
        for method, name in methods.items():
            rows = select(DETECTION, experiment=experiment, head="two layers", method=method)
            by_score = {score: [r for r in rows if r["score"] == score] for score in columns}
            cells = (f"{mean(own, 'auroc'):.3f}" if own else "" for own in by_score.values())
            lines.append([asked, name, *cells])
    head = ["questions", "method", "maximum probability", *columns[1:]]
    return markdown(head, lines, left=2)


def theory() -> str:
    """Errors of approximations of CNMAP, and their bounds, as the data grow."""
    shown = {
        "map_error": "weights: MAP, no adaptation",
        "influence_error": "weights: influence function",
        "theorem_3_1_bound": "bound by Theorem 3.1",
        "influence_sharper_bound": "sharper bound",
        "acnml_error": "weights: ACNML, Laplace posterior",
        "acnml_sharper_bound": "sharper bound",
        "influence_log_prob_error": "log-probabilities: influence function",
        "proposition_3_2_bound": "bound by Proposition 3.2 and Theorem 3.1",
        "acnml_log_prob_error": "log-probabilities: ACNML",
        "acnml_log_prob_sharper_bound": "sharper bound",
    }
    sizes = (100, 1_000, 10_000, 100_000)
    at = {n: select(THEORY, n=n)[0] for n in sizes}
    lines = [
        [name, *(_scientific(float(at[n][column])) for n in sizes)]
        for column, name in shown.items()
    ]
    return markdown(["largest error", *(f"n = {n:,}" for n in sizes)], lines)


def _scientific(value: float) -> str:
    return "none" if math.isinf(value) else f"{value:.2g}"


# (method, posterior) -> what readers know it as; `fidelity` shows these at α = 1.
FAMILY = {
    ("network", ""): "the network",
    ("temperature", ""): "temperature",
    ("GLM", "EK-FAC"): "GLM, EK-FAC",
    ("pNML", ""): "pNML",
    ("influence", "EK-FAC"): "influence, EK-FAC",
    ("IF-COMP", "EK-FAC"): "IF-COMP",
    ("ACNML, linearised", "last layer, EK-FAC"): "ACNML, last layer, EK-FAC",
    ("ACNML, 10 steps", "EK-FAC"): "ACNML, 10 steps, EK-FAC",
    ("ACNML, linearised network", "EK-FAC"): "ACNML, linearised network, EK-FAC",
    ("ACNML, solved", "diagonal"): "ACNML, solved, diagonal",
    ("ACNML, solved", "EK-FAC"): "ACNML, solved, EK-FAC",
    ("ACNML, solved", "full"): "ACNML, solved, full",
}


def fidelity() -> str:
    """Total variation to CNML and Spearman's correlation of log C, at α = 1, by problem."""
    problems = list(dict.fromkeys(row["problem"] for row in read(FIDELITY)))
    lines = []
    for (method, posterior), name in FAMILY.items():
        cells = [name]
        for problem in problems:
            # A linear model is its linearisation, and all of it is the last layer.
            solver, over = method, posterior
            if problem == "logistic regression":
                solver = method.replace("solved", "linearised").replace(" network", "")
                over = posterior.removeprefix("last layer, ")
            rows = select(FIDELITY, problem=problem, method=solver, posterior=over, queries="all")
            (row,) = [r for r in rows if not r["alpha"] or float(r["alpha"]) == 1]
            rank = f" / {float(row['regret_rank']):.2f}" if row["regret_rank"] else ""
            cells.append(f"{float(row['variation']):.3f}{rank}")
        lines.append(cells)
    return markdown(["at α = 1", *problems], lines)


def label_noise() -> str:
    """AUROC of finding wrong labels: means over seeds and noise rates."""
    every = read(LABEL_NOISE)
    cases = list(dict.fromkeys((r["labels"], r["data"], r["noise"]) for r in every))
    lines = []
    for score in dict.fromkeys(row["score"] for row in every):
        own = (
            select(LABEL_NOISE, labels=labels, data=data, noise=noise, score=score)
            for labels, data, noise in sorted(cases)
        )
        lines.append([score, *(f"{mean(rows, 'auroc'):.3f}" for rows in own)])
    short = {"labels of the training data": "training", "new labels": "new"}
    head = [f"{short[labels]}: {data}, {noise}" for labels, data, noise in sorted(cases)]
    return markdown(["score", *head], lines)


def if_comp() -> str:
    """Median and quartiles of the ECE over corruptions, and the median NLL, at severity 5."""
    every = read(IF_COMP_STUDY)
    models = list(dict.fromkeys(row["network"] for row in every))
    lines = []
    for method in dict.fromkeys(row["method"] for row in every):
        cells = [method]
        for network in models:
            rows = select(IF_COMP_STUDY, network=network, method=method, severity=5)
            eces = [float(row["ece"]) for row in rows]
            low, middle, high = statistics.quantiles(eces, n=4, method="inclusive")
            nll = statistics.median(float(row["nll"]) for row in rows)
            cells += [f"{middle:.3f} ({low:.3f}, {high:.3f})", f"{nll:.3f}"]
        lines.append(cells)
    names = {"resnet20": "ResNet-20", "resnet56": "ResNet-56", "resnet18": "ResNet-18"}
    head = [f"{names[n]}, {score}" for n in models for score in ("ECE", "NLL")]
    return markdown(["severity 5", *head], lines)


def linearised() -> str:
    """Scores of posteriors over all layers on shifted images, at equal price without shift."""
    digits, photographs = read(LINEARISED), read("linearised-resnet20/metrics.csv")
    most = max(int(row["n"]) for row in photographs)  # costly methods have seen fewer images
    columns = {
        name: _shifted(digits, name) for name in dict.fromkeys(r["posterior"] for r in digits)
    }
    columns["KFAC, ResNet-20"] = [r for r in _shifted(photographs, "KFAC") if int(r["n"]) == most]
    lines = []
    for method in dict.fromkeys(row["method"] for row in digits):
        cells = [method]
        for rows in columns.values():
            own = [row for row in rows if row["method"] == method]
            scores = (f"{mean(own, s):.3f}" for s in ("ece", "nll", "brier") if own)
            cells.append(" / ".join(scores))
        lines.append(cells)
    return markdown(["ECE / NLL / Brier", *columns], lines)


def _shifted(rows: Iterable[Row], posterior: str) -> list[Row]:
    own = (row for row in rows if row["posterior"] == posterior)
    return [row for row in own if row["shift"] not in ("0", "clean")]


LIBRARIES = "laplace-torch/libraries.csv"
STRUCTURES = {"diag": "diagonal", "kron": "Kronecker"}


def laplace_libraries() -> str:
    """Costs of fits and predictions of both libraries."""
    lines = []
    for row in read(LIBRARIES):
        case = [row["network"], STRUCTURES[row["structure"]], row["library"]]
        if row["error"]:
            is_full = "can't allocate memory" in row["error"]
            lines.append([*case, "over 6 GB" if is_full else "refused", "", "", ""])
            continue
        columns = "fit_seconds", "fit_megabytes", "predict_milliseconds", "predict_megabytes"
        lines.append([*case, *(_three_digits(float(row[column])) for column in columns)])
    head = ["network", "posterior", "library", "fit, s", "its peak, MB", "prediction, ms per input"]
    return markdown([*head, "its peak, MB"], lines, left=3)


def _three_digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def laplace_agreement() -> str:
    """How far variances and predictions of both libraries are apart."""
    columns = "variance_median", "variance_most", "prediction_most"
    lines = [
        [row["network"], STRUCTURES[row["structure"]], *(f"{float(row[c]):.1e}" for c in columns)]
        for row in read(LIBRARIES)
        if row["variance_most"]
    ]
    head = ["network", "posterior", "variances, median", "variances, largest", "GLM, largest"]
    return markdown(head, lines, left=2)


def commands() -> str:
    """The installed commands, their options and what they do, from their own definitions."""
    import typer

    from acnml.cli import build_app

    lines = []
    for words, command in _leaves(typer.main.get_command(build_app()), "acnml"):
        names = [max(p.opts, key=len) for p in command.params if p.param_type_name == "option"]
        shown = ", ".join(f"`{name}`" for name in names if name != "--help")
        about = (command.help or "").split("\n\n")[0].replace("\n", " ").replace("|", "\\|")
        lines.append([f"`{words}`", shown, about])
    return markdown(["command", "options", "what it does"], lines, left=3)


def _leaves(command: Any, words: str) -> Iterator[tuple[str, Any]]:
    inner = getattr(command, "commands", None)
    if inner is None:
        yield words, command
    else:
        for name, each in inner.items():
            yield from _leaves(each, f"{words} {name}")


RULES = (EQUAL, "density-temperature", "acnml", "closed-form")


def segmentation() -> str:
    """ECE and NLL of pixels at equal price, by shift."""
    return _by_shift(read("segmentation/metrics.csv"), RULES)


def heads(data: str, *methods: str) -> str:
    """ECE and NLL of several labels or of tokens at equal price, by shift: means over seeds."""
    return _by_shift(select("heads/metrics.csv", data=data), methods)


def _by_shift(every: Sequence[Row], methods: Sequence[str]) -> str:
    shifts, lines = list(dict.fromkeys(row["shift"] for row in every)), []
    for method in methods:
        cells = [method]
        for shift in shifts:
            rows = [row for row in every if (row["shift"], row["method"]) == (shift, method)]
            cells.append(" / ".join(f"{mean(rows, name):.3f}" for name in ("ece", "nll")))
        lines.append(cells)
    return markdown(["ECE / NLL", "no shift", *shifts[1:]], lines)


TABLES: dict[str, Callable[[], str]] = {
    "segmentation": segmentation,
    "heads-labels": partial(heads, "several labels", *RULES),
    "heads-tokens": partial(heads, "tokens", "network", *RULES),
    "evidence": evidence,
    "gain": gain,
    "won": won,
    "unknown": unknown,
    "tabular": tabular,
    "conformal": conformal,
    "text": text,
    "theory": theory,
    "fidelity": fidelity,
    "label-noise": label_noise,
    "if-comp": if_comp,
    "linearised": linearised,
    "laplace-libraries": laplace_libraries,
    "laplace-agreement": laplace_agreement,
    "commands": commands,
    **decision_tables.TABLES,
    **paper_tables.TABLES,
    **benchmark_tables.TABLES,
}
