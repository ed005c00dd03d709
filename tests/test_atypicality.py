"""The score of atypicality: by hand, merged, and in the cases in which covariances fail."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from acnml.atypicality import Atypicality, Moments
from cases import normal


def data(count: int = 600, features: int = 5, classes: int = 3, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    centres = 3 * torch.randn(classes, features, generator=generator)
    mixing = torch.randn(features, features, generator=generator)
    labels = torch.arange(count) % classes
    noise = torch.randn(count, features, generator=generator)
    return (centres[labels] + noise @ mixing).double(), labels


def moments_of(x, labels, classes: int = 3, parts: int = 1) -> Moments:
    moments = Moments(classes)
    for own, its in zip(x.chunk(parts), labels.chunk(parts), strict=True):
        moments.add(own, its)
    return moments


def covariance_within(x, labels):
    centred = np.concatenate([x[labels == k] - x[labels == k].mean(0) for k in np.unique(labels)])
    return centred.T @ centred / len(centred)


def test_moments_are_numpys():
    x, labels = data()
    moments = moments_of(x + 1e6, labels, parts=7)
    expected = np.cov(x.numpy().T, bias=True)
    np.testing.assert_allclose(moments.covariance.numpy(), expected, rtol=1e-7, atol=1e-7)
    within = covariance_within(x.numpy(), labels.numpy())
    np.testing.assert_allclose(moments.covariance_within.numpy(), within, rtol=1e-7, atol=1e-7)
    means = np.stack([x[labels == k].numpy().mean(0) for k in range(3)])
    np.testing.assert_allclose(moments.class_means.numpy(), means + 1e6, rtol=1e-12)


def test_scores_are_mahalanobis_distances():
    x, labels = data()
    train, held_out = slice(0, 500), slice(500, 600)
    score = Atypicality.fit(moments_of(x[train], labels[train]), x[held_out], labels[held_out])
    assert score.shrinkage <= 1e-5  # many data, few features
    precision = np.linalg.inv(covariance_within(x[train].numpy(), labels[train].numpy()))
    means = [x[train][labels[train] == k].numpy().mean(0) for k in range(3)]
    gaps = np.stack([x.numpy() - mean for mean in means], axis=1)
    by_class = np.einsum("nkp,pq,nkq->nk", gaps, precision, gaps).min(1)
    np.testing.assert_allclose(score.distances(x).by_class, by_class, rtol=1e-3)
    unit = np.sort(by_class[held_out])[:99].mean()  # without the farthest 1 %
    np.testing.assert_allclose(score(x), by_class / unit, rtol=1e-3)
    total = np.linalg.inv(np.cov(x[train].numpy().T, bias=True))
    centred = x.numpy() - x[train].numpy().mean(0)
    overall = np.einsum("np,pq,nq->n", centred, total, centred)
    np.testing.assert_allclose(score.distances(x).overall, overall, rtol=2e-3, atol=2e-3)
    np.testing.assert_allclose(
        score.distances(x).relative, by_class - overall, rtol=1e-2, atol=1e-2
    )


def test_it_is_one_on_average_and_grows_with_the_distance():
    x, labels = data()
    score = Atypicality.fit(moments_of(x[:500], labels[:500]), x[500:], labels[500:])
    ordinary = score(x[500:]).sort().values[:99]  # without the farthest 1 %
    assert float(ordinary.mean()) == pytest.approx(1.0, rel=1e-5)
    direction = normal(1, 5)
    far = torch.cat([score(x[500:501] + size * direction) for size in (10.0, 30.0, 100.0)])
    assert (far.diff() > 0).all()


@pytest.mark.parametrize("rank", [2, 4, 16])
def test_what_is_left_out_of_the_directions_counts_by_its_length(rank):
    x, labels = data(features=24)
    score = Atypicality.fit(moments_of(x[:500], labels[:500]), x[500:], labels[500:], rank=rank)
    assert len(score.directions) <= rank
    identity = score.directions @ score.directions.T
    torch.testing.assert_close(identity, torch.eye(len(identity)), rtol=0, atol=1e-5)
    # A shift that the directions do not see is seen by the rest.
    unseen = normal(24, seed=9).float()
    unseen = unseen - score.directions.T @ (score.directions @ unseen)
    moved = x[500:] + 50 * (unseen / score.scale).double()
    assert (score(moved) > 2 * score(x[500:])).all()


def test_fewer_data_than_features_are_shrunk_until_held_out_data_agree():
    generator = torch.Generator().manual_seed(0)
    x, labels = torch.randn(1400, 300, generator=generator), torch.arange(1400) % 10
    few, many = (
        Atypicality.fit(moments_of(x[:n], labels[:n], 10), x[1000:], labels[1000:])
        for n in (100, 1000)
    )
    assert few.overfit < 2
    assert many.overfit < 1.2
    # Noise as large as half of the data's own changes the score by as much as it should, not more.
    noise = 0.5 * torch.randn(400, 300, generator=generator)
    assert float(few(x[1000:] + noise).mean()) == pytest.approx(1.25, rel=0.1)


def test_features_that_are_constant_or_repeated_do_not_count():
    x, labels = data()
    repeated = torch.cat([x, torch.full((600, 2), 7.0).double(), x[:, :2]], dim=1)
    plain, odd = (
        Atypicality.fit(moments_of(each[:500], labels[:500]), each[500:], labels[500:])
        for each in (x, repeated)
    )
    changed = repeated.clone()
    changed[:, 5] += 100  # a constant feature has no scale to measure a change by
    torch.testing.assert_close(odd(changed), odd(repeated))
    assert torch.corrcoef(torch.stack([plain(x), odd(repeated)]))[0, 1] > 0.8
    with pytest.raises(ValueError, match="no feature varies within the classes"):
        Atypicality.fit(moments_of(0 * x, labels), x, labels)


def test_a_class_without_training_data_is_never_the_nearest():
    x, labels = data()
    known = labels != 2
    score = Atypicality.fit(moments_of(x[known][:300], labels[known][:300]), x[500:], labels[500:])
    of_missing, of_others = score(x[labels == 2]).mean(), score(x[known]).mean()
    assert of_missing > 2 * of_others


def test_single_inputs_of_classes_have_one_mean():
    x, _ = data()
    train, held_out = slice(0, 500), slice(500, 600)
    each, groups = moments_of(x[train], torch.arange(500), classes=500), torch.arange(100)
    one = moments_of(x[train], torch.zeros(500, dtype=torch.int64), classes=1)
    found = Atypicality.fit(each, x[held_out], groups)
    expected = Atypicality.fit(one, x[held_out], torch.zeros(100, dtype=torch.int64))
    assert len(found.class_means) == 1
    torch.testing.assert_close(found(x.float()), expected(x.float()))


def test_another_number_of_features_is_refused():
    x, labels = data()
    score = Atypicality.fit(moments_of(x[:500], labels[:500]), x[500:], labels[500:])
    with pytest.raises(ValueError, match="there are 4 features, but the score was fitted on 5"):
        score(x[:, :4])


def test_many_features_by_subspace_iteration(monkeypatch):
    x, labels = data(features=8)
    wide = x @ normal(8, 40, seed=3) + 0.3 * normal(600, 40, seed=4)
    moments = moments_of(wide[:500], labels[:500])
    dense = Atypicality.fit(moments, wide[500:], labels[500:], rank=8)
    monkeypatch.setattr("acnml.atypicality.DENSE", 10)
    iterated = Atypicality.fit(moments, wide[500:], labels[500:], rank=8)
    torch.testing.assert_close(iterated(wide), dense(wide), rtol=1e-3, atol=1e-3)
