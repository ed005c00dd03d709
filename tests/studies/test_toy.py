"""The toy study, from its parts to the command, at a tiny size."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial

import pytest
import torch

from acnml.exact import cnml, fit
from short import Silent, command, no_trace
from studies.toy import study as toy
from studies.toy.report import report
from studies.toy.study import ACNML, BMA, CNMAP, CNML, MAP, METHODS, ToyStudy
from studies.toy.summary import claims, closing_text

tiny_study = partial(ToyStudy, points=24, resolution=12, distances=(5.0, 1000.0), samples=20)


@pytest.fixture(scope="module")
def findings():
    return toy.run(tiny_study(), Silent())


def test_the_same_seed_gives_the_same_maps_and_leaves_no_trace(findings):
    progress = Silent()
    with no_trace():
        again = toy.run(tiny_study(), progress)
    for method in METHODS:
        for l2 in findings.study.penalties:
            assert torch.equal(again.maps[method][l2], findings.maps[method][l2])
    assert again.rings == findings.rings
    assert progress.done == findings.study.work


def test_samples_are_the_same_points_moved_apart(findings):
    apart, together = findings.sample, findings.overlapping_sample
    assert torch.equal(together.labels, apart.labels)
    moved = (apart.points - together.points)[together.labels == 1]
    torch.testing.assert_close(moved, moved[0].expand_as(moved))
    assert together.labels.sum() == len(together.labels) / 2


def test_maps_are_oriented_as_the_plane():
    """Rows of a map are heights, from below; columns go from left to right."""
    points = toy.grid(tiny_study(resolution=3, extent=2.0)).view(3, 3, 3)
    assert points[0, 2].tolist() == [2.0, -2.0, 1.0]
    assert points[2, 0].tolist() == [-2.0, 2.0, 1.0]


def test_maps_are_probabilities_of_the_methods_they_name(findings):
    study, sample = findings.study, findings.sample
    refits = cnml(toy.problem(sample, 1.0), toy.grid(study)[17:18])
    assert findings.maps[CNMAP][1.0].flatten()[17] == pytest.approx(
        refits.log_probs[0, 1].exp().item()
    )
    trained = fit(toy.problem(sample, 1.0)).log_probs(toy.grid(study))[:, 1].exp()
    torch.testing.assert_close(findings.maps[MAP][1.0].flatten(), trained)
    assert (findings.exact[0.0].normaliser >= 1).all()
    assert (findings.exact[0.0].normaliser <= 2).all()


def test_the_two_samples_differ_in_whether_a_line_parts_them(findings):
    assert findings.overlapping[0.0].limits == 0
    assert findings.exact[0.0].limits > 0.5
    maps = (*findings.exact.values(), *findings.overlapping.values())
    assert all(found.unconverged == 0 for found in maps)
    assert (findings.exact[0.0].probability == 0.5).double().mean() > 0.3


def test_far_away_cnml_and_acnml_prefer_no_class_and_map_is_sure(findings):
    for method in (CNML, CNMAP, ACNML):
        assert findings.rings[method][-1] < 0.52
    assert findings.rings[MAP][-1] > 0.99
    assert findings.rings[BMA][-1] > 0.6


def test_the_papers_claims_are_judged_by_confidence_and_normaliser(findings):
    """A larger penalty acts as in the paper's figure where a line parts the classes."""
    outcomes = [verdict.holds for verdict in claims(findings)]
    assert outcomes == [True, True, True, False]
    backwards = dict(zip(findings.exact, reversed(findings.exact.values()), strict=True))
    assert not claims(replace(findings, exact=backwards))[2].holds
    # The confidence alone is not enough, nor is the normaliser.
    penalties, maps = zip(*((p, m) for p, m in findings.exact.items() if p), strict=True)
    for field in ("probability", "normaliser"):
        swapped = {
            p: m._replace(**{field: getattr(o, field)})
            for p, m, o in zip(penalties, maps, reversed(maps), strict=True)
        }
        changed = replace(findings, exact={0.0: findings.exact[0.0], **swapped})
        assert not claims(changed)[2].holds
    unsure = replace(findings, cnml_at_query=(0.36, 0.64))
    assert not claims(unsure)[1].holds
    assert not claims(replace(findings, exact=findings.overlapping))[0].holds


def test_the_command_shows_a_table_and_writes_the_report(monkeypatch, tmp_path, findings):
    monkeypatch.setattr(toy, "ToyStudy", tiny_study)
    out = tmp_path / "new" / "folder"
    output = command("toy", "--out", out)
    for method in METHODS:
        assert re.search(rf"^ +{method} +[\d.]+% +[\d.]+% +[\d.]+%", output, re.MULTILINE)
    assert f"Report: {out / 'report.html'}" in output
    assert closing_text(findings) in " ".join(output.split())
    assert (out / "report.html").read_text(encoding="utf-8") == report(findings).html()
    assert "| yes | Figure 1: CNML" in (out / "results.md").read_text(encoding="utf-8")
    table = (out / "results.csv").read_text().splitlines()
    assert table[0].startswith("sample,method,lambda,confidence")
    assert len(table) == 1 + 2 * 4 + 3 * 3
    assert {path.suffix for path in out.iterdir()} == {".html", ".md", ".csv", ".png", ".svg"}
