"""Typicality: where features are taken, what s(x) is, and what it does in predictors and files."""

from __future__ import annotations

import copy
import math
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.covariance import OAS
from torch import nn

import acnml
from acnml import (
    Acnml,
    Classifier,
    Gradient,
    Map,
    Place,
    calibrate,
    fit_neighbours,
    fit_typicality,
    metrics,
    tuning,
)
from acnml._algebra.dual import Affine
from acnml.fit.curvature import Factors, KroneckerCurvature
from acnml.predictors.density_tempered import density_tempered
from acnml.tuning.density import slope_of_least_nll
from acnml.tuning.temperature import least_nll_temperature
from acnml.typicality import density
from acnml.typicality.mahalanobis import Moments, oas_shrinkage
from acnml.typicality.neighbours import _Marginals
from acnml.typicality.places import Taps, find_places, pooled
from cases import normal
from test_calibrate import joined, problem


def conv_net() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            *(nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
            *(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True)),
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)),
        ).double()


@pytest.fixture(scope="module")
def fitted():
    """An overconfident MLP with its data and a typicality of it."""
    model, train, validation, test = problem()
    return fit_typicality(Classifier(model), train, validation), model, train, validation, test


# Places ------------------------------------------------------------------------------------------


def places_of(model, x):
    return find_places(Classifier(model), x)


def test_stages_and_vectors_of_a_convolutional_network():
    places = places_of(conv_net(), normal(4, 2, 8, 8))
    assert places == (
        Place("1"),  # the last tensor with 8×8 positions
        Place("5"),  # the last with 4×4
        Place("8", is_input=True),
        Place("10", is_input=True),
    )


def test_hidden_layers_of_an_mlp_and_not_its_inputs():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))
    places = places_of(model, torch.randn(5, 4))
    assert places == (Place("2", is_input=True), Place("4", is_input=True))


def test_inputs_of_a_linear_model():
    assert places_of(nn.Linear(4, 3), torch.randn(5, 4)) == (Place("", is_input=True),)


def test_hidden_states_of_a_transformer_are_pooled_over_tokens():
    layer = nn.TransformerEncoderLayer(6, 2, 8, batch_first=True)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.encoder = nn.Embedding(10, 6), nn.TransformerEncoder(layer, 2)
            self.head = nn.Linear(6, 3)

        def forward(self, tokens):
            return self.head(self.encoder(self.embed(tokens)).mean(1))

    classifier = Classifier(Model())
    tokens = torch.arange(28).view(4, 7) % 10
    places = find_places(classifier, tokens)
    assert places == (Place("encoder", channels=-1), Place("head", is_input=True))
    taps = Taps(classifier, places)
    taps.classifier.logits(tokens)
    features = taps.features()
    assert features.shape == (4, 3 * 6)
    torch.testing.assert_close(features[:, :6], features[:, 12:])  # the mean over tokens, twice


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_hidden_states_are_left_out():
    """An encoder of torch runs on nested tensors where tokens are padding, by default."""

    class Padded(nn.Module):
        def __init__(self, nested):
            super().__init__()
            torch.manual_seed(0)
            layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=nested)
            self.head = nn.Linear(4, 3)

        def forward(self, x, attention_mask):
            return self.head(self.encoder(x, src_key_padding_mask=~attention_mask)[:, 0])

    mask = torch.ones(60, 6, dtype=torch.bool)
    mask[::2, 4:] = False
    data = [{"x": normal(60, 6, 4), "attention_mask": mask, "labels": torch.arange(60) % 3}]
    with torch.random.fork_rng():
        both = [
            calibrate(Padded(nested).double().eval(), data, list(data), price=0.5, temperature=1.0)
            for nested in (True, False)
        ]
    nested, dense = ([each.alpha, *each(data[0]).flatten().tolist()] for each in both)
    assert nested == pytest.approx(dense, abs=1e-9)


def test_channels_of_a_one_dimensional_convolution():
    model = nn.Sequential(nn.Conv1d(2, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(3 * 5, 4))
    assert places_of(model, torch.randn(4, 2, 7))[0] == Place("1", channels=1)


def test_pooling_is_mean_and_deviation_over_positions():
    x = normal(3, 4, 5, 6)
    by_hand = torch.stack([torch.cat([i.mean((1, 2)), i.std((1, 2), correction=0)]) for i in x])
    torch.testing.assert_close(pooled(x), by_hand)
    torch.testing.assert_close(pooled(x.movedim(1, -1), channels=-1), by_hand)


def test_taps_keep_tensors_that_later_modules_overwrite():
    """The output of the convolution is overwritten by the ReLU behind it."""
    model, x = conv_net(), normal(4, 2, 8, 8)
    taps = Taps(Classifier(model), [Place("0")])
    taps.classifier.logits(x)
    torch.testing.assert_close(taps.features(), pooled(model[0](x)))


def test_a_model_without_places_is_refused():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 3))

        def forward(self, x):
            return x @ self.weight

    with pytest.raises(ValueError, match="name the places by `places`"):
        fit_typicality(Classifier(Model()), [torch.randn(20, 4)], [torch.randn(20, 4)])


def test_a_place_that_does_not_run_is_named():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.head, self.unused = nn.Linear(4, 3), nn.Linear(2, 2)

        def forward(self, x):
            return self.head(x)

    x = torch.randn(20, 4)
    with pytest.raises(ValueError, match="did not run output of 'unused'"):
        fit_typicality(Classifier(Model()), [x], [x], places=[Place("unused")])


class Branching(nn.Module):
    """Leaves a layer out for batches with a large entry."""

    def __init__(self):
        super().__init__()
        self.first, self.h, self.head = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        z = torch.tanh(self.first(x))
        if x.abs().max() < 100:
            z = torch.tanh(self.h(z))
        return self.head(z)


def test_a_chunk_that_does_not_reach_a_place_has_no_features():
    """It must not get the features of the chunk before it."""
    model, x = Branching().double(), normal(512, 4)
    classifier = Classifier(model)
    typicality = fit_typicality(classifier, x, x, places=[Place("h")])
    tempered = acnml.DensityTempered(classifier, typicality)
    data = (torch.cat([x[:256], 1e4 * x[256:]]), torch.arange(512) % 3)
    for call in (
        lambda: typicality(data[0]),
        lambda: tempered(data[0]),
        lambda: tuning.density_temperature(classifier, typicality, [data]),
        lambda: fit_typicality(classifier, [data], [data], places=[Place("h")]),
    ):
        with pytest.raises(ValueError, match="the model did not run output of 'h'"):
            call()


def test_a_module_that_does_not_reach_a_place_has_no_features():
    model, x = Branching().double(), normal(100, 4)
    classifier = Classifier(model)
    typicality = fit_typicality(classifier, x, x, places=[Place("h")])
    posterior = acnml.fit_laplace(classifier, x, layers=[model.head])
    module = Acnml(classifier, posterior, alpha=0.1, typicality=typicality).as_module()
    module(x)
    with pytest.raises(ValueError, match="the network did not run output of 'h'"):
        module(1e4 * x)


def test_a_place_without_the_batch_is_named():
    class Turned(nn.Module):
        """A layer that receives (positions, B, features)."""

        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Linear(3, 4), nn.Linear(4, 3)

        def forward(self, x):
            return self.head(self.embed(x.movedim(1, 0)).mean(0))

    classifier, x = Classifier(Turned().double()), normal(40, 6, 3)
    message = "output of 'embed' has 6 rows for a batch of 13 inputs"
    with pytest.raises(ValueError, match=message):
        fit_typicality(classifier, x, x, places=[Place("embed", channels=-1)])


# The distance ------------------------------------------------------------------------------------


def hidden(model, loader):
    """Features by hand: the only default place of the MLP is the input of its head."""
    return torch.tanh(model.body(joined(loader)[0])).detach()


def test_mahalanobis_by_hand_with_scikit_learns_shrinkage(fitted):
    typicality, model, train, validation, test = fitted
    own, held_out, other = (hidden(model, loader) for loader in (train, validation, test))
    mean, std = own.mean(0), own.std(0, correction=0)
    oas = OAS(assume_centered=True).fit(((own - mean) / std).numpy())
    assert typicality.shrinkage == pytest.approx(oas.shrinkage_, rel=1e-9)

    def distance(features):
        z = ((features - mean) / std).numpy()
        return np.einsum("bi,ij,bj->b", z, oas.precision_, z)

    expected = distance(other) / distance(held_out).mean()
    np.testing.assert_allclose(typicality(joined(test)[0]).numpy(), expected, rtol=1e-8)
    assert typicality(joined(validation)[0]).mean().item() == pytest.approx(1)


@pytest.mark.parametrize("count", [5, 40, 3000])
def test_shrinkage_is_that_of_scikit_learn_also_with_few_data(count):
    x = normal(count, 12) @ normal(12, 12, seed=1)
    x = (x - x.mean(0)) / x.std(0, correction=0)
    expected = OAS(assume_centered=True).fit(x.numpy()).shrinkage_
    assert oas_shrinkage(x.T @ x / count, count) == pytest.approx(expected, rel=1e-9)


def test_moments_do_not_cancel():
    """A mean of 1e6 deviations: sums of squares alone would lose all digits of single precision."""
    x = (normal(900, 3) + 1e6).float()
    moments = Moments()
    for batch in x.split(64):
        moments.add(batch)
    torch.testing.assert_close(moments.mean, x.double().mean(0))
    expected = torch.cov(x.double().T, correction=0)
    torch.testing.assert_close(moments.covariance, expected, rtol=1e-10, atol=1e-12)


def test_fewer_data_than_features():
    model, train, validation, _ = problem()
    few = [(x[:8], y[:8]) for x, y in train[:1]]
    typicality = fit_typicality(Classifier(model), few, validation)
    assert typicality.shrinkage > 0
    assert torch.isfinite(typicality(joined(validation)[0])).all()


def test_constant_features_are_left_out():
    model, train, validation, _ = problem()
    with torch.no_grad():
        model.body.weight[3] = 0.0
    typicality = fit_typicality(Classifier(model), train, validation)
    assert typicality.whitening.shape == (15, 16)
    assert (typicality.whitening[:, 3] == 0).all()
    with torch.no_grad():
        model.body.weight.zero_()
    with pytest.raises(ValueError, match="all features are constant"):
        fit_typicality(Classifier(model), train, validation)


@pytest.mark.parametrize("fit", [fit_typicality, fit_neighbours])
def test_a_nearly_dead_unit_does_not_count(fit):
    """It is zero for the first inputs and tiny for one other. Where it is not, s does not rise."""
    x = torch.cat([normal(400, 4), torch.zeros(400, 1).double()], dim=1)
    x[150, 4] = 1e-6
    score = fit(Classifier(nn.Linear(5, 3).double()), x[:200], x[200:])
    awake = x[200:] + torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0]).double()
    torch.testing.assert_close(score(awake), score(x[200:]))


@pytest.mark.parametrize("most", [4096, 6])
@pytest.mark.parametrize("fit", [fit_typicality, fit_neighbours])
def test_a_fit_needs_no_default_device(monkeypatch, fitted, fit, most):
    """A tensor that is made without a device has no values here; see tests/test_devices.py."""
    _, model, train, validation, test = fitted
    monkeypatch.setattr(density, "MOST_FEATURES", most)
    expected = fit(Classifier(model), train, validation)(joined(test)[0])
    x = joined(test)[0]
    with torch.device("meta"):
        found = fit(Classifier(model), train, validation)(x)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("fit", [fit_typicality, fit_neighbours])
def test_a_score_survives_a_change_of_precision(fit):
    model, train, validation, test = problem()
    narrow, x = copy.deepcopy(model).float(), joined(test)[0]
    data = [[(x.float(), y) for x, y in part] for part in (train, validation)]
    score = fit(Classifier(narrow), *data)
    expected = score(x.float())
    narrow.double()
    assert score(x).dtype == torch.float64
    torch.testing.assert_close(score(x), expected.double(), rtol=1e-4, atol=0)
    wide = fit(Classifier(model), train, validation)
    expected = wide(x)
    model.float()
    torch.testing.assert_close(wide(x.float()), expected, rtol=1e-4, atol=0)


def test_many_features_are_folded(monkeypatch, fitted):
    _, model, train, validation, test = fitted
    monkeypatch.setattr(density, "MOST_FEATURES", 6)
    typicality = fit_typicality(Classifier(model), train, validation)
    assert typicality.mean.shape == (6,)
    reader = typicality.reader
    z = (hidden(model, test) - reader.shift) / reader.scale * reader.signs
    by_hand = torch.stack([z[:, i::6].sum(1) for i in range(6)], dim=1)
    torch.testing.assert_close(reader.read(hidden(model, test)), by_hand)
    far = typicality(5 * joined(test)[0]).mean()
    assert far > typicality(joined(test)[0]).mean()


def test_nearest_neighbours_by_hand(fitted):
    _, model, train, validation, test = fitted
    found = fit_neighbours(Classifier(model), train, validation, k=3)
    own, held_out, other = (hidden(model, loader) for loader in (train, validation, test))
    mean, std = own.mean(0), own.std(0, correction=0)

    def distance(features):
        difference = ((features - mean) / std)[:, None] - ((own - mean) / std)[None]
        return difference.square().sum(-1).sort(-1).values[:, 2]

    expected = distance(other) / distance(held_out).mean()
    torch.testing.assert_close(found(joined(test)[0]), expected, rtol=1e-9, atol=1e-12)
    few = fit_neighbours(Classifier(model), train, validation, k=1, most=20)
    assert few.kept.shape == (20, 16)
    with pytest.raises(ValueError, match="k must be between 1 and 20, got 30"):
        fit_neighbours(Classifier(model), train, validation, k=30, most=20)


def test_kept_neighbours_are_those_with_the_smallest_keys(fitted):
    """Rows are chosen among a few batches at a time, but as if among all at once."""
    _, model, train, validation, _ = fitted
    x = joined(train)[0]
    sizes = [7, 40, 1, 90, len(x) - 138]
    found = fit_neighbours(Classifier(model), x.split(sizes), validation, k=1, most=20)
    generator = torch.Generator().manual_seed(0)
    keys = torch.cat([torch.rand(n, generator=generator) for n in sizes])
    chosen = keys.argsort(stable=True)[:20].sort().values
    own = hidden(model, train)
    expected = (own[chosen] - own.mean(0)) / own.std(0, correction=0)
    torch.testing.assert_close(found.kept, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"k": 0}, "k must be between 1 and 10000, got 0"),
        ({"k": 30, "most": 20}, "k must be between 1 and 20, got 30"),
        ({"most": 0}, "most must be at least 1, got 0"),
    ],
)
def test_settings_of_neighbours_are_checked_before_the_data_are_read(fitted, settings, message):
    _, model, _, validation, _ = fitted
    unread = (pytest.fail("the data are read") for _ in range(1))
    with pytest.raises(ValueError, match=message):
        fit_neighbours(Classifier(model), unread, validation, **settings)


def test_marginals_are_the_diagonal_of_the_moments():
    """Also with a mean of 1e6 deviations."""
    x, moments, marginals = (normal(900, 3) + 1e6).float(), Moments(), _Marginals()
    for batch in x.split(64):
        moments.add(batch)
        marginals.add(batch)
    torch.testing.assert_close(marginals.mean, x.double().mean(0))
    expected = x.double().var(0, correction=0)
    torch.testing.assert_close(marginals.variance, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(moments.variance, moments.covariance.diagonal(), rtol=0, atol=0)


def test_features_that_are_not_finite_are_refused(fitted):
    typicality, *_, test = fitted
    x = joined(test)[0][:3]
    broken = replace(typicality, mean=typicality.mean * math.nan)
    with pytest.raises(ValueError, match="the typicality is NaN or infinite for 3 of 3 inputs"):
        broken(x)
    with pytest.raises(ValueError, match="input x is NaN"):
        typicality(x * math.nan)


# In ACNML ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def weighed():
    model, train, validation, test = problem()
    return calibrate(model, train, validation, price=0.02, typicality=True), model, test, validation


def one_by_one(predictor, x):
    """ACNML at α·s(x), for every input a predictor of its own."""
    scales = predictor.typicality(x).tolist()
    plain = replace(predictor, typicality=None)
    parts = [
        replace(plain, alpha=plain.alpha * scale)(x[i : i + 1]) for i, scale in enumerate(scales)
    ]
    return torch.cat(parts)


def test_alpha_is_scaled_for_every_input(weighed):
    result, _, test, _ = weighed
    x = joined(test)[0][:20]
    expected = one_by_one(result.predictor, x)
    torch.testing.assert_close(result(x), expected, rtol=0, atol=1e-7)
    solved = result.solve(x)
    torch.testing.assert_close(solved.log_probs, expected, rtol=0, atol=1e-7)
    cached = result.predictor.solve_features(result.predictor.features(x))
    torch.testing.assert_close(cached.log_probs, expected, rtol=0, atol=1e-7)
    plain = replace(result.predictor, typicality=None)
    assert (plain(x) - expected).abs().max() > 1e-3


@pytest.mark.parametrize("solver", [None, Gradient(steps=3, step_size=0.5)])
def test_posteriors_over_all_layers(fitted, solver):
    typicality, model, train, _, test = fitted
    classifier = Classifier(model)
    posterior = acnml.fit_laplace(classifier, train, prior_precision=10.0, structure="diag")
    predictor = Acnml(typicality.classifier, posterior, solver, alpha=0.1, typicality=typicality)
    x = joined(test)[0][:5]
    torch.testing.assert_close(predictor(x), one_by_one(predictor, x), rtol=0, atol=1e-9)


def test_price_is_spent_and_the_network_runs_once_over_each_data_set():
    model, train, validation, _ = problem()
    result = calibrate(model, train, validation, price=0.02, typicality=True)
    n_train, n_validation = (len(joined(loader)[1]) for loader in (train, validation))
    checked = 100  # inputs that first-sight checks and the search for places may look at again
    assert n_train + n_validation <= sum(model._seen) <= n_train + n_validation + checked
    x, labels = joined(validation)
    added = metrics.nll(result(x), labels) - metrics.nll(Map(result.classifier)(x), labels)
    assert 0.018 <= added <= 0.02 + 1e-9
    assert "(1 on average), computed from 16 features: input of 'head'" in str(result)


def test_a_prediction_runs_the_network_once(weighed):
    result, model, test, _ = weighed
    x = joined(test)[0]
    result(x)
    model._seen.clear()
    result.solve(x)
    assert sum(model._seen) == len(x)


def test_it_is_what_fit_typicality_fits(weighed):
    result, model, test, validation = weighed
    _, train, _, _ = problem()
    expected = fit_typicality(Classifier(model), train, validation)
    x = joined(test)[0]
    torch.testing.assert_close(result.typicality(x), expected(x), rtol=1e-8, atol=1e-10)


def test_places_can_be_named():
    model, train, validation, test = problem()
    result = calibrate(model, train, validation, typicality=[Place("body")])
    assert result.typicality.reader.places == (Place("body"),)
    x = joined(test)[0]
    features = model.body(x).detach()
    torch.testing.assert_close(result.typicality.read(features), result.typicality(x))


def test_searches_use_the_scale(weighed):
    result, _, _, validation = weighed
    grid = (0.5 * result.alpha, result.alpha)
    choice = tuning.alpha_by_nll(result.predictor, validation, grid)
    x, labels = joined(validation)
    for row in choice.table:
        if row.value == 0:
            continue
        expected = metrics.nll(replace(result.predictor, alpha=row.value)(x), labels)
        assert row.nll == pytest.approx(expected, abs=1e-8)


@pytest.fixture(scope="module")
def convolutional():
    """In single precision, as networks are: onnxruntime lacks some operations in double."""
    model = conv_net().float()
    x = normal(260, 2, 8, 8).float()
    labels = (torch.arange(260) % 2) * (1 + (x.mean((1, 2, 3)) > 0).long())
    labels[::2] = model(x).argmax(-1)[::2]
    train, validation = [(x[:100], labels[:100])], [(x[100:200], labels[100:200])]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # few data
        return calibrate(model, train, validation, price=0.03, typicality=True), x[200:]


def test_the_module_gives_the_predictors_numbers(convolutional):
    result, x = convolutional
    module = result.as_module()
    log_probs, regret = module(x)
    torch.testing.assert_close(log_probs.exp(), result.probs(x), rtol=0, atol=1e-5)
    torch.testing.assert_close(regret, result.regret(x), rtol=0, atol=1e-5)
    assert module.residual(x).shape == (len(x), 3)
    plain = replace(result.predictor, typicality=None).as_module()
    assert (plain(x)[0] - log_probs).abs().max() > 1e-3


def test_places_that_differ_in_their_channels_only():
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(4 * 4 * 4, 3)).double()
    x = normal(400, 2, 6, 6)
    labels = (model(x).detach() + normal(400, 3, seed=1)).argmax(-1)
    places = [Place("0", channels=1), Place("0", channels=2)]
    data = (x[:200], labels[:200]), (x[200:], labels[200:])
    result = calibrate(model, *data, price=0.1, typicality=places)
    _, _, score = result.as_module()._features(x)
    torch.testing.assert_close(score, result.typicality(x))


def test_copies_and_threads_do_not_share_features(convolutional):
    result, x = convolutional
    module = result.as_module()
    twin = copy.deepcopy(module)
    module(x[:2])
    torch.testing.assert_close(twin(x)[0].exp(), result.probs(x), rtol=0, atol=1e-5)
    parts = [x[i::5] for i in range(5)] * 4
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda part: module(part)[0], parts))
    for part, own in zip(parts, found, strict=True):
        torch.testing.assert_close(own.exp(), result.probs(part), rtol=0, atol=1e-5)


def test_it_compiles_and_exports_in_one_graph(convolutional, tmp_path):
    result, x = convolutional
    module = result.as_module()
    torch.testing.assert_close(module(x)[0].exp(), result.probs(x), rtol=0, atol=1e-5)
    batch = torch.export.Dim("batch")
    program = torch.export.export(module, (x,), dynamic_shapes={"args": ({0: batch},)})
    torch.testing.assert_close(program.module()(x[:7])[0], module(x[:7])[0], rtol=0, atol=1e-5)
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x)[0], module(x)[0], rtol=0, atol=1e-5)
    for package in ("onnx", "onnxruntime", "onnxscript"):
        pytest.importorskip(package)
    exported = acnml.export_onnx(result, x[:8], tmp_path / "model.onnx")
    assert exported.difference < 1e-4


def test_files(weighed, fitted, tmp_path):
    result, model, test, _ = weighed
    x = joined(test)[0]
    acnml.save(result, tmp_path / "calibrated.safetensors")
    loaded = acnml.load(tmp_path / "calibrated.safetensors", Classifier(model))
    assert torch.equal(loaded(x), result(x))
    assert torch.equal(loaded.typicality(x), result.typicality(x))
    typicality, own, train, validation, _ = fitted
    neighbours = fit_neighbours(Classifier(own), train, validation)
    tempered = acnml.DensityTempered(typicality.classifier, typicality, 2.0, 0.3)
    for value in (typicality, neighbours, tempered):
        acnml.save(value, tmp_path / "density.safetensors")
        again = acnml.load(tmp_path / "density.safetensors", Classifier(own))
        assert torch.equal(again(x), value(x))
    with torch.no_grad():
        other = copy.deepcopy(nn.Sequential(own.body, nn.Tanh(), own.head))
    with pytest.raises(acnml.StorageError):
        acnml.load(tmp_path / "density.safetensors", Classifier(other))
    with pytest.raises(acnml.StorageError, match=r"use load\(path, model\)"):
        acnml.load(tmp_path / "density.safetensors")


def test_a_file_and_a_calibrated_network_in_double_precision(tmp_path):
    model, train, validation, test = problem()
    model.float()
    data = [[(x.float(), y) for x, y in part] for part in (train, validation)]
    calibrated, x = calibrate(model, *data, price=0.02, typicality=True), joined(test)[0]
    expected = calibrated.probs(x.float())
    acnml.save(calibrated, tmp_path / "file")
    wide = copy.deepcopy(model).double()
    loaded = acnml.load(tmp_path / "file", wide, weights="rounded")
    torch.testing.assert_close(loaded.probs(x).float(), expected, rtol=1e-3, atol=1e-5)
    model.double()
    torch.testing.assert_close(calibrated.probs(x).float(), expected, rtol=1e-3, atol=1e-5)


def test_a_file_needs_no_last_layer_and_takes_a_tempered_network(weighed, tmp_path):
    """The file has the last layer, and both parts of it know the predictor's temperature."""
    result, model, test, _ = weighed
    x = joined(test)[0]
    acnml.save(result, tmp_path / "calibrated.safetensors")
    other = copy.deepcopy(model)
    other.head = nn.Linear(16, 3).double()
    for network in (Classifier(other), Classifier(model).tempered(result.temperature)):
        loaded = acnml.load(tmp_path / "calibrated.safetensors", network)
        assert torch.equal(loaded(x), result(x))


def test_refusals(fitted, weighed):
    typicality, model, train, validation, _ = fitted
    classifier = Classifier(model)
    posterior = acnml.fit_laplace(classifier, train, layers=[model.head])
    other = Classifier(copy.deepcopy(nn.Sequential(model.body, nn.Tanh(), model.head)))
    with pytest.raises(ValueError, match="fitted on another model"):
        acnml.DensityTempered(other, typicality)
    swapped = classifier.at({"body.weight": 2 * model.body.weight})
    for build in (acnml.DensityTempered, lambda c, t: Acnml(c, posterior, typicality=t)):
        with pytest.raises(ValueError, match=r"fitted with another 'body.weight' than the pred"):
            build(swapped, typicality)
        build(classifier.at({"body.weight": model.body.weight.clone()}), typicality)
    with pytest.raises(TypeError, match="typicality must come from fit_typicality, got a float"):
        Acnml(classifier, posterior, typicality=2.0)
    neighbours = fit_neighbours(classifier, train, validation)
    predictor = Acnml(classifier, posterior, typicality=neighbours)
    with pytest.raises(TypeError, match="a NearestNeighbours cannot be exported"):
        predictor.as_module()
    with pytest.raises(ValueError, match="the loader gave no batch"):
        fit_typicality(classifier, [], validation)
    with pytest.raises(ValueError, match="give more training data"):
        fit_typicality(classifier, [(x[:1], y[:1]) for x, y in train[:1]], validation)


# The theory --------------------------------------------------------------------------------------


def test_kernel_of_an_extended_head():
    """A head that also sees φ, with mean weights 0: its kernel is V(x) + φᵀA_φ⁻¹φ · G⁻¹.

    The curvature is Kronecker-factored, and a and φ are uncorrelated.
    """
    inputs, extra, classes = 4, 6, 3
    a, phi = normal(50, inputs, seed=1), normal(50, extra, seed=2)
    A, A_phi = a.T @ a, phi.T @ phi
    root = normal(classes, classes, seed=3)
    G = root @ root.T + torch.eye(classes).double()
    zero = torch.zeros(classes, extra).double()
    weight = normal(classes, inputs, seed=4)
    tiny = 1e-12  # a prior that does not matter

    def kernel(mean, factor, x):
        layer = Affine("weight", None)
        curvature = KroneckerCurvature({"weight": mean}, (Factors(layer, factor, G),), 1, (1,))
        return curvature.posterior(tiny).output_kernel(layer, x).dense()

    extended = kernel(
        torch.cat([weight, zero], 1), torch.block_diag(A, A_phi), torch.cat([a, phi], 1)
    )
    leverage = torch.einsum("bi,ij,bj->b", phi, torch.linalg.inv(A_phi), phi)
    expected = kernel(weight, A, a) + leverage[:, None, None] * torch.linalg.inv(G)
    torch.testing.assert_close(extended, expected, rtol=1e-8, atol=1e-10)


# Density-aware temperature scaling ---------------------------------------------------------------


def test_density_tempered_by_hand(fitted):
    typicality, model, _, _, test = fitted
    x = joined(test)[0]
    found = acnml.DensityTempered(typicality.classifier, typicality, 1.7, 0.4)(x)
    for i in range(5):
        own = 1.7 * (1 + 0.4 * typicality(x)[i] ** 2)
        expected = torch.log_softmax(model(x[i : i + 1]).detach() / own, -1)[0]
        torch.testing.assert_close(found[i], expected, rtol=0, atol=1e-9)
    plain = acnml.DensityTempered(typicality.classifier, typicality, 1.7)
    expected = Map(typicality.classifier.tempered(1.7))(x)
    torch.testing.assert_close(plain(x), expected, rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match="slope must be finite and not negative, got -1"):
        acnml.DensityTempered(typicality.classifier, typicality, 1.7, -1)


def test_density_temperature_of_a_price(fitted):
    typicality, model, _, validation, _ = fitted
    classifier = typicality.classifier
    x, labels = joined(validation)
    model._seen.clear()
    found = tuning.density_temperature(classifier, typicality, validation, price=0.02)
    whole = [size for size in model._seen if size > 3]  # a check of the model runs two or three
    assert sum(whole) == len(x)
    best = tuning.temperature_by_nll(Map(classifier), validation).value
    assert found.temperature == pytest.approx(best, rel=1e-6)
    limit = metrics.nll(Map(classifier.tempered(best))(x), labels) + 0.02
    assert metrics.nll(found(x), labels) == pytest.approx(limit, abs=1e-6)


def test_density_temperature_of_least_nll(fitted):
    typicality, _, _, validation, _ = fitted
    x, labels = joined(validation)
    found = tuning.density_temperature(typicality.classifier, typicality, validation)
    best = metrics.nll(found(x), labels)
    for factor in (0.9, 1.1):
        hotter = replace(found, temperature=factor * found.temperature)
        assert metrics.nll(hotter(x), labels) >= best - 1e-9
    for slope in (0.0, 0.9 * found.slope, 1.1 * found.slope + 1e-3):
        assert metrics.nll(replace(found, slope=slope)(x), labels) >= best - 1e-9


def test_slopes_without_a_best_temperature_are_left_out():
    """An input that is wrong with confidence and very typical: no slope cools it.

    For a large slope, all other log-probabilities are nearly uniform, and the NLL of this input
    alone decides for T → ∞. That says nothing about smaller slopes.
    """
    labels = torch.arange(200) % 3
    logits = normal(200, 3) + 2.0 * torch.eye(3).double()[labels]
    logits[0] = torch.tensor([-30.0, 30.0, 0.0])  # its label is 0
    score = normal(200, seed=1).exp()
    score[0] = 0.001
    temperature, slope = slope_of_least_nll(logits, score, labels)

    def nll(temperature, slope):
        return metrics.nll(density_tempered(logits, score, temperature, slope), labels)

    found, refused = nll(temperature, slope), []
    for each in (0.0, *torch.logspace(-4, 4, 50).tolist()):
        scaled = torch.log_softmax(logits, -1) / (1 + each * score**2).unsqueeze(-1)
        try:
            assert nll(least_nll_temperature(scaled, labels), each) >= found - 1e-9
        except ValueError:
            refused.append(each)
    assert refused
    assert 0.0 not in refused
    with pytest.raises(ValueError, match="the NLL is lowest for T → ∞"):
        slope_of_least_nll(-logits, score, labels)


class BatchCentred(nn.Module):
    """A network that subtracts the mean of its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()

    def forward(self, x):
        return self.layers(x - x.mean(0))


ENDS_IN_SOFTMAX = (lambda: nn.Sequential(*BatchCentred().layers, nn.Softmax(-1)), "probabilities")
ROWS_DEPEND = (BatchCentred, "depend on the rest of its batch")


def density_of(classifier):
    """A density that needs no fit and no check of the model: the features of two inputs."""
    place = Place("layers.2" if isinstance(classifier.model, BatchCentred) else "2", is_input=True)
    reader = density.Reader((place,), torch.zeros(8).double(), torch.ones(8).double())
    return acnml.Typicality(
        classifier, reader, torch.zeros(8).double(), torch.eye(8).double(), 1.0, 0.0
    )


@pytest.mark.parametrize(("build", "message"), [ENDS_IN_SOFTMAX, ROWS_DEPEND])
def test_density_tempering_checks_the_model_as_map_does(build, message):
    x, labels = normal(40, 4), torch.arange(40) % 3

    def fresh():
        return Classifier(build())

    with pytest.raises(ValueError, match=message):
        Map(fresh())(x)
    classifier = fresh()
    with pytest.raises(ValueError, match=message):
        acnml.DensityTempered(classifier, density_of(classifier))(x)
    classifier = fresh()
    with pytest.raises(ValueError, match=message):
        tuning.density_temperature(classifier, density_of(classifier), [(x, labels)])


@pytest.mark.parametrize(("build", "message"), [ENDS_IN_SOFTMAX, ROWS_DEPEND])
def test_scores_and_their_fits_check_the_model_as_map_does(build, message):
    x = normal(40, 4)
    for fit in (fit_typicality, fit_neighbours):
        with pytest.raises(ValueError, match=message):
            fit(Classifier(build()), x[:20], x[20:])
    score = density_of(Classifier(build()))
    with pytest.raises(ValueError, match=message):
        score(x)


@pytest.mark.parametrize("size", [1.0, 1e10, 1e15])
def test_density_tempered_without_a_slope_is_temperature_scaling_also_far_away(size):
    model, train, validation, test = problem()
    model.float()
    train, validation = ([(x.float(), y) for x, y in data] for data in (train, validation))
    classifier = Classifier(model)
    typicality = fit_typicality(classifier, train, validation)
    x = size * joined(test)[0].float()
    found = acnml.DensityTempered(classifier, typicality, 1.7, slope=0.0)(x)
    expected = acnml.Tempered(Map(classifier), 1.7)(x)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_score_whose_square_overflows_gives_the_uniform_distribution():
    logits, score = normal(2, 3), torch.tensor([1e200, 3e300]).double()
    uniform = torch.full((2, 3), -math.log(3)).double()
    torch.testing.assert_close(density_tempered(logits, score, 2.0, 0.5), uniform)
    narrow = density_tempered(logits.float(), torch.tensor([1e30, 3e38]), 2.0, 0.5)
    torch.testing.assert_close(narrow, uniform.float())
    plain = torch.log_softmax(logits / 2, -1)
    assert torch.equal(density_tempered(logits, score, 2.0, 0.0), plain)


def test_log_probabilities_that_are_not_finite_are_refused(fitted):
    typicality, _, _, _, test = fitted
    frozen = acnml.DensityTempered(typicality.classifier, typicality, 1e-308)
    with pytest.raises(ValueError, match=r"NaN or infinite.*raise the temperature \(1e-308\)"):
        frozen(joined(test)[0])


def test_data_without_a_best_temperature_are_told_what_to_do(fitted):
    typicality, model, _, validation, _ = fitted
    x = joined(validation)[0]
    perfect = [(x, model(x).detach().argmax(-1))]
    for price in (None, 0.02):
        with pytest.raises(ValueError, match=r"no best temperature.*use acnml\.DensityTempered"):
            tuning.density_temperature(typicality.classifier, typicality, perfect, price)


def test_a_perfectly_typical_input_stays_at_the_mean():
    """Its score is 0, also for solvers that take inputs one by one."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        classifier = Classifier(nn.Linear(2, 3).double())
    x = torch.cat([normal(50, 2), -normal(50, 2)])  # with a mean of zero
    typicality = acnml.fit_typicality(classifier, x, normal(50, 2, seed=1))
    posterior, centre = acnml.fit_laplace(classifier, x), torch.zeros(1, 2).double()
    expected = acnml.Map(classifier)(centre)
    for solver in (acnml.Linearised(), acnml.Gradient(), acnml.Reference(5, 0.1)):
        found = acnml.Acnml(classifier, posterior, solver, typicality=typicality)(centre)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


def test_moments_of_features_add_up():
    features = normal(12, 5) * torch.tensor([1.0, 10, 100, 0.1, 1]) + 1000
    whole, parts = Moments(), []
    whole.add(features)
    for part in features.split(5):
        parts.append(Moments())
        parts[-1].add(part)
    found = Moments() + sum(parts[1:], parts[0])
    assert found.count == 12
    torch.testing.assert_close(found.mean, whole.mean, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.mean, features.mean(0), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.covariance, whole.covariance, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(
        found.covariance, features.T.cov(correction=0), rtol=1e-10, atol=1e-10
    )
