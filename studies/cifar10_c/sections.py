"""The sections of the report's page."""

from __future__ import annotations

from html import escape

from studies.cifar10_c.looks import BUDGET_GROUP, NEAR_GROUP, label, paper_group
from studies.cifar10_c.results import Results
from studies.cifar10_c.tables import (
    Table,
    agreement_table,
    all_clean_table,
    choice_table,
    clean_table,
    severity_table,
    timing_table,
)
from studies.cifar10_c.verdict import common_images
from studies.study.figures import panels, svg
from studies.study.tables import html_row


def plainly(results: Results) -> str:
    """Say what is the paper's protocol and what is not."""
    study, data = results.study, results.data
    weights = {
        "given": "starts from weights that others have trained on all training images",
        "random": "is trained from random weights",
    }[study.recipe.start]
    source = {"test": "test set, and are left out of the evaluation", "train": "training set"}[
        study.choice.source
    ]
    absent = [] if study.members > 1 else ["no SWA-Ensemble (one member)"]
    absent += [] if study.dropout_model else ["no SWA-Dropout (the network has no dropout)"]
    return (
        f"{data.note} {study.model} {weights}; SWAG collects "
        f"{study.recipe.training.collected} epochs. {len(data.held_out.labels):,} held-out images "
        f"for the knobs come from the {source}. Seeds: {len(study.seeds)}. "
        + (f"There is {' and '.join(absent)}." if absent else "")
    ).strip()


def spread(results: Results) -> str:
    """Say what ± means."""
    if len(results.study.seeds) > 1:
        return f"± is the standard deviation over {len(results.study.seeds)} seeds."
    return (
        f"There is one seed: ± is the standard error over images, by {results.study.resamples} "
        "bootstrap draws; it says nothing of other networks."
    )


def what_was_done(results: Results) -> str:
    """Explain data, networks and how knobs were chosen."""
    study = results.study
    rules, images = study.choice, study.images
    whole = f"{results.level(images.in_distribution):,}"
    counts = [f"{results.level(n):,}" for n in (images.cheap, images.network_wide, images.beside)]
    return f"""<h2>What was done</h2>
<p>{escape(plainly(results))}</p>
<p>Evaluation images are the first of one random order of the test set: {whole} clean ones for cheap
methods; of each of {len(study.corruptions)} corruptions at {len(study.severities)} severities
{counts[0]} for cheap methods, {counts[1]} for those over the whole network, {counts[2]} for some
beside them, {results.level(images.paper_steps):,} for the paper’s gradient steps. Methods are
compared on the same images only.</p>
<p>Every family has one knob, set on clean held-out images by one of these rules. <em>The paper’s
α</em>: the largest of its grid that costs at most {rules.accuracy:.1%} accuracy and {rules.nll:g}
nats against SWA. <em>The price of SWA</em>: the most cautious value whose NLL is not above SWA’s.
<em>Near SWA-Temp</em>: the most cautious value whose NLL is at most {rules.near:g} nats above that
of SWA with the temperature of least NLL. <em>Least NLL</em>, for baselines. No corrupted image had
a say in a value; that the last layer has α for a knob as well was decided after severity 5 had been
seen.</p>"""


def in_distribution(results: Results) -> str:
    """Show the table of clean images."""
    caption = (
        f"Clean test images, the same for all methods that see so many. {spread(results)} "
        "The paper’s Table 2 is not at hand, so that its numbers do not stand beside."
    )
    more = "The same on all clean images, for the cheap methods."
    return f"""<h2>In distribution</h2>{_table(clean_table(results), caption)}
{_table(all_clean_table(results), more)}"""


def corrupted(results: Results, drawn: dict[str, str]) -> str:
    """Show the paper's comparison under corruptions."""
    n = common_images(results, paper_group(results.study))
    caption = (
        "The mean ECE over all corruptions, by severity. Few images raise it by themselves: "
        "compare rows of equally many. All scores are in metrics.csv."
    )
    return f"""<h2>As images get worse</h2>
<figure><div class="scroll">{panels(drawn, "boxes-")}</div>
<figcaption>Every box is over the corruptions, {n:,} images each. ACNML over all weights has the
paper’s α.</figcaption></figure>
<figure><div class="panels">{panels(drawn, "paper-lines-")}</div>
<figcaption>Medians over the corruptions, with 95 % intervals from drawing corruptions with
replacement.</figcaption></figure>
{_table(severity_table(results, "ece"), caption)}"""


def at_the_same_price(results: Results, drawn: dict[str, str]) -> str:
    """Show methods whose knobs cost the same on clean images."""
    budget, near = (f"{common_images(results, group):,}" for group in (BUDGET_GROUP, NEAR_GROUP))
    return f"""<h2>At the same price</h2>
<p>Caution is cheap to fake: a temperature lowers all confidences. So here knobs stand where
held-out NLL is the same: first that of SWA, then nearly that of SWA-Temp, the least that a
temperature can reach.</p>
<figure><div class="panels">{panels(drawn, "budget-lines-")}</div>
<figcaption>Every method at the NLL of SWA; {budget} images of each corruption.</figcaption>
</figure>
<figure><div class="panels">{panels(drawn, "near-lines-")}</div>
<figcaption>SWA-Temp, and methods that pay {results.study.choice.near:g} nats for more caution: a
higher temperature, or ACNML over the tempered likelihood; {near} images of each corruption.
</figcaption></figure>"""


def frontier(results: Results, drawn: dict[str, str]) -> str:
    """Show the whole trade-off."""
    if "frontier" not in drawn:
        return ""
    study = results.study
    return f"""<h2>What caution costs, and what it buys</h2>
<figure><div class="scroll">{svg("frontier", drawn["frontier"])}</div>
<figcaption>Each path is a family whose knob turns; the first
{results.level(study.frontier.images):,} images of {len(study.corruptions)} corruptions, seed
{study.seeds[0]}. Left is better on clean images, down is better on corrupted ones; the dashed line
is SWA’s NLL. What only lowers confidences lies on the path of SWA-Temp.</figcaption></figure>"""


def reliability(drawn: dict[str, str]) -> str:
    """Show reliability diagrams."""
    return f"""<h2>Does 80% sure mean right 80% of the time?</h2>
<figure><div class="small panels">{panels(drawn, "reliability-")}</div>
<figcaption>Gaussian blur. Every point is one twentieth of the images, grouped by confidence. Below
the diagonal is overconfident.</figcaption></figure>"""


def knobs(results: Results) -> str:
    """Show where knobs stand."""
    caption = f"Chosen on held-out images, for seed {results.study.seeds[0]}."
    return f"<h2>The knobs</h2>{_table(choice_table(results), caption)}"


def unsolved(results: Results) -> str:
    """Say where ACNML has found no solution; nothing where it always has."""
    each = ", ".join(f"{label(u.method)} {u.images:,} of {u.of:,}" for u in results.unsolved)
    return (
        f"No solution was found for some images, which count as uniform predictions: {each}."
        if each
        else "A solution was found for every image."
    )


def steps(results: Results) -> str:
    """Show the agreement of solvers."""
    if not results.agreements:
        return ""
    caption = (
        "The paper’s gradient steps against the linearised solution with the same α: mean total "
        "variation between their probabilities, and how often both predict the same class."
    )
    return f"""<h2>Is the fast solution the paper’s?</h2>{_table(agreement_table(results), caption)}
<p>{escape(unsolved(results))}</p>"""


def timing(results: Results) -> str:
    """Show what methods cost."""
    caption = "Time for one clean image, in batches, as it was measured while the study ran."
    return f"<h2>What it costs</h2>{_table(timing_table(results), caption)}"


def _table(table: Table, caption: str) -> str:
    head, rows = table
    if not rows:
        return ""
    columns = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    body = "".join(html_row(row[0], row[1:]) for row in rows)
    return f"""<div class="scroll"><table><caption>{escape(caption)}</caption>
<thead><tr>{columns}</tr></thead><tbody>{body}</tbody></table></div>"""
