"""Numbers of the pages that are more than a statistic of one column. `VALUES` lists their queries.

Every function takes the words of a query and returns one or more numbers.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from operator import add, mul, truediv
from typing import Any

from scipy.stats import t as student

from decision_tables import held
from results import RESULTS, ROOT, Row, read, select
from studies.cifar10_c import methods as cifar10_c
from studies.cifar10_c.settings import CLEAN
from studies.corruptions import BENCHMARK
from studies.engine.compare import by_shift, lower, of_method
from studies.engine.method import Method
from studies.paper_mnist.naive import MOMENTUM
from studies.paper_mnist.settings import PRESETS
from studies.paper_mnist.study import AT_ONE_RATE
from studies.rotated_mnist import methods as rotated_mnist

# Methods of the paper's studies, as the pages call them.
RESNET20 = "linearised-resnet20/metrics.csv"
MAP_ONE_RATE, BMA_ONE_RATE, ACNML_ONE_RATE, _ = AT_ONE_RATE
CIFAR = {
    "SGD": cifar10_c.MAP_SGD,
    "SWA": cifar10_c.MAP_SWA,
    "SWA-Temp": cifar10_c.TEMPERED,
    "SWA-Temp, near": cifar10_c.TEMPERED_NEAR,
    "SWA-Temp, SWA's price": cifar10_c.TEMPERED_BUDGET,
    "SWA-Temp, ACNML-SWAGD's price": cifar10_c.TEMPERED_MATCHED,
    "SWA-Ensemble": cifar10_c.SWA_ENSEMBLE,
    "SWA-Dropout": cifar10_c.SWA_DROPOUT,
    "SWAG-D": cifar10_c.BMA_SWAG_D,
    "SWAG": cifar10_c.BMA_SWAG,
    "KFAC-Laplace": cifar10_c.BMA_KFAC,
    "KFAC-Laplace, scale 1": cifar10_c.BMA_KFAC_UNSCALED,
    "KFAC-Laplace, one batch": cifar10_c.BMA_MADDOX,
    "ACNML-KFAC, one batch": cifar10_c.ACNML_MADDOX,
    "ACNML-SWAGD": cifar10_c.ACNML_SWAG_D_PAPERS,
    "ACNML-SWAGD, near": cifar10_c.ACNML_SWAG_D_TEMPERED,
    "ACNML-KFAC": cifar10_c.ACNML_KFAC_PAPERS,
    "last layer": cifar10_c.ACNML_HEAD,
    "last layer, SWA's price": cifar10_c.ACNML_HEAD_ALPHA,
    "last layer, near": cifar10_c.ACNML_HEAD_ALPHA_TEMPERED,
}
MNIST = {
    "MAP": rotated_mnist.MAP_BBP,
    "BMA": rotated_mnist.BMA_BBP,
    "ACNML": rotated_mnist.ACNML_BBP_PAPER,
    "linearised": rotated_mnist.ACNML_BBP,
    "network": rotated_mnist.MAP,
    "tempered network": rotated_mnist.TEMPERED,
    "tempered ensemble": rotated_mnist.TEMPERED_ENSEMBLE,
    "ensemble of ACNML": rotated_mnist.ACNML_HEADS,
    "last layer": rotated_mnist.ACNML_HEAD,
    "MAP, SWAG-D": rotated_mnist.MAP_SWAG,
    "BMA, SWAG-D": rotated_mnist.BMA_SWAG,
    "ACNML, SWAG-D": rotated_mnist.ACNML_SWAG,
    "BMA, KFAC": rotated_mnist.BMA_KFAC,
    "ACNML, KFAC": rotated_mnist.ACNML_KFAC,
    "MAP, one rate": MAP_ONE_RATE,
    "BMA, one rate": BMA_ONE_RATE,
    "ACNML, one rate": ACNML_ONE_RATE,
}


def evidence(score: str, group: str, method: str, *networks: str) -> list[float]:
    """`evidence ece "severity 5" ACNML resnet20`: the mean over shifts at a price of 0.01 nats."""
    conditions: dict[str, str | float] = {"group": group, "method": method, "price": 0.01}
    return [
        statistics.fmean(
            float(row[score])
            for row in select("evidence/metrics.csv", network=network, **conditions)
        )
        for network in networks
    ]


TABULAR = "tabular/metrics.csv"


def by_table(classifier: str, method: str, score: str, rows: str = "shifted") -> dict[str, float]:
    """Return a score for every table: the mean over seeds."""
    found = select(TABULAR, classifier=classifier, method=method, rows=rows)
    values: dict[str, list[float]] = {}
    for row in found:
        values.setdefault(row["table"], []).append(float(row[score]))
    return {table: statistics.fmean(each) for table, each in values.items()}


def tables_lower(score: str, classifier: str, rows: str, ours: str, rival: str) -> list[float]:
    """`tables-lower ece mlp shifted ACNML sigmoid`: at how many tables ours is lower."""
    pair = (by_table(classifier, method, score, rows) for method in (ours, rival))
    return [lower(*pair)]


# Networks for images with shifts that have labels.
IMAGES = ("letters", "resnet20", "resnet56", "resnet20-own", "resnet14-cifar100")


def unshifted(score: str, method: str) -> list[float]:
    """`unshifted ece ACNML`: the mean over networks on images without shift."""
    return [statistics.fmean(evidence(score, "clean", method, *IMAGES))]


def toy(column: str, sample: str) -> list[float]:
    """`toy confidence separable`: CNMAP in the plane, for λ = 0.1, 1 and 10."""
    rows = select("toy/results.csv", sample=sample, method="CNMAP")
    return [float(row[column]) for row in rows]


def rivals(network: str, method: str) -> list[float]:
    """`rivals streams "variational last layer"`: ECE and NLL under the strongest shift."""
    file = "evidence-rivals-letters" if network == "letters" else "evidence-rivals"
    found = select(f"{file}/metrics.csv", network=network, method=method, price=0.01)
    row = max((row for row in found if row["nll"]), key=lambda row: float(row["nll"]))
    return [float(row["ece"]), float(row["nll"])]


def linearised_gap(score: str) -> list[float]:
    """`linearised-gap ece`: of ResNet-20 to the true network, and half of its 95 % interval."""
    by_method = {
        method: [float(row[score]) for row in select(RESNET20, method=method, n=200)]
        for method in ("linearised network", "true network")
    }
    pairs = list(zip(*by_method.values(), strict=True))[1:]  # the first has no shift
    apart = [linearised - true for linearised, true in pairs]
    half = student.ppf(0.975, len(apart) - 1) * statistics.stdev(apart) / math.sqrt(len(apart))
    return [abs(statistics.fmean(apart)), float(half)]


def cnml_distances(column: str, problem: str = "MNIST", posterior: str = "EK-FAC") -> list[float]:
    """`cnml-distances variation`: of the linearised network and of the optimum, at α = 1."""
    found = []
    for solver in ("linearised network", "solved"):
        (row,) = select(
            "fidelity/metrics.csv",
            queries="all",
            alpha=1,
            problem=problem,
            posterior=posterior,
            method=f"ACNML, {solver}",
        )
        found.append(float(row[column]))
    return found


def linearised_farther() -> list[float]:
    """`linearised-farther`: the ratio of these distances, the least and the most."""
    pairs = [(problem, over) for problem in ("digits", "MNIST") for over in ("full", "EK-FAC")]
    distances = [cnml_distances("variation", *pair) for pair in pairs]
    ratios = [linearised / solved for linearised, solved in distances]
    return [min(ratios), max(ratios)]


def cifar_scores(
    score: str, method: str, severity: str, images: int = 1000, run: str = "cifar10-c"
) -> dict[str, float]:
    """Return a score by corruption, at a severity 1 to 5; or that of clean images."""
    return by_shift(cifar_rows(run, CIFAR[method], severity, images), score)


def cifar_rows(run: str, method: Method, severity: str, images: int) -> list[Row]:
    """Return a method's rows of the fifteen corruptions at a severity, or of clean images.

    Raises:
        ValueError: if one of them is missing.
    """
    clean = severity == CLEAN
    shifts = {CLEAN} if clean else {f"{corruption} {severity}" for corruption in BENCHMARK}
    rows = [row for row in read(f"{run}/metrics.csv") if row["n"] == str(images)]
    found = of_method((row for row in rows if row["shift"] in shifts), method.name)
    if missing := shifts - {row["shift"] for row in found}:
        raise ValueError(f"{run} has no {', '.join(sorted(missing))} for {method.name!r}")
    return found


def cifar(score: str, method: str, *severities: str, images: int = 1000) -> list[float]:
    """`cifar ece ACNML-SWAGD 4 5`: the mean over corruptions, for every severity."""
    return [
        statistics.fmean(cifar_scores(score, method, severity, images).values())
        for severity in severities
    ]


def cifar_few(score: str, method: str, *severities: str) -> list[float]:
    """`cifar-100`: the same on 100 images of each corruption."""
    return cifar(score, method, *severities, images=100)


def cifar_lower(score: str, ours: str, rival: str, *severities: str) -> list[float]:
    """`cifar-lower ece ACNML-SWAGD SWA 4 5`: for how many corruptions ours is lower."""
    return [
        lower(cifar_scores(score, ours, each), cifar_scores(score, rival, each))
        for each in severities
    ]


def cifar_run(run: str, images: str, score: str, severity: str, *methods: str) -> list[float]:
    """`cifar-run cifar10-c-vgg16 100 ece 5 SWA SWAG-D`: means over corruptions and seeds."""
    return [
        statistics.fmean(cifar_scores(score, method, severity, int(images), run).values())
        for method in methods
    ]


def cifar_run_lower(
    run: str, images: str, score: str, severity: str, ours: str, *rivals: str
) -> list[float]:
    """`cifar-run-lower RUN 100 ece 5 ACNML-SWAGD SWA`: for how many corruptions ours is lower."""
    own, *others = (
        cifar_scores(score, method, severity, int(images), run) for method in (ours, *rivals)
    )
    return [lower(own, other) for other in others]


def cifar_less(score: str, ours: str, rival: str, *severities: str) -> list[float]:
    """`cifar-less nll ours rival 4 5`: how much lower our mean over corruptions is."""
    pairs = zip(cifar(score, ours, *severities), cifar(score, rival, *severities), strict=True)
    return [its - own for own, its in pairs]


def mnist_scores(run: str, score: str, angles: str, method: str, images: int) -> dict[str, float]:
    """Return a score by angle: at one angle, as 0, or from one up, as 45+."""
    first = float(angles.rstrip("+"))

    def wanted(row: Row) -> bool:
        if row["shift"] == "random" or int(row["n"]) != images:
            return False
        angle = float(row["shift"].rstrip("°"))
        return angle >= first if angles.endswith("+") else angle == first

    rows = filter(wanted, read(f"{run}/metrics.csv"))
    return by_shift(of_method(rows, MNIST[method].name), score)


def mnist(run: str, images: str, score: str, angles: str, *methods: str) -> list[float]:
    """`mnist paper-mnist 10000 ece 45+ MAP BMA`: the mean over angles, for every method."""
    return [
        statistics.fmean(mnist_scores(run, score, angles, method, int(images)).values())
        for method in methods
    ]


def mnist_lower(
    run: str, images: str, score: str, angles: str, ours: str, *rivals: str
) -> list[float]:
    """`mnist-lower ... ACNML BMA`: at how many angles ours is lower than all rivals."""
    own = mnist_scores(run, score, angles, ours, int(images))
    others = [mnist_scores(run, score, angles, rival, int(images)) for rival in rivals]
    best = {shift: min(other[shift] for other in others) for shift in own}
    return [lower(own, best)]


def angles(run: str, images: str, first: str) -> list[float]:
    """`angles paper-mnist 10000 45+`: the number of angles."""
    return [len(mnist_scores(run, "ece", first, "MAP", int(images)))]


def naive(
    column: str, shift: str, *methods: str, file: str = "paper-mnist-small/naive-subset.csv"
) -> list[float]:
    """`naive confidence 0° MAP`: the mean over the queries of the study of naive CNML."""
    rows = [row for row in read(file) if row["shift"] == shift]
    return [
        statistics.fmean(float(row[column]) for row in rows if row["method"] == method)
        for method in methods
    ]


def naive_whole(column: str, shift: str, *methods: str) -> list[float]:
    """`naive-whole confidence 0° MAP`: the same with all training images."""
    return naive(column, shift, *methods, file="paper-mnist-whole/naive-whole.csv")


def adapted(*shifts: str, file: str = "paper-mnist-small/naive-subset.csv") -> list[float]:
    """`adapted 0° random`: the mean of C(x) - 1 of ACNML in times of naive CNML's."""
    pairs = (naive("normaliser", shift, "ACNML", "naive CNML", file=file) for shift in shifts)
    return [(ours - 1) / (its - 1) for ours, its in pairs]


def adapted_whole(*shifts: str) -> list[float]:
    """`adapted-whole 0° random`: the same with all training images."""
    return adapted(*shifts, file="paper-mnist-whole/naive-whole.csv")


def flat_progress(preset: str, part: str) -> list[float]:
    """`flat-progress small subset`: how far naive CNML gets where the data leave the loss flat.

    There the weight decay 1 / (n σ₀²) alone acts. SGD with momentum covers a share
    1 - exp(-rate · decay · steps) of the way, with rate = learning rate / (1 - momentum).
    """
    settings = getattr(PRESETS[preset], part)
    decay = 1 / settings.training.prior_std**2  # for every image
    steps = settings.epochs / settings.batch_size  # for every image
    return [1 - math.exp(-settings.learning_rate / (1 - MOMENTUM) * decay * steps)]


VERDICTS = ("holds", "direction holds", "mixed", "does not hold", "open", "not run")


def verdict_cells() -> list[list[str]]:
    """Return the cells of all rows of docs/paper.md that judge a claim."""
    text = re.sub(r"<!--.*?-->", "", (ROOT / "docs/paper.md").read_text(encoding="utf-8"))
    rows = [cells(line) for line in text.splitlines() if line.startswith("|")]
    return [row for row in rows if len(row) == 5 and row[1].startswith(VERDICTS)]


def verdicts(verdict: str, scale: str = "") -> list[float]:
    """`verdicts holds "paper's"`: how many claims of the page have a verdict, at some scale."""
    judged = [re.split(r"[:;(¹]", row[1])[0].strip() for row in verdict_cells()]
    scales = [row[4].startswith(scale) for row in verdict_cells()]
    return [sum(each == verdict and at for each, at in zip(judged, scales, strict=True))]


def report_rows(file: str, *head: str) -> list[list[str]]:
    """Return the cells of the table of a report that has these first columns."""
    lines = iter((RESULTS / file).read_text(encoding="utf-8").splitlines())
    for line in lines:
        if cells(line)[: len(head)] == list(head):
            next(lines)  # the rule below the head
            return [cells(row) for row in _until_empty(lines)]
    raise ValueError(f"{file} has no table with the columns {head}")


def cells(line: str) -> list[str]:
    """Return the cells of a line of a Markdown table."""
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def _until_empty(lines: Iterator[str]) -> Iterator[str]:
    for line in lines:
        if not line.strip():
            return
        yield line


def naive_score(run: str, score: str, shift: str, *methods: str) -> list[float]:
    """`naive-score paper-mnist-small ECE random MAP`: of the table of naive CNML in a report."""
    head = ("method", "shift", "accuracy", "NLL", "Brier score", "ECE")
    rows = {(row[0], row[1]): row for row in report_rows(f"{run}/results.md", *head)}
    return [float(rows[method, shift][head.index(score)]) for method in methods]


def quoted(file: str, text: str) -> list[float]:
    """`quote toy/results.md "confidence {} / {}"`: the numbers at {} in a report.

    ... stands for any text of the same line. The text must be found once.
    """
    escaped = re.escape(text).replace(r"\{\}", r"([\d,]*\.?\d+)(%?)").replace(r"\.\.\.", ".*?")
    report = (RESULTS / file).read_text(encoding="utf-8")
    found = {match.groups() for match in re.finditer(escaped, report)}
    if len(found) != 1:
        raise ValueError(f"{len(found)} different places in {file} are like {text!r}")
    (groups,) = found
    numbers, percents = groups[::2], groups[1::2]
    return [
        float(number.replace(",", "")) / (100 if percent else 1)
        for number, percent in zip(numbers, percents, strict=True)
    ]


def paper(network: str, method: str, *columns: str) -> list[float]:
    """`paper VGG16 SWA nll ece`: numbers of the paper's Table 2."""
    (row,) = [
        row
        for row in read("zhou-levine-2021/table-2.csv")
        if (row["network"], row["method"]) == (network, method)
    ]
    return [float(row[column]) for column in columns]


@cache
def measured(file: str) -> Any:
    """Return the content of a JSON file in benchmarks/."""
    return json.loads((ROOT / "benchmarks" / file).read_text(encoding="utf-8"))


def seconds(subject: str, method: str) -> float:
    """Return the measured time of an input in a batch."""
    (row,) = [
        row
        for part in ("costs", "earlier costs")
        for row in measured("results.json")[part]
        if (row["subject"], row["method"]) == (subject, method)
    ]
    return float(row["seconds"])


def gap(solver: str, subject: str, *posteriors: str) -> list[float]:
    """`gap "the paper's steps" ResNet-20 diagonal`: nats below the best objective found."""
    rows = {
        row["posterior"]: row
        for row in measured("results.json")["gaps"]
        if row["subject"] == subject
    }
    return [rows[posterior]["gap"][solver] for posterior in posteriors]


def linearising() -> list[float]:
    """`linearising`: the time of the paper's steps on rotated MNIST, in times of linearising."""
    rows = read("rotated-mnist/timings.csv")
    steps, linearised = (
        min(float(row["seconds_per_input"]) for row in of_method(rows, MNIST[method].name))
        for method in ("ACNML", "linearised")
    )
    return [steps / linearised]


# Networks of the paper's Table 1, as benchmarks/results.json calls them.
TIMED = {
    "mlp": "MLP 784-1200-1200-10",
    "vgg16": "VGG16",
    "wide_resnet28x10": "WideResNet-28-10",
}


def epoch(network: str) -> float:
    """Return the computed seconds of an epoch of naive CNML, in batches."""
    return seconds(TIMED[network], "naive CNML, an epoch (computed)")


def faster(whose: str, *networks: str) -> list[float]:
    """`faster single mlp`: an epoch of naive CNML in times of ACNML's steps.

    `theirs` are the paper's times, `single` ours of one input, `batch` ours of an input of a batch.
    """
    if whose == "theirs":
        naive_cnml, acnml = (
            next(row for row in read("zhou-levine-2021/table-1.csv") if row["method"] == method)
            for method in ("naive CNML", "ACNML")
        )
        return [float(naive_cnml[network]) / float(acnml[network]) for network in networks]
    if whose == "single":
        times = measured("single_input.json")
        return [
            times[network]["naive CNML, an epoch"] / times[network]["five exact steps"]
            for network in networks
        ]
    steps = "diagonal: 5 exact steps"
    return [epoch(network) / seconds(TIMED[network], steps) for network in networks]


def ratio(file: str, column: str, *words: str) -> list[float]:
    """`ratio measurements/serving.csv p50_ms path=/onnx over path=/network`: one row by another."""
    at = words.index("over")
    found = []
    for conditions in (words[:at], words[at + 1 :]):
        (row,) = select(file, **dict(word.split("=", 1) for word in conditions))
        found.append(float(row[column]))
    return [found[0] / found[1]]


def benchmark(file: str, *words: str) -> list[float]:
    """`benchmark scoring.json ray/rows over "fit/one process/wall"`: numbers of a JSON file.

    Words are paths of keys or plain numbers, with `over`, `times` and `plus` between them. They are
    read from left to right.
    """
    value = _at(file, words[0])
    for operator, word in zip(words[1::2], words[2::2], strict=True):
        value = OPERATORS[operator](value, _at(file, word))
    return [value]


OPERATORS = {"over": truediv, "times": mul, "plus": add}


def _at(file: str, word: str) -> float:
    """Return a plain number, or the one at a path of keys such as `ray/rows`."""
    try:
        return float(word)
    except ValueError:
        found = measured(file)
        for key in word.split("/"):
            found = found[key]
        return float(found)


VALUES: dict[str, Callable[..., Iterable[float]]] = {
    "evidence": evidence,
    "unshifted": unshifted,
    "tables-lower": tables_lower,
    "toy": toy,
    "linearised-farther": linearised_farther,
    "cnml-distances": cnml_distances,
    "linearised-gap": linearised_gap,
    "rivals": rivals,
    "cifar": cifar,
    "cifar-100": cifar_few,
    "cifar-lower": cifar_lower,
    "cifar-run": cifar_run,
    "cifar-run-lower": cifar_run_lower,
    "cifar-less": cifar_less,
    "mnist": mnist,
    "mnist-lower": mnist_lower,
    "angles": angles,
    "naive": naive,
    "naive-whole": naive_whole,
    "adapted": adapted,
    "adapted-whole": adapted_whole,
    "flat-progress": flat_progress,
    "verdicts": verdicts,
    "naive-score": naive_score,
    "quote": quoted,
    "paper": paper,
    "held": lambda method: [held(method)],
    "faster": faster,
    "gap": gap,
    "linearising": linearising,
    "ratio": ratio,
    "benchmark": benchmark,
}
