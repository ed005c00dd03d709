"""The tables of the pages, computed from docs/results. `TABLES` lists them by name."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import benchmark_tables
import decision_tables
import paper_tables
from results import Row, markdown, read, select
from values import IMAGES, TABULAR, by_table

EVIDENCE = "evidence/metrics.csv"
COMPARED = "evidence/comparisons.csv"
CASES = "evidence/cases.csv"
CONFORMAL = "tabular/conformal.csv"
DETECTION = "text/detection.csv"
THEORY = "theory/results.csv"
FIDELITY = "fidelity/metrics.csv"
LABEL_NOISE = "label-noise/metrics.csv"
IF_COMP_STUDY = "if-comp/metrics.csv"

PRICE = 0.01
TEMPERATURE, EQUAL, DENSITY = "temperature", "temperature of equal price", "density temperature"
ACNML, WEIGHED = "ACNML", "ACNML · s"  # `calibrate` is the second: α weighed by typicality
LEVERAGE, GLM, BMA = "leverage NML", "GLM-Laplace", "BMA"
FIRST_ORDER, PNML = "IF-COMP, last layer", "pNML"
DROPOUT, ENSEMBLE = "MC dropout", "ensemble"
ENSEMBLE_ACNML, ENSEMBLE_WEIGHED = "ensemble of ACNML", "ensemble of ACNML · s"

# Names as readers know them; others are printed as they are in the file.
NETWORKS = {
    "mnist": "MNIST network",
    "resnet20": "ResNet-20",
    "resnet56": "ResNet-56",
    "resnet18": "ResNet-18",
    "resnet20-own": "our ResNet-20",
    "letters": "network for letters",
    "clinc150": "questions (CLINC150)",
    "tables": "tables",
    "mnist-200": "MNIST network, 200 images",
}
GROUPS = {
    "rotated by 45° or more": "digits rotated by 45° or more",
    "severity 5": "CIFAR-10-C severity 5",
    "severity 3": "CIFAR-10-C severity 3",
    "near OOD": "unknown classes, near",
    "far OOD": "unknown classes, far",
}


def mean(rows: Iterable[Row], column: str) -> float:
    """Return the mean of a column."""
    return statistics.fmean(float(row[column]) for row in rows)


def networks() -> list[str]:
    """Return the networks for images of the study, in its order."""
    found = dict.fromkeys(row["network"] for row in read(EVIDENCE))
    return [name for name in found if name in IMAGES]


def shifts_by_strength(network: str) -> list[str]:
    """Return the groups of labelled shifts, that with the largest ECE of the network first."""
    names = dict.fromkeys(r["group"] for r in select(EVIDENCE, network=network) if r["nll"])
    shifted = [name for name in names if name != "clean"]
    plain = {"network": network, "method": "network"}
    return sorted(shifted, key=lambda g: -mean(select(EVIDENCE, group=g, **plain), "ece"))


def scores(network: str, group: str, method: str) -> list[Row]:
    """Return the scores of a method at the price of all tables here, shift by shift."""
    return select(EVIDENCE, network=network, group=group, method=method, price=PRICE)


def place(network: str, group: str) -> str:
    """Return the name of a network and of a group of shifts."""
    shift = group if network == "letters" else GROUPS.get(group, group)
    return f"{NETWORKS.get(network, network)}, {shift}"


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
    lines = [[name, *(pair(*p, method) for p in places)] for method, name in shown.items()]
    return markdown(["method", *(place(*p) for p in places)], lines)


def has(network: str, group: str, method: str) -> bool:
    """Return whether a method was run on a network."""
    wanted = {"network": network, "group": group, "method": method}
    return any(all(row[k] == v for k, v in wanted.items()) for row in read(EVIDENCE))


def pair(network: str, group: str, method: str) -> str:
    """Return mean ECE and NLL of a method, or nothing where it was not run."""
    if not has(network, group, method):
        return ""
    rows = scores(network, group, method)
    return f"{mean(rows, 'ece'):.3f} / {mean(rows, 'nll'):.3f}"


def difference(row: Row) -> str:
    """Return a mean difference with its interval."""
    ends = f" [{float(row['low']):+.3f}, {float(row['high']):+.3f}]" if row["low"] else ""
    return f"{float(row['mean']):+.3f}{ends}"


def counts(row: Row) -> str:
    """Return shifts won and lost, with those that are certain in brackets."""
    return f"{row['won']} ({row['surely_won']}) : {row['lost']} ({row['surely_lost']})"


def against(method: str, rival: str, networks: Sequence[str] | None = None) -> str:
    """Compare a method with a rival in every group of shifts, at the price of all tables here."""
    rows = select(COMPARED, method=method, rival=rival, price=PRICE)
    by_score = {(r["network"], r["group"], r["score"]): r for r in rows}
    lines = []
    for network, group in dict.fromkeys((r["network"], r["group"]) for r in rows):
        if networks is not None and network not in networks:
            continue
        cells = []
        for score in ("ece", "nll"):
            own = by_score.get((network, group, score))
            cells += ["", ""] if own is None else [difference(own), counts(own)]
        lines.append([place(network, group), *cells])
    return markdown(["shift", "ECE", "won : lost", "NLL", "won : lost"], lines)


def intervals() -> str:
    """The default of `calibrate` against the temperature of equal price, at every shift."""
    return against(WEIGHED, EQUAL)


def confirmation() -> str:
    """With typicality against without, on data that had no part in finding the rule."""
    return against(WEIGHED, ACNML, ("letters", "clinc150", "tables"))


def gains_by_method() -> str:
    """All main methods at the strongest shifts: ECE / NLL."""
    places = [(network, shifts_by_strength(network)[0]) for network in networks()]
    places.append(("tables", "shifted rows"))
    posterior = (GLM, BMA, ACNML, WEIGHED, FIRST_ORDER)
    shown = ("network", TEMPERATURE, EQUAL, DENSITY, *posterior, LEVERAGE, PNML)
    lines = [[method, *(pair(*p, method) for p in places)] for method in shown]
    lines = [line for line in lines if any(line[1:])]  # a method may not have been run yet
    return markdown(["ECE / NLL", *(place(*p) for p in places)], lines)


def averages() -> str:
    """Averages over networks, masks or weights, on rotated digits: the first seed."""
    own: dict[str, str | float] = {
        "network": "mnist",
        "group": "rotated by 45° or more",
        "price": PRICE,
        "seed": 0,
    }
    shown = (EQUAL, DENSITY, WEIGHED, BMA, DROPOUT, ENSEMBLE, ENSEMBLE_ACNML, ENSEMBLE_WEIGHED)
    lines = [
        [method, *(f"{mean(rows, score):.3f}" for score in ("ece", "nll", "brier", "aurc"))]
        for method in shown
        for rows in [select(EVIDENCE, method=method, **own)]
    ]
    return markdown(["digits rotated by 45° or more", "ECE", "NLL", "Brier", "AURC"], lines)


def unknown() -> str:
    """Detection of inputs of no known class: AUROC / AUPR / FPR95, and ECE with them."""
    groups = dict.fromkeys((r["network"], r["group"]) for r in read(EVIDENCE) if not r["nll"])
    shown = [(m, "confidence") for m in (TEMPERATURE, EQUAL, DENSITY, WEIGHED, ENSEMBLE)]
    shown += [(ACNML, "regret"), (WEIGHED, "regret"), (TEMPERATURE, "typicality")]
    lines = []
    for network, group in groups:
        for method, by in shown:
            if not has(network, group, method):
                continue
            rows = scores(network, group, method)
            cells = [f"{mean(rows, f'{m}_{by}'):.3f}" for m in ("auroc", "aupr", "fpr95")]
            name, ece = f"{method}, by {by}", f"{mean(rows, 'ece'):.3f}"
            if by == "typicality":
                name, ece = "s(x) alone", ""
            lines.append([place(network, group), name, *cells, ece])
    return markdown(["inputs", "method", "AUROC", "AUPR", "FPR95", "ECE with them"], lines, left=2)


def typicality_cases() -> str:
    """In how many cases a method has the lower mean."""
    lines = []
    pairs = [(WEIGHED, ACNML), (WEIGHED, "temperature of equal price"), (WEIGHED, DENSITY)]
    pairs += [("ACNML · s²", DENSITY), (LEVERAGE, DENSITY), ("both", DENSITY)]
    for networks in dict.fromkeys(row["networks"] for row in read(CASES)):
        for method, rival in pairs:
            own = select(CASES, networks=networks, method=method, rival=rival)
            cells = {row["score"]: f"{row['lower']} of {row['cases']}" for row in own}
            data = "fresh" if networks == "fresh" else "found"
            lines.append([data, method, rival, *(cells.get(s, "") for s in ("ece", "nll"))])
    return markdown(["data", "method", "rival", "lower ECE", "lower NLL"], lines, left=3)


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
        "ACNML, +0.01": "ACNML, one α (+0.01 nats)",
        "ACNML · s, +0.01": "ACNML · s (+0.01 nats)",
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
    head = [f"{NETWORKS[n]}, {score}" for n in models for score in ("ECE", "NLL")]
    return markdown(["severity 5", *head], lines)


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


def laplace_predictors() -> str:
    """Costs of predictors on the networks of the comparison."""
    lines = []
    for row in read("laplace-torch/predictors.csv"):
        ms, megabytes = float(row["predict_milliseconds"]), float(row["predict_megabytes"])
        name, one = row["network"], "network"
        (network,) = select("laplace-torch/predictors.csv", network=name, predictor=one)
        passes = ms / float(network["predict_milliseconds"])
        cells = map(_three_digits, (passes, ms, megabytes))
        lines.append([name, row["predictor"], *cells])
    return markdown(["network", "predictor", "passes", "ms per input", "peak, MB"], lines, left=2)


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
    "typicality": typicality,
    "typicality-cases": typicality_cases,
    "intervals": intervals,
    "confirmation": confirmation,
    "methods": gains_by_method,
    "averages": averages,
    "unknown": unknown,
    "tabular": tabular,
    "conformal": conformal,
    "text": text,
    "theory": theory,
    "fidelity": fidelity,
    "label-noise": label_noise,
    "if-comp": if_comp,
    "laplace-libraries": laplace_libraries,
    "laplace-agreement": laplace_agreement,
    "laplace-predictors": laplace_predictors,
    "commands": commands,
    **decision_tables.TABLES,
    **paper_tables.TABLES,
    **benchmark_tables.TABLES,
}
