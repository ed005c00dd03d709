"""Choosing α, temperature and prior precision: tables by hand, scipy, passes over the data."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from scipy import optimize
from torch import Tensor, nn

from acnml import Acnml, Bma, Classifier, Diagonal, Linearised, Map, Tempered, metrics, tuning
from acnml.fit import DiagonalCurvature, fit_curvature
from acnml.predictors import Predictor
from acnml.solve import Solution, UnsolvedError
from acnml.tuning import Choice, Scores, sweep, within_price
from cases import MODELS, normal
from dense import vector

GRID = (0.25, 0.5, 1.0, 1.5, 2.0)

# 3 of 4 are right. With the logit 2 for one class and 0 for two, p = e²/(e² + 2) and 1/(e² + 2).
FOUR = [(2 * torch.eye(3, dtype=torch.float64)[[0, 1, 2, 2]], torch.tensor([0, 1, 2, 0]))]


def nll_at(logit: float) -> float:
    """The NLL on `FOUR` with another logit in place of 2."""
    return math.log(math.exp(logit) + 2) - 0.75 * logit


@dataclass(frozen=True)
class Scaled(Predictor):
    """A predictor whose logits are the inputs times a number."""

    factor: float = 1.0

    def __call__(self, x: Tensor) -> Tensor:
        return (self.factor * x).log_softmax(-1)


@dataclass(frozen=True)
class FakeSolver:
    """Likelihoods that α flattens."""

    limit: float = math.inf  # from which α on there is no solution

    def __call__(self, classifier: Classifier, posterior: Diagonal, x: Tensor) -> Solution:
        alpha = posterior.var["weight"][0, 0].item()
        if alpha >= self.limit:
            raise UnsolvedError("too cautious")
        logits = x / (1 + alpha)
        zeros = torch.zeros_like(logits)
        return Solution(logits.log_softmax(-1), zeros)

    def log_lik(self, classifier: Classifier, posterior: Diagonal, x: Tensor) -> Tensor:
        return self(classifier, posterior, x).log_lik


def identity() -> nn.Linear:
    """Logits are the inputs."""
    model = nn.Linear(3, 3, bias=False).double()
    nn.init.eye_(model.weight)
    return model


def fake_acnml(limit: float = math.inf) -> Acnml:
    """The posterior's mean is the identity, and the model's own weights are something else."""
    posterior = Diagonal({"weight": identity().weight.detach()}, {"weight": torch.ones(3, 3)})
    posterior = posterior.to(torch.float64)
    classifier = Classifier(nn.Linear(3, 3, bias=False).double())
    return Acnml(classifier, posterior, FakeSolver(limit), 7.0)


def row_of(predictor, value, loader) -> Scores:
    """Scores from predictions for the inputs themselves."""
    log_probs = torch.cat([predictor(x) for x, _ in loader])
    return Scores(value, **metrics.summary(log_probs, torch.cat([y for _, y in loader])))


def test_a_choice_prints_its_rule_and_an_aligned_table():
    rows = (
        Scores(0.0, 0.98, 0.0712, 0.03, 0.004),
        Scores(0.25, 0.98, 0.08, 0.03, 0.01),
        Scores(10.0, 0.5, 12.3, 0.7, 0.2),
    )
    assert str(Choice(0.25, rows, "the largest that is harmless")) == (
        "0.25: the largest that is harmless\n"
        "   value  accuracy      nll   brier     ece\n"
        "       0    0.9800   0.0712  0.0300  0.0040\n"
        "→   0.25    0.9800   0.0800  0.0300  0.0100\n"
        "      10    0.5000  12.3000  0.7000  0.2000"
    )


class TestSweep:
    X, Y = normal(40, 3, seed=3), torch.arange(40) % 3

    def test_scores_all_data_for_every_value_in_a_pass_each(self):
        passes, data = [], [(self.X[:25], self.Y[:25]), (self.X[25:], self.Y[25:])]

        class Counting:
            def __iter__(self):
                passes.append(1)
                yield from data

        rows = sweep(Scaled, [2.0, 0.5], Counting())
        assert len(passes) == 2
        assert rows == tuple(row_of(Scaled(value), value, data) for value in (2.0, 0.5))
        best = tuning.least_nll(Scaled, [2.0, 0.1, 0.5], data)
        assert best.table == sweep(Scaled, [2.0, 0.1, 0.5], data)
        assert min(best.table, key=lambda row: row.nll).value == best.value == 0.1

    @pytest.mark.parametrize("form", [lambda x, y: [x, y], lambda x, y: {"input": x, "labels": y}])
    def test_batches_may_be_lists_or_mappings(self, form):
        def make(_: float) -> Map:
            return Map(Classifier(identity()))

        expected = sweep(make, [1.0], [(self.X, self.Y)])
        assert sweep(make, [1.0], [form(self.X, self.Y)]) == expected

    @pytest.mark.parametrize(
        ("data", "error", "message"),
        [
            ([], ValueError, "the loader gave no batch"),
            ([(X, Y), X], ValueError, "batch 1: there are no labels: yield"),
            ([(X, Y.tolist())], TypeError, "batch 0: labels must be a tensor of integers, got li"),
            ([(X, Y.double())], TypeError, "batch 0: labels must be a tensor of integers.*float64"),
            ([(X, Y[:5])], ValueError, r"batch 0: labels have shape \(5,\), expected \(40,\)"),
            ([(X, Y), (X, Y + 1)], ValueError, "batch 1: label 3 is outside .* first at index 2"),
            ([(X * math.nan, Y)], ValueError, "log.prob.* NaN"),
            ([object()], TypeError, "batch 0: a loader must yield tuples"),
        ],
    )
    def test_refuses_bad_validation_data(self, data, error, message):
        with pytest.raises(error, match=message):
            tuning.temperature_by_nll(Scaled(), data)


class Counting(nn.Module):
    """Counts the batches that pass through it, whichever copy they pass."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 3)
        self.calls: list[int] = []

    def __deepcopy__(self, memo):
        copy = Counting().double()
        copy.load_state_dict(self.state_dict())
        copy.calls = self.calls
        return copy

    def forward(self, x):
        self.calls.append(len(x))
        return self.head(torch.tanh(self.body(x)))


class TestPasses:
    """A search over the hyperparameters of a last layer runs the network once."""

    ALPHAS = (0.01, 0.1, 1.0)

    @pytest.fixture
    def setting(self):
        model, x = Counting().double(), normal(60, 4, seed=3)
        labels = model(x).argmax(-1)
        labels[::5] = 0
        loader = [(x[i : i + 20], labels[i : i + 20]) for i in (0, 20, 40)]
        curvature = fit_curvature(Classifier(model), loader, layers=[model.head])
        predictor = Acnml(Classifier(model), curvature.posterior(1.0))
        predictor(x[:8])  # the model is checked when it is first seen
        model.calls.clear()
        return model, loader, predictor, curvature

    def test_of_alpha(self, setting):
        model, loader, predictor, _ = setting
        table = sweep(lambda a: replace(predictor, alpha=a), self.ALPHAS, loader)
        assert sum(model.calls) == 60
        for row in table:
            expected = row_of(replace(predictor, alpha=row.value), row.value, loader)
            assert row == pytest.approx(expected, abs=1e-9)

    def test_of_a_knob_at_a_price(self, setting):
        model, loader, predictor, _ = setting
        plain = Map(predictor.classifier)
        within_price(lambda a: replace(predictor, alpha=a), loader, price=0.05, reference=plain)
        assert sum(model.calls) == 2 * 60  # one pass for the reference

    def test_too_many_covariances_are_not_kept(self, setting, monkeypatch):
        _, loader, predictor, _ = setting
        monkeypatch.setattr(tuning, "MOST_KEPT", 100)
        for row in sweep(lambda a: replace(predictor, alpha=a), self.ALPHAS, loader):
            expected = row_of(replace(predictor, alpha=row.value), row.value, loader)
            assert row == pytest.approx(expected, abs=1e-9)

    def test_other_views_do_not_share_features(self, setting):
        """A different temperature, weights or solver give different predictions."""
        _, loader, predictor, _ = setting
        body = predictor.classifier.copy_parameters(["body.weight"])
        moved = {n: t + 0.1 for n, t in body.items()}
        others = {
            1.0: predictor,
            2.0: replace(predictor, classifier=predictor.classifier.tempered(1.5)),
            3.0: replace(predictor, classifier=predictor.classifier.at(moved)),
            4.0: replace(predictor, solver=Linearised(tolerance=1e-7)),
        }
        for row in sweep(others.__getitem__, list(others), loader):
            expected = row_of(others[row.value], row.value, loader)
            assert row == pytest.approx(expected, abs=1e-9)


REFERENCE = 0.8  # factor of the logits


def flatter(value: float) -> Scaled:
    """The larger the value, the more cautious; the temperature is 1 + value."""
    return Scaled(REFERENCE / (1 + value))


def nll_of_flatter(value: float) -> float:
    return nll_at(2 * REFERENCE / (1 + value))


@dataclass(frozen=True)
class Late(Predictor):
    """Right with probability 0.9 up to 3, and ½ above."""

    value: float

    def __call__(self, x: Tensor) -> Tensor:
        right = 0.9 if self.value <= 3 else 0.5
        return torch.tensor([[right, 1 - right]]).double().log()


class TestWithinPrice:
    @pytest.mark.parametrize("start", [1e-4, 1.0, 100.0])
    @pytest.mark.parametrize("price", [0.001, 0.01, 0.05, 0.1])
    def test_finds_the_value_that_costs_the_price(self, price, start):
        """The chosen value is within the limit, and close to the exact root."""
        choice = within_price(flatter, FOUR, price, Scaled(REFERENCE), start)
        cost = nll_of_flatter(choice.value) - nll_of_flatter(0)
        assert 0.99 * price <= cost <= price + 1e-9
        # Below the temperature of least NLL, where p = 3/4, the NLL falls.
        low, high = 2 * REFERENCE / math.log(6) - 1, 1e3
        root = optimize.brentq(lambda v: nll_of_flatter(v) - nll_of_flatter(0) - price, low, high)
        assert choice.value == pytest.approx(root, rel=0.01)

    def test_the_table_holds_every_value_that_was_tried(self):
        tried = []

        def make(value):
            tried.append(value)
            return flatter(value)

        choice = within_price(make, FOUR, 0.05, Scaled(REFERENCE))
        assert [row.value for row in choice.table] == sorted(tried)
        assert {1.0, choice.value} <= set(tried)
        assert len(tried) < 15
        for row in choice.table:
            assert row.nll == pytest.approx(nll_of_flatter(row.value), rel=1e-12)
        assert f"within 0.05 nats of the reference NLL {nll_of_flatter(0):.4f}" in choice.rule
        assert "→" in str(choice)

    def test_a_value_that_meets_the_price_exactly_is_within_it(self):
        price = nll_of_flatter(1) - nll_of_flatter(0)
        choice = within_price(flatter, FOUR, price, Scaled(REFERENCE), start=1.0)
        assert (choice.value, len(choice.table)) == (1, 1)

    def test_an_nll_that_jumps_is_followed_to_the_jump(self):
        choice = within_price(Late, [(torch.zeros(1, 1), torch.tensor([0]))], 0.05, Late(1.0))
        assert 3 / (1 + 1e-4) <= choice.value <= 3
        assert len(choice.table) < 30

    def test_says_so_if_no_value_is_within_the_price_or_every_value_is(self):
        with pytest.raises(ValueError, match=r"no value is within 0\.01 nats") as refused:
            within_price(lambda v: Scaled(0.1), FOUR, 0.01, Scaled(REFERENCE))
        assert "raise the price" in str(refused.value)
        assert "accuracy" in str(refused.value).splitlines()[1]
        with pytest.raises(ValueError, match=r"every value is within 5 nats .* lower the price"):
            within_price(flatter, FOUR, 5.0, Scaled(REFERENCE))

    @pytest.mark.parametrize("price", [-0.1, math.nan, math.inf])
    def test_the_price_is_a_number_of_nats(self, price):
        with pytest.raises(ValueError, match="price must be finite and not negative"):
            within_price(flatter, FOUR, price, Scaled(REFERENCE))

    def test_values_without_a_solution_are_passed_over(self):
        def search(given: Acnml) -> Choice:
            plain = Map(given.at_mean)
            return within_price(lambda a: replace(given, alpha=a), FOUR, 9.0, plain)

        choice = search(fake_acnml(limit=0.5))
        assert 0.5 / (1 + 1e-4) <= choice.value < 0.5
        assert all(row.value < 0.5 for row in choice.table)
        with pytest.raises(ValueError, match="found no solution for any value"):
            search(fake_acnml(limit=0.0))


class TestEvidence:
    @pytest.mark.parametrize("h", [0.01, 1.0, 300.0])
    def test_of_an_isotropic_curvature(self, h):
        """For H = hI, τ‖θ̂‖² = P h / (h + τ): a quadratic equation for τ."""
        mean = {"w": normal(7, 3), "b": normal(4, seed=1)}
        curvature = DiagonalCurvature(mean, {n: torch.full_like(t, h) for n, t in mean.items()})
        square, count = vector(mean).square().sum().item(), 25
        root = math.sqrt((square * h) ** 2 + 4 * square * count * h)
        expected = (root - square * h) / (2 * square)
        found = tuning.prior_precision_by_evidence(curvature).value
        assert found == pytest.approx(expected, rel=1e-6)

    @pytest.mark.parametrize("structure", ["diag", "kron"])
    def test_equals_scipys(self, structure):
        case = MODELS[2]
        data = [(case.x(20), torch.arange(20) % 3)]
        curvature = fit_curvature(case.model(), data, structure=structure)
        choice = tuning.prior_precision_by_evidence(curvature)
        found = optimize.minimize_scalar(
            lambda u: -curvature.log_evidence(math.exp(u)),
            bounds=(-10, 10),
            options={"xatol": 1e-8},
        )
        assert choice.value == pytest.approx(math.exp(found.x), rel=1e-4)
        values = [row.value for row in choice.table]
        assert values == sorted(values)
        assert choice.value in values
        for row in choice.table:
            assert row.log_evidence == curvature.log_evidence(row.value) <= -found.fun + 1e-9

    @pytest.mark.parametrize(("structure", "decompositions"), [("kron", 2 * 2), ("full", 1)])
    def test_each_matrix_is_decomposed_once(self, structure, decompositions, monkeypatch):
        """Two factors of two layers, or one matrix, however many prior precisions are tried."""
        case, calls, decompose = MODELS[1], [], torch.linalg.eigvalsh
        data = [(case.x(20), torch.arange(20) % 3)]
        curvature = fit_curvature(case.model(), data, structure=structure)
        monkeypatch.setattr(torch.linalg, "eigvalsh", lambda m: calls.append(m) or decompose(m))
        tuning.prior_precision_by_evidence(curvature)
        assert len(calls) == decompositions

    def test_without_a_maximum_it_is_refused(self):
        mean = {"w": torch.zeros(4, 3), "b": torch.zeros(4)}
        curvature = DiagonalCurvature(mean, {n: torch.ones_like(t) for n, t in mean.items()})
        with pytest.raises(ValueError, match="the evidence is still rising at a prior precision"):
            tuning.prior_precision_by_evidence(curvature)

    def test_a_sweep_is_the_alternative(self):
        case = MODELS[1]
        classifier, data = Classifier(case.model()), [(case.x(9), torch.arange(9) % 3)]
        curvature = fit_curvature(classifier, data, structure="diag")
        choice = tuning.least_nll(
            lambda tau: Bma(classifier, curvature.posterior(tau), samples=3), [10.0, 0.1], data
        )
        expected = Bma(classifier, curvature.posterior(choice.value), samples=3)
        assert row_of(expected, choice.value, data) in choice.table


def learnable(seed: int, scale: float) -> tuple[Tensor, Tensor]:
    """Logits that are informative about the labels, but not perfectly."""
    y = torch.arange(60) % 3
    x = normal(60, 3, seed=seed)
    x[torch.arange(60), y] += 0.7
    return scale * x, y


class TestTemperature:
    @pytest.mark.parametrize("scale", [1e-4, 1.0, 1e5])
    @pytest.mark.parametrize("seed", range(3))
    def test_equals_scipys(self, seed, scale):
        x, y = learnable(seed, scale)
        expected = optimize.minimize_scalar(
            lambda u: metrics.nll((x / math.exp(u)).log_softmax(-1), y),
            bounds=(math.log(scale) - 5, math.log(scale) + 5),
            options={"xatol": 1e-9},
        )
        choice = tuning.temperature_by_nll(Scaled(), [(x, y)])
        # The NLL is flat at its minimum: scipy, which sees no slopes, knows T to √ε only.
        assert choice.value == pytest.approx(math.exp(expected.x), rel=1e-6)
        assert min(row.nll for row in choice.table) <= expected.fun + 1e-12

    def test_a_calibrated_predictor_keeps_its_temperature(self):
        """Labels in the very proportions that the predictor gives them."""
        x = torch.tensor([[0.5, 0.25, 0.25]] * 4 + [[0.25, 0.75, 1e-30]] * 4).double().log()
        y = torch.tensor([0, 0, 1, 2, 0, 1, 1, 1])
        choice = tuning.temperature_by_nll(Scaled(), [(x, y)])
        assert choice.value == pytest.approx(1.0, rel=1e-10)

    def test_tempered_predictors_and_classifiers_have_the_tables_nll(self):
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

    @pytest.mark.parametrize(
        ("x", "y", "message"),
        [
            (3 * torch.eye(3), [0, 1, 2], "every validation example is predicted correctly"),
            (torch.zeros(3, 3), [0, 1, 2], "every validation example is predicted correctly"),
            (3 * torch.eye(3), [1, 2, 0], "labels are no more probable than other"),
            (torch.tensor([[0, 1, -math.inf]]), [0], "log-probabilities are NaN or infinite"),
        ],
    )
    def test_refuses_data_without_an_optimal_temperature(self, x, y, message):
        with pytest.raises(ValueError, match=message):
            tuning.temperature_by_nll(Scaled(), [(x, torch.tensor(y))])
