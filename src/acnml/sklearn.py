"""ACNML for scikit-learn: `AcnmlClassifier` wraps any classifier as `CalibratedClassifierCV` does.

Needs the extra `sklearn`. docs/howto/sklearn.md is the how-to.
"""

from __future__ import annotations

import math
import numbers
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean, median
from typing import Any, Literal, NamedTuple, final

import numpy as np
import torch
from numpy.typing import NDArray

from acnml._util import checks
from acnml._util.messages import callers_level, needed_by
from acnml.atypicality import Atypicality, Moments
from acnml.calibration import Answer, Calibrator, fit_calibrator
from acnml.calibration.calibrator import RuleName
from acnml.calibration.fitting import LEAST_DATA
from acnml.calibration.search import least_nll_temperature

with needed_by("acnml.sklearn", "acnml[sklearn]"):
    from scipy import sparse
    from sklearn import get_config
    from sklearn.base import BaseEstimator, ClassifierMixin, MetaEstimatorMixin, clone
    from sklearn.frozen import FrozenEstimator
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import StratifiedShuffleSplit, check_cv
    from sklearn.model_selection._search import BaseSearchCV
    from sklearn.pipeline import Pipeline, make_pipeline
    from sklearn.preprocessing import FunctionTransformer, OneHotEncoder
    from sklearn.random_projection import SparseRandomProjection
    from sklearn.utils import Tags, _safe_indexing, check_array, get_tags, indexable
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.parallel import Parallel, delayed
    from sklearn.utils.validation import (
        _check_sample_weight,
        _check_y,
        check_is_fitted,
        validate_data,
    )

__all__ = ["AcnmlClassifier"]

# Folds by default, if every class has as many data.
FOLDS = 5

# The score has a dense covariance of this many features at most.
WIDEST = 10_000

# Leaves are one-hot, and projected at random to this many features.
LEAF_FEATURES = 256

# A probability counts as at least this one: those of trees and neighbours may be zero.
LEAST_PROBABILITY = 1e-4


@final
class AcnmlClassifier(ClassifierMixin, MetaEstimatorMixin, BaseEstimator):
    """A classifier whose confidence falls on inputs unlike its training data.

    It wraps any classifier with `decision_function` or `predict_proba`. Temperature and α are
    chosen on data that the classifier was not fitted on, see `acnml.fit_calibrator`:

    - With several splits (the default), the classifier is fitted once for every split. The held-out
      predictions of all splits decide, with a score of atypicality from the training part of each.
      The result is fitted on all data, as in `CalibratedClassifierCV(ensemble=False)`.
    - With one split, the classifier is fitted on its training part only, and its held-out part
      decides. This is cheaper, and right for large data.
    - With "prefit" or a `FrozenEstimator`, the classifier is not fitted. The data given to `fit`
      must be others than those that it was fitted on. Pass the latter as `X_train` and `y_train`
      for the score; otherwise it is fitted to the given data, by cross-validation.

    With fewer than 50 held-out rows, or without a single error among them, there is no best
    temperature. It is then left at 1, and a warning says so.

    Args:
        estimator: the classifier. The default is a `LogisticRegression`.
        features: what the score of atypicality is computed from: a transformer, which is fitted on
            the training inputs, or a function of the inputs. By default the inputs as they are, or
            what a pipeline passes to its last step. "leaves" takes the leaves that an input reaches
            in a forest or in boosted trees with a method `apply`.
        price: accepted increase of the held-out NLL over the best temperature, in nats. A higher
            price gives less confident predictions.
        rule: "closed-form" or "acnml", see `acnml.fit_calibrator`.
        cv: how to hold out data: a number of stratified folds (the default is 5, or as many as the
            rarest class has data), a share between 0 and 1 for a single stratified split, a
            splitter of scikit-learn (for one that needs groups, pass `groups` to `fit`), a list of
            pairs (training indices, held-out indices), or "prefit".
        temperature: of the classifier; by default that of least held-out NLL.
        n_jobs: processes that fit the classifiers of the splits.
        random_state: of a split by a share.

    Attributes:
        classes_: the labels.
        calibrator_: the `acnml.Calibrator`. Print it to see the choice and why.
        estimator_: the fitted classifier.
        n_features_in_: number of features.
        feature_names_in_: their names, if `fit` was given a DataFrame.

    >>> from sklearn.datasets import load_digits
    >>> from sklearn.naive_bayes import GaussianNB
    >>> from acnml.sklearn import AcnmlClassifier
    >>> X, y = load_digits(return_X_y=True)
    >>> classifier = AcnmlClassifier(GaussianNB(), cv=2, price=0.05).fit(X[:1000], y[:1000])
    >>> answer = classifier.answer(X[1000:])
    >>> bool((answer.label == y[1000:])[~answer.abstain].mean() > 0.8)
    True
    """

    def __init__(
        self,
        estimator: Any = None,
        *,
        features: Any = None,
        price: float = 0.01,
        rule: RuleName = "closed-form",
        cv: Any = None,
        temperature: float | None = None,
        n_jobs: int | None = None,
        random_state: Any = None,
    ) -> None:
        self.estimator = estimator
        self.features = features
        self.price = price
        self.rule = rule
        self.cv = cv
        self.temperature = temperature
        self.n_jobs = n_jobs
        self.random_state = random_state

    def fit(
        self,
        X: Any,
        y: Any,
        sample_weight: Any = None,
        *,
        X_train: Any = None,
        y_train: Any = None,
        groups: Any = None,
    ) -> AcnmlClassifier:
        """Fit the classifier, and choose temperature and α on held-out data.

        Args:
            X: the inputs.
            y: the labels, of any type.
            sample_weight: weights for the classifier's own `fit`. The score and the choices count
                every input once.
            X_train: for `cv="prefit"`, the inputs that the classifier was fitted on.
            y_train: their labels; by default the classifier's predictions.
            groups: the group of every input, for splitters such as `GroupKFold`.
        """
        self._forget()
        checks.require_positive(self.price, "price")  # before classifiers are fitted
        if self.temperature is not None:
            checks.require_positive(self.temperature, "temperature")
        X, y, groups = indexable(X, y, groups)
        if y is None:
            raise ValueError("AcnmlClassifier requires y to be passed, but the target y is None")
        y = _check_y(y, multi_output=False, y_numeric=False)
        check_classification_targets(y)
        validate_data(self, X, skip_check_array=True)
        base = self._base()
        if not isinstance(base, (Pipeline, BaseSearchCV)):  # which may take anything
            check_array(X, accept_sparse=True, dtype=None, ensure_all_finite=False, allow_nd=True)
        weights = None if sample_weight is None else _check_sample_weight(sample_weight, X)
        if self.cv == "prefit" or isinstance(base, FrozenEstimator):
            if weights is not None:
                raise ValueError("sample_weight has no effect on a fitted classifier: leave it out")
            return self._fit_around(base, X, y, X_train, y_train, groups)
        if X_train is not None:
            raise ValueError('X_train is for cv="prefit" only: leave it out')
        return self._fit_by_splits(base, X, y, weights, groups)

    def _forget(self) -> None:
        """Remove what a fit before this one has left, so that no failed fit is half of each."""
        fitted = "classes_", "calibrator_", "estimator_", "_fitted"
        for name in (*fitted, "n_features_in_", "feature_names_in_"):
            self.__dict__.pop(name, None)

    def _fit_by_splits(
        self, base: Any, X: Any, y: Any, weights: Any, groups: Any
    ) -> AcnmlClassifier:
        classes, labels = np.unique(y, return_inverse=True)
        if len(classes) < 2:
            raise ValueError(f"y has only one class, {classes.tolist()}: at least 2 are needed")
        splits = self._splits(X, y, groups)
        parts = [train for train, _ in splits] + ([np.arange(len(y))] if len(splits) > 1 else [])
        fits = Parallel(n_jobs=self.n_jobs)(
            delayed(_fit)(clone(base), self.features, X, y, weights, rows) for rows in parts
        )
        for own in (fitted.estimator.classes_.tolist() for fitted in fits):
            if own != classes.tolist():  # a frozen last step has its own
                raise ValueError(
                    f"{type(base).__name__} has the classes {own}, but y has {classes.tolist()}: "
                    "use fewer folds or stratified ones, or a classifier with the classes of y"
                )
        folds = [_Fold.of(own, X, labels, *split) for own, split in zip(fits, splits, strict=False)]
        return self._choose(fits[-1], classes, folds, X, labels)

    def _fit_around(
        self, base: Any, X: Any, y: Any, X_train: Any, y_train: Any, groups: Any
    ) -> AcnmlClassifier:
        """Calibrate a classifier that is fitted already."""
        own = base.estimator if isinstance(base, FrozenEstimator) else base
        check_is_fitted(
            own,
            msg="a prefit classifier must be fitted, but this %(name)s is not: fit it first, or "
            "choose another cv",
        )
        classes, labels = np.asarray(own.classes_), _indices(y, own.classes_)
        if X_train is None:
            fitted = _Fitted.of(own, self.features, X, y)
            splits = self._splits(X, y, groups)
            folds = [_Fold.of(fitted, X, labels, *split) for split in splits]
            return self._choose(fitted, classes, folds, X, labels)
        known = own.predict(X_train) if y_train is None else y_train
        fitted, given = _Fitted.of(own, self.features, X_train, known), _indices(known, classes)
        held_out = fitted.logits(X), fitted.features(X), labels
        fold = _Fold(fitted.features(X_train), given, *held_out)
        return self._choose(fitted, classes, [fold], X_train, given)

    def _choose(
        self, fitted: _Fitted, classes: Any, folds: Sequence[_Fold], X: Any, labels: Any
    ) -> AcnmlClassifier:
        """Choose temperature and α on the folds, for a classifier with the score of X."""
        logits = np.concatenate([fold.logits for fold in folds])
        y = np.concatenate([fold.test_labels for fold in folds])
        if len(folds) == 1:
            train: Any = folds[0].train, folds[0].train_labels
            score: Any = folds[0].test
        else:
            train, score = _cross_fitted(folds, fitted.features(X), labels, len(classes))
        found = fit_calibrator(
            train,
            (logits, score, y),
            price=self.price,
            rule=self.rule,
            temperature=self.temperature or _temperature(logits, y),
        )
        # In double precision an answer does not depend on the rows beside it in any visible digit.
        self.calibrator_: Calibrator = found.to(torch.float64)
        self._fitted, self.estimator_, self.classes_ = fitted, fitted.estimator, classes
        return self

    def _base(self) -> Any:
        """Return the estimator to fit."""
        return LogisticRegression() if self.estimator is None else self.estimator

    def _splits(self, X: Any, y: Any, groups: Any) -> list[Any]:
        """Return the training and the held-out indices of every split."""
        cv = None if self.cv == "prefit" else self.cv
        if isinstance(cv, numbers.Real) and not isinstance(cv, numbers.Integral):
            cv = StratifiedShuffleSplit(1, test_size=float(cv), random_state=self.random_state)
        elif cv is None:
            cv = max(2, min(FOLDS, np.unique(y, return_counts=True)[1].min()))
        return list(check_cv(cv, y, classifier=True).split(X, y, groups))

    def answer(
        self, X: Any, share: float = 0.05, by: Literal["confidence", "regret"] = "confidence"
    ) -> Answer:
        """Return label, probabilities, regret, score and whether to abstain, from one pass.

        Args:
            X: the inputs.
            share: abstain on inputs that are less certain than this share of the held-out data.
            by: what decides, "confidence" or "regret".
        """
        check_is_fitted(self)
        logits = self._fitted.logits(X)
        # An estimator that knows names decides itself: a `ColumnTransformer` finds columns by name.
        if not hasattr(self.estimator_, "feature_names_in_"):
            validate_data(self, X, reset=False, skip_check_array=True)
        found = self.calibrator_(logits, self._fitted.features(X), share, by)
        return found._replace(label=self.classes_[found.label])

    def predict(self, X: Any) -> NDArray[Any]:
        """Return the likeliest label of every input."""
        return self.answer(X).label  # type: ignore[return-value]

    def predict_proba(self, X: Any) -> NDArray[Any]:
        """Return the probabilities (n, classes)."""
        return self.answer(X).probs  # type: ignore[return-value]

    def predict_log_proba(self, X: Any) -> NDArray[Any]:
        """Return the logarithms of the probabilities (n, classes)."""
        return self.answer(X).log_probs  # type: ignore[return-value]

    def regret(self, X: Any) -> NDArray[Any]:
        """Return the regret log C(x) (n,), from 0 to log K: high where many labels fit."""
        return self.answer(X).regret  # type: ignore[return-value]

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "calibrator_")

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        base = self._base()
        if isinstance(base, BaseEstimator):
            own = get_tags(base).input_tags
            tags.input_tags.sparse = own.sparse
            # The score needs numbers, which an imputer in a pipeline or in `features` gives.
            imputed = self.features is not None or isinstance(base, Pipeline)
            tags.input_tags.allow_nan = own.allow_nan and imputed
        return tags


@final
@dataclass(frozen=True, eq=False)
class _Fitted:
    """A fitted classifier, and how features are made of its inputs."""

    estimator: Any
    featurise: Callable[[Any], Any]

    @staticmethod
    def of(estimator: Any, features: Any, X: Any, y: Any) -> _Fitted:
        """Fit features to the classifier's training data."""
        if features == "leaves":
            return _Fitted(estimator, _leaves_of(estimator, X).transform)
        if hasattr(features, "transform"):
            return _Fitted(estimator, clone(features).fit(X, y).transform)
        return _Fitted(estimator, _split_up(estimator)[0] if features is None else features)

    def logits(self, X: Any) -> NDArray[np.float64]:
        """Return decision values (n, K), or the logarithms of probabilities."""
        classes, kind = len(self.estimator.classes_), type(self.estimator).__name__
        # An SVM with "ovo" has a value for each pair of classes: as many as classes if these are 3.
        last = _split_up(self.estimator)[1]
        has_pairs = getattr(last, "decision_function_shape", "ovr") == "ovo"
        if hasattr(self.estimator, "decision_function") and not (has_pairs and classes > 2):
            values = np.asarray(self.estimator.decision_function(X), dtype=np.float64)
            if values.ndim == 1:
                values = np.stack([np.zeros_like(values), values], axis=1)
            if values.shape[1] == classes:
                return values
        if not hasattr(self.estimator, "predict_proba"):
            raise TypeError(
                f"{kind} has neither probabilities nor one decision value for each class"
                + (': set decision_function_shape="ovr"' if has_pairs else "")
            )
        probs = np.asarray(self.estimator.predict_proba(X), dtype=np.float64)
        if probs.shape[1] != classes:
            raise ValueError(f"{kind} has {probs.shape[1]} probabilities for {classes} classes")
        return np.log(probs.clip(LEAST_PROBABILITY, 1))

    def features(self, X: Any) -> NDArray[np.float64]:
        """Return the features (n, q) of the score."""
        found = self.featurise(X)
        checked = check_array(found, accept_sparse="csr", dtype=np.float64, ensure_all_finite=False)
        if checked.shape[1] > WIDEST:
            raise ValueError(
                f"the score takes at most {WIDEST} features, and there are {checked.shape[1]}: "
                "pass features=TruncatedSVD(100), or another transformer that reduces them"
            )
        checked = checked.toarray() if sparse.issparse(checked) else checked
        if not np.isfinite(checked).all():
            raise ValueError(
                "features are NaN or infinite: impute them, also for a classifier that takes them, "
                "e.g. by features=SimpleImputer()"
            )
        return np.require(checked, requirements=["C", "WRITEABLE"])  # as torch needs it


def _split_up(estimator: Any) -> tuple[Callable[[Any], Any], Any]:
    """Return what a pipeline does before its last step, and this step."""
    inner = estimator.best_estimator_ if isinstance(estimator, BaseSearchCV) else estimator
    if not isinstance(inner, Pipeline):
        return _as_it_is, inner
    return inner[:-1].transform if len(inner.steps) > 1 else _as_it_is, inner.steps[-1][1]


def _as_it_is(X: Any) -> Any:
    return X


def _leaves(trees: Any, before: Callable[[Any], Any], X: Any) -> NDArray[Any]:
    """Return the leaves that inputs reach, a column for every tree."""
    found = np.asarray(trees.apply(before(X)))
    return found.reshape(len(found), -1)


def _leaves_of(estimator: Any, X: Any) -> Pipeline:
    """Return a transformer of inputs to the leaves that they reach, one-hot and projected."""
    before, trees = _split_up(estimator)
    if not hasattr(trees, "apply"):
        raise TypeError(
            f"{type(trees).__name__} has no method `apply` that tells the leaves of an input: use "
            "features=None, the inputs as they are"
        )
    one_hot = OneHotEncoder(handle_unknown="ignore")
    leaves = make_pipeline(FunctionTransformer(partial(_leaves, trees, before)), one_hot).fit(X)
    if len(one_hot.get_feature_names_out()) <= LEAF_FEATURES:
        return leaves
    projection = SparseRandomProjection(LEAF_FEATURES, random_state=0, dense_output=True)
    return make_pipeline(leaves, projection).fit(X)


class _Fold(NamedTuple):
    """Training features with classes, and held-out logits and features with classes."""

    train: NDArray[Any]
    train_labels: NDArray[Any]
    logits: NDArray[Any]
    test: NDArray[Any]
    test_labels: NDArray[Any]

    @staticmethod
    def of(fitted: _Fitted, X: Any, labels: Any, train: Any, test: Any) -> _Fold:
        """Read a split of the data."""
        known, held_out = _safe_indexing(X, train), _safe_indexing(X, test)
        return _Fold(
            fitted.features(known),
            labels[train],
            fitted.logits(held_out),
            fitted.features(held_out),
            labels[test],
        )

    def atypicality(self, classes: int) -> Atypicality:
        """Return the score of the training part, in the unit of the held-out part."""
        held_out = torch.from_numpy(self.test), torch.from_numpy(self.test_labels)
        return Atypicality.fit(_moments(self.train, self.train_labels, classes), *held_out)


def _cross_fitted(
    folds: Sequence[_Fold], features: NDArray[Any], labels: NDArray[Any], classes: int
) -> tuple[Atypicality, NDArray[Any]]:
    """Return the score of all data, and the scores of held-out data by those of their folds.

    All data have no held-out data to choose the shrinkage and the unit by: those of the folds hold.
    """
    own = [fold.atypicality(classes) for fold in folds]
    scores = [score(torch.from_numpy(f.test)) for score, f in zip(own, folds, strict=True)]
    rank = int(median(len(score.directions) for score in own))
    whole = Atypicality.fit(
        _moments(features, labels, classes),
        torch.from_numpy(features),
        torch.from_numpy(labels),
        rank=rank,
        least_rank=rank,
        shrinkages=(math.exp(fmean(math.log(score.shrinkage) for score in own)),),
    )
    typical, overfit = (fmean(getattr(s, name) for s in own) for name in ("typical", "overfit"))
    return replace(whole, typical=typical, overfit=overfit), torch.cat(scores).numpy()


def _moments(features: NDArray[Any], labels: NDArray[Any], classes: int) -> Moments:
    moments = Moments(classes)
    moments.add(torch.from_numpy(features), torch.from_numpy(labels))
    return moments


def _fit(estimator: Any, features: Any, X: Any, y: Any, weights: Any, rows: Any) -> _Fitted:
    """Fit an estimator on some rows."""
    inputs, labels = _safe_indexing(X, rows), y[rows]
    arguments = {} if weights is None else {_weight_argument(estimator): weights[rows]}
    return _Fitted.of(estimator.fit(inputs, labels, **arguments), features, inputs, labels)


def _weight_argument(estimator: Any) -> str:
    """Return under which name `fit` passes weights to the classifier."""
    if get_config()["enable_metadata_routing"]:  # pipelines and searches find it by this name
        return "sample_weight"
    if isinstance(estimator, Pipeline):
        name, last = estimator.steps[-1]
        return f"{name}__{_weight_argument(last)}"
    is_search = isinstance(estimator, BaseSearchCV)
    return _weight_argument(estimator.estimator) if is_search else "sample_weight"


def _indices(y: Any, classes: NDArray[Any]) -> NDArray[Any]:
    """Return the indices of labels in the classes of a fitted classifier, in any order."""
    unknown = np.setdiff1d(y, classes)
    if len(unknown):
        raise ValueError(f"the classifier was not fitted on class {unknown[0]!r}: drop its rows")
    order = np.argsort(classes)
    found: NDArray[Any] = order[np.searchsorted(classes, y, sorter=order)]
    return found


def _temperature(logits: NDArray[Any], labels: NDArray[Any]) -> float:
    """Return the temperature of least NLL; 1, with a warning, if the data cannot decide it."""
    try:
        if len(labels) < LEAST_DATA:
            raise ValueError(f"{len(labels)} held-out rows are too few to choose a temperature by")
        return least_nll_temperature(torch.from_numpy(logits), torch.from_numpy(labels))
    except ValueError as reason:
        warnings.warn(f"{reason}; the temperature is left at 1", stacklevel=callers_level())
        return 1.0
