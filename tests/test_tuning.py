"""Choices against hand-computed tables, closed forms and scipy."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from scipy import optimize
from torch import Tensor, nn

from acnml import (
    Acnml,
    Bma,
    Classifier,
    Diagonal,
    Map,
    Predictor,
    Solution,
    Tempered,
    diagonal_curvature,
    kronecker_curvature,
    metrics,
    tuning,
)
from acnml.inference import DiagonalCurvature
from acnml.tuning import Choice, Evidence, Judged, Scores, Tolerance
from cases import MODELS, POSTERIORS, normal
from dense import vector

X, Y = normal(40, 3, seed=3), torch.arange(40) % 3
DATA = [(X[:25], Y[:25]), (X[25:], Y[25:])]


@dataclass(frozen=True)
class Scaled(Predictor):
    """The inputs times a number, taken for logits."""

    factor: float = 1.0

    def __call__(self, x: Tensor) -> Tensor:
        return (self.factor * x).log_softmax(-1)


# Sweeps ----------------------------------------------------------------------------------------


def test_sweep_scores_all_data_for_every_value():
    rows = tuning.sweep(Scaled, [2.0, 0.5], DATA)
    assert [row.value for row in rows] == [2.0, 0.5]
    for row in rows:
        log_probs = (row.value * X).log_softmax(-1)
        assert row == Scores(row.value, **metrics.summary(log_probs, Y))


def test_sweep_goes_over_the_data_once_for_every_value():
    passes = []

    class Counting:
        def __iter__(self):
            passes.append(1)
            yield from DATA

    tuning.sweep(Scaled, [1.0, 2.0, 3.0], Counting())
    assert len(passes) == 3


@pytest.mark.parametrize("form", [lambda x, y: [x, y], lambda x, y: {"input": x, "labels": y}])
def test_batches_may_be_lists_or_mappings(form):
    def make(_: float) -> Map:
        return Map(Classifier(identity()))

    assert tuning.sweep(make, [1.0], [form(X, Y)]) == tuning.sweep(make, [1.0], [(X, Y)])


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        ([], ValueError, "the loader gave no batch"),
        ([(X, Y), X], ValueError, "batch 1: it has no labels: yield"),
        ([(X, Y.tolist())], TypeError, "batch 0: labels must be a tensor of integers, got list"),
        ([(X, Y.double())], ValueError, "batch 0: labels must be integers"),
        ([(X, Y[:5])], ValueError, r"batch 0: labels must have shape \(40,\), got \(5,\)"),
        ([(X, Y), (X, Y + 1)], ValueError, r"batch 1: labels\[2\] = 3 is outside 0..2"),
        ([(X * math.nan, Y)], ValueError, r"batch 0: log_probs\[0\] contains NaN"),
        ([object()], TypeError, "batch 0: a loader must yield tuples"),
    ],
)
def test_refuses_bad_validation_data(data, error, message):
    with pytest.raises(error, match=message):
        tuning.sweep(Scaled, [1.0], data)
    with pytest.raises(error, match=message):
        tuning.temperature_by_nll(Scaled(), data)


def test_an_iterator_serves_one_value_only():
    with pytest.raises(ValueError, match="an iterator used up before"):
        tuning.sweep(Scaled, [1.0, 2.0], iter(DATA))


# Alpha -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FakeSolver:
    """Likelihoods that α changes in a known way: it flattens, and beyond 1 it errs."""

    def __call__(self, classifier: Classifier, posterior: Diagonal, x: Tensor) -> Solution:
        alpha = posterior.var["weight"][0, 0].item()
        logits = x / (1 + alpha) if alpha <= 1 else x.flip(-1)
        return Solution(logits.log_softmax(-1), *[torch.zeros_like(logits)] * 2)

    def log_lik(self, classifier: Classifier, posterior: Diagonal, x: Tensor) -> Tensor:
        return self(classifier, posterior, x).log_lik


def identity() -> nn.Linear:
    """Logits are the inputs."""
    model = nn.Linear(3, 3, bias=False).double()
    nn.init.eye_(model.weight)
    return model


def fake_acnml() -> Acnml:
    """The posterior's mean is the identity, and the model's own weights are something else."""
    mean = {"weight": identity().weight.detach()}
    posterior = Diagonal(mean, {"weight": torch.ones(3, 3).double()})
    return Acnml(Classifier(nn.Linear(3, 3, bias=False).double()), posterior, FakeSolver(), 7.0)


# 3 of 4 are right. With the logit 2 for one class and 0 for two, p = e²/(e² + 2) and 1/(e² + 2).
FOUR = [(2 * torch.eye(3, dtype=torch.float64)[[0, 1, 2, 2]], torch.tensor([0, 1, 2, 0]))]


def nll_at(logit: float) -> float:
    return math.log(math.exp(logit) + 2) - 0.75 * logit


def nll_flipped() -> float:
    """Only the second point is right after the flip, and the last, whose logit moves to 0."""
    return math.log(math.exp(2) + 2) - 0.5 * 2


def test_the_largest_harmless_alpha_of_a_hand_computed_table():
    tolerance = Tolerance(accuracy=0.1, nll=nll_at(2 / 1.5) - nll_at(2))
    choice = tuning.largest_harmless_alpha(fake_acnml(), FOUR, tolerance=tolerance)
    assert choice.value == 0.5
    assert [row.value for row in choice.table] == [0, 0.25, 0.5, 1, 1.5, 2]
    assert [row.accuracy for row in choice.table] == [0.75, 0.75, 0.75, 0.75, 0.5, 0.5]
    nlls = [nll_at(2 / (1 + alpha)) for alpha in (0, 0.25, 0.5, 1)] + 2 * [nll_flipped()]
    assert [row.nll for row in choice.table] == pytest.approx(nlls, rel=1e-12)
    assert [row.harmless for row in choice.table] == [True, True, True, False, False, False]


@pytest.mark.parametrize(
    ("tolerance", "expected"),
    [
        (Tolerance(accuracy=1.0, nll=10.0), 2.0),
        (Tolerance(accuracy=0.25, nll=10.0), 2.0),  # met exactly
        (Tolerance(accuracy=0.24, nll=10.0), 1.0),
        (Tolerance(accuracy=1.0, nll=nll_at(1) - nll_at(2)), 1.0),  # met exactly
    ],
)
def test_both_tolerances_count(tolerance, expected):
    choice = tuning.largest_harmless_alpha(fake_acnml(), FOUR, tolerance=tolerance)
    assert choice.value == expected


def test_says_so_if_no_alpha_is_harmless():
    with pytest.raises(ValueError, match="there is none") as refused:
        tuning.largest_harmless_alpha(fake_acnml(), FOUR, [1.5, 2.0])
    message = str(refused.value)
    assert "costs at most 0.005 of MAP's accuracy 0.7500 and 0.05 nats" in message
    assert "give smaller alphas, a larger tolerance" in message
    assert message.count("no") >= 2  # the table is there
    assert "harmless" in message.splitlines()[1]


def test_alpha_by_nll_is_the_minimum_of_the_table():
    choice = tuning.alpha_by_nll(fake_acnml(), FOUR, [2.0, 1.0, 0.1, 0.25])
    assert choice.value == 0.1  # the best of all is 2 / log 6 - 1 = 0.116
    assert [row.value for row in choice.table] == [0, 0.1, 0.25, 1, 2]
    assert choice.table[0].nll == pytest.approx(nll_at(2), rel=1e-12)


def test_alphas_are_tried_on_the_predictor_that_was_given():
    case = MODELS[1]
    predictor = Acnml(Classifier(case.model()), POSTERIORS["low_rank"](case.model()))
    x, y = case.x(6), torch.arange(6) % 3
    for row in tuning.alpha_by_nll(predictor, [(x, y)]).table[1:]:
        log_probs = Acnml(predictor.classifier, predictor.posterior, predictor.solver, row.value)(x)
        assert row.nll == metrics.nll(log_probs, y)


@pytest.mark.parametrize("alpha", tuning.ALPHAS)
def test_matching_finds_the_alpha_that_the_likelihoods_were_made_with(alpha):
    case = MODELS[1]
    classifier, posterior = Classifier(case.model()), POSTERIORS["diagonal"](case.model())
    likelihoods = Acnml(classifier, posterior, alpha=alpha).solve(case.x(4)).log_lik
    choice = tuning.alpha_matching_cnml(Acnml(classifier, posterior), case.x(4), likelihoods)
    assert choice.value == alpha
    for row in choice.table:
        assert (row.distance == 0) == (row.value == alpha)
        assert math.copysign(row.distance, row.value - alpha) == pytest.approx(row.excess)


def test_matching_measures_probabilities():
    x, cnml = FOUR[0][0], torch.full((4, 3), 0.5).double().log()
    choice = tuning.alpha_matching_cnml(fake_acnml(), x, cnml, [1.0])
    high, low = (math.exp(z) / (math.e + 2) for z in (1, 0))
    distance = (abs(high - 0.5) + 2 * abs(low - 0.5)) / 3
    excess = ((high - 0.5) + 2 * (low - 0.5)) / 3
    assert choice.table[0] == pytest.approx((1.0, distance, excess), rel=1e-12)


def test_matching_refuses_likelihoods_of_other_inputs():
    with pytest.raises(ValueError, match=r"shape \(5, 3\), ACNML's likelihoods \(4, 3\)"):
        tuning.alpha_matching_cnml(fake_acnml(), FOUR[0][0], torch.zeros(5, 3))


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ([], "the grid is empty"),
        ([1.0, 0.0], "a grid's value must be a positive, finite number, got 0.0"),
        ([math.nan], "got nan"),
    ],
)
def test_refuses_bad_grids(grid, message):
    curvature = DiagonalCurvature({"w": torch.ones(2)}, {"w": torch.ones(2)})
    for choose in (
        lambda: tuning.largest_harmless_alpha(fake_acnml(), FOUR, grid),
        lambda: tuning.alpha_by_nll(fake_acnml(), FOUR, grid),
        lambda: tuning.alpha_matching_cnml(fake_acnml(), FOUR[0][0], torch.zeros(4, 3), grid),
        lambda: tuning.prior_precision_by_evidence(curvature, grid),
        lambda: tuning.prior_precision_by_nll(Scaled, FOUR, grid),
    ):
        with pytest.raises(ValueError, match=message):
            choose()


@pytest.mark.parametrize("tolerance", [{"accuracy": -0.1}, {"nll": -1.0}, {"nll": math.nan}])
def test_refuses_negative_tolerances(tolerance):
    with pytest.raises(ValueError, match="tolerances must not be negative"):
        Tolerance(**tolerance)


# Prior precision -------------------------------------------------------------------------------


@pytest.mark.parametrize("h", [0.01, 1.0, 300.0])
def test_evidence_optimum_of_an_isotropic_curvature(h):
    """For H = hI, τ‖θ̂‖² = P h / (h + τ): a quadratic equation for τ."""
    mean = {"w": normal(7, 3), "b": normal(4, seed=1)}
    curvature = DiagonalCurvature(mean, {n: torch.full_like(t, h) for n, t in mean.items()})
    square, count = vector(mean).square().sum().item(), 25
    root = math.sqrt((square * h) ** 2 + 4 * square * count * h)
    expected = (root - square * h) / (2 * square)
    assert tuning.prior_precision_by_evidence(curvature).value == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("estimate", [diagonal_curvature, kronecker_curvature])
@pytest.mark.parametrize("grid", [tuning.PRIOR_PRECISIONS, (1e3, 0.5, 1e-3)])
def test_evidence_optimum_equals_scipys(estimate, grid):
    case = MODELS[2]
    curvature = estimate(Classifier(case.model()), [(case.x(20), torch.arange(20) % 3)])
    choice = tuning.prior_precision_by_evidence(curvature, grid)
    found = optimize.minimize_scalar(
        lambda u: -curvature.log_evidence(math.exp(u)), bounds=(-10, 10), options={"xatol": 1e-8}
    )
    assert choice.value == pytest.approx(math.exp(found.x), rel=1e-4)
    values = [row.value for row in choice.table]
    assert values == sorted(values)
    assert {*grid, choice.value} <= set(values)
    for row in choice.table:
        assert row.log_evidence == curvature.log_evidence(row.value) <= -found.fun + 1e-9


@pytest.mark.parametrize("grid", [[1.0], [1e-4, 1e-3, 1e-2], [1e2, 1e3, 1e4]])
def test_says_so_if_the_evidence_is_largest_at_an_end(grid):
    curvature = DiagonalCurvature({"w": torch.ones(2)}, {"w": torch.ones(2)})
    with pytest.raises(ValueError, match=r"largest at an end of the grid: widen it\n.*evidence"):
        tuning.prior_precision_by_evidence(curvature, grid)


def test_prior_precision_by_nll_is_the_minimum_of_its_sweep():
    case = MODELS[1]
    classifier, data = Classifier(case.model()), [(case.x(9), torch.arange(9) % 3)]
    curvature = diagonal_curvature(classifier, data)

    def bma(tau: float) -> Bma:
        return Bma(classifier, curvature.posterior(tau), samples=3)

    choice = tuning.prior_precision_by_nll(bma, data, [10.0, 0.1, 1.0])
    assert choice.table == tuning.sweep(bma, [0.1, 1.0, 10.0], data)
    assert min(choice.table, key=lambda row: row.nll).value == choice.value


# Temperature -----------------------------------------------------------------------------------


def nll_tempered(temperature: float, x: Tensor, y: Tensor) -> float:
    return metrics.nll((x / temperature).log_softmax(-1), y)


def learnable(seed: int, scale: float) -> tuple[Tensor, Tensor]:
    """Logits that say something of the labels, but not everything."""
    y = torch.arange(60) % 3
    x = normal(60, 3, seed=seed)
    x[torch.arange(60), y] += 0.7
    return scale * x, y


@pytest.mark.parametrize("scale", [1e-4, 0.3, 1.0, 20.0, 1e5])
@pytest.mark.parametrize("seed", range(3))
def test_temperature_equals_scipys(seed, scale):
    x, y = learnable(seed, scale)
    around = math.log(scale)
    expected = optimize.minimize_scalar(
        lambda u: nll_tempered(math.exp(u), x, y),
        bounds=(around - 5, around + 5),
        options={"xatol": 1e-9},
    )
    choice = tuning.temperature_by_nll(Scaled(), [(x, y)])
    # The NLL is flat at its minimum: scipy, which sees no slopes, knows T to √ε only.
    assert choice.value == pytest.approx(math.exp(expected.x), rel=1e-6)
    assert min(row.nll for row in choice.table) <= expected.fun + 1e-12


@pytest.mark.parametrize("seed", range(3))
def test_the_slope_at_the_temperature_is_zero(seed):
    """d NLL / d(1/T) = mean (E_p[z] - z_y): the expected logit is the observed one."""
    x, y = learnable(seed, 3.0)
    x = x.log_softmax(-1)
    probs = (x / tuning.temperature_by_nll(Scaled(), [(x, y)]).value).softmax(-1)
    slope = (probs * x).sum(1) - x[torch.arange(60), y]
    assert abs(slope.mean().item()) < 1e-10


def test_the_temperature_follows_the_scale_of_the_logits():
    x, y = learnable(0, 1.0)
    one, seven = (tuning.temperature_by_nll(Scaled(c), [(x, y)]).value for c in (1.0, 7.0))
    assert seven == pytest.approx(7 * one, rel=1e-10)


def test_a_calibrated_predictor_keeps_its_temperature():
    """Labels in the very proportions that the predictor gives them."""
    x = torch.tensor([[0.5, 0.25, 0.25]] * 4 + [[0.25, 0.75, 1e-30]] * 4).double().log()
    y = torch.tensor([0, 0, 1, 2, 0, 1, 1, 1])
    choice = tuning.temperature_by_nll(Scaled(), [(x, y)])
    assert choice.value == pytest.approx(1.0, rel=1e-10)


def test_tempered_predictors_and_classifiers_have_the_tables_nll():
    x, y = learnable(1, 4.0)
    classifier = Classifier(identity())
    choice = tuning.temperature_by_nll(Map(classifier), [(x, y)])
    chosen = next(row for row in choice.table if row.value == choice.value)
    for predictor in (
        Tempered(Map(classifier), choice.value),
        Map(classifier.tempered(choice.value)),
    ):
        assert metrics.nll(predictor(x), y) == pytest.approx(chosen.nll, rel=1e-12)
    untouched = next(row for row in choice.table if row.value == 1)
    assert untouched.nll == pytest.approx(metrics.nll(Map(classifier)(x), y), rel=1e-12)
    assert chosen.nll == min(row.nll for row in choice.table) < untouched.nll
    assert len({row.accuracy for row in choice.table}) == 1


def test_temperature_of_single_precision_predictions():
    x, y = learnable(2, 4.0)
    single = tuning.temperature_by_nll(Scaled(), [(x.float(), y)]).value
    assert single == pytest.approx(tuning.temperature_by_nll(Scaled(), [(x, y)]).value, rel=1e-5)


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (3 * torch.eye(3), torch.arange(3), "every validation point is predicted correctly"),
        (torch.zeros(3, 3), torch.arange(3), "every validation point is predicted correctly"),
        (3 * torch.eye(3), torch.tensor([1, 2, 0]), "labels are no more probable than other"),
        (
            torch.tensor([[0.0, 1.0, -torch.inf]]),
            torch.tensor([0]),
            "log-probabilities are NaN or infinite",
        ),
    ],
)
def test_refuses_data_without_an_optimal_temperature(x, y, message):
    with pytest.raises(ValueError, match=message):
        tuning.temperature_by_nll(Scaled(), [(x, y)])


# Tables ----------------------------------------------------------------------------------------


def test_a_choice_prints_its_rule_and_an_aligned_table():
    rows = (
        Judged(0.0, 0.98, 0.0712, 0.03, 0.004, True),
        Judged(0.25, 0.98, 0.08, 0.03, 0.01, True),
        Judged(10.0, 0.5, 12.3, 0.7, 0.2, False),
    )
    assert str(Choice(0.25, rows, "the largest that is harmless")) == (
        "0.25: the largest that is harmless\n"
        "   value  accuracy      nll   brier     ece  harmless\n"
        "       0    0.9800   0.0712  0.0300  0.0040       yes\n"
        "→   0.25    0.9800   0.0800  0.0300  0.0100       yes\n"
        "      10    0.5000  12.3000  0.7000  0.2000        no"
    )


def test_choices_are_plain_values():
    one, other = (Choice(1.0, (Evidence(1.0, -3.0),), "why") for _ in range(2))
    assert one == other
    assert hash(one) == hash(other)


def test_progress_bars_are_shown_when_asked_for(capsys):
    tuning.largest_harmless_alpha(fake_acnml(), FOUR, [0.25], Tolerance(nll=9.0), progress=True)
    assert "0.25" in capsys.readouterr().err
    tuning.alpha_by_nll(fake_acnml(), FOUR, [0.25])
    assert capsys.readouterr() == ("", "")
