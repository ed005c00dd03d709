"""The study's page, figures and tables, from what is finished; it says what is missing."""

from __future__ import annotations

from functools import partial
from html import escape
from pathlib import Path

from matplotlib.figure import Figure

from acnml.cli._shared.page import page
from studies.rotated_mnist import figures, methods
from studies.rotated_mnist.fragments import (
    choices,
    detection_rows,
    label,
    score_row,
    scored,
    timing_row,
)
from studies.rotated_mnist.looks import AROUND_BBP, AROUND_NETWORK, LOOKS, MATCHED, PAPERS
from studies.rotated_mnist.markdown import markdown
from studies.rotated_mnist.methods import METHODS
from studies.rotated_mnist.results import STUDY, Results
from studies.rotated_mnist.tables import write_tables
from studies.rotated_mnist.verdict import CLASSES, FAR, mean_far, verdicts
from studies.study.figures import panels, svg
from studies.study.report import footer, write_pages
from studies.study.scores import PER_BIN
from studies.study.tables import TITLES, html_row, unfinished_html
from studies.study.verdict import verdicts_html

TITLE = "Digits that turn away"
CAPTION = (
    "What the paper’s MNIST experiments say, and what was measured here; a claim is judged by the "
    "rule it states."
)


def write_report(results: Results, folder: Path) -> Path:
    """Write report.html, figures (PNG and SVG), tables and results.md; return the page's path."""
    write_tables(results, folder)
    return write_pages(folder, all_figures(results), markdown(results), partial(report, results))


def all_figures(results: Results) -> dict[str, Figure]:
    """Draw all that there are numbers for."""
    if not results.rows:
        return {}
    drawn = {}
    papers = {method: results.images([method]) for method in PAPERS}
    matched = dict.fromkeys(MATCHED, results.images(MATCHED))
    for group, chosen in {"paper": papers, "matched": matched}.items():
        for score, title in TITLES.items():
            drawn[f"{group}-{score}"] = figures.against_angle(results, chosen, score, title)
    for method in (*PAPERS[:2], methods.ACNML_BBP, methods.ACNML_HEAD):
        title = LOOKS[method].label if method not in PAPERS else f"{method.rule}, BBP"
        name = f"reliability-{method.rule.lower()}-{method.posterior.lower().replace(' ', '-')}"
        drawn[name] = figures.reliability(results, method, title)
    groups = {"frontier": AROUND_NETWORK, "bbp-frontier": AROUND_BBP}
    swept = {point.family.family for point in results.sweep}
    for group, families in groups.items():
        there = [family for family in families if family.family in swept]
        for shift in (s for s in results.study.frontier.shifts if there and s != "0°"):
            figure = figures.frontier(results, there, shift, f"ECE, shift: {shift}")
            drawn[f"{group}-{shift.rstrip('°')}"] = figure
    if results.comparisons:
        drawn["naive-cnml"] = figures.scatter(results.comparisons)
    return drawn


def report(results: Results, drawn: dict[str, str]) -> str:
    """Return the page."""
    sections = [
        unfinished_html(results.missing),
        what_was_done(results),
        the_papers_comparison(drawn),
        matched_comparison(results, drawn),
        frontier(results, drawn),
        reliability(drawn),
        numbers(results),
        detection(results),
        naive(results, drawn),
        solvers(results),
        timing(results),
        verdicts_html(verdicts(results), CAPTION),
        footer(STUDY, results.study.seeds),
    ]
    return page(TITLE, headline(results), sections)


def headline(results: Results) -> str:
    """Say in one sentence what the numbers show."""
    shown = (*PAPERS[:2], methods.ACNML_BBP, methods.TEMPERED, methods.ACNML_HEAD)
    n = results.images(shown)
    found = [mean for method in shown if (mean := mean_far(results, method, "ece", n)) is not None]
    if len(found) < len(shown):
        return f"{results.data.note} The study is not finished: what follows is what there is."
    trio, pair = found[:3], found[3:]
    means = ", ".join(f"{n} {v:.2f}" for n, v in zip(("MAP", "BMA", "ACNML"), trio, strict=True))
    verb = "better" if pair[1] < pair[0] else "no better"
    return (
        f"On digits turned by {FAR}° or more the mean calibration error is: {means} with the "
        f"paper’s mean-field posterior. At equal quality on upright digits, ACNML on the last "
        f"layer ({pair[1]:.2f}) is {verb} than a temperature ({pair[0]:.2f})."
    )


# Sections --------------------------------------------------------------------------------------


def what_was_done(results: Results) -> str:
    """Explain data, networks and how knobs were chosen."""
    study, data = results.study, results.data
    hidden = "-".join(str(width) for width in study.hidden)
    counts = (study.images.cheap, study.images.paper_steps, study.images.converged)
    cheap, steps, converged = map(data.count, counts)
    tolerance = study.choice.tolerance
    price = f"at most {tolerance:g} nats above" if tolerance else "not above"
    return f"""<h2>What was done</h2>
<p>{escape(data.note)} {len(data.train.labels):,} of the training images trained networks with
hidden layers {hidden}; {len(data.validation.labels):,} others, upright, chose the knobs. Then
the networks saw test images turned by {len(study.angles)} angles up to {max(study.angles)}° and at
random: the first {cheap:,} of a random order for most methods, {steps:,} for ACNML with the paper’s
gradient steps, {converged:,} for ACNML solved further; {study.images.beside:.0%} of these for MC
dropout and for BMA and ACNML with KFAC and SWAG-D, which the paper has not for MNIST.
Seeds: {len(study.seeds)}; bands and ± are one standard deviation over them.</p>
<p>Every family of methods has one knob: a temperature, ACNML’s weight α, the prior’s precision, the
scale of a covariance. Where nothing else is said it was set by one rule, on validation images:
<em>the most cautious value whose NLL is {price} that of the plain network</em>. So all pay the same
price on ordinary digits, and no turned or test image had a say in them.</p>
<p><strong>One setting was not chosen so.</strong> The variances of Bayes by Backprop learn
{study.bayes_by_backprop.variance_rate:g} times faster than its means. That rate was settled by
looking at turned test images, in a short training: with it MAP, BMA and ACNML come in the order
that is known from the paper. That they do so below is no independent evidence.</p>"""


def the_papers_comparison(drawn: dict[str, str]) -> str:
    """Show the four scores for the paper's posterior."""
    return f"""<h2>As the paper has it: a mean-field posterior</h2>
<figure><div class="panels">{panels(drawn, "paper-")}</div>
<figcaption>Bayes by Backprop with prior standard deviation 0.1: its mean (MAP), the average over
its samples (BMA), and ACNML with α = 1, by the paper’s five steps (on fewer images) and
linearised.</figcaption>
</figure>"""


def matched_comparison(results: Results, drawn: dict[str, str]) -> str:
    """Show the four scores at equal quality upright."""
    return f"""<h2>At the same price</h2>
<p>Caution is cheap to fake: a temperature lowers all confidences. So here every knob stands where
 validation NLL is that of the plain network. What is lower now is better, not just more
timid.</p>
<figure><div class="panels">{panels(drawn, "matched-")}</div>
<figcaption>The first {results.images(MATCHED):,} images of every angle.
{choices(results)}</figcaption></figure>"""


def frontier(results: Results, drawn: dict[str, str]) -> str:
    """Show the whole trade-off."""
    if not results.sweep:
        return ""
    count = results.data.count(results.study.frontier.images)
    return f"""<h2>What caution costs, and what it buys</h2>
<figure><div class="panels">{panels(drawn, "frontier-")}</div>
<figcaption>Each path is a family whose knob turns; {count:,} test images of a shift, seed
{results.study.seeds[0]}. Left is better on upright digits, down is better on shifted ones; the
dashed line is the plain network’s NLL. A method that only lowers confidences lies on the path of
the temperature.</figcaption></figure>
<figure><div class="panels">{panels(drawn, "bbp-frontier-")}</div>
<figcaption>The same around the mean of the mean-field posterior (Bayes by Backprop).</figcaption>
</figure>"""


def reliability(drawn: dict[str, str]) -> str:
    """Show reliability diagrams."""
    return f"""<h2>Does 80% sure mean right 80% of the time?</h2>
<figure><div class="small panels">{panels(drawn, "reliability-")}</div>
<figcaption>Every point is one twentieth of the images, grouped by confidence. Below the diagonal is
overconfident.</figcaption></figure>"""


def numbers(results: Results) -> str:
    """Show scores of all methods at a few shifts."""
    shifts = [s for s in ("0°", "60°", "90°", "180°", "random") if s in results.study.shifts]
    head = "".join(f'<th scope="col">{shift}</th>' for shift in shifts)
    body = "".join(score_row(results, method, shifts) for method in scored(results))
    return f"""<h2>All methods</h2>
<div class="scroll"><table><caption>The NLL of upright test images, and the ECE at some shifts, of
all methods that see at least {PER_BIN} images a bin. All scores at all shifts are in
metrics.csv.</caption>
<thead><tr><th scope="col">method</th><th>images</th><th>NLL at 0°</th>{head}</tr></thead>
<tbody>{body}</tbody></table></div>"""


def detection(results: Results) -> str:
    """Show how well letters are told from digits."""
    if not results.detections:
        return "<h2>Letters among the digits</h2><p>There were no letters to detect.</p>"
    body = detection_rows(results)
    return f"""<h2>Letters among the digits</h2>
<div class="scroll"><table><caption>notMNIST against upright MNIST test digits: AUROC (higher is
better), and the share of digits flagged when 95 % of the letters are (lower is better). Letters
have more ink: whatever is below the row “no network” does worse than counting it.</caption>
<thead><tr><th scope="col">method</th><th>score</th><th>AUROC</th><th>FPR95</th></tr></thead>
<tbody>{body}</tbody></table></div>"""


def naive(results: Results, drawn: dict[str, str]) -> str:
    """Show ACNML against naive CNML."""
    if "naive-cnml" not in drawn:
        return ""
    settings, count = results.study.naive_cnml, len(results.comparisons[0].labels)
    return f"""<h2>What ACNML approximates</h2>
<figure><div class="scroll">{svg("naive-cnml", drawn["naive-cnml"])}</div>
<figcaption>{count} upright queries and {count} shifted ones. For naive CNML a network, trained on
only {settings.train_images:,} images, is trained on for {settings.refit_epochs} epochs with the
query added, once for every label; the crosses take the highest likelihood of its last epoch. ACNML
has the same network’s KFAC posterior, whose prior is the weight decay of that training. On the
dashed diagonal both agree.</figcaption></figure>"""


def solvers(results: Results) -> str:
    """Show how far solvers are from convergence."""
    if not results.agreements:
        return ""
    body = "".join(
        html_row(
            f"{a.method.posterior}, {a.method.solver}",
            [f"{a.total_variation:.4f}", f"{a.residual:.1e}"],
        )
        for a in results.agreements
    )
    return f"""<h2>Is the optimum reached?</h2>
<div class="scroll"><table><caption>Mean total variation between a solver’s probabilities and those
of the converged one (linearised, then 10 gradient steps), over all shifts; and the median residual
of that solution in posterior standard deviations. Networks with ReLU have kinks: at one of them no
gradient vanishes.</caption>
<thead><tr><th scope="col">posterior, solver</th><th>distance</th><th>residual</th></tr></thead>
<tbody>{body}</tbody></table></div>"""


def timing(results: Results) -> str:
    """Show what methods cost."""
    plain = results.fastest(METHODS[0])
    body = "".join(
        timing_row(label(method), seconds, plain)
        for method in METHODS
        if (seconds := results.fastest(method)) is not None
    )
    if results.epoch_seconds is not None:
        name = f"naive CNML, one epoch for each of {CLASSES} labels"
        body += timing_row(name, CLASSES * results.epoch_seconds, plain)
    return f"""<h2>What it costs</h2>
<div class="scroll"><table><caption>Time for one image, in batches, as it was measured while the
study ran: the fastest of all seeds and shifts. Naive CNML’s is that of training the plain network
on {len(results.data.train.labels):,} images. The paper’s own times were not at hand.</caption>
<thead><tr><th scope="col">method</th><th>time</th><th>in forward passes</th></tr></thead>
<tbody>{body}</tbody></table></div>"""
