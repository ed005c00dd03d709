"""Plots: what they draw, on which axes, from tensors and from arrays."""

from __future__ import annotations

import matplotlib as mpl
import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

import acnml
from acnml import metrics, plots, tuning
from acnml.tuning import Evidence
from test_calibrate import problem


def predictions(n: int = 200):
    generator = torch.Generator().manual_seed(0)
    log_probs = torch.log_softmax(2 * torch.randn(n, 4, generator=generator), 1)
    labels = torch.multinomial(log_probs.exp(), 1, generator=generator).squeeze(1)
    return log_probs, labels


def axes():
    return Figure().subplots()


@pytest.fixture(scope="module")
def calibrated():
    model, train, validation, _ = problem()
    return acnml.calibrate(model, train, validation, price=0.1)


LOG_PROBS, LABELS = predictions()
REGRETS = LOG_PROBS.amax(1).neg(), LOG_PROBS.amax(1).neg() + 0.3
DRAWN = {
    "reliability": (plots.reliability, (LOG_PROBS, LABELS)),
    "risk_coverage": (plots.risk_coverage, (LOG_PROBS, LABELS)),
    "regret": (plots.regret, REGRETS),
    "class_probabilities": (plots.class_probabilities, (LOG_PROBS[0],)),
}


@pytest.mark.parametrize(("draw", "arguments"), DRAWN.values(), ids=list(DRAWN))
def test_tensors_and_arrays_look_the_same_on_the_given_axes(draw, arguments):
    ax, other = axes(), axes()
    assert draw(*arguments, ax=ax) is ax
    draw(*(argument.numpy() for argument in arguments), ax=other)

    def shown(of):
        lines = [line.get_xydata() for line in of.get_lines()]
        patches = [patch.get_path().vertices for patch in of.patches]
        return [*lines, *patches]

    assert len(shown(ax)) > 0
    for one, two in zip(shown(ax), shown(other), strict=True):
        np.testing.assert_allclose(one, two, equal_nan=True)
    assert ax.get_title(loc="left")
    ax.figure.canvas.draw()


def test_without_axes_a_figure_is_made_and_no_setting_changes(monkeypatch):
    from matplotlib import pyplot

    monkeypatch.setattr(pyplot, "subplots", lambda **_: (None, axes()))
    before = dict(mpl.rcParams)
    for draw, arguments in DRAWN.values():
        assert draw(*arguments).get_title(loc="left")
    assert dict(mpl.rcParams) == before


def test_reliability_shows_the_bins_and_the_error():
    ax = plots.reliability(LOG_PROBS, LABELS, bins=8, ax=axes())
    diagram = metrics.reliability(LOG_PROBS, LABELS, 8)
    drawn = ax.get_lines()[0].get_xydata()
    np.testing.assert_allclose(drawn, torch.stack(diagram[:2], 1).numpy())
    (text,) = (t.get_text() for t in ax.get_legend().get_texts())
    assert text == f"ECE {metrics.ece(LOG_PROBS, LABELS, 8):.3f}"


def test_the_frontier_shows_the_table(calibrated):
    ax = plots.price_frontier(calibrated, ax=axes())
    by_name = {line.get_label(): line.get_xydata()[0] for line in ax.get_lines()}
    best = calibrated.table[1]
    assert best.method == "temperature"
    for row in calibrated.table:
        np.testing.assert_allclose(by_name[row.method], [row.nll - best.nll, row.confidence])


def test_the_likeliest_classes_are_shown_with_their_names():
    ax = plots.class_probabilities(LOG_PROBS[:1], names=list("abcd"), most=3, label=0, ax=axes())
    order = LOG_PROBS[0].argsort(descending=True)[:3]
    assert [tick.get_text() for tick in ax.get_yticklabels()] == ["abcd"[k] for k in order]
    widths = [bar.get_width() for bar in ax.patches]
    np.testing.assert_allclose(widths, LOG_PROBS[0].exp()[order].numpy(), rtol=1e-6)
    with pytest.raises(ValueError, match=r"those of one input, \(K,\), got \(2, 4\)"):
        plots.class_probabilities(LOG_PROBS[:2], ax=axes())


@pytest.mark.parametrize("rank", [0, 3])
def test_the_true_class_is_always_shown(rank):
    order = LOG_PROBS[0].argsort(descending=True).tolist()
    label = order[rank]
    ax = plots.class_probabilities(LOG_PROBS[0], label=torch.tensor(label), most=2, ax=axes())
    shown = order[:2] if rank < 2 else [*order[:2], label]
    assert [int(tick.get_text()) for tick in ax.get_yticklabels()] == shown
    green = [mpl.colors.same_color(bar.get_facecolor(), plots.GREEN) for bar in ax.patches]
    assert green == [k == label for k in shown]


def test_notebooks_show_tables(calibrated):
    html = calibrated._repr_html_()
    assert html.count("<tr>") == 1 + len(calibrated.table)
    assert f"<b>{calibrated.alpha:.4g}</b>" in html
    assert all(f"<p>{note}</p>".replace("'", "&#x27;") in html for note in calibrated.notes)
    choice = tuning.Choice(0.5, (Evidence(0.1, -12.0), Evidence(0.5, -9.5)), "<largest>")
    assert "<p>0.5: &lt;largest&gt;</p>" in choice._repr_html_()
    assert "<b>0.5</b>" in choice._repr_html_()
