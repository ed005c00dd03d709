"""The paper's MNIST experiments: posteriors, methods, order of the work, and claims."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from acnml import metrics
from studies.data.catalogue import MNIST
from studies.data.folder import locate
from studies.engine import claims
from studies.engine.claims import Claim, Judgement
from studies.engine.grounds import MeanField
from studies.engine.method import ACNML, LINEARISED, MAP, PAPER_STEPS, Look, Method, Share
from studies.engine.results import Results
from studies.engine.study import Network, Phase, Study, bins_for, see
from studies.engine.tables import counted
from studies.paper_mnist import report
from studies.paper_mnist.naive import NAIVE, NAIVE_MAX, Compared, Comparison, compare_all
from studies.paper_mnist.settings import LINES, ONE_RATE, SUBSET, WHOLE, PaperMnist
from studies.rotated_mnist import methods as ms
from studies.rotated_mnist.settings import RANDOM, UPRIGHT, degrees
from studies.rotated_mnist.study import CLASSES, load_data, mlp_model, sizes

ONE_RATE_BBP, SUBSET_BBP, WHOLE_BBP = "BBP, one rate", "BBP, few images", "BBP, all images"
FEW, ALL = "network of few images", "network of all images"
BLOCKS = {PAPER_STEPS: 50, LINEARISED: 500}
COARSE = 30  # degrees: multiples of it come first, so that a report is useful early
HARDLY = 0.005  # of accuracy

PAPERS = (ms.MAP_BBP, ms.BMA_BBP, ms.ACNML_BBP_PAPER, ms.ACNML_BBP)
AT_ONE_RATE = tuple(replace(method, posterior=ONE_RATE_BBP) for method in PAPERS)
GROUPS = {LINES: PAPERS, ONE_RATE: AT_ONE_RATE}
LOOKS: dict[Method, Look] = {
    **{method: ms.LOOKS[method] for method in PAPERS},
    **{r: ms.LOOKS[method] for method, r in zip(PAPERS, AT_ONE_RATE, strict=True)},
}


def build(settings: PaperMnist) -> Study:
    """Put the study together."""
    has_mnist = any(locate(file) for file in MNIST.files)
    model = mlp_model(settings.hidden, has_mnist)
    # Bayes by Backprop starts from random weights: the networks themselves are not trained.
    networks = {
        ms.NETWORK: Network(model, None),
        FEW: Network(model, None, inputs=settings.subset.train_images),
        ALL: Network(model, None, inputs=settings.whole.train_images),
    }
    grounds = {
        ms.BBP: MeanField(ms.NETWORK, settings.bayes_by_backprop),
        ONE_RATE_BBP: MeanField(ms.NETWORK, settings.one_rate),
        SUBSET_BBP: MeanField(FEW, settings.subset.training),
        WHOLE_BBP: MeanField(ALL, settings.whole.training),
    }
    extras = {
        SUBSET: partial(compare_all, ground=SUBSET_BBP, settings=settings.subset),
        WHOLE: partial(compare_all, ground=WHOLE_BBP, settings=settings.whole),
    }
    study = Study(
        name="paper-mnist",
        title="The paper’s MNIST experiments",
        settings=settings,
        load=lambda _: load_data(settings.train_images, settings.validation),
        networks=networks,
        grounds=grounds,
        methods=tuple(m for part, group in GROUPS.items() if part in settings.parts for m in group),
        plain=ms.MAP_BBP,
        shifts=settings.shifts,
        share=partial(share_of, settings),
        plan=sizes(settings.train_images, settings.validation, has_mnist),
        seeds=settings.seeds,
        looks=LOOKS,
        diagrams=(UPRIGHT, RANDOM),
        bins=settings.bins,
        samples=settings.samples,
        extras={name: each for name, each in extras.items() if name in settings.parts},
        claims=all_claims(settings),
        sections=report.sections,
        page="docs/rotated-mnist.md",
    )
    return study.replaced(phases=order(study, settings))


def share_of(settings: PaperMnist, method: Method, _: str) -> Share:
    """Return what a method sees: all see the same, and a run for more images continues this one."""
    return Share(settings.images, BLOCKS.get(method.solver, 1000), in_tranches=True)


def order(study: Study, settings: PaperMnist) -> tuple[Phase, ...]:
    """Return the order of the work: the parts in their order, and coarse angles first."""
    first = study.seeds[:1]

    def is_fine(shift: str) -> bool:
        return shift != RANDOM and degrees(shift) % COARSE != 0

    def curves(part: str) -> list[Phase]:
        shifts = sorted(study.shifts, key=is_fine)
        cheap, steps = (
            [m for m in GROUPS[part] if (m.solver == PAPER_STEPS) == costly]
            for costly in (False, True)
        )
        return [
            phase
            for seed in study.seeds
            for phase in (
                Phase(f"{part}: MAP, BMA and linearised, seed {seed}", see(cheap, shifts), (seed,)),
                Phase(f"{part}: five steps, seed {seed}", see(steps, shifts), (seed,)),
            )
        ]

    phases = {
        LINES: curves(LINES),
        SUBSET: [Phase(SUBSET, (), first, (SUBSET,))],
        ONE_RATE: curves(ONE_RATE),
        WHOLE: [Phase(WHOLE, (), first, (WHOLE,))],
    }
    return tuple(each for part, some in phases.items() if part in settings.parts for each in some)


# Claims ----------------------------------------------------------------------------------------


def all_claims(settings: PaperMnist) -> tuple[Claim, ...]:
    """Return the claims of section 5 and appendix C of the paper about MNIST."""
    found: list[Claim] = []
    if LINES in settings.parts:
        found += (
            claim._replace(caveat="the learning rate of the variances was chosen on rotated images")
            for claim in curve_claims(settings, GROUPS[LINES], "")
        )
    if ONE_RATE in settings.parts:
        found += curve_claims(settings, GROUPS[ONE_RATE], "With one common learning rate: ")
    for part, note in ((SUBSET, "few training images"), (WHOLE, "all training images")):
        if part in settings.parts:
            found += naive_claims(part, note)
    return tuple(found)


def curve_claims(settings: PaperMnist, group: Sequence[Method], note: str) -> list[Claim]:
    """Return the claims about curves over rotation; ACNML is the paper's five steps."""
    plain, bma, ours, _ = group
    far = {s: (s,) for s in settings.shifts if s != RANDOM and degrees(s) >= report.FAR}

    def better(score: str) -> Claim:
        text = f"{note}ACNML has a lower {claims.SHOWN[score]} than MAP and BMA on rotated digits."
        rule = f"lower at every angle from {report.FAR}° up"
        return claims.lower(text, rule, ours, [plain, bma], score, far)

    def cautious(results: Results) -> Judgement | None:
        n = results.inputs(group)
        each = {m: results.mean(m, "ece", [UPRIGHT], n) for m in (plain, bma, ours)}
        known = {m: value for m, value in each.items() if value is not None}
        if len(known) < len(each):
            return None
        text = ", ".join(f"{LOOKS[m].label} {value:.3f}" for m, value in known.items())
        return Judgement(f"{text}; {n:,} images", known[ours] == max(known.values()))

    return [
        better("ece"),
        better("brier"),
        better("nll"),
        Claim(
            f"{note}Upright, ACNML is overly conservative and worse calibrated than the others.",
            "highest ECE at 0°",
            cautious,
        ),
        claims.comparable(
            f"{note}All methods have a similar accuracy.", ours, [plain, bma], "accuracy", HARDLY
        ),
    ]


Judge = Callable[[Compared], Judgement | None]


def naive_claims(part: str, note: str) -> list[Claim]:
    """Return the claims about naive CNML, around one posterior."""

    def claim(text: str, rule: str, judge: Judge) -> Claim:
        def judged(results: Results) -> Judgement | None:
            compared = results.extras.get(part)
            return None if compared is None else judge(compared)

        return Claim(f"{text} ({note})", rule, judged)

    return [
        claim(
            "In distribution, ACNML’s normaliser is above naive CNML’s for almost all inputs.",
            "for at least 90 % of the upright queries",
            _higher_normaliser,
        ),
        claim(
            "Out of distribution it is above it less extremely.",
            "for more than half of the rotated queries, and by less on average than upright",
            _less_extreme,
        ),
        claim(
            "ACNML is less confident than naive CNML.",
            "for more than half of the queries, upright and rotated",
            _less_confident,
        ),
        claim(
            "The maximum over the last epoch is more conservative than its end.",
            "lower mean confidence, upright and rotated",
            _max_is_cautious,
        ),
        claim(
            "On rotated digits naive CNML improves over MAP.",
            "lower Brier score and ECE on the randomly rotated queries",
            partial(_improves, ours=NAIVE, other=[MAP]),
        ),
        claim(
            "On rotated digits the maximum improves over naive CNML.",
            "lower NLL and ECE on the randomly rotated queries",
            partial(_improves, ours=NAIVE_MAX, other=[NAIVE], scores=("nll", "ece")),
        ),
        claim(
            "On severe rotations ACNML improves over both.",
            f"lower Brier score, NLL and ECE on all queries of the lines from {report.SEVERE}° up, "
            "or on the randomly rotated ones where there are no lines",
            _better_when_severe,
        ),
        claim(
            "ACNML is over two orders of magnitude faster than an epoch of naive CNML.",
            "five steps at least 100 times faster than one epoch for every label",
            _faster,
        ),
    ]


def _both(compared: Compared) -> tuple[Comparison, Comparison]:
    return compared.shifts[UPRIGHT], compared.shifts[RANDOM]


def _excess(comparison: Comparison) -> Tensor:
    return comparison.normaliser(ACNML) - comparison.normaliser(NAIVE)


def _share(found: Tensor) -> float:
    return found.double().mean().item()


def _higher_normaliser(compared: Compared) -> Judgement:
    excess = _excess(compared.shifts[UPRIGHT])
    share = _share(excess > 0)
    return Judgement(f"{share:.0%} of {len(excess):,} queries", share >= 0.9)


def _less_extreme(compared: Compared) -> Judgement:
    upright, rotated = (_excess(each) for each in _both(compared))
    share = _share(rotated > 0)
    ratios = [
        (c.normaliser(ACNML).mean() - 1) / (c.normaliser(NAIVE).mean() - 1) for c in _both(compared)
    ]
    text = (
        f"{share:.0%} of {len(rotated):,}; mean excess {upright.mean():.3f} upright, "
        f"{rotated.mean():.3f} rotated; C - 1 in times of naive CNML’s {ratios[0]:.1f} upright, "
        f"{ratios[1]:.1f} rotated"
    )
    holds = share > 0.5 and bool(rotated.mean() < upright.mean())
    return Judgement(text, holds)


def _less_confident(compared: Compared) -> Judgement:
    shares = [_share(c.confidence(ACNML) < c.confidence(NAIVE)) for c in _both(compared)]
    text = f"{shares[0]:.0%} upright, {shares[1]:.0%} rotated"
    return Judgement(text, min(shares) > 0.5)


def _max_is_cautious(compared: Compared) -> Judgement:
    pairs = [
        [c.confidence(name).mean().item() for name in (NAIVE_MAX, NAIVE)] for c in _both(compared)
    ]
    shown = (f"{m:.3f} against {n:.3f} {w}" for (m, n), w in zip(pairs, WHERE, strict=True))
    return Judgement(f"mean confidence {', '.join(shown)}", all(m < n for m, n in pairs))


WHERE = ("upright", "rotated")


def _improves(
    compared: Compared,
    ours: str,
    other: Sequence[str],
    scores: tuple[str, ...] = ("brier", "ece"),
    where: Sequence[str] = (RANDOM,),
    lines: bool = False,
) -> Judgement:
    """Judge whether a method has lower scores than others on all queries of some shifts."""
    parts = [compared.shifts[shift] for shift in where]
    parts = [part.first(compared.settings.lines) for part in parts] if lines else parts
    labels = torch.cat([part.labels for part in parts])
    bins = bins_for(len(labels))
    found = {
        name: metrics.summary(torch.cat([part.log_probs(name) for part in parts]), labels, bins)
        for name in (ours, *other)
    }
    text = "; ".join(
        f"{claims.SHOWN[s]} " + ", ".join(f"{name} {found[name][s]:.3f}" for name in found)
        for s in scores
    )
    holds = all(found[ours][s] < found[name][s] for s in scores for name in other)
    return Judgement(f"{text}; {len(labels):,} queries, {counted(bins, 'bin')}", holds)


def _better_when_severe(compared: Compared) -> Judgement:
    angles = [a for a in compared.settings.angles if a >= report.SEVERE]
    severe = [f"{angle}°" for angle in angles if compared.settings.lines]
    every = ("brier", "nll", "ece")
    where, lines = (severe, True) if severe else ([RANDOM], False)
    return _improves(compared, ACNML, [NAIVE, NAIVE_MAX], every, where, lines)


def _faster(compared: Compared) -> Judgement:
    epoch = compared.seconds[NAIVE] / compared.settings.epochs
    ratio = epoch / compared.seconds[ACNML]
    text = f"{compared.seconds[ACNML]:.3g} s for five steps, {epoch:.3g} s for an epoch of each of "
    return Judgement(f"{text}{CLASSES} labels on {compared.train_images:,} images", ratio >= 100)
