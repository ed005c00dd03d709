"""acnml.sklearn: any classifier, the ways to hold out data, and scikit-learn's own checks."""

from __future__ import annotations

import copy
import io

import numpy as np
import pytest

import acnml

pytest.importorskip("sklearn", reason="needs scikit-learn")

import joblib
from scipy import sparse
from sklearn import config_context
from sklearn.base import clone
from sklearn.datasets import make_classification
from sklearn.ensemble import (
    GradientBoostingClassifier,
    HistGradientBoostingClassifier,
    RandomForestClassifier,
)
from sklearn.exceptions import NotFittedError
from sklearn.frozen import FrozenEstimator
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, GroupKFold, ShuffleSplit, cross_val_score
from sklearn.naive_bayes import GaussianNB
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC
from sklearn.utils.estimator_checks import parametrize_with_checks

from acnml.sklearn import LEAST_PROBABILITY, AcnmlClassifier

# Few data make every price uncertain, and small networks need not converge here.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The price of"),
    pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning"),
]

NAMES = np.array(["ant", "bee", "cat"])


def data(classes: int = 3, n: int = 240):
    x, y = make_classification(
        n, 6, n_informative=4, n_classes=classes, class_sep=1.5, flip_y=0.1, random_state=0
    )
    return x, NAMES[y]


def fast(estimator=None, **settings) -> AcnmlClassifier:
    return AcnmlClassifier(estimator, **{"cv": 2, "price": 0.05, **settings})


# scikit-learn's checks ---------------------------------------------------------------------------

WEIGHTS = (
    "sample weights reach the classifier's fit; folds, score and the choices count every input "
    "once, so that a weight of 2 is not the same as a repeated input"
)


def expected_failures(estimator) -> dict[str, str]:
    checks = ("on_dense_data", "on_sparse_data")
    return {f"check_sample_weight_equivalence_{check}": WEIGHTS for check in checks}


@pytest.mark.filterwarnings("ignore")
@parametrize_with_checks(
    [
        AcnmlClassifier(LogisticRegression(C=1.0), cv=0.4, random_state=0),
        AcnmlClassifier(
            make_pipeline(StandardScaler(), LogisticRegression()), cv=0.4, random_state=0
        ),
    ],
    expected_failed_checks=expected_failures,
)
def test_scikit_learn_checks(estimator, check):
    check(estimator)


# Any classifier ----------------------------------------------------------------------------------

KINDS = [
    LogisticRegression(),
    SVC(),
    GaussianNB(),
    RandomForestClassifier(20, random_state=0),
    HistGradientBoostingClassifier(max_iter=10),
    GridSearchCV(make_pipeline(StandardScaler(), LogisticRegression()), {}, cv=2),
]


def logits_of(fitted, x):
    """Decision values, or logarithms of probabilities, of a classifier with three classes."""
    if hasattr(fitted, "decision_function"):
        return fitted.decision_function(x)
    return np.log(fitted.predict_proba(x).clip(LEAST_PROBABILITY, 1))


@pytest.mark.parametrize("estimator", KINDS, ids=lambda e: str(e)[:40].split("(")[0])
def test_any_classifier_is_calibrated_by_its_logits_and_inputs(estimator):
    x, y = data()
    train, test = next(ShuffleSplit(1, test_size=0.4, random_state=0).split(x))
    found = fast(estimator, cv=[(train, test)]).fit(x, y)
    own, labels = clone(estimator).fit(x[train], y[train]), np.searchsorted(NAMES, y)
    is_pipeline = "StandardScaler" in str(estimator)
    features = StandardScaler().fit(x[train]).transform(x) if is_pipeline else x
    logits = logits_of(own, x)
    expected = acnml.fit_calibrator(
        (features[train], labels[train]), (logits[test], features[test], labels[test]), price=0.05
    )
    assert str(found.calibrator_) == str(expected)
    answer = expected(logits, features)
    np.testing.assert_allclose(found.predict_proba(x), answer.probs, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found.regret(x), answer.regret, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found.answer(x).score, answer.score, rtol=1e-4)


@pytest.mark.parametrize("features", [StandardScaler(), lambda x: x[:, :3]])
def test_features_of_the_score_can_be_given(features):
    """Of a classifier that has one decision value for two classes."""
    x, y = data(2)
    train, test = next(ShuffleSplit(1, test_size=0.4, random_state=0).split(x))
    found = fast(features=features, cv=[(train, test)], price=0.02).fit(x, y)
    own = features(x) if callable(features) else StandardScaler().fit(x[train]).transform(x)
    z = found.estimator_.decision_function(x)
    expected = found.calibrator_(np.stack([np.zeros_like(z), z], axis=1), own)
    np.testing.assert_array_equal(found.answer(x).score, expected.score)
    np.testing.assert_array_equal(found.predict_proba(x), expected.probs)


def test_missing_numbers_need_an_imputer_for_the_score():
    x, y = data()
    x[::7, 0] = np.nan
    trees = HistGradientBoostingClassifier(max_iter=10)
    with pytest.raises(ValueError, match=r"features are NaN or infinite: .*SimpleImputer"):
        fast(trees).fit(x, y)
    found = fast(trees, features=SimpleImputer()).fit(x, y)
    assert np.isfinite(found.predict_proba(x)).all()


# How data are held out ---------------------------------------------------------------------------


def test_several_splits_are_pooled_and_the_result_is_fitted_on_all_data():
    x, y = data()
    labels = np.searchsorted(NAMES, y)
    halves = np.arange(0, 240, 2), np.arange(1, 240, 2)
    splits = [halves, halves[::-1]]
    found = fast(cv=splits).fit(x, y)
    logits, scores = [], []
    for train, test in splits:
        logits.append(LogisticRegression().fit(x[train], y[train]).decision_function(x[test]))
        # The score of a fold: as if this were the only split.
        scores.append(fast(cv=[(train, test)]).fit(x, y).answer(x[test]).score)
    pooled = np.concatenate([labels[test] for _, test in splits])
    expected = acnml.fit_calibrator(
        found.calibrator_.atypicality,
        (np.concatenate(logits), np.concatenate(scores), pooled),
        price=0.05,
    )
    assert found.calibrator_.temperature == pytest.approx(expected.temperature)
    assert found.calibrator_.alpha == pytest.approx(expected.alpha, rel=1e-4)
    whole = LogisticRegression().fit(x, y)
    np.testing.assert_array_equal(found.estimator_.coef_, whole.coef_)


def test_the_score_of_all_data_has_the_unit_and_the_shrinkage_of_the_folds():
    # Few rows for many features: a covariance that knows the rows calls them too typical.
    rng = np.random.default_rng(0)
    y = np.arange(1100) % 2
    x = rng.standard_normal((1100, 40)) + 4 * y[:, None] * np.eye(40)[0]
    found = fast(temperature=1.0, cv=5).fit(x[:100], y[:100])
    assert found.answer(x[100:]).score.mean() == pytest.approx(1, abs=0.1)
    assert found.calibrator_.atypicality.shrinkage > 0.05


@pytest.mark.parametrize(
    "make", [lambda e: fast(e, cv="prefit"), lambda e: fast(FrozenEstimator(e), cv=None)]
)
def test_fitted_classifiers_are_not_fitted_again(make):
    x, y = data()
    fitted = make_pipeline(StandardScaler(), LogisticRegression()).fit(x[:120], y[:120])
    before = fitted[-1].coef_.copy()
    given = make(fitted).fit(x[120:], y[120:], X_train=x[:120], y_train=y[:120])
    guessed = make(fitted).fit(x[120:], y[120:], X_train=x[:120])
    alone = make(fitted).fit(x[120:], y[120:])
    for found in (given, guessed, alone):
        np.testing.assert_array_equal(fitted[-1].coef_, before)
        assert found.score(x, y) > 0.5
    features, logits = fitted[0].transform(x), fitted.decision_function(x)
    for found, known in ((given, y[:120]), (guessed, fitted.predict(x[:120]))):
        expected = acnml.fit_calibrator(
            (features[:120], np.searchsorted(NAMES, known)),
            (logits[120:], features[120:], np.searchsorted(NAMES, y[120:])),
            price=0.05,
        )
        assert str(found.calibrator_) == str(expected)


def test_a_prefit_classifier_must_be_fitted():
    pipeline = make_pipeline(StandardScaler(), LogisticRegression())
    for estimator in (pipeline, FrozenEstimator(LogisticRegression())):
        with pytest.raises(NotFittedError, match=r"must be fitted, but this \w+ is not: fit it"):
            fast(estimator, cv="prefit").fit(*data())


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
    message = r"Pipeline has the classes \['ant', 'bee', 'cat'\], but y has \['bee', 'cat'\]"
    with pytest.raises(ValueError, match=message):
        fast(pipeline).fit(x[some], y[some])
    with pytest.raises(ValueError, match=r"but y has \['ant', 'bee', 'cat', 'dog'\]: use fewer"):
        fast(pipeline).fit(x, np.where(np.arange(240) < 60, "dog", y))
    assert fast(pipeline).fit(x, y).classes_.tolist() == NAMES.tolist()
    # A classifier that is frozen as a whole keeps its own classes.
    whole = fast(frozen).fit(x[some], y[some])
    assert whole.classes_.tolist() == NAMES.tolist()
    assert whole.predict_proba(x).shape == (240, 3)


@pytest.mark.filterwarnings("ignore:40 validation examples say little")
@pytest.mark.filterwarnings("ignore:Held-out features are")
def test_too_few_data_for_a_temperature_leave_it_at_one():
    x, y = data(2)
    with pytest.warns(
        UserWarning, match="40 held-out rows are too few .* temperature is left at 1"
    ):
        few = fast().fit(x[:40], y[:40])
    assert few.calibrator_.temperature == 1
    easy = np.concatenate([np.linspace(-2, -1, 60), np.linspace(1, 2, 60)])[:, None]
    with pytest.warns(UserWarning, match="every validation example is .* temperature is left at 1"):
        perfect = fast().fit(easy, np.repeat(["a", "b"], 60))
    assert perfect.calibrator_.temperature == 1
    assert perfect.predict([[-1.0], [1.0]]).tolist() == ["a", "b"]


@pytest.mark.filterwarnings("ignore:The least populated class")
def test_folds_follow_the_rarest_class():
    x, y = data(2)
    rare = np.where(np.arange(240) < 3, "cat", y)
    found = fast(cv=None).fit(x, rare)  # three folds, not five
    assert found.classes_.tolist() == ["ant", "bee", "cat"]
    rare[1:3] = "ant"
    for cv in (None, [(np.arange(3, 240), np.arange(3))]):
        with pytest.raises(ValueError, match=r"has the classes \['ant', 'bee'\], but y has .*cat"):
            fast(cv=cv).fit(x, rare)


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


def test_answers_have_the_shapes_and_types_of_scikit_learn():
    x, y = data()
    found = fast().fit(x, y)
    assert found.classes_.tolist() == NAMES.tolist()
    assert found.n_features_in_ == 6
    probs = found.predict_proba(x)
    np.testing.assert_allclose(probs.sum(1), 1, rtol=1e-12)
    np.testing.assert_allclose(found.predict_log_proba(x), np.log(probs), atol=1e-12)
    np.testing.assert_array_equal(found.predict(x), NAMES[probs.argmax(1)])
    assert found.regret(x).shape == found.answer(x).score.shape == (240,)
    assert found.answer(x, share=1).abstain.all()
    assert not found.answer(x, share=0, by="regret").abstain.all()
    assert found.answer(x).label.tolist() == found.predict(x).tolist()


def test_sparse_inputs_become_dense_and_wide_ones_are_refused():
    x, y = data()
    expected = fast().fit(x, y).predict_proba(x)
    found = fast().fit(sparse.csr_array(x), y).predict_proba(sparse.csr_array(x))
    np.testing.assert_allclose(found, expected, atol=1e-5)
    wide = sparse.random_array((60, 10_001), density=0.001, random_state=0, format="csr")
    with pytest.raises(
        ValueError, match=r"at most 10000 features, .* 10001: pass features=TruncatedSVD"
    ):
        fast().fit(wide, np.arange(60) % 2)


def test_search_and_cross_validation():
    x, y = data()
    pipeline = make_pipeline(StandardScaler(), LogisticRegression())
    grid = {"estimator__logisticregression__C": [0.1, 1.0], "price": [0.02, 0.05]}
    search = GridSearchCV(fast(pipeline), grid, cv=2, scoring="neg_log_loss").fit(x, y)
    assert set(search.best_params_) == set(grid)
    assert cross_val_score(fast(), x, y, cv=2).min() > 0.4
    outer = make_pipeline(StandardScaler(), fast()).fit(x, y)
    with joblib.parallel_backend("threading"):
        several = make_pipeline(StandardScaler(), fast(n_jobs=2)).fit(x, y)
    np.testing.assert_allclose(several.predict_proba(x), outer.predict_proba(x), rtol=1e-12)


def test_sample_weights_reach_the_classifier():
    x, y = data()
    weights = np.where(y == "ant", 5.0, 1.0)
    found = fast().fit(x, y, weights)
    expected = LogisticRegression().fit(x, y, weights)
    np.testing.assert_array_equal(found.estimator_.coef_, expected.coef_)
    pipeline = make_pipeline(StandardScaler(), LogisticRegression())
    for estimator in (pipeline, GridSearchCV(LogisticRegression(), {}, cv=2)):
        assert fast(estimator).fit(x, y, weights).score(x[y == "ant"], y[y == "ant"]) > 0.5


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


class Unused(LogisticRegression):
    """A classifier for settings that are wrong before any classifier is fitted."""

    def fit(self, X, y, sample_weight=None):
        raise AssertionError("it was fitted")


@pytest.mark.parametrize("name", ["price", "temperature"])
def test_settings_are_checked_before_a_classifier_is_fitted(name):
    with pytest.raises(ValueError, match=f"^{name} must be a positive, finite number, got -1"):
        fast(Unused(), **{name: -1.0}).fit(*data())


def test_values_of_pairs_of_classes_are_not_taken_for_those_of_classes():
    x, y = data()
    with pytest.raises(TypeError, match='set decision_function_shape="ovr"'):
        fast(SVC(decision_function_shape="ovo")).fit(x, y)
    by_class = fast(make_pipeline(StandardScaler(), SVC())).fit(x, y)
    assert by_class.score(x, y) > 0.5


@pytest.mark.parametrize(
    "make",
    [
        lambda: RandomForestClassifier(20, random_state=0),
        lambda: GradientBoostingClassifier(n_estimators=5, random_state=0),
        lambda: make_pipeline(StandardScaler(), RandomForestClassifier(20, random_state=0)),
    ],
)
def test_leaves_of_trees_are_features(make):
    x, y = data()
    found = fast(make(), features="leaves").fit(x, y)
    assert len(found.calibrator_.atypicality.mean) <= 256
    # Leaves that no training input reaches together are atypical.
    shuffled = np.random.default_rng(0).permuted(x, axis=0)
    assert found.answer(shuffled).score.mean() > found.answer(x).score.mean()
    file = io.BytesIO()
    joblib.dump(found, file)
    file.seek(0)
    assert np.array_equal(joblib.load(file).predict_proba(x), found.predict_proba(x))


def test_what_has_no_leaves_is_refused():
    with pytest.raises(TypeError, match="HistGradientBoostingClassifier has no method `apply`"):
        fast(HistGradientBoostingClassifier(max_iter=5), features="leaves").fit(*data())


def test_a_fit_that_fails_leaves_no_fitted_classifier():
    x, y = data()
    found = fast().fit(x, y)
    with pytest.raises(ValueError, match="price must be"):
        found.set_params(price=-1).fit(x, np.char.upper(y))
    with pytest.raises(NotFittedError):
        found.predict(x)
    assert not hasattr(found, "classes_")
