"""Parts, the same images for all curves, naive CNML from one mean, and what is claimed of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import acnml
from acnml import Gradient, metrics
from acnml.fit import Refit
from acnml.predictors import NaiveCnml, NaiveCnmlMax
from stores import Whole
from studies.engine.claims import verdicts
from studies.engine.grounds import Batches
from studies.engine.method import ACNML, MAP
from studies.engine.redraw import redraw, results_in
from studies.engine.report import drawn, markdown, sections_of, write_report
from studies.paper_mnist.naive import NAIVE, NAIVE_MAX, Compared, Comparison, Match
from studies.paper_mnist.settings import SUBSET, PaperMnist
from studies.paper_mnist.settings import NaiveCnml as NaiveSettings
from studies.paper_mnist.study import AT_ONE_RATE, FEW, PAPERS, SUBSET_BBP, build, naive_claims
from studies.rotated_mnist.settings import RANDOM, UPRIGHT
from studies.training import BayesByBackprop

TRAINING = BayesByBackprop(epochs=2, batch_size=50, learning_rate=0.01)
TINY = PaperMnist(
    seeds=(0,),
    hidden=(12,),
    train_images=300,
    validation=100,
    angles=(0, 90),
    images=40,
    samples=2,
    bins=4,
    bayes_by_backprop=TRAINING,
    one_rate=replace(TRAINING, variance_rate=1.0),
    subset=NaiveSettings(4, 2, (0, 90), 60, replace(TRAINING, epochs=5), 2, 0.1, 30),
    whole=NaiveSettings(2, 0, (), None, TRAINING, 1, batch_size=100),
    alphas=(0.1, 1.0),
)


@pytest.fixture(scope="module")
def finished(no_mnist, tmp_path_factory):
    return Whole.run(build(TINY), tmp_path_factory.mktemp("finished"))


@pytest.fixture(scope="module")
def sections(finished):
    return sections_of(finished.results)


def test_all_curves_stand_on_the_same_images(finished):
    results = finished.results
    assert results.missing == ()
    assert {row.n for row in results.rows} == {TINY.images}
    assert {row.method for row in results.rows} == {*PAPERS, *AT_ONE_RATE}
    assert {row.shift for row in results.rows} == set(TINY.shifts)


def test_both_start_from_the_mean_of_one_posterior(finished):
    """The library's predictors, built by hand around the saved posterior, give the same."""
    workshop, results = finished.workshop(), finished.results
    compared: Compared = results.extras[SUBSET]
    found = compared.shifts[RANDOM]
    (fitted,) = workshop.study.grounds[SUBSET_BBP].artefacts(PAPERS[0], workshop)
    posterior = fitted.load_saved()
    classifier = workshop.untrained(FEW).at(posterior.mean)
    queries = workshop.data.load(RANDOM, TINY.subset.points).inputs
    amortised = acnml.Acnml(classifier, posterior, Gradient(5, 0.5)).log_lik(queries)
    torch.testing.assert_close(found.log_lik[ACNML], amortised)
    torch.testing.assert_close(found.log_lik[MAP], classifier.log_probs(queries).detach())
    train = workshop.train_data(FEW)
    assert compared.train_images == len(train.labels) == 60
    settings = TINY.subset
    batches = Batches(train, workshop, FEW, settings.batch_size)
    decay = 1 / (60 * TRAINING.prior_std**2)
    refit = Refit(settings.epochs, settings.learning_rate, 0.9, decay)
    for name, kind in ((NAIVE, NaiveCnml), (NAIVE_MAX, NaiveCnmlMax)):
        naive = kind(classifier, batches, refit, progress=False).log_lik(queries)
        torch.testing.assert_close(found.log_lik[name], naive, rtol=1e-4, atol=1e-5)


def test_the_report_has_a_verdict_for_every_claim(finished, sections):
    results = finished.results
    found = verdicts(results)
    assert len(found) == 2 * 5 + 2 * 8
    assert all(verdict.holds is not None for verdict in found)
    assert "α by matching naive CNML" in markdown(results, sections)
    names = drawn(sections).keys()
    assert {"lines-ece", "one-rate-nll", "naive-subset-scatter", "naive-subset-ece"} <= names
    assert "naive-whole-ece" not in names  # without lines


def test_the_numbers_of_every_query_are_written_out(finished, sections):
    """Four queries upright and four rotated, two of each line, all by five methods."""
    (section,) = [s for s in sections if "naive-subset.csv" in s.numbers]
    columns, rows = section.numbers["naive-subset.csv"]
    assert len(rows) == (4 + 2 + 4) * 5  # 0°, 90°, random
    found = finished.results.extras[SUBSET].shifts[RANDOM]
    (row,) = [r for r in rows if r[:3] == (NAIVE, RANDOM, 3)]
    told = dict(zip(columns, row, strict=True))
    assert told["normaliser"] == found.normaliser(NAIVE)[3].item()
    assert told["nll"] == found.nll(NAIVE)[3].item()
    assert told["correct"] == int(found.log_probs(NAIVE)[3].argmax() == found.labels[3])
    expected = metrics.brier(found.log_probs(NAIVE)[3:], found.labels[3:])
    assert told["brier"] == pytest.approx(expected)


def test_figures_are_drawn_again_from_the_csv_files(finished, sections, tmp_path):
    """Nothing else is read: neither artefacts nor data."""
    results = finished.results
    write_report(results, tmp_path)
    again = results_in(tmp_path, results.study)
    assert len(again.rows) == len(results.rows)
    for ours, saved in zip(again.rows, results.rows, strict=True):
        assert ours[:4] == saved[:4]
        assert ours[4:] == pytest.approx(saved[4:], rel=1e-5)
    assert again.diagrams.keys() == results.diagrams.keys()
    for place, diagram in again.diagrams.items():
        assert diagram.confidence == pytest.approx(results.diagrams[place].confidence, rel=1e-5)
    figures, redrawn = drawn(sections), drawn(sections_of(again))
    assert redrawn.keys() == figures.keys()
    for name, figure in redrawn.items():
        for ours, saved in zip(figure.axes[0].lines, figures[name].axes[0].lines, strict=True):
            assert ours.get_xydata() == pytest.approx(saved.get_xydata(), rel=1e-4), name
    for figure in tmp_path.glob("*.png"):
        if figure.stem != "naive-subset-scatter":
            figure.unlink()
    assert redraw(results.study, tmp_path) == ["naive-subset-scatter"]


# Claims ----------------------------------------------------------------------------------------


def told(**scores: float) -> Comparison:
    """Three classes and queries of class 0; p_θ̂_0(0|x) is 0.9, the others' are given."""
    likelihoods = {
        name: torch.tensor([[0.9, other, other]]).repeat(6, 1).log()
        for name, other in scores.items()
    }
    return Comparison("", torch.zeros(6).long(), likelihoods)


NAMES = {"plain": MAP, "ours": ACNML, "naive": NAIVE, "best": NAIVE_MAX}


def compared(upright: dict[str, float], rotated: dict[str, float], seconds: float) -> Compared:
    shifts = {
        shift: told(**{NAMES[name]: value for name, value in values.items()})
        for shift, values in ((UPRIGHT, upright), (RANDOM, rotated))
    }
    settings = NaiveSettings(6, 0)
    times = {ACNML: 1.0, NAIVE: 5 * seconds}
    return Compared(settings, 100, shifts, (Match(1.0, 0.1),), times)


def outcomes(found: Compared | None, finished) -> list[bool | None]:
    results = finished.results
    extras = {} if found is None else {SUBSET: found}
    judged = (c.judge(replace(results, extras=extras)) for c in naive_claims(SUBSET, "few"))
    return [None if each is None else each.holds for each in judged]


def test_claims_about_naive_cnml_follow_the_numbers(finished):
    assert outcomes(None, finished) == [None] * 8
    upright = {"plain": 0.001, "ours": 0.3, "naive": 0.01, "best": 0.05}
    rotated = {"plain": 0.2, "ours": 0.4, "naive": 0.25, "best": 0.3}
    # The true label is certain to be first: more caution is a worse score.
    cautious = [True, True, True, True, False, False, False, True]
    assert outcomes(compared(upright, rotated, 200.0), finished) == cautious
    backwards = {"plain": 0.4, "ours": 0.2, "naive": 0.3, "best": 0.25}
    bold = [False, False, False, False, True, True, True, False]
    assert outcomes(compared(backwards, backwards, 20.0), finished) == bold
    # Out of distribution the excess must be smaller than in it.
    assert not outcomes(compared(rotated, upright, 200.0), finished)[1]
