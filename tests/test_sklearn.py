"""acnml.sklearn: conversions, the ways to hold out data, and scikit-learn's own checks."""

from __future__ import annotations

import copy
import io
import warnings
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn

import acnml

pytest.importorskip("sklearn", reason="needs scikit-learn")

import joblib
from scipy import sparse
from sklearn import config_context
from sklearn.base import clone
from sklearn.calibration import CalibratedClassifierCV
from sklearn.compose import ColumnTransformer
from sklearn.datasets import make_classification
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.exceptions import NotFittedError
from sklearn.frozen import FrozenEstimator
from sklearn.linear_model import LogisticRegression, LogisticRegressionCV, SGDClassifier
from sklearn.model_selection import GridSearchCV, GroupKFold, ShuffleSplit, cross_val_score
from sklearn.naive_bayes import GaussianNB
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler
from sklearn.svm import LinearSVC
from sklearn.utils.estimator_checks import parametrize_with_checks

from acnml._util.batches import CHUNK
from acnml.sklearn import AcnmlClassifier, TorchClassifier, to_module
from acnml.sklearn._modules import Fitted
from cases import normal

# Few data make every price uncertain, and small networks need not converge here.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The price of"),
    pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning"),
]

NAMES = np.array(["ant", "bee", "cat"])


def data(classes: int = 3, n: int = 240):
    x, y = make_classification(
        n, 6, n_informative=4, n_classes=classes, class_sep=0.7, flip_y=0.1, random_state=0
    )
    return x, NAMES[y]


def linear(features: int, classes: int) -> nn.Module:
    return nn.Linear(features, classes)


def fast(estimator=None, **settings) -> AcnmlClassifier:
    return AcnmlClassifier(estimator, **{"cv": 2, "price": 0.05, **settings})


# scikit-learn's checks ---------------------------------------------------------------------------

WEIGHTS = (
    "sample weights reach the classifier's fit; folds, curvature and the choices count every input "
    "once, so that a weight of 2 is not the same as a repeated input"
)
BATCHES = (
    "batches are drawn at random: a repeated input falls into other batches than a weighted one"
)


def expected_failures(estimator) -> dict[str, str]:
    reason = BATCHES if isinstance(estimator, TorchClassifier) else WEIGHTS
    checks = ("on_dense_data", "on_sparse_data")
    return {f"check_sample_weight_equivalence_{check}": reason for check in checks}


@pytest.mark.filterwarnings("ignore")
@parametrize_with_checks(
    [
        AcnmlClassifier(LogisticRegression(C=1.0), cv=0.4, random_state=0),
        AcnmlClassifier(
            make_pipeline(StandardScaler(), LogisticRegression()), cv=0.4, random_state=0
        ),
        TorchClassifier(epochs=50, random_state=0),
    ],
    expected_failed_checks=expected_failures,
)
def test_scikit_learn_checks(estimator, check):
    check(estimator)


# Conversion --------------------------------------------------------------------------------------

CONVERTIBLE = [
    LogisticRegression(),
    LogisticRegression(fit_intercept=False, C=10),
    LogisticRegressionCV(
        Cs=2, cv=2, scoring="neg_log_loss", l1_ratios=(0,), use_legacy_attributes=False
    )
    if "use_legacy_attributes" in LogisticRegressionCV().get_params()
    else LogisticRegressionCV(Cs=2, cv=2),
    LinearDiscriminantAnalysis(),
    *(
        MLPClassifier((5, 4), activation=activation, max_iter=5, random_state=0)
        for activation in ("identity", "logistic", "tanh", "relu")
    ),
    MLPClassifier((), max_iter=5, random_state=0),
    make_pipeline(StandardScaler(), LogisticRegression()),
    make_pipeline(StandardScaler(), make_pipeline(StandardScaler(), LogisticRegression())),
    GridSearchCV(make_pipeline(StandardScaler(), LogisticRegression()), {}, cv=2),
    TorchClassifier(epochs=2, random_state=0),
]


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("estimator", CONVERTIBLE, ids=lambda e: str(e)[:60])
def test_a_module_has_the_probabilities_of_its_estimator(estimator, classes):
    x, y = data(classes)
    fitted = clone(estimator).fit(x, y)
    parts = Fitted.of(fitted)
    features = torch.from_numpy(parts.features(x))
    with torch.no_grad():
        logits = to_module(fitted)(features)
    tolerance = 1e-6 if logits.dtype == torch.float32 else 1e-12
    assert logits.shape == (len(x), classes)
    np.testing.assert_allclose(
        torch.softmax(logits.double(), 1).numpy(), fitted.predict_proba(x), atol=tolerance
    )


@pytest.mark.parametrize("estimator", [LogisticRegression(), SGDClassifier(loss="log_loss")])
def test_a_binary_decision_value_is_the_second_logit(estimator):
    x, y = data(2)
    fitted = estimator.fit(x, y)
    with torch.no_grad():
        logits = to_module(fitted)(torch.from_numpy(x)).numpy()
    assert (logits[:, 0] == 0).all()
    np.testing.assert_allclose(logits[:, 1], fitted.decision_function(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("estimator", "classes", "message"),
    [
        (SGDClassifier(loss="log_loss"), 3, r"one-vs-rest.* use LogisticRegression, or MLP"),
        (SGDClassifier(loss="hinge"), 2, r"loss='hinge'\) is not a model of prob.*use loss='log_l"),
        (LinearSVC(), 2, "LinearSVC cannot be converted .* Supported are LogisticRegression"),
        (GaussianNB(), 2, "GaussianNB cannot be converted"),
        (CalibratedClassifierCV(LogisticRegression()), 2, "CalibratedClassifierCV cannot be conv"),
    ],
)
def test_other_models_are_refused_by_name(estimator, classes, message):
    with pytest.raises((TypeError, ValueError), match=message):
        fast(estimator).fit(*data(classes))


class Stubborn(LogisticRegression):
    def predict_proba(self, X):
        return super().predict_proba(X) ** 2


def test_probabilities_that_are_no_softmax_are_noticed():
    with pytest.raises(ValueError, match=r"this Stubborn are not the softmax of its last layer"):
        fast(Stubborn()).fit(*data())


# How data are held out ---------------------------------------------------------------------------


def test_one_split_is_calibrate_on_the_held_out_part():
    x, y = data()
    train, test = next(ShuffleSplit(1, test_size=0.4, random_state=0).split(x))
    found = fast(cv=[(train, test)]).fit(x, y)
    module = to_module(LogisticRegression().fit(x[train], y[train]))
    labels = np.searchsorted(NAMES, y)
    expected = acnml.calibrate(
        module, x[train], (x[test], labels[test]), price=0.05, typicality=False
    )
    np.testing.assert_allclose(found.predict_proba(x), expected.probs(x), rtol=1e-12)
    np.testing.assert_allclose(found.regret(x), expected.regret(x), rtol=1e-9)
    assert str(found.calibrated_) == str(expected)


def test_several_splits_are_pooled_and_the_result_is_fitted_on_all_data():
    x, y = data()
    labels = np.searchsorted(NAMES, y)
    splits = [
        (np.arange(0, 240, 2), np.arange(1, 240, 2)),
        (np.arange(1, 240, 2), np.arange(0, 240, 2)),
    ]
    found = fast(cv=splits).fit(x, y)
    modules = [to_module(LogisticRegression().fit(x[train], y[train])) for train, _ in splits]
    held_out = torch.cat(
        [m(torch.from_numpy(x[test])) for m, (_, test) in zip(modules, splits, strict=True)]
    ).detach()
    pooled = torch.from_numpy(np.concatenate([labels[test] for _, test in splits]))
    log_probs = torch.log_softmax(held_out / found.calibrated_.temperature, 1)
    row = found.calibrated_.table[1]
    assert row.nll == pytest.approx(acnml.metrics.nll(log_probs, pooled), rel=1e-9)
    for factor in (0.98, 1.02):
        other = torch.log_softmax(held_out / found.calibrated_.temperature / factor, 1)
        assert acnml.metrics.nll(other, pooled) > row.nll
    whole = LogisticRegression().fit(x, y)
    np.testing.assert_array_equal(found.estimator_.coef_, whole.coef_)
    spent = next(r.nll for r in found.calibrated_.table if r.method == "ACNML, +0.05") - row.nll
    assert 0.045 <= spent <= 0.05


def test_folds_that_are_one_split_equal_calibrate():
    x, y = data()
    labels = np.searchsorted(NAMES, y)
    model = to_module(LogisticRegression().fit(x[:120], y[:120]))
    parts = (model, x[:120], (x[120:], labels[120:]))
    one = acnml.calibrate(*parts, price=0.05, typicality=False)
    folds = acnml.calibrate_folds(model, x[:120], [parts], price=0.05)
    assert str(one) == str(folds)
    np.testing.assert_allclose(one(x), folds(x), rtol=1e-12)


@pytest.mark.parametrize(
    "make", [lambda e: fast(e, cv="prefit"), lambda e: fast(FrozenEstimator(e), cv=None)]
)
def test_fitted_classifiers_are_not_fitted_again(make):
    x, y = data()
    fitted = make_pipeline(StandardScaler(), LogisticRegression()).fit(x[:120], y[:120])
    before = fitted[-1].coef_.copy()
    given = make(fitted).fit(x[120:], y[120:], X_train=x[:120])
    alone = make(fitted).fit(x[120:], y[120:])
    for found in (given, alone):
        np.testing.assert_array_equal(fitted[-1].coef_, before)
        assert found.score(x, y) > 0.5
    features = fitted[0].transform(x)
    labels = np.searchsorted(NAMES, y)
    expected = acnml.calibrate(
        to_module(fitted),
        features[:120],
        (features[120:], labels[120:]),
        price=0.05,
        typicality=False,
    )
    np.testing.assert_allclose(given.predict_proba(x), expected.probs(features), rtol=1e-12)


@pytest.mark.parametrize(
    "make",
    [
        lambda: fast(LogisticRegression(), cv="prefit"),
        lambda: fast(MLPClassifier(), cv="prefit"),
        lambda: fast(make_pipeline(StandardScaler(), LogisticRegression()), cv="prefit"),
        lambda: fast(GridSearchCV(LogisticRegression(), {"C": [1]}), cv="prefit"),
        lambda: fast(FrozenEstimator(LogisticRegression())),
        lambda: fast(TorchClassifier(), cv="prefit"),
    ],
)
def test_a_prefit_classifier_must_be_fitted(make):
    with pytest.raises(NotFittedError, match=r"must be fitted, but this \w+ is not: fit it first"):
        make().fit(*data())


def test_classes_of_a_fitted_classifier_may_be_in_any_order():
    x, y = data()
    fitted = LogisticRegression().fit(x[:120], y[:120])
    turned, order = copy.deepcopy(fitted), [2, 0, 1]
    for name in ("classes_", "coef_", "intercept_"):
        setattr(turned, name, getattr(fitted, name)[order])
    found, expected = (fast(each, cv="prefit").fit(x[120:], y[120:]) for each in (turned, fitted))
    assert found.classes_.tolist() == expected.classes_[order].tolist()
    np.testing.assert_allclose(
        found.predict_proba(x), expected.predict_proba(x)[:, order], rtol=1e-6
    )


@pytest.mark.filterwarnings("ignore:1 of 3 classes have no validation data")
def test_a_frozen_last_step_must_have_the_classes_of_y():
    x, y = data()
    frozen = FrozenEstimator(LogisticRegression().fit(x[:120], y[:120]))
    pipeline, some = make_pipeline(StandardScaler(), frozen), y != "ant"
    message = (
        r"LogisticRegression has the classes \['ant', 'bee', 'cat'\], but y has \['bee', 'cat'\]"
    )
    with pytest.raises(ValueError, match=message):
        fast(pipeline).fit(x[some], y[some])
    with pytest.raises(
        ValueError, match=r"but y has \['ant', 'bee', 'cat', 'dog'\]: give data of all"
    ):
        fast(pipeline).fit(x, np.where(np.arange(240) < 60, "dog", y))
    assert fast(pipeline).fit(x, y).classes_.tolist() == NAMES.tolist()
    # A classifier that is frozen as a whole keeps its own classes.
    whole = fast(frozen).fit(x[some], y[some])
    assert whole.classes_.tolist() == NAMES.tolist()
    assert whole.predict_proba(x).shape == (240, 3)


def test_a_trained_network_as_it_is():
    x, y = data()
    network = TorchClassifier(epochs=30, random_state=0).fit(x[:120], y[:120]).module_
    labels = np.searchsorted(NAMES, y)
    found = fast(network, cv="prefit").fit(x[120:], labels[120:])
    assert found.classes_.tolist() == [0, 1, 2]
    with pytest.raises(TypeError, match=r'trained with cv="prefit" only; .* factory\(features'):
        fast(network).fit(x, labels)


class Recording(nn.Identity):
    """A layer that records where it runs and on how many rows."""

    runs: ClassVar[list[tuple[int, int, bool]]] = []

    def forward(self, x):
        self.runs.append((id(self), len(x), self.training))
        return super().forward(x)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_network_is_neither_run_nor_changed(dtype):
    # What is run is acnml's copy of the structure, on the network's device and in its type.
    x, noise = normal(3 * CHUNK, 6, seed=0), normal(3 * CHUNK, 3, seed=1)
    network = nn.Sequential(Recording(), nn.Dropout(0.5), nn.Linear(6, 3)).to(dtype).train()
    network[2].weight.data = torch.eye(3, 6, dtype=dtype)
    x, labels = x.numpy(), (x[:, :3] + noise).argmax(-1).numpy()
    Recording.runs.clear()
    fast(network, cv="prefit").fit(x[CHUNK:], labels[CHUNK:], X_train=x[:CHUNK])
    where, rows, training = zip(*Recording.runs, strict=True)
    assert all(module.training for module in network.modules())
    assert id(network[0]) not in where
    assert max(rows) <= CHUNK
    assert not any(training)


def test_inputs_are_moved_to_the_device_of_the_network():
    network = nn.Identity()  # its inputs are logits
    network.register_buffer("somewhere", torch.zeros(1, device="meta"))
    # Inputs lose their values on the meta device. So the error shows that they were moved there.
    with pytest.raises(TypeError, match="input x is on the meta device"):
        fast(network, cv="prefit").fit(normal(60, 3).numpy(), np.arange(60) % 3)


def test_too_few_data_for_a_temperature_leave_it_at_one():
    x, y = data(2)
    with pytest.warns(
        UserWarning, match="40 held-out rows are too few .* temperature is left at 1"
    ):
        few = fast().fit(x[:40], y[:40])
    assert few.calibrated_.temperature == 1
    easy = np.concatenate([np.full((60, 1), -1.0), np.full((60, 1), 1.0)])
    with pytest.warns(UserWarning, match="every validation point is .* temperature is left at 1"):
        perfect = fast().fit(easy, np.repeat(["a", "b"], 60))
    assert perfect.calibrated_.temperature == 1
    assert perfect.predict([[-1.0], [1.0]]).tolist() == ["a", "b"]


def test_a_given_temperature_is_used():
    assert fast(temperature=2.0).fit(*data()).calibrated_.temperature == 2


def test_folds_follow_the_rarest_class():
    x, y = data(2)
    rare = np.where(np.arange(240) < 3, "cat", y)
    found = fast(cv=None).fit(x, rare)  # three folds, not five
    assert found.classes_.tolist() == ["ant", "bee", "cat"]
    with pytest.raises(
        ValueError, match=r"5 folds need 5 rows of every class, but class .*cat.* 3"
    ):
        fast(cv=5).fit(x, rare)
    rare[1:3] = "ant"
    with pytest.raises(
        ValueError, match=r"2 folds need 2 rows of every class, .* has 1: use fewer"
    ):
        fast(cv=None).fit(x, rare)
    with pytest.raises(ValueError, match=r"training part of a split has no data of class"):
        fast(cv=[(np.arange(3, 240), np.arange(3))]).fit(x, rare)


@pytest.mark.parametrize("frozen", [False, True])
def test_no_splits_are_refused(frozen):
    x, y = data()
    estimator = FrozenEstimator(LogisticRegression().fit(x, y)) if frozen else LogisticRegression()
    with pytest.raises(ValueError, match="cv has no splits: give at least one pair"):
        fast(estimator, cv=[]).fit(x, y)


# Habits of scikit-learn --------------------------------------------------------------------------


def test_groups_reach_the_splitter():
    x, y = data()
    groups = np.arange(len(y)) % 7
    splits = list(GroupKFold(3).split(x, y, groups))
    expected = fast(cv=splits).fit(x, y)
    found = fast(cv=GroupKFold(3)).fit(x, y, groups=groups)
    assert np.array_equal(found.predict_proba(x), expected.predict_proba(x))
    fitted = LogisticRegression().fit(x[:120], y[:120])
    held_out = x[120:], y[120:]
    prefit = AcnmlClassifier(FrozenEstimator(fitted), cv=GroupKFold(2), price=0.05)
    prefit.fit(*held_out, groups=groups[120:])
    assert prefit.predict_proba(x).shape == (240, 3)
    with pytest.raises(ValueError, match="inconsistent numbers of samples"):
        fast(cv=GroupKFold(3)).fit(x, y, groups=groups[:-1])


def test_answers_have_the_shapes_and_types_of_scikit_learn():
    x, y = data()
    found = fast().fit(x, y)
    assert found.classes_.tolist() == NAMES.tolist()
    assert found.n_features_in_ == 6
    probs = found.predict_proba(x)
    np.testing.assert_allclose(probs.sum(1), 1, rtol=1e-12)
    np.testing.assert_allclose(found.predict_log_proba(x), np.log(probs), atol=1e-12)
    np.testing.assert_array_equal(found.predict(x), NAMES[probs.argmax(1)])
    assert found.regret(x).shape == (240,)


@pytest.mark.parametrize("kind", [bool, np.int8, np.float64, str, object])
def test_labels_of_any_type(kind):
    x, y = data(2)
    labels = y.astype(object) if kind is object else (y == "bee").astype(kind)
    found = fast().fit(x, labels)
    assert found.predict(x).dtype == labels.dtype
    assert set(found.predict(x)) <= set(labels)


def test_far_inputs_are_less_certain_than_by_the_classifier_itself():
    x, y = data()
    found = fast().fit(x, y)
    far = 20 * np.random.default_rng(0).standard_normal((100, 6))
    plain = found.estimator_.predict_proba(far).max(1).mean()
    assert found.predict_proba(far).max(1).mean() < plain
    assert found.regret(far).mean() > found.regret(x).mean()


def test_data_frames_and_columns_of_text():
    pandas = pytest.importorskip("pandas", reason="needs pandas")
    x, y = data()
    frame = pandas.DataFrame(x, columns=list("abcdef"))
    found = fast().fit(frame, pandas.Series(y))
    assert found.feature_names_in_.tolist() == list("abcdef")
    expected = fast().fit(x, y).predict_proba(x)
    np.testing.assert_allclose(found.predict_proba(frame), expected, rtol=1e-12)
    frame["a"] = np.where(x[:, 0] > 0, "high", "low")
    columns = ColumnTransformer([("text", OneHotEncoder(), ["a"])], remainder=StandardScaler())
    mixed = fast(make_pipeline(columns, LogisticRegression())).fit(frame, y)
    assert mixed.score(frame, y) > 0.5
    assert mixed.n_features_in_ == 6


def test_columns_in_another_order_are_refused_unless_they_are_found_by_name():
    pandas = pytest.importorskip("pandas", reason="needs pandas")
    x, y = data()
    labels = np.searchsorted(NAMES, y)
    frame = pandas.DataFrame(x, columns=list("abcdef"))
    turned = frame[list("fedcba")]
    network = to_module(LogisticRegression().fit(x, y))
    found = fast(network, cv="prefit").fit(frame, labels)
    expected = fast(network, cv="prefit").fit(x, labels).predict_proba(x)
    np.testing.assert_array_equal(found.predict_proba(frame), expected)
    for use in (found.predict, found.predict_proba, found.predict_log_proba, found.regret):
        with pytest.raises(ValueError, match="Feature names must be in the same order"):
            use(turned)
    with pytest.raises(ValueError, match="Feature names must be in the same order"):
        fast(network, cv="prefit").fit(frame, labels, X_train=turned)
    columns = ColumnTransformer([("kept", "passthrough", list("abcdef"))])
    by_name = fast(make_pipeline(columns, LogisticRegression())).fit(frame, y)
    np.testing.assert_array_equal(by_name.predict_proba(turned), by_name.predict_proba(frame))


def test_inputs_of_a_network_need_not_be_tables():
    class Mean(nn.Module):  # of a sequence of any length
        def __init__(self):
            super().__init__()
            self.last = to_module(LogisticRegression().fit(*data()))

        def forward(self, x):
            return self.last(x.mean(1))

    x, y = data()
    twice, thrice = (np.repeat(x[:, None], n, axis=1) for n in (2, 3))
    found = fast(Mean(), cv="prefit").fit(twice, np.searchsorted(NAMES, y))
    np.testing.assert_allclose(found.predict_proba(thrice), found.predict_proba(twice), rtol=1e-9)
    tensors = torch.from_numpy(thrice)
    np.testing.assert_array_equal(found.predict_proba(tensors), found.predict_proba(thrice))


def test_sparse_inputs_become_dense_and_wide_ones_are_refused():
    x, y = data()
    expected = fast().fit(x, y).predict_proba(x)
    found = fast().fit(sparse.csr_array(x), y).predict_proba(sparse.csr_array(x))
    np.testing.assert_allclose(found, expected, atol=1e-5)
    wide = sparse.random_array((60, 10_001), density=0.001, random_state=0, format="csr")
    with pytest.raises(ValueError, match=r"10001 features; .* at most 10000: .* TruncatedSVD"):
        fast().fit(wide, np.arange(60) % 2)


def test_search_and_cross_validation():
    x, y = data()
    pipeline = make_pipeline(StandardScaler(), LogisticRegression())
    grid = {"estimator__logisticregression__C": [0.1, 1.0], "price": [0.02, 0.05]}
    search = GridSearchCV(fast(pipeline), grid, cv=2, scoring="neg_log_loss").fit(x, y)
    assert set(search.best_params_) == set(grid)
    assert cross_val_score(fast(), x, y, cv=2).min() > 0.4
    outer = make_pipeline(StandardScaler(), fast()).fit(x, y)
    assert outer.predict_proba(x).shape == (240, 3)


def test_parameters_are_nested_and_cloned():
    found = fast(LogisticRegression(C=3.0))
    assert found.get_params()["estimator__C"] == 3.0
    found.set_params(estimator__C=5.0, price=0.02)
    copied = clone(found)
    assert copied.estimator is not found.estimator
    assert (copied.estimator.C, copied.price) == (5.0, 0.02)


def test_a_fitted_object_survives_joblib():
    x, y = data()
    found = fast().fit(x, y)
    file = io.BytesIO()
    joblib.dump(found, file)
    file.seek(0)
    again = joblib.load(file).predict_proba(x)
    np.testing.assert_allclose(again, found.predict_proba(x), rtol=1e-12)


def test_jobs_give_the_same_numbers():
    x, y = data()
    with joblib.parallel_backend("threading"):
        several = fast(n_jobs=2).fit(x, y)
    expected = fast().fit(x, y).predict_proba(x)
    np.testing.assert_allclose(several.predict_proba(x), expected, rtol=1e-12)


def test_sample_weights_reach_the_classifier():
    x, y = data()
    weights = np.where(y == "ant", 5.0, 1.0)
    found = fast().fit(x, y, weights)
    expected = LogisticRegression().fit(x, y, weights)
    np.testing.assert_array_equal(found.estimator_.coef_, expected.coef_)
    pipeline = make_pipeline(StandardScaler(), LogisticRegression())
    for estimator in (pipeline, GridSearchCV(LogisticRegression(), {}, cv=2)):
        assert fast(estimator).fit(x, y, weights).score(x[y == "ant"], y[y == "ant"]) > 0.5
    with pytest.raises(ValueError, match="LinearDiscriminantAnalysis takes no sample_weight"):
        fast(LinearDiscriminantAnalysis()).fit(x, y, weights)


def test_sample_weights_are_routed_where_scikit_learn_routes():
    x, y = data()
    weights = np.where(y == "ant", 5.0, 1.0)
    with config_context(enable_metadata_routing=True):
        scaler = StandardScaler().set_fit_request(sample_weight=False)
        last = LogisticRegression().set_fit_request(sample_weight=True)
        last.set_score_request(sample_weight=False)
        for estimator in (make_pipeline(scaler, last), GridSearchCV(last, {}, cv=2), last):
            found = fast(estimator).fit(x, y, weights).estimator_
            expected = clone(estimator).fit(x, y, sample_weight=weights)
            np.testing.assert_array_equal(found.predict_proba(x), expected.predict_proba(x))
        without = make_pipeline(StandardScaler(), LinearDiscriminantAnalysis())
        with pytest.raises(ValueError, match="LinearDiscriminantAnalysis takes no sample_weight"):
            fast(without).fit(x, y, weights)


class Unused(LogisticRegression):
    """A classifier for settings that are wrong before any classifier is fitted."""

    def fit(self, X, y, sample_weight=None):
        raise AssertionError("it was fitted")


@pytest.mark.parametrize("name", ["price", "temperature", "prior_precision"])
@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (-1.0, ValueError, "must be a positive, finite number, got -1"),
        (float("nan"), ValueError, "must be a positive, finite number, got nan"),
        ("0.1", TypeError, "must be a number, got a str"),
    ],
)
def test_settings_are_checked_before_a_classifier_is_fitted(name, value, error, message):
    with pytest.raises(error, match=f"^{name} {message}"):
        fast(Unused(), **{name: value}).fit(*data())


@pytest.mark.parametrize("last", ["passthrough", None])
def test_a_pipeline_must_end_in_a_classifier(last):
    pipeline = Pipeline([("scale", StandardScaler()), ("last", last)])
    for estimator in (pipeline, make_pipeline(StandardScaler(), pipeline)):
        with pytest.raises(
            TypeError, match=rf"last step of the pipeline, 'last', is {last!r}, but"
        ):
            fast(estimator).fit(*data())
    with pytest.raises(TypeError, match="StandardScaler cannot be converted"):
        fast(make_pipeline(StandardScaler())).fit(*data())
    # The step may also be a setting that a search chooses.
    search = GridSearchCV(pipeline, {"last": [LogisticRegression()]}, cv=2, scoring="accuracy")
    assert fast(search).fit(*data()).score(*data()) > 0.5


def test_a_fit_that_fails_leaves_no_fitted_classifier():
    x, y = data()
    others = np.char.upper(y)
    found = fast().fit(x, y)
    with pytest.raises(ValueError, match="price must be"):
        found.set_params(price=-1).fit(x, others)
    with pytest.raises(NotFittedError):
        found.predict(x)
    assert not hasattr(found, "classes_")
    # Also if it fails late.
    found = fast().fit(x, y)
    with pytest.raises(AssertionError, match="it was fitted"):
        found.set_params(estimator=Unused()).fit(x, others)
    with pytest.raises(NotFittedError):
        found.predict(x)
    found.set_params(estimator=None).fit(x, others)
    assert found.score(x, others) > 0.5


def test_it_is_not_fitted_before_it_is():
    for use in ("predict", "predict_proba", "predict_log_proba", "regret"):
        with pytest.raises(NotFittedError):
            getattr(fast(), use)(data()[0])


def test_warnings_are_those_of_calibrate_only():
    x, y = data()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fast(price=0.3).fit(x, y)


# Networks ----------------------------------------------------------------------------------------


def test_a_factory_is_trained_as_a_torch_classifier():
    x, y = data()
    found = fast(linear, random_state=0).fit(x, y)
    assert isinstance(found.estimator_, TorchClassifier)
    assert isinstance(found.estimator_.module_, nn.Linear)
    expected = TorchClassifier(linear, random_state=0).fit(x, y)
    assert torch.equal(found.estimator_.module_.weight, expected.module_.weight)
    with pytest.raises(TypeError, match=r"estimator must be a classifier or a function factory"):
        fast(3).fit(x, y)


def normalised(features: int, classes: int) -> nn.Module:
    return nn.Sequential(nn.BatchNorm1d(features), nn.Linear(features, classes))


@pytest.mark.parametrize("n", [2, 41, 42])
def test_batch_norm_sees_no_batch_of_one_row(n):
    x, y = data(n=60)
    x, y = x[:n], np.array(["a", "b"] * 30)[:n]
    network = TorchClassifier(normalised, epochs=2, batch_size=20, random_state=0).fit(x, y)
    assert np.isfinite(network.predict_proba(x)).all()
    assert int(network.module_[0].num_batches_tracked) == 2 * (1 if n == 2 else n // 20 + (n == 42))


def test_training_leaves_the_random_state_alone():
    x, y = data()
    before = torch.random.get_rng_state()
    TorchClassifier(linear, epochs=1, random_state=0).fit(x, y)
    assert torch.equal(torch.random.get_rng_state(), before)


def ten(features: int, classes: int) -> nn.Module:
    return nn.Linear(features, 10)


def two(features: int, classes: int) -> nn.Module:
    return nn.Linear(features, 2)


@pytest.mark.parametrize("factory", [ten, two])
def test_a_network_must_have_one_logit_per_class(factory):
    for estimator in (TorchClassifier(factory), fast(factory)):
        with pytest.raises(ValueError, match=r"a tensor \(\d+, (10|2)\), but there are 3 classes"):
            estimator.fit(*data())


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"epochs": -3}, "epochs must be at least 1, got -3"),
        ({"epochs": 1.5}, "epochs must be an integer, got 1.5"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"learning_rate": -0.1}, "learning_rate must be a positive, finite number, got -0.1"),
        ({"learning_rate": "fast"}, "learning_rate must be a number, got a str"),
        ({"weight_decay": -1.0}, "weight_decay must be a finite number of at least 0, got -1"),
        ({"weight_decay": "none"}, "weight_decay must be a finite number of at least 0"),
    ],
)
def test_settings_of_a_training_are_checked(setting, message):
    def unused(features: int, classes: int) -> nn.Module:
        raise AssertionError("a network was made")

    with pytest.raises((TypeError, ValueError), match=message):
        TorchClassifier(unused, **setting).fit(*data())


@pytest.mark.parametrize("epochs", [1, 3])
def test_a_training_that_diverges_is_named(epochs):
    # After one epoch the weights are too large. In the next one, so is the loss.
    network = TorchClassifier(epochs=epochs, learning_rate=1e30, random_state=0)
    with pytest.raises(ValueError, match=r"training diverged.* learning rate, or standardise"):
        fast(network).fit(*data())


def test_a_training_that_fails_leaves_no_fitted_network():
    x, y = data()
    network = TorchClassifier(linear, epochs=1, random_state=0).fit(x, y)
    with pytest.raises(ValueError, match="there are 3 classes"):
        network.set_params(factory=ten).fit(x, np.char.upper(y))
    with pytest.raises(NotFittedError):
        network.predict(x)


class TestSkorch:
    @staticmethod
    def net(**settings):
        skorch = pytest.importorskip("skorch", reason="needs skorch")
        fixed = {"max_epochs": 30, "lr": 0.1, "verbose": 0, "train_split": None}
        return skorch.NeuralNetClassifier(**{**fixed, **settings})

    @pytest.mark.parametrize("in_pipeline", [False, True])
    def test_a_net_with_cross_entropy(self, in_pipeline):
        x, y = data()
        x = x.astype(np.float32)
        net = self.net(module=lambda: nn.Linear(6, 3), criterion=nn.CrossEntropyLoss)
        found = fast(make_pipeline(StandardScaler(), net) if in_pipeline else net).fit(x, y)
        assert found.classes_.tolist() == NAMES.tolist()
        assert found.predict_proba(x).shape == (240, 3)
        assert found.score(x, y) > 0.4

    def test_a_net_must_have_one_logit_per_class(self):
        x, y = data()
        x, labels = x.astype(np.float32), np.searchsorted(NAMES, y)
        net = self.net(module=lambda: nn.Linear(6, 10), criterion=nn.CrossEntropyLoss)
        message = "NeuralNetClassifier has 10 logits, but there are 3 classes: give .* 3 outputs"
        with pytest.raises(ValueError, match=message):
            fast(net).fit(x, y)
        with pytest.raises(ValueError, match=message):
            fast(net.fit(x, labels), cv="prefit").fit(x, labels)

    def test_columns_in_another_order_are_refused(self):
        pandas = pytest.importorskip("pandas", reason="needs pandas")
        x, y = data()
        frame = pandas.DataFrame(x.astype(np.float32), columns=list("abcdef"))
        net = self.net(module=lambda: nn.Linear(6, 3), criterion=nn.CrossEntropyLoss)
        found = fast(net).fit(frame, y)
        assert found.predict_proba(frame).shape == (240, 3)
        with pytest.raises(ValueError, match="Feature names must be in the same order"):
            found.predict_proba(frame[list("fedcba")])

    def test_a_softmax_at_the_end_is_taken_off(self):
        x, y = data()
        net = self.net(module=lambda: nn.Sequential(nn.Linear(6, 3), nn.Softmax(dim=-1)))
        found = fast(net).fit(x.astype(np.float32), y)
        assert len(to_module(found.estimator_)) == 1

    def test_other_ends_are_refused(self):
        class Inside(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(6, 3)

            def forward(self, x):
                return torch.softmax(self.layer(x), -1)

        x, y = data()
        with pytest.raises(
            ValueError, match=r"NLLLoss does not return one logit .*CrossEntropyLoss"
        ):
            fast(self.net(module=Inside)).fit(x.astype(np.float32), y)
