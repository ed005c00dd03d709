"""Non-finite inputs and logits: -inf is valid in attention masks, but not in logits."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import acnml
from acnml import Acnml, Classifier, Diagonal, Gradient, Linearised, Map
from acnml._util.checks import RowsError
from acnml.fit import Refit
from acnml.solve import Reference
from cases import TwoLayers, diagonal, normal, seeded

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
