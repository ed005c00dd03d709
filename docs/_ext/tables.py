"""The tables of the pages, computed from docs/results. `TABLES` lists them by name."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from results import Row, read, select

EVIDENCE = "evidence/metrics.csv"
TABULAR = "tabular/metrics.csv"
CONFORMAL = "tabular/conformal.csv"
DETECTION = "text/detection.csv"
THEORY = "theory/results.csv"
FIDELITY = "fidelity/metrics.csv"
LABEL_NOISE = "label-noise/metrics.csv"
IF_COMP = "if-comp/metrics.csv"

PRICE = 0.01
TEMPERATURE, EQUAL, DENSITY = "temperature", "temperature of equal price", "density temperature"
ACNML, WEIGHED = "ACNML", "ACNML · s"  # `calibrate` is the second: α weighed by typicality

# Names as readers know them; others are printed as they are in the file.
NETWORKS = {
    "mnist": "MNIST network",
    "resnet20": "ResNet-20",
    "resnet56": "ResNet-56",
    "resnet18": "ResNet-18",
}
GROUPS = {
    "rotated by 45° or more": "digits rotated by 45° or more",
    "severity 5": "CIFAR-10-C severity 5",
    "severity 3": "CIFAR-10-C severity 3",
}


def markdown(head: Sequence[str], lines: Iterable[Sequence[str]], left: int = 1) -> str:
    """Return a table whose first `left` columns are text, and whose others are numbers."""
    rule = ["---"] * left + ["---:"] * (len(head) - left)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, rule, *lines))


def mean(rows: Iterable[Row], column: str) -> float:
    """Return the mean of a column."""
    return statistics.fmean(float(row[column]) for row in rows)


def networks() -> list[str]:
    """Return the networks of the study, in its order."""
    return list(dict.fromkeys(row["network"] for row in read(EVIDENCE)))


def shifts_by_strength(network: str) -> list[str]:
    """Return the groups of shifts, that with the largest ECE of the plain network first."""
    names = dict.fromkeys(r["group"] for r in select(EVIDENCE, network=network))
    shifted = [name for name in names if name != "clean"]
    plain = {"network": network, "method": "network"}
    return sorted(shifted, key=lambda g: -mean(select(EVIDENCE, group=g, **plain), "ece"))


def scores(network: str, group: str, method: str) -> list[Row]:
    """Return the scores of a method at the price of all tables here, shift by shift."""
    return select(EVIDENCE, network=network, group=group, method=method, price=PRICE)


def place(network: str, group: str) -> str:
    """Return the name of a network and of a group of shifts."""
    return f"{NETWORKS.get(network, network)}, {GROUPS.get(group, group)}"


def lowest_bold(values: Sequence[float]) -> list[str]:
    """Return numbers with three decimals, the lowest in bold; none if all look the same."""
    texts = [f"{value:.3f}" for value in values]
    best = min(texts, key=float)
    return texts if set(texts) == {best} else [f"**{t}**" if t == best else t for t in texts]


def gain() -> str:
    """What is gained over temperature scaling, and where nothing is: the table of the README."""
    compared = ("network", TEMPERATURE, EQUAL, WEIGHED)
    strong = [(n, shifts_by_strength(n)[0]) for n in networks()]
    weak = [(n, group) for n in networks() for group in shifts_by_strength(n)[1:]]
    clean = [(n, "clean") for n in networks()]
    groups = [
        *((place(*one), [one]) for one in strong),
        ("all networks, weaker shifts (mean)", weak),
        ("all networks, no shift (mean)", clean),
    ]
    lines = []
    for name, places in groups:
        rows = {m: [mean(scores(*p, m), "ece") for p in places] for m in compared}
        nll = {m: [mean(scores(*p, m), "nll") for p in places] for m in (EQUAL, WEIGHED)}
        lines.append(
            [
                name,
                *lowest_bold([statistics.fmean(rows[m]) for m in compared]),
                *lowest_bold([statistics.fmean(v) for v in nll.values()]),
            ]
        )
    for classifier, name in (("logistic", "logistic regression"), ("mlp", "MLP")):
        own = {"classifier": classifier, "rows": "shifted"}
        of = {
            m: select(TABULAR, method=m, **own) for m in ("classifier", TEMPERATURE, EQUAL, ACNML)
        }
        lines.append(
            [
                f"nine tables, {name}, shifted rows",
                *lowest_bold([mean(rows, "ece") for rows in of.values()]),
                *lowest_bold([mean(of[m], "nll") for m in (EQUAL, ACNML)]),
            ]
        )
    head = ["ECE (last two: NLL)", "no calibration", "best temperature"]
    head += ["temperature, same price", "ACNML", "NLL: temperature, same price", "NLL: ACNML"]
    return markdown(head, lines)


def evidence() -> str:
    """Strong shifts: ECE and NLL of the main methods, and the shifts that ACNML wins."""
    lines = []
    for network in networks():
        group = shifts_by_strength(network)[0]
        ece = [scores(network, group, m) for m in ("network", TEMPERATURE, EQUAL, DENSITY, WEIGHED)]
        nll = [scores(network, group, m) for m in (EQUAL, DENSITY, WEIGHED)]
        pairs = zip(scores(network, group, WEIGHED), scores(network, group, EQUAL), strict=True)
        won = [float(own["ece"]) < float(its["ece"]) for own, its in pairs]
        lines.append(
            [
                place(network, group),
                *lowest_bold([mean(rows, "ece") for rows in ece]),
                *lowest_bold([mean(rows, "nll") for rows in nll]),
                f"{sum(won)} of {len(won)}",
            ]
        )
    head = ["network under shift", "ECE: network", "best temperature", EQUAL, DENSITY, "ACNML"]
    return markdown([*head, f"NLL: {EQUAL}", DENSITY, "ACNML", "shifts won (ECE)"], lines)


def typicality() -> str:
    """All methods that use the typicality of an input, and those that they are compared with."""
    shown = {
        EQUAL: EQUAL,
        "GLM-Laplace": "GLM-Laplace, last layer",
        ACNML: ACNML,
        "ACNML, extended head": "ACNML, additive kernel",
        WEIGHED: "**ACNML, α·s(x)**",
        "ACNML · s²": "ACNML, α·s(x)²",
        DENSITY: "density temperature, s(x)",
        "density temperature, k-NN": "density temperature, k-NN",
        "both": "density temperature, then ACNML",
        "leverage NML": "closed-form NML, leverage c·s(x)²",
    }
    places = [(network, shifts_by_strength(network)[0]) for network in networks()]
    lines = [
        [name, *(f"{mean(r, 'ece'):.3f} / {mean(r, 'nll'):.3f}" for r in rows)]
        for method, name in shown.items()
        for rows in [[scores(*p, method) for p in places]]
    ]
    return markdown(["method", *(place(*p) for p in places)], lines)


def by_table(classifier: str, method: str, score: str) -> dict[str, float]:
    """Return a score on shifted rows for every table: the mean over seeds."""
    rows = select(TABULAR, classifier=classifier, method=method, rows="shifted")
    tables = dict.fromkeys(row["table"] for row in rows)
    return {table: mean([r for r in rows if r["table"] == table], score) for table in tables}


def tabular() -> str:
    """Tables under shift: all calibrators of scikit-learn, temperatures, and ACNML."""
    lines = []
    for method in ("classifier", TEMPERATURE, "sigmoid", "isotonic", EQUAL, ACNML):
        cells = []
        for classifier in ("logistic", "mlp"):
            better = []
            for score in ("ece", "nll"):
                its, ours = by_table(classifier, method, score), by_table(classifier, ACNML, score)
                cells.append(f"{statistics.fmean(its.values()):.3f}")
                better.append(sum(ours[table] < its[table] for table in its))
            cells.append("" if method == ACNML else f"{better[0]}, {better[1]} of {len(its)}")
        lines.append([method, *cells])
    columns = ["ECE", "NLL", "ACNML better (ECE, NLL)"]
    head = ["under shift"]
    for name in ("logistic regression", "MLP"):
        head += [f"{name}: {columns[0]}", *columns[1:]]
    return markdown(head, lines)


def conformal() -> str:
    """Coverage and size of conformal sets, in distribution and under shift."""
    lines = []
    for classifier, name in (("logistic", "logistic regression"), ("mlp", "MLP")):
        for method in (TEMPERATURE, EQUAL, ACNML):
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
    }
    questions = {
        "out-of-scope questions": "1,000 out-of-scope questions",
        "domains left out": "banking and credit cards left out of training",
    }
    columns = ("max. probability", "entropy", "energy", "regret")
    lines = []
    for experiment, asked in questions.items():
        for method, name in methods.items():
            rows = select(DETECTION, experiment=experiment, head="two layers", method=method)
            found = {row["score"]: f"{float(row['auroc']):.3f}" for row in rows}
            lines.append([asked, name, *(found.get(column, "") for column in columns)])
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
    ("ACNML, linearised", "EK-FAC"): "ACNML, linearised, EK-FAC",
    ("ACNML, solved", "diagonal"): "ACNML, solved, diagonal",
    ("ACNML, solved", "KFAC"): "ACNML, solved, KFAC",
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
            # A linear model is solved by its linearisation, and all of it is the last layer.
            solver, over = method, posterior
            if problem == "logistic regression":
                solver = method.replace("solved", "linearised")
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
    every = read(IF_COMP)
    models = list(dict.fromkeys(row["network"] for row in every))
    lines = []
    for method in dict.fromkeys(row["method"] for row in every):
        cells = [method]
        for network in models:
            rows = select(IF_COMP, network=network, method=method, severity=5)
            eces = [float(row["ece"]) for row in rows]
            low, middle, high = statistics.quantiles(eces, n=4, method="inclusive")
            nll = statistics.median(float(row["nll"]) for row in rows)
            cells += [f"{middle:.3f} ({low:.3f}, {high:.3f})", f"{nll:.3f}"]
        lines.append(cells)
    head = [f"{NETWORKS[n]}, {score}" for n in models for score in ("ECE", "NLL")]
    return markdown(["severity 5", *head], lines)


def commands() -> str:
    """Our commands, their options and what they do, from their own definitions."""
    import typer

    from acnml.cli import build_app as acnml_app
    from studies.__main__ import build_app as studies_app

    lines = []
    for program, app in (("acnml", acnml_app()), ("python -m studies", studies_app())):
        for words, command in _leaves(typer.main.get_command(app), program):
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


TABLES: dict[str, Callable[[], str]] = {
    "gain": gain,
    "evidence": evidence,
    "typicality": typicality,
    "tabular": tabular,
    "conformal": conformal,
    "text": text,
    "theory": theory,
    "fidelity": fidelity,
    "label-noise": label_noise,
    "if-comp": if_comp,
    "commands": commands,
}
