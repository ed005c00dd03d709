"""The baselines: equalities with what they must be, and the properties of every predictor."""

from __future__ import annotations

import itertools
import json
import math

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call

import acnml
from acnml import (
    Acnml,
    Bma,
    Classifier,
    Diagonal,
    Ensemble,
    Glm,
    LogitSampling,
    Map,
    McDropout,
    Probit,
    StorageError,
    Tempered,
    linearisation,
    storage,
)
from acnml.batches import as_arguments, size, take
from acnml.linearisation import LogitMoments, logit_moments
from acnml.random import seeded
from cases import MODELS, POSTERIORS, Case, diagonal, factor_kronecker, normal, spd
from dense import covariance, vector
from test_predictors import Idle, bad_inputs, each_case, fingerprint, posterior_over, same

LINEAR, MLP, CONV = MODELS[:3]
FINE = {"rtol": 1e-11, "atol": 1e-12}


class Dropping(nn.Module):
    """A case's model with dropout on its logits, whatever its inputs are."""

    def __init__(self, model: nn.Module, rate: float) -> None:
        super().__init__()
        self.model, self.dropout = model, nn.Dropout(rate)

    def forward(self, *args, **kwargs):
        return self.dropout(self.model(*args, **kwargs))


def dropping(case: Case, rate: float) -> nn.Module:
    return Dropping(case.model(), rate)


def small_network(*layers: nn.Module) -> nn.Module:
    """Layers in float64 with the same weights in every test."""
    model, generator = nn.Sequential(*layers).double(), torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.7, generator=generator)
    return model


def input_dropout(rate: float, classes: int = 3, inplace: bool = False) -> nn.Module:
    """A linear model whose inputs are dropped."""
    return small_network(nn.Dropout(rate, inplace=inplace), nn.Linear(4, classes))


def baselines(model: nn.Module, build, classifier: Classifier | None = None) -> list:
    """All that do not depend on the place in the batch."""
    classifier, posterior = classifier or Classifier(model), build(model)
    return [
        Ensemble((Map(classifier), Bma(classifier, posterior, samples=2))),
        Tempered(Bma(classifier, posterior, samples=2), 1.7),
        Glm(classifier, posterior),
        Glm(classifier, posterior, LogitSampling(samples=20, seed=3)),
    ]


def all_baselines(model: nn.Module, build) -> list:
    """All baselines, for a model of `dropping`."""
    return [McDropout(Classifier(model), samples=3), *baselines(model, build)]


# --- every predictor -----------------------------------------------------------------------------


@each_case
def test_rows_are_distributions(case, build):
    for predict in all_baselines(dropping(case, 0.5), build):
        log_probs = predict(case.x())
        assert log_probs.shape == (3, 3)
        assert not log_probs.requires_grad
        torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones(3).double(), **FINE)


@each_case
def test_the_users_model_is_untouched(case, build):
    model = dropping(case, 0.5).train()
    model.model.eval()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = fingerprint(model)
    for predict in all_baselines(model, build):
        predict(case.x())
    assert same(before, fingerprint(model))


@each_case
def test_deterministic_and_without_global_random_state(case, build):
    state = torch.get_rng_state()
    first, again = ([p(case.x()) for p in all_baselines(dropping(case, 0.5), build)] for _ in "ab")
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert torch.equal(state, torch.get_rng_state())


@each_case
def test_a_batch_is_its_inputs_one_by_one(case, build):
    x = case.x(4)
    for predict in baselines(case.model(), build):
        one_by_one = torch.cat([predict(take(x, slice(i, i + 1))) for i in range(size(x))])
        torch.testing.assert_close(predict(x), one_by_one, rtol=1e-9, atol=1e-10)


def test_batches_larger_than_a_block():
    x = MLP.x(600)
    for predict in baselines(MLP.model(), diagonal):
        torch.testing.assert_close(predict(x)[300:303], predict(x[300:303]), rtol=1e-9, atol=1e-10)
    assert McDropout(Classifier(dropping(MLP, 0.5)), samples=2)(x).shape == (600, 3)


@pytest.mark.parametrize(("case", "x", "message"), bad_inputs())
def test_refuses_bad_inputs(case, x, message):
    for predict in all_baselines(dropping(case, 0.5), diagonal):
        with pytest.raises(ValueError, match=message):
            predict(x)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_refuses_non_finite_logits(value):
    model = dropping(MLP, 0.5)
    build = diagonal(model, ["model.0.weight"])
    with torch.no_grad():
        model.model[2].bias[1] = value
    for predict in all_baselines(model, lambda _: build):
        with pytest.raises(ValueError, match="NaN or infinite for 3 of 3 inputs"):
            predict(MLP.x())


def test_dtype_follows_the_model():
    posterior = diagonal(dropping(MLP, 0.5))
    for dtype in (torch.float32, torch.bfloat16):
        for predict in all_baselines(dropping(MLP, 0.5).to(dtype), lambda _: posterior):
            log_probs = predict(MLP.x())  # float64 inputs and posterior
            assert log_probs.dtype == torch.float32
            assert (log_probs.exp().sum(-1) - 1).abs().max() < 1e-5


@each_case
def test_storage_round_trip(case, build, tmp_path):
    model, path = dropping(case, 0.5), tmp_path / "predictor.safetensors"
    for predict in all_baselines(model, build):
        acnml.save(predict, path)
        loaded = acnml.load(path, Classifier(model))
        assert type(loaded) is type(predict)
        assert torch.equal(loaded(case.x()), predict(case.x()))


# --- the global random state ---------------------------------------------------------------------


def draw_and_fail() -> None:
    with seeded(3):
        torch.rand(5)
        raise RuntimeError("half-way")


def test_seeded_restores_the_global_state():
    state = torch.get_rng_state()
    with seeded(3):
        first = torch.rand(5)
    with pytest.raises(RuntimeError, match="half-way"):
        draw_and_fail()
    assert torch.equal(state, torch.get_rng_state())
    with seeded(3):
        assert torch.equal(first, torch.rand(5))
    with seeded(4):
        assert not torch.equal(first, torch.rand(5))


# --- McDropout -----------------------------------------------------------------------------------


@pytest.mark.parametrize("case", MODELS, ids=lambda case: case.name)
def test_dropout_of_nothing_is_map(case):
    classifier = Classifier(dropping(case, 0.0))
    torch.testing.assert_close(
        McDropout(classifier, samples=3)(case.x()), Map(classifier)(case.x()), **FINE
    )


def test_one_draw_has_the_exact_expectation_and_variance_in_logit_space():
    """E[W(x ⊙ m / (1-p))] = Wx, Var = p/(1-p) Σ_d (W_d x_d)²: for logit differences z_0 - z_k.

    log p_0 - log p_k of a single forward pass is z_0 - z_k; every row has masks of its own.
    """
    model, x, rate, n = input_dropout(0.3), normal(1, 4, seed=1), 0.3, 20_000
    log_probs = McDropout(Classifier(model), samples=1)(x.expand(n, 4))
    gaps = log_probs[:, :1] - log_probs[:, 1:]
    expected = Map(Classifier(model))(x)
    weights = (model[1].weight[:1] - model[1].weight[1:]).detach()
    var = rate / (1 - rate) * ((weights * x) ** 2).sum(-1)
    errors = gaps.mean(0) - (expected[0, :1] - expected[0, 1:])
    assert (errors.abs() < 4.5 * (var / n).sqrt()).all()
    torch.testing.assert_close(gaps.var(0), var, rtol=0.05, atol=0)


def test_average_converges_to_the_sum_over_all_masks():
    model, x, rate, rows = input_dropout(0.3), normal(1, 4, seed=1), 0.3, 2000
    masks = torch.tensor(list(itertools.product([0.0, 1.0], repeat=4))).double()
    weights = (masks * (1 - rate) + (1 - masks) * rate).prod(-1)
    probs = model[1](x * masks / (1 - rate)).softmax(-1).detach()
    expected = weights @ probs
    var = weights @ (probs - expected) ** 2
    actual = McDropout(Classifier(model), samples=10)(x.expand(rows, 4)).exp().mean(0)
    assert ((actual - expected).abs() < 4.5 * (var / (10 * rows)).sqrt()).all()


def test_dropout_is_the_average_over_its_forward_passes():
    model, x = input_dropout(0.5), normal(3, 4)
    with seeded(7):
        probs = torch.stack([model.train()(x).softmax(-1) for _ in range(5)])
    actual = McDropout(Classifier(model), samples=5, seed=7)(x)
    torch.testing.assert_close(actual.exp(), probs.mean(0).detach(), **FINE)


@pytest.mark.parametrize(
    ("dropout", "shape"),
    [
        (nn.Dropout, (8,)),
        (nn.AlphaDropout, (8,)),
        (nn.FeatureAlphaDropout, (8,)),
        (nn.Dropout1d, (8, 2)),
        (nn.Dropout2d, (8, 2, 2)),
        (nn.Dropout3d, (8, 2, 2, 2)),
    ],
)
def test_all_kinds_of_dropout_are_on_and_batch_norm_is_not(dropout, shape):
    norm = nn.BatchNorm1d(math.prod(shape))
    model = small_network(dropout(0.5), nn.Flatten(), norm, nn.Linear(math.prod(shape), 3))
    norm.running_mean.normal_(generator=torch.Generator().manual_seed(0))
    x = normal(1, *shape)
    with seeded(2):
        dropped = model.eval()[0].train()(x)
    expected = model[1:](dropped).log_softmax(-1).detach()  # a batch of one has no batch statistics
    actual = McDropout(Classifier(model.train()), samples=1, seed=2)(x)
    torch.testing.assert_close(actual, expected, **FINE)
    assert not torch.allclose(actual, Map(Classifier(model))(x))


def test_dropout_in_a_transformer_layer_is_on():
    """In eval mode torch would take a shortcut around the layer's dropout modules."""
    encoder = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.5, batch_first=True)
    model = small_network(encoder, nn.Flatten(), nn.Linear(12, 3))
    classifier, x = Classifier(model), normal(2, 3, 4)
    assert not torch.allclose(McDropout(classifier, samples=3)(x), Map(classifier)(x))


def test_inplace_dropout_does_not_write_to_the_inputs():
    x = normal(3, 4)
    kept = x.clone()
    actual = McDropout(Classifier(input_dropout(0.5, inplace=True)), samples=4)(x)
    assert torch.equal(x, kept)
    assert torch.equal(actual, McDropout(Classifier(input_dropout(0.5)), samples=4)(x))


def test_dropout_follows_the_classifiers_view():
    model = dropping(MLP, 0.0)
    moved = Classifier(model).at({"model.2.bias": torch.ones(3).double()}).tempered(2.0)
    torch.testing.assert_close(McDropout(moved)(MLP.x()), Map(moved)(MLP.x()), **FINE)


def test_dropout_is_off_again_afterwards_also_after_a_failure():
    classifier, state = Classifier(input_dropout(0.5)), torch.get_rng_state()
    before = Map(classifier)(normal(3, 4))
    McDropout(classifier)(normal(3, 4))
    with pytest.raises(ValueError, match="failed on inputs"):
        McDropout(classifier)(normal(3, 5))
    assert torch.equal(Map(classifier)(normal(3, 4)), before)
    assert torch.equal(torch.get_rng_state(), state)


def test_dropout_seeds_differ():
    classifier, x = Classifier(input_dropout(0.5)), normal(3, 4)
    assert not torch.equal(McDropout(classifier, seed=0)(x), McDropout(classifier, seed=1)(x))


def test_dropout_refuses():
    with pytest.raises(ValueError, match="Sequential has no dropout layers"):
        McDropout(Classifier(MLP.model()))
    with pytest.raises(ValueError, match="samples must be at least 1, got 0"):
        McDropout(Classifier(input_dropout(0.5)), samples=0)


# --- Ensemble ------------------------------------------------------------------------------------


def networks(n: int) -> list[nn.Module]:
    return [small_network(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)) for _ in range(n)]


def members(n: int) -> list[Map]:
    """Networks that differ: the k-th has its first bias shifted by k."""
    models = networks(n)
    with torch.no_grad():
        for shift, model in enumerate(models):
            model[0].bias += shift
    return [Map(Classifier(model)) for model in models]


def test_ensemble_of_one_is_its_member():
    member = members(1)[0]
    assert torch.equal(Ensemble((member,))(MLP.x()), member(MLP.x()))


def test_ensemble_is_the_mean_of_probabilities_in_any_order():
    parts, x = members(3), MLP.x()
    expected = torch.stack([member(x).exp() for member in parts]).mean(0)
    for order in itertools.permutations(parts):
        torch.testing.assert_close(Ensemble(order)(x).exp(), expected, **FINE)


def test_ensemble_takes_a_list_and_other_ensembles():
    parts, x = members(4), MLP.x()
    nested = Ensemble((Ensemble(parts[:2]), Ensemble(parts[2:])))
    torch.testing.assert_close(nested(x), Ensemble(parts)(x), **FINE)


def test_ensemble_refuses():
    with pytest.raises(ValueError, match="at least one predictor"):
        Ensemble(())
    with pytest.raises(TypeError, match="averages predictors such as Map, got a Classifier"):
        Ensemble((Classifier(MLP.model()),))
    wide = Map(Classifier(small_network(nn.Linear(4, 5))))
    with pytest.raises(ValueError, match=r"differ in their classes: \[3, 5\]"):
        Ensemble((*members(1), wide))(MLP.x())


def test_ensembles_over_one_network_are_stored(tmp_path):
    model = MLP.model()
    first, second = Classifier(model), Classifier(model).at({"2.bias": torch.ones(3).double()})
    parts = (Map(first), Map(second.tempered(3.0)), Acnml(second, POSTERIORS["low_rank"](model)))
    acnml.save(Ensemble(parts), tmp_path / "ensemble.safetensors")
    loaded = acnml.load(tmp_path / "ensemble.safetensors", Classifier(model))
    assert torch.equal(loaded(MLP.x()), Ensemble(parts)(MLP.x()))


def test_ensembles_over_several_networks_are_not_stored(tmp_path):
    model = MLP.model()
    heads = [Map(Classifier(model, get_logits=head)) for head in (torch.neg, torch.abs)]
    for parts in (members(2), heads, (Ensemble(members(1)), Tempered(members(1)[0], 2.0))):
        with pytest.raises(ValueError, match=r"several networks.*save its members one by one"):
            acnml.save(Ensemble(parts), tmp_path / "ensemble.safetensors")
    assert list(tmp_path.iterdir()) == []


# --- temperature ---------------------------------------------------------------------------------


@each_case
def test_temperature_one_changes_nothing(case, build):
    predict = Bma(Classifier(case.model()), build(case.model()), samples=2)
    torch.testing.assert_close(Tempered(predict, 1.0)(case.x()), predict(case.x()), **FINE)


@settings(max_examples=25, deadline=None)
@given(st.floats(0.05, 50.0), st.sampled_from(MODELS))
def test_tempering_map_tempers_the_model(temperature, case):
    classifier = Classifier(case.model())
    torch.testing.assert_close(
        Tempered(Map(classifier), temperature)(case.x()),
        Map(classifier.tempered(temperature))(case.x()),
        rtol=1e-9,
        atol=1e-11,
    )


def test_temperature_moves_between_certain_and_uniform():
    predict = Map(Classifier(MLP.model()))
    probs = [Tempered(predict, t)(MLP.x()).exp() for t in (0.001, 0.5, 1.0, 2.0, 1e12)]
    confidences = torch.stack([p.max(-1).values for p in probs])
    assert (confidences.diff(dim=0) < 0).all()
    assert (confidences[0] > 0.99).all()
    torch.testing.assert_close(probs[-1], torch.ones(3, 3).double() / 3, rtol=0, atol=1e-11)


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan, math.inf])
def test_refuses_temperatures_that_are_not_positive(temperature):
    classifier = Classifier(MLP.model())
    for temper in (classifier.tempered, lambda t: Tempered(Map(classifier), t)):
        with pytest.raises(ValueError, match="temperature must be a positive, finite number"):
            temper(temperature)


def test_refuses_temperatures_that_overflow():
    classifier = Classifier(MLP.model())
    with pytest.raises(ValueError, match="product of all temperatures must be a positive"):
        classifier.tempered(1e-200).tempered(1e-200)
    with pytest.raises(ValueError, match=r"raise the temperature \(1e-310\)"):
        Tempered(Map(classifier), 1e-310)(MLP.x())


def test_tempered_classifiers_compose():
    model, moved = MLP.model(), {"2.bias": torch.ones(3).double()}
    plain, x = Classifier(model), MLP.x()
    assert plain.temperature == 1.0
    twice = plain.tempered(2.0).tempered(3.0)
    torch.testing.assert_close(twice.logits(x), plain.logits(x) / 6, **FINE)
    for view in (plain.at(moved).tempered(2.0), plain.tempered(2.0).at(moved)):
        torch.testing.assert_close(view.logits(x), plain.at(moved).logits(x) / 2, **FINE)
    assert plain.temperature == 1.0
    assert [repr(c) for c in (plain, twice)] == [
        "Classifier(Sequential)",
        "Classifier(Sequential, temperature=6)",
    ]


def test_acnml_of_a_tempered_model_is_that_of_the_model_with_smaller_last_weights():
    """Logits W a / T: the same as weights W / T, whose variances are divided by T²."""
    model, T = LINEAR.model(), 2.0
    posterior = diagonal(model)
    shrunk = Diagonal(
        {n: t / T for n, t in posterior.mean.items()},
        {n: t / T**2 for n, t in posterior.var.items()},
    )
    torch.testing.assert_close(
        Acnml(Classifier(model).tempered(T), posterior)(LINEAR.x()),
        Acnml(Classifier(model), shrunk)(LINEAR.x()),
        **FINE,
    )


def test_storage_keeps_the_classifiers_temperature(tmp_path):
    model, path = MLP.model(), tmp_path / "acnml.safetensors"
    predict = Acnml(Classifier(model).tempered(1.7), diagonal(model))
    acnml.save(predict, path)
    for given_classifier in (Classifier(model), Classifier(model).tempered(1.7)):
        loaded = acnml.load(path, given_classifier)
        assert loaded.classifier.temperature == 1.7
        assert torch.equal(loaded(MLP.x()), predict(MLP.x()))
    with pytest.raises(StorageError, match=r"stored with temperature 1\.7, the given .* has 3;"):
        acnml.load(path, Classifier(model).tempered(3.0))


def test_files_from_before_temperatures_load(tmp_path):
    model, path = MLP.model(), tmp_path / "map.safetensors"
    acnml.save(Map(Classifier(model).at({"2.bias": torch.ones(3).double()})), path)
    with safetensors.safe_open(path, "pt") as file:
        header = json.loads(file.metadata()[storage.HEADER])
    del header["value"]["classifier"]["temperature"]
    metadata = {storage.HEADER: json.dumps(header)}
    safetensors.torch.save_file(safetensors.torch.load_file(path), path, metadata)
    assert acnml.load(path, Classifier(model)).classifier.temperature == 1.0


# --- Glm -----------------------------------------------------------------------------------------


def dense_kernel(model: nn.Module, posterior: acnml.Posterior, one: object) -> Tensor:
    """J Σ Jᵀ for one input, all written out."""
    args, kwargs = as_arguments(one)

    def logits(*tensors: Tensor) -> Tensor:
        named = dict(zip(posterior.mean, tensors, strict=True))
        return functional_call(model.eval(), named, args, kwargs)[0]

    jacobians = torch.autograd.functional.jacobian(logits, tuple(posterior.mean.values()))
    J = torch.stack([vector(dict(enumerate(j))) for j in zip(*jacobians, strict=True)])
    return J @ covariance(posterior) @ J.T


@each_case
def test_kernel_equals_the_dense_one(case, build):
    model, x = case.model(), case.x()
    posterior = build(model)
    moments = logit_moments(Classifier(model), posterior, x)
    expected = [dense_kernel(model, posterior, take(x, slice(i, i + 1))) for i in range(3)]
    torch.testing.assert_close(moments.kernel, torch.stack(expected), rtol=1e-10, atol=1e-11)
    assert torch.equal(moments.kernel, moments.kernel.mT)
    torch.testing.assert_close(moments.logits, Classifier(model).logits(x), **FINE)


def test_kernel_is_taken_at_the_posterior_mean():
    model, other = MLP.model(), MLP.model()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    moments = logit_moments(Classifier(model), diagonal(other), MLP.x())
    expected = logit_moments(Classifier(other), diagonal(other), MLP.x())
    torch.testing.assert_close(moments.kernel, expected.kernel, **FINE)
    torch.testing.assert_close(moments.logits, expected.logits, **FINE)


def test_kernel_of_a_linear_model_is_exact():
    """Var(W a) for independent weights: Σ_d var(W_kd) a_d²; for A⁻¹ ⊗ G⁻¹: (aᵀ A⁻¹ a) G⁻¹."""
    model, x = LINEAR.model(), LINEAR.x()
    inputs = torch.cat([x, torch.ones(3, 1).double()], dim=-1)
    posterior = diagonal(model)
    var = torch.cat([posterior.var["weight"], posterior.var["bias"][:, None]], dim=-1)
    actual = logit_moments(Classifier(model), posterior, x).kernel
    torch.testing.assert_close(actual, torch.diag_embed(inputs**2 @ var.T), **FINE)

    kronecker = factor_kronecker(model)
    block = kronecker.blocks[0]
    lengths = ((inputs @ block.input_cov) * inputs).sum(-1)
    actual = logit_moments(Classifier(model), kronecker, x).kernel
    torch.testing.assert_close(actual, lengths[:, None, None] * block.output_cov, **FINE)


def test_kernel_does_not_depend_on_how_many_inputs_share_a_computation(monkeypatch):
    model, x = CONV.model(), CONV.x(5)
    together = logit_moments(Classifier(model), diagonal(model), x)
    for budget in (1, 10_000):
        monkeypatch.setattr(linearisation, "JACOBIAN_BYTES", budget)
        parts = logit_moments(Classifier(model), diagonal(model), x)
        torch.testing.assert_close(parts.kernel, together.kernel, **FINE)


def test_tempering_divides_logits_and_kernel():
    model, x = MLP.model(), MLP.x()
    plain = logit_moments(Classifier(model), diagonal(model), x)
    tempered = logit_moments(Classifier(model).tempered(2.0), diagonal(model), x)
    torch.testing.assert_close(tempered.logits, plain.logits / 2, **FINE)
    torch.testing.assert_close(tempered.kernel, plain.kernel / 4, **FINE)


@each_case
def test_small_covariance_makes_glm_map(case, build):
    model = case.model()
    expected = Map(Classifier(model))(case.x())
    for link in (Probit(), LogitSampling(samples=5)):
        glm = Glm(Classifier(model), build(model).scaled(1e-20), link)
        torch.testing.assert_close(glm(case.x()), expected, rtol=1e-8, atol=1e-8)


@each_case
def test_probit_is_its_formula(case, build):
    model = case.model()
    moments = logit_moments(Classifier(model), build(model), case.x())
    var = torch.stack([kernel.diag() for kernel in moments.kernel])
    expected = (moments.logits / torch.sqrt(1 + math.pi / 8 * var)).log_softmax(-1)
    torch.testing.assert_close(Glm(Classifier(model), build(model))(case.x()), expected, **FINE)


@pytest.mark.parametrize("link", [Probit(), LogitSampling(samples=5000)])
def test_more_variance_is_less_confident(link):
    """With the same variance for both of two classes: otherwise the vaguer class may gain."""
    logits, eye = (
        torch.tensor([[1.0, 0.0], [0.0, 2.0], [-3.0, 0.0]]).double(),
        torch.eye(2).double(),
    )
    moments = [LogitMoments(logits, (var * eye).expand(3, 2, 2)) for var in (0.1, 1.0, 10.0)]
    confidences = torch.stack([link(m).max(-1).values for m in moments])
    assert (confidences.diff(dim=0) < 0).all()


def two_class_moments(n: int = 6) -> LogitMoments:
    """Means and kernels of two classes, the last kernels singular."""
    kernel = 3 * spd(n, 2, seed=5)
    kernel[-1] = torch.tensor([[4.0, -2.0], [-2.0, 1.0]])
    return LogitMoments(2 * normal(n, 2, seed=6), kernel)


def sigmoid_moments(mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
    """E σ(d) and Var σ(d) for d ~ N(mean, var), by Gauss-Hermite quadrature."""
    nodes, weights = (torch.from_numpy(v) for v in np.polynomial.hermite.hermgauss(100))
    values = (mean[:, None] + (2 * var[:, None]).sqrt() * nodes).sigmoid()
    weights = weights / weights.sum()
    first, second = values @ weights, values**2 @ weights
    return first, second - first**2


def test_logit_sampling_converges_to_the_integral():
    moments, n = two_class_moments(), 20_000
    kernel = moments.kernel
    var = kernel[:, 0, 0] + kernel[:, 1, 1] - 2 * kernel[:, 0, 1]
    expected, spread = sigmoid_moments(moments.logits[:, 0] - moments.logits[:, 1], var)
    actual = LogitSampling(samples=n)(moments).exp()
    assert ((actual[:, 0] - expected).abs() < 4.5 * (spread / n).sqrt()).all()


def test_logit_sampling_draws_have_the_kernel_as_covariance():
    """A draw's log-ratios are its logit differences: their moments are known."""
    mean, kernel, n = normal(1, 3), 2 * spd(1, 3, seed=1), 4000
    draws = [LogitSampling(1, seed)(LogitMoments(mean, kernel))[0] for seed in range(n)]
    gaps = torch.stack(draws)[:, :2] - torch.stack(draws)[:, 2:]
    contrast = torch.tensor([[1.0, 0, -1], [0, 1, -1]]).double()
    expected = contrast @ kernel[0] @ contrast.T
    errors = gaps.mean(0) - contrast @ mean[0]
    assert (errors.abs() < 4.5 * (expected.diag() / n).sqrt()).all()
    torch.testing.assert_close(gaps.T.cov(), expected, rtol=0.1, atol=0.1)


@pytest.mark.parametrize("kernel", [torch.zeros(3, 3), torch.ones(3, 3)])
def test_logits_that_only_move_together_are_certain(kernel):
    """Such kernels are singular, and softmax does not see the shift they allow."""
    logits = normal(2, 3)
    actual = LogitSampling(samples=7)(LogitMoments(logits, kernel.double().expand(2, 3, 3)))
    torch.testing.assert_close(actual, logits.log_softmax(-1), rtol=1e-6, atol=1e-6)


def test_the_linearised_average_of_a_linear_model_is_the_average():
    """For a model linear in θ, Glm and Bma integrate the same: to the error of sampling."""
    model, x = LINEAR.model(), LINEAR.x()
    glm = Glm(Classifier(model), diagonal(model), LogitSampling(samples=4000))(x)
    bma = Bma(Classifier(model), diagonal(model), samples=2000)(x)
    torch.testing.assert_close(glm.exp(), bma.exp(), rtol=0, atol=0.04)


def test_glm_refuses_posteriors_that_do_not_fit_or_are_not_used():
    with pytest.raises(ValueError, match="no parameter or buffer 'wieght'"):
        Glm(Classifier(LINEAR.model()), posterior_over("wieght", 3, 4))
    with pytest.raises(ValueError, match="use none of the posterior's parameters"):
        Glm(Classifier(Idle()), posterior_over("idle.weight", 3, 4))(torch.zeros(1, 4))
    with pytest.raises(ValueError, match="samples must be at least 1, got 0"):
        LogitSampling(samples=0)


def test_glm_says_when_a_model_cannot_be_vectorised():
    class Branching(nn.Module):
        def __init__(self):
            super().__init__()
            self.matrix = nn.Parameter(normal(4, 3))

        def forward(self, x):
            return (x if x.sum().item() > 0 else -x) @ self.matrix

    model = Branching()
    with pytest.raises(ValueError, match=r"torch\.func\.vmap cannot vectorise this model"):
        Glm(Classifier(model), diagonal(model))(normal(2, 4))
