"""Inputs, features and logits that are not finite, huge, or not to be trusted."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import acnml
from acnml import Acnml, Classifier, Diagonal, Gradient, Linearised, Map
from acnml._util.checks import RowsError
from acnml.fit import Refit
from acnml.solve import Reference
from acnml.solve.logits import solve
from cases import TwoLayers, diagonal, normal, seeded

# Non-finite inputs and logits: -inf is valid in attention masks, but not in logits ----------------

Y = torch.tensor([0, 1, 2, 0])


class Attending(nn.Module):
    """One head of attention under a mask, boolean or added to the scores."""

    def __init__(self) -> None:
        super().__init__()
        self.keys, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        keys = self.keys(x)
        return self.head(functional.scaled_dot_product_attention(x, keys, keys, mask).mean(1))


PREDICTIONS = {
    "map": lambda c, batch: Map(c)(batch),
    "reference": lambda c, batch: Acnml(c, diagonal(c.model), Reference(), 1.0, "ignore")(batch),
    "gradient": lambda c, batch: Acnml(c, diagonal(c.model), Gradient(), 1.0, "ignore")(batch),
    "linearised": lambda c, batch: Acnml(c, diagonal(c.model), Linearised(), 1.0, "ignore")(batch),
    "glm": lambda c, batch: acnml.Glm(c, diagonal(c.model))(batch),
    "naive": lambda c, batch: acnml.predictors.NaiveCnml(c, [(batch, Y)], Refit(1))(batch),
    "laplace": lambda c, batch: acnml.fit.fit_curvature(c, [(batch, Y)]).factors[0].gradients,
    "swag": lambda c, batch: acnml.fit_swag(c, [(batch, Y)], learning_rate=0.5).mean["head.weight"],
}


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # vmap, of attention
@pytest.mark.parametrize("predict", PREDICTIONS.values(), ids=PREDICTIONS.keys())
def test_a_mask_of_minus_infinity_is_the_boolean_mask(predict):
    x, allowed = normal(4, 5, 4), torch.ones(4, 1, 5, dtype=torch.bool)
    allowed[1, :, 3:] = allowed[2, :, 0] = False
    added = torch.zeros(4, 1, 5).double().masked_fill(~allowed, -math.inf)
    classifier = Classifier(seeded(Attending))
    expected = predict(classifier, {"x": x, "mask": allowed})
    actual = predict(classifier, {"x": x, "mask": added})
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)


class Undefined(nn.Module):
    """Multiplies by a non-finite number if the first feature is negative."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.drop, self.layer, self.factor = nn.Dropout(0.1), nn.Linear(4, 3), factor

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.drop(x)) * torch.where(x[:, :1] > 0, 1.0, self.factor)


def small(model: nn.Module) -> Diagonal:
    return diagonal(model).scaled(1e-3)


@pytest.mark.parametrize("factor", [math.nan, math.inf])
@pytest.mark.parametrize(
    "use",
    [
        lambda c, x: Map(c)(x),
        lambda c, x: acnml.McDropout(c, 2)(x),
        lambda c, x: acnml.Bma(c, small(c.model), 2)(x),
        lambda c, x: acnml.Glm(c, small(c.model))(x),
        lambda c, x: Acnml(c, small(c.model))(x),
        lambda c, x: Acnml(c, small(c.model), Gradient())(x),
        lambda c, x: Acnml(c, small(c.model), Reference())(x),
        lambda c, x: acnml.predictors.NaiveCnml(c, [(x.abs(), Y)])(x),
        lambda c, x: acnml.fit_laplace(c, [(x, Y)]),
        lambda c, x: acnml.fit_laplace(c, [(x, Y)], structure="diag"),
        lambda c, x: acnml.fit_bayes_by_backprop(c, [(x, Y)], epochs=1),
        lambda c, x: acnml.fit_swag(c, [(x, Y)], epochs=2, learning_rate=0.5),
    ],
)
def test_errors_name_the_logits_that_are_not_finite(use, factor):
    classifier, x = Classifier(Undefined(factor).double()), normal(4, 4).abs()
    x[2, 0] = -1
    with pytest.raises(
        ValueError,
        match=r"(logits|log-probabilities) are NaN or infinite for 1 of 4 .* index 2; check",
    ):
        use(classifier, x)


class Exploding(TwoLayers):
    """Has infinite features and logits for inputs with a large first entry."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(torch.tanh(self.body(x)) + x[:, :1].exp()))


def head(model: nn.Module) -> Diagonal:
    return diagonal(model, ["head.weight", "head.bias"])


@pytest.mark.parametrize(
    "make",
    [
        lambda c, x: Map(c),
        lambda c, x: Acnml(c, head(c.model), alpha=0.01),
        lambda c, x: Acnml(c, head(c.model), alpha=0.01).problem,
        lambda c, x: acnml.Glm(c, head(c.model)),
        lambda c, x: acnml.Glm(c, diagonal(c.model)),
        lambda c, x: acnml.Bma(c, head(c.model), 2),
        lambda c, x: acnml.McDropout(c, 2),
        lambda c, x: acnml.IfComp(c, head(c.model)),
        lambda c, x: acnml.IfComp(c, head(c.model)).ood_score,
        lambda c, x: acnml.fit_pnml(c, x),
        lambda c, x: acnml.fit_pnml(c, x).leverage,
        lambda c, x: acnml.Tempered(Map(c), 2.0),
        lambda c, x: acnml.Ensemble((Map(c), Map(c))),
    ],
)
def test_errors_name_rows_of_the_batch_and_not_of_a_chunk(make):
    """Predictors run 256 inputs at a time."""
    classifier, x = Classifier(Exploding().double()), normal(600, 4)
    use = make(classifier, x[:100])
    use(x[:20])
    x[500, 0] = 1e6
    with pytest.raises(RowsError, match="for 1 of 600 inputs, first at index 500; ") as refused:
        use(x)
    assert (refused.value.rows, refused.value.total) == ((500,), 600)


USES_OF_DATA = [
    lambda c, data: acnml.fit_laplace(c, data, structure="diag"),
    lambda c, data: acnml.tuning.temperature_by_nll(Map(c), data),
]


@pytest.mark.parametrize("use", USES_OF_DATA)
def test_errors_name_rows_of_data_in_memory(use):
    """The library makes the batches, so their numbers would mean nothing to the user."""
    classifier, x = Classifier(Exploding().double()), normal(600, 4)
    x[[300, 500], 2] = math.nan
    message = "^input x is NaN or infinite for 2 of 600 inputs, first at index 300, 500; "
    with pytest.raises(RowsError, match=message) as refused:
        use(classifier, (x, torch.arange(600) % 3))
    assert refused.value.rows == (300, 500)


@pytest.mark.parametrize("use", USES_OF_DATA)
def test_errors_name_the_batch_of_a_loader_and_its_rows(use):
    classifier, x = Classifier(Exploding().double()), normal(80, 4)
    x[67, 2] = math.nan
    loader = list(zip(x.split(40), (torch.arange(80) % 3).split(40), strict=True))
    message = "^batch 1: input x is NaN or infinite for 1 of 40 inputs, first at index 27; "
    with pytest.raises(RowsError, match=message) as refused:
        use(classifier, loader)
    assert refused.value.rows == (27,)


# Inputs of any size: larger ones are answered with more caution, or refused; never surer ----------

RAY = torch.tensor([[1.0, -0.7]])
GROWING = [10.0**e for e in (0, 0.5, 1, 1.5, 2, 3, 4, 6, 8, 10, 15, 18, 19.3, 25, 38)]
TINY = [1e-45, 1e-40, 1e-20, 1e-6]


def unit_variances() -> Acnml:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Linear(2, 3)
    mean = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    posterior = Diagonal(mean, {name: torch.ones_like(t) for name, t in mean.items()})
    return Acnml(Classifier(model), posterior)


def laplace() -> Acnml:
    classifier = unit_variances().classifier
    data = [normal(20, 2).float()]
    return Acnml(classifier, acnml.fit_laplace(classifier, data, progress=False))


def calibrated(rule: str = "acnml") -> acnml.Calibrated:
    model, x = unit_variances().classifier.model, normal(400, 2, seed=1).float()
    labels = (model(x).detach() + normal(400, 3, seed=2).float()).argmax(-1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # 400 points are few
        return acnml.calibrate(model, [x], [(x, labels)], rule=rule, progress=False)


def answered(predict, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and regret."""
    found = predict.solve(x) if isinstance(predict, Acnml) else predict(x)
    return found.log_probs, found.regret


each_predictor = pytest.mark.parametrize("make", [unit_variances, laplace, calibrated])


def at(scale: float) -> torch.Tensor:
    return (RAY.double() * scale).float()


@each_predictor
def test_larger_inputs_are_answered_with_more_caution_or_refused(make):
    predict, last, refused = make(), 0.0, False
    for scale in GROWING:
        try:
            log_probs, regret = answered(predict, at(scale))
        except RowsError:  # by the solver, or because s(x) overflows
            refused = True
            continue
        assert not refused, f"{scale} is answered, but a smaller input was refused"
        assert log_probs.isfinite().all()
        assert last - 1e-4 <= regret.item() <= math.log(3) + 1e-6
        last = regret.item()
    assert refused


@each_predictor
def test_tiny_inputs_are_answered_like_zero(make):
    predict = make()
    expected, _ = answered(predict, torch.zeros(1, 2))
    for scale in TINY:
        torch.testing.assert_close(answered(predict, at(scale))[0], expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("rule", ["acnml", "closed-form"])
def test_the_module_gives_the_same_answer_or_nan(rule):
    predict = calibrated(rule)
    module = predict.as_module()
    for scale in [*TINY, *GROWING]:
        with torch.no_grad():
            log_probs, regret, _ = module(at(scale))
        if log_probs.isnan().any():
            assert scale > 100
            assert log_probs.isnan().all()
            assert regret.isnan().all()
        else:
            expected, _ = answered(predict, at(scale))
            torch.testing.assert_close(log_probs, expected, rtol=0, atol=1e-3)
    assert log_probs.isnan().all()


def test_the_exported_file_gives_nan_as_well(tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    path = acnml.export_onnx(calibrated(), normal(4, 2).float(), tmp_path / "model.onnx").path
    session = onnxruntime.InferenceSession(str(path))
    both = torch.cat([at(1.0), at(2e19)])
    found = session.run(None, {session.get_inputs()[0].name: both.numpy()})
    for tensor in map(torch.from_numpy, found):
        assert tensor[0].isfinite().all()
        assert tensor[1].isnan().all()


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
@pytest.mark.parametrize("classes", [3, 70])
def test_a_kernel_that_is_not_finite_spoils_its_own_input_only(bad, classes):
    logits, var = normal(3, classes), normal(3, classes, seed=1).exp()
    expected = solve(logits, torch.diag_embed(var))
    var[1, 2] = bad
    found = solve(logits, torch.diag_embed(var))
    assert not (found.residual[1] <= torch.inf).any()
    assert found.log_lik[1].isnan().all()
    for i in (0, 2):
        torch.testing.assert_close(found.log_lik[i], expected.log_lik[i], rtol=0, atol=1e-9)


# What `calibrate` refuses or warns of, because answers could not be trusted -----------------------


class Two(TwoLayers):
    def __init__(self) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            super().__init__(hidden=16)


class FirstBatch(Two):
    """Subtracts the mean of the first batch that it saw."""

    mu = None

    def forward(self, x):
        if self.mu is None:
            self.mu = x.mean(0)
        return super().forward(x - self.mu)


class Recurrent(Two):
    """Goes on from the state in which the last batch left it."""

    state = None

    def forward(self, x):
        before = 0.0 if self.state is None else self.state
        self.state = x.sum()
        return super().forward(x + before)


class Level(Two):
    """Has logits on a high level, and subtracts the mean of the batch."""

    def forward(self, x):
        return super().forward(x - x.mean(0)) + 1e4


def data(model: nn.Module, n: int = 400):
    x = normal(n, 4, seed=3).float()
    with torch.no_grad():
        labels = Two()(x).argmax(-1)
    labels[::4] = (labels[::4] + 1) % 3
    return (x[: n // 2], labels[: n // 2]), (x[n // 2 :], labels[n // 2 :])


@pytest.mark.parametrize("kind", [FirstBatch, Recurrent, Level])
def test_models_that_remember_or_mix_inputs_are_refused(kind):
    model = kind()
    with pytest.raises(ValueError, match=r"rest of its batch|random even in eval"):
        acnml.calibrate(model, *data(model))


def test_a_high_level_alone_is_no_reason():
    class High(Two):
        def forward(self, x):
            return super().forward(x) + 1e4

    acnml.calibrate(High(), *data(High()), price=0.1)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_infinite_features_have_no_answer_anywhere(bad):
    model = Two()
    train, validation = data(model)
    x = train[0][:5].clone()
    x[2, 1] = bad
    calibrated = acnml.calibrate(model, train, validation, price=0.1)
    with pytest.raises(ValueError, match="first at index 2"):
        calibrated(x)
    flagged = acnml.calibrate(model, train, validation, price=0.1, on_error="flag")
    none = [False, False, True, False, False]
    assert flagged(x).log_probs.isnan().any(1).tolist() == none
    assert flagged(x).label.tolist()[2] == flagged.predict(x).tolist()[2] == -1
    for by in ("confidence", "regret"):
        assert flagged.abstains(x, share=0.0, by=by).tolist() == none
    for part in calibrated.as_module()(x):
        assert part.reshape(5, -1).isnan().any(1).tolist() == none


class Beside(Two):
    """Has a branch whose hidden values depend on the batch, unlike the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(16, 3)

    def forward(self, x):
        hidden = torch.tanh(self.body(x))
        self.other(hidden - hidden.mean(0))
        return self.head(hidden)


def test_features_that_depend_on_the_batch_are_left_out():
    model = Beside()
    found = acnml.calibrate(model, *data(model), price=0.1)
    assert [place.module for place in found.places] == ["head"]
    places = [acnml.features.Place("other", is_input=True), *found.places]
    with pytest.raises(ValueError, match="the input of 'other', depend on the rest of its batch"):
        acnml.calibrate(model, *data(model), places=places)
