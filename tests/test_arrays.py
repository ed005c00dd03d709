"""NumPy arrays in place of tensors, and data sets (X, y) in place of loaders."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

import acnml
from acnml import Acnml, Classifier, Map, metrics, tuning
from acnml._util.batches import CHUNK, as_loader
from cases import MLP, diagonal, normal
from predicting import dropping
from test_calibrate import problem

LABELS = torch.arange(6) % 3


def predictors() -> list[acnml.predictors.Predictor]:
    model = MLP.model()
    classifier, posterior = Classifier(model), diagonal(model)
    plain, data = Map(classifier), (MLP.x(40), torch.arange(40) % 3)
    explaining = Acnml(classifier, posterior)
    return [
        plain,
        explaining,
        acnml.IfComp(classifier, posterior),
        acnml.Modes((explaining, explaining)),
        acnml.fit_pnml(classifier, data),
        acnml.Bma(classifier, posterior, 2),
        acnml.Glm(classifier, posterior),
        acnml.McDropout(Classifier(dropping(MLP, 0.5)), 2),
        acnml.Tempered(plain, 2.0),
        acnml.Ensemble((plain, plain)),
        acnml.predictors.NaiveCnml(classifier, [(MLP.x(6), LABELS)], acnml.fit.Refit(1)),
        acnml.predictors.NaiveCnmlMax(classifier, [(MLP.x(6), LABELS)], acnml.fit.Refit(1)),
    ]


def outcomes(predictor: acnml.predictors.Predictor, x) -> list:
    names = [n for n in ("regret", "log_lik") if hasattr(predictor, n)]
    return [predictor(x), *(getattr(predictor, name)(x) for name in names)]


def assert_arrays_equal(arrays, tensors) -> None:
    for array, tensor in zip(arrays, tensors, strict=True):
        assert isinstance(array, np.ndarray)
        assert isinstance(tensor, Tensor)
        assert array.dtype == tensor.numpy().dtype
        assert np.array_equal(array, tensor.numpy())


@pytest.mark.parametrize("predictor", predictors(), ids=lambda p: type(p).__name__)
def test_predictors_return_arrays_for_arrays_and_tensors_for_tensors(predictor):
    x = MLP.x(4)
    assert_arrays_equal(outcomes(predictor, x.numpy()), outcomes(predictor, x))
    other = np.float32 if x.dtype == torch.float64 else np.float64
    converted = predictor(x.numpy().astype(other))
    assert converted.dtype == predictor(x).numpy().dtype


@pytest.mark.filterwarnings("ignore:The price")
def test_calibrate_takes_data_sets_of_arrays_and_returns_arrays():
    model, train, validation, _ = problem()
    (x, y), (xv, yv) = ([torch.cat(t) for t in zip(*d, strict=True)] for d in (train, validation))
    expected = acnml.calibrate(model, train, validation)
    found = acnml.calibrate(model, (x.numpy(), y.numpy()), (xv.numpy(), yv.numpy()))
    unlabelled = acnml.calibrate(model, x.numpy(), (xv, yv))
    query = normal(5, 4, seed=1)
    methods = ("log_probs", "probs", "predict", "regret", "score", "abstains")
    for name in methods:
        array, tensor = getattr(found, name)(query.numpy()), getattr(expected, name)(query)
        assert isinstance(array, np.ndarray)
        assert isinstance(tensor, Tensor)
        assert array.dtype == tensor.numpy().dtype
        np.testing.assert_allclose(array, tensor.numpy(), rtol=1e-4, atol=1e-6)
    answer = found.calibrator(model(query).detach().numpy(), found.features(query.numpy()))
    assert_arrays_equal(answer, found(query))
    predicted = acnml.calibrate(model, (x, model(x).argmax(-1)), (xv, yv))
    assert unlabelled.alpha == pytest.approx(predicted.alpha)


@pytest.mark.parametrize(
    "fit",
    [
        acnml.fit_laplace,
        partial(acnml.fit_laplace, structure="diag"),
        partial(acnml.fit_laplace, structure="full"),
        lambda c, data: acnml.fit.fit_curvature(c, data).posterior(1.0),
    ],
)
@pytest.mark.parametrize("form", [lambda t: t, Tensor.numpy])
def test_fits_take_data_sets(fit, form):
    classifier, x = Classifier(MLP.model()), MLP.x(6)
    expected = fit(classifier, [(x, LABELS)])
    found = fit(classifier, (form(x), form(LABELS)))
    for name, tensor in expected.cov_mv(expected.mean).items():
        assert torch.equal(found.cov_mv(found.mean)[name], tensor)


def test_tuning_takes_data_sets():
    model = MLP.model()
    predictor, x = Acnml(Classifier(model), diagonal(model)), MLP.x(6)

    def make(alpha):
        return replace(predictor, alpha=alpha)

    expected = tuning.sweep(make, [0.1, 1.0], [(x, LABELS)])
    assert tuning.sweep(make, [0.1, 1.0], (x.numpy(), LABELS.numpy())) == expected


class TestDataOrLoader:
    X, Y = normal(2 * CHUNK + 3, 2, seed=0), torch.arange(2 * CHUNK + 3)

    @pytest.mark.parametrize("form", [lambda t: t, Tensor.numpy])
    def test_a_tuple_of_inputs_and_labels_is_a_data_set(self, form):
        loader = as_loader((form(self.X), form(self.Y)))
        for _ in range(2):  # it can be iterated again
            x, y = (torch.cat(tensors) for tensors in zip(*loader, strict=True))
            assert torch.equal(x, self.X)
            assert torch.equal(y, self.Y)
        assert len(loader) == 3

    def test_inputs_may_be_several(self):
        two = as_loader(((self.X, self.X.numpy()), self.Y))
        mapping = as_loader(({"a": self.X}, self.Y))
        assert [len(x) for x, _ in two] == [2, 2, 2]
        assert [set(x) for x, _ in mapping] == [{"a"}] * 3

    def test_inputs_alone(self):
        assert [len(batch) for batch in as_loader(self.X.numpy())] == [1, 1, 1]

    @pytest.mark.parametrize(
        "loader",
        [
            [X, Y],  # a list of two batches without labels
            [(X, Y)],
            ((X, Y), (X, Y)),  # a tuple of two batches
            ([X, Y], [X, Y]),
            (((X, X), Y), ((X, X), Y)),  # of a model with two inputs
            (({"a": X}, Y), ({"a": X}, Y)),
            ({"x": X, "labels": Y},),
            ({"x": X, "labels": Y}, {"x": X, "labels": Y}),
        ],
    )
    def test_everything_else_is_a_loader(self, loader):
        assert as_loader(loader) is loader

    def test_lengths_must_agree(self):
        with pytest.raises(ValueError, match=r"X has 515 inputs, but y has 514 labels"):
            as_loader((self.X, self.Y[1:]))


class TestLabelsOfADataSet:
    """In (X, y), y holds labels. Anything else is refused, never taken for a batch of inputs."""

    X, Y = normal(6, 3, seed=0), torch.arange(6) % 3

    @pytest.mark.parametrize("y", [Y[0], Y.tolist(), None])
    @pytest.mark.parametrize("x", [X, (X, X), {"a": X}])
    def test_a_vector_is_asked_for(self, x, y):
        message = (
            rf"y must be a vector .* got a {type(y).__name__}: .* pass X in place of \(X, None"
        )
        with pytest.raises(TypeError, match=message):
            as_loader((x, y))

    def test_one_hot_labels_are_not_taken_for_inputs(self):
        classifier, one_hot = Classifier(torch.nn.Linear(3, 3)), torch.eye(3)[self.Y]
        with pytest.raises(ValueError, match=r"pass y\.argmax\(1\) of one-hot labels"):
            acnml.fit.fit_curvature(classifier, (self.X, one_hot))
        with pytest.raises(ValueError, match=r"pass y\[:, 0\]"):
            acnml.fit.fit_curvature(classifier, (self.X, self.Y[:, None]))


class TestOddArrays:
    predict = Map(Classifier(MLP.model()))
    x = MLP.x(4).numpy()

    def test_views_and_read_only_arrays(self):
        expected = self.predict(self.x)
        frozen = self.x.copy()
        frozen.flags.writeable = False
        strange = (frozen, np.asfortranarray(self.x), self.x.astype(self.x.dtype.newbyteorder()))
        for x in strange:
            assert np.array_equal(self.predict(x), expected)
        assert np.array_equal(self.predict(self.x[::-1]), expected[::-1])

    @pytest.mark.parametrize(
        ("x", "message"),
        [
            (x.astype(object), r"array of object, which torch has no type for; convert"),
            (x.astype(int), r"if the inputs are integers, convert them: x.float\(\)"),
            (x.tolist(), r"input x\[0\] must be a tensor, got list"),
        ],
    )
    def test_what_cannot_be_converted_is_explained(self, x, message):
        with pytest.raises((TypeError, ValueError), match=message):
            self.predict(x)


def test_metrics_take_arrays_and_return_them():
    log_probs, labels = torch.tensor([[0.9, 0.1], [0.2, 0.8]]).log(), torch.tensor([0, 0])
    for metric in (metrics.nll, metrics.ece, metrics.aurc, metrics.reliability):
        expected, found = metric(log_probs, labels), metric(log_probs.numpy(), labels.numpy())
        if isinstance(expected, float):
            assert found == expected
        else:
            assert_arrays_equal(found, expected)
    assert metrics.auroc(np.zeros(2), np.ones(2)) == 1
