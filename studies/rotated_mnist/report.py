"""The sections of the rotated-MNIST report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from studies.engine.figures import Axis, frontier, lines
from studies.engine.method import Method
from studies.engine.report import Panels, Section
from studies.engine.results import Results
from studies.engine.sections import all_methods, detection, diagrams, knobs, solvers, timing
from studies.engine.tables import TITLES
from studies.rotated_mnist import methods as ms
from studies.rotated_mnist.settings import RANDOM, UPRIGHT, RotatedMnist

FAR = 45  # degrees from which digits count as rotated
CLASSES = 10


def headline(results: Results, far: Sequence[str]) -> str:
    """Say in one sentence what the numbers show; nothing while they are not finished."""
    shown = (ms.MAP_BBP, ms.BMA_BBP, ms.ACNML_BBP, ms.TEMPERED, ms.ACNML_HEAD)
    n = results.inputs(shown)
    found = [v for m in shown if (v := results.mean(m, "ece", far, n)) is not None]
    if len(found) < len(shown):
        return ""
    trio, (tempered, head) = found[:3], found[3:]
    means = ", ".join(f"{n} {v:.2f}" for n, v in zip(("MAP", "BMA", "ACNML"), trio, strict=True))
    verb = "better calibrated" if head < tempered else "not better calibrated"
    return (
        f"On digits rotated by {FAR}° or more the mean calibration error is {means} with the "
        f"paper’s mean-field posterior. At equal NLL on upright digits, last-layer ACNML "
        f"({head:.2f}) is {verb} than temperature scaling ({tempered:.2f})."
    )


def sections(results: Results) -> list[Section]:
    """Return all sections."""
    settings: RotatedMnist = results.study.settings
    places = {float(angle): (f"{angle}°",) for angle in sorted(settings.angles)}
    ticks = tuple(float(angle) for angle in sorted(settings.angles) if angle % 30 == 0)
    axis = Axis(places, "rotation", "{x:.0f}°", ticks)
    shown = [s for s in (UPRIGHT, "60°", "90°", "180°", RANDOM) if s in settings.shifts]
    converged = (
        "Mean total variation between a solver’s probabilities and those of the converged one "
        "(linearised, then 10 gradient steps) over all shifts; and the median residual of the "
        "converged solution, in posterior standard deviations. Networks with ReLU have kinks, and "
        "at a kink no gradient vanishes."
    )
    letters = (
        "notMNIST against upright MNIST test digits: AUROC (higher is better), and the share of "
        "digits flagged when 95 % of the letters are (lower is better). Letters have more ink: a "
        "method below the row “no network” does worse than the mean brightness."
    )
    return [
        what_was_done(results),
        the_papers_comparison(results, axis),
        matched_comparison(results, axis),
        trade_off(results),
        diagrams(
            results,
            ms.PAPER,
            {UPRIGHT: "upright", RANDOM: "random rotation"},
            "Bayes by Backprop. Points are groups of equally many images with similar confidence.",
        ),
        all_methods(results, shown),
        detection(results, letters),
        knobs(results),
        solvers(results, converged),
        cost(results),
    ]


def what_was_done(results: Results) -> Section:
    """Explain data, networks and how knobs were chosen."""
    settings, data = results.study.settings, results.data
    hidden = "-".join(str(width) for width in settings.hidden)
    counts = (settings.images.cheap, settings.images.paper_steps, settings.images.converged)
    cheap, steps, converged = map(data.count, counts)
    tolerance = settings.choice.tolerance
    price = f"at most {tolerance:g} nats above" if tolerance else "not above"
    rate = settings.bayes_by_backprop.variance_rate
    return Section(
        "What was done",
        [
            f"Networks with hidden layers {hidden} were trained on {len(data.train.labels):,} "
            f"training images; {len(data.held_out.labels):,} other upright images chose the knobs. "
            f"The networks then saw test images rotated by {len(settings.angles)} angles up to "
            f"{max(settings.angles)}° and by random angles. Most methods saw the first {cheap:,} "
            f"images of a random order, ACNML with the paper’s gradient steps {steps:,}, and "
            f"converged ACNML {converged:,}. MC dropout, and BMA and ACNML with KFAC and SWAG-D, "
            f"which the paper does not have for MNIST, saw {settings.images.beside:.0%} of these. "
            f"Bands and ± are one standard deviation over {len(settings.seeds)} seeds.",
            "Each family of methods has one knob: a temperature, ACNML’s weight α, the prior "
            "precision, or the scale of a covariance. Unless stated otherwise it was set by one "
            f"rule, on validation images: *the most cautious value whose NLL is {price} that of "
            "the plain network*. All methods thus have the same price on ordinary digits, and no "
            "rotated or test image was used to set them.",
            f"**One setting was chosen differently.** The variances of Bayes by Backprop learn "
            f"{rate:g} times faster than its means. This rate was chosen on rotated test images, "
            "in a short training, such that MAP, BMA and ACNML come in the order known from the "
            "paper. The same order below is therefore no independent evidence.",
        ],
    )


def the_papers_comparison(results: Results, axis: Axis) -> Section:
    """Show the four scores for the paper's posterior."""
    n = results.inputs(ms.PAPER)
    counts = dict.fromkeys(ms.PAPER, n)
    drawn = {f"paper-{s}": lines(results, counts, s, t, axis) for s, t in TITLES.items()}
    caption = (
        "Bayes by Backprop with prior standard deviation 0.1: its mean (MAP), the average over its "
        "samples (BMA), and ACNML with α = 1, by the paper’s five steps and linearised, all on the "
        f"first {n:,} images of every angle. The study paper-mnist has all images."
    )
    return Section(
        "The paper’s comparison: a mean-field posterior", panels=[Panels(drawn, caption)]
    )


def matched_comparison(results: Results, axis: Axis) -> Section:
    """Show the four scores at equal NLL on upright digits."""
    n = results.inputs(ms.MATCHED)
    counts = dict.fromkeys(ms.MATCHED, n)
    drawn = {f"matched-{s}": lines(results, counts, s, t, axis) for s, t in TITLES.items()}
    text = (
        "A temperature can lower all confidences at no cost in accuracy. For a fair comparison "
        "every knob is set such that the validation NLL equals that of the plain network."
    )
    caption = f"The first {n:,} images of every angle."
    return Section("Comparison at equal validation NLL", [text], [Panels(drawn, caption)])


def trade_off(results: Results) -> Section:
    """Show validation NLL against calibration under shift, for all values of the knobs."""
    study = results.study
    assert study.frontier is not None  # the study has one
    swept = {point.family for point in results.sweep}
    shifts = [shift for shift in study.frontier.shifts if shift != study.base]

    def drawn(prefix: str, families: Sequence[Method]) -> Mapping[str, Figure]:
        there = [family for family in families if family.family in swept]
        return {
            f"{prefix}-{s.rstrip('°')}": frontier(results, there, [s], f"ECE, shift: {s}", 3.5)
            for s in (shifts if there else ())
        }

    caption = (
        f"Each path is a family whose knob is swept; {results.data.count(study.frontier.inputs):,} "
        f"test images of a shift, seed {study.seeds[0]}. Further left is better on upright digits, "
        "lower is better on shifted ones; the dashed line is the plain network’s NLL. A method "
        "that only lowers confidences lies on the path of the temperature."
    )
    around = "The same around the mean of the mean-field posterior (Bayes by Backprop)."
    return Section(
        "Validation NLL against calibration under shift",
        panels=[
            Panels(drawn("frontier", ms.AROUND_NETWORK), caption),
            Panels(drawn("bbp-frontier", ms.AROUND_BBP), around),
        ],
    )


def cost(results: Results) -> Section:
    """Show what predictions cost, naive CNML included."""
    more = []
    if results.seconds_per_epoch is not None:
        name = f"naive CNML, one epoch for each of {CLASSES} labels"
        more.append((name, CLASSES * results.seconds_per_epoch))
    note = (
        "The time of naive CNML is that of training the plain network on "
        f"{len(results.data.train.labels):,} images. The paper’s Table 1 has, unbatched on a GPU, "
        "0.08 s for five steps and 13.83 s for one epoch of naive CNML, which is 173 times as long."
    )
    return timing(results, more, note)
