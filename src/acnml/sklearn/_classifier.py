"""AcnmlClassifier: ACNML around a classifier of scikit-learn."""

from __future__ import annotations

import numbers
import warnings
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn import get_config
from sklearn.base import BaseEstimator, ClassifierMixin, MetaEstimatorMixin, clone
from sklearn.frozen import FrozenEstimator
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedShuffleSplit, check_cv
from sklearn.model_selection._search import BaseSearchCV
from sklearn.pipeline import Pipeline
from sklearn.utils import Tags, _safe_indexing, check_array, get_tags, indexable
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.parallel import Parallel, delayed
from sklearn.utils.validation import (
    _check_sample_weight,
    _check_y,
    check_is_fitted,
    has_fit_parameter,
    validate_data,
)
from torch import nn

from acnml._util import checks
from acnml._util.callers import callers_level
from acnml.calibration import LEAST_DATA, Calibrated, calibrate, calibrate_folds
from acnml.sklearn._modules import SUPPORTED, Fitted, is_skorch, logits_of
from acnml.sklearn._torch import TorchClassifier
from acnml.tuning.temperature import why_no_temperature

# Folds by default, if every class has as many data.
FOLDS = 5

# Inputs on which the probabilities of an estimator and its module are compared.
COMPARED = 100


@final
class AcnmlClassifier(ClassifierMixin, MetaEstimatorMixin, BaseEstimator):
    """A classifier whose confidence falls on inputs unlike its training data.

    It wraps a classifier whose probabilities are the softmax of a last linear layer. Temperature
    and α are chosen on data that the classifier was not fitted on, see `acnml.calibrate`:

    - With several splits (the default), the classifier is fitted once for every split. The held-out
      predictions of all splits are pooled and decide temperature and α. The result is a classifier
      that is fitted on all data, as in `CalibratedClassifierCV(ensemble=False)`.
    - With one split, the classifier is fitted on its training part only, and its held-out part
      decides. This is cheaper, and right for networks and large data.
    - With "prefit" or a `FrozenEstimator`, the classifier is not fitted. The data given to `fit`
      must be others than those that it was fitted on. Pass the latter as `X_train` for the
      posterior; otherwise it is fitted on the given data, by cross-validation.

    The weight of the query is α for all inputs, without the typicality of `acnml.calibrate`.

    With fewer than 50 held-out rows, or without a single error among them, there is no best
    temperature. It is then left at 1, and a warning says so. If the price of caution is not known
    well because the held-out data are few, a warning tells the error.

    Args:
        estimator: a `LogisticRegression`, `LogisticRegressionCV`, `LinearDiscriminantAnalysis`,
            binary `SGDClassifier(loss="log_loss")`, `MLPClassifier`, skorch `NeuralNetClassifier`
            or `TorchClassifier`; a `Pipeline` or a search that ends in one of them; or a function
            `factory(features, classes)` that returns an `nn.Module`, which is trained as a
            `TorchClassifier`. With `cv="prefit"` also a trained `nn.Module`. The default is a
            `LogisticRegression`.
        price: accepted increase of the held-out NLL over the best temperature, in nats. A higher
            price gives less confident predictions.
        cv: how to hold out data: a number of stratified folds (the default is 5, or as many as the
            rarest class has data), a share between 0 and 1 for a single stratified split, a
            splitter of scikit-learn (for one that needs groups, pass `groups` to `fit`), a list of
            pairs (training indices, held-out indices), or "prefit".
        temperature: of the classifier; by default that of least held-out NLL.
        prior_precision: of the Gaussian prior of the last layer; see `acnml.calibrate`.
        n_jobs: processes that fit the classifiers of the splits.
        random_state: of a split by a share, and of a network from a factory.

    Attributes:
        classes_: the labels.
        calibrated_: the `acnml.Calibrated` of the last step. Print it to see the choice and why.
        estimator_: the fitted classifier.
        n_features_in_: number of features.
        feature_names_in_: their names, if `fit` was given a DataFrame.

    >>> from sklearn.datasets import load_digits
    >>> from sklearn.linear_model import LogisticRegression
    >>> from acnml.sklearn import AcnmlClassifier
    >>> X, y = load_digits(return_X_y=True)
    >>> classifier = AcnmlClassifier(LogisticRegression(C=0.001), cv=2, price=0.05)
    >>> classifier.fit(X[:1000] / 16, y[:1000]).predict_proba(X[1000:] / 16).shape
    (797, 10)
    """

    def __init__(
        self,
        estimator: Any = None,
        *,
        price: float = 0.01,
        cv: Any = None,
        temperature: float | None = None,
        prior_precision: float | None = None,
        n_jobs: int | None = None,
        random_state: Any = None,
    ) -> None:
        self.estimator = estimator
        self.price = price
        self.cv = cv
        self.temperature = temperature
        self.prior_precision = prior_precision
        self.n_jobs = n_jobs
        self.random_state = random_state

    def fit(
        self,
        X: Any,
        y: Any,
        sample_weight: Any = None,
        *,
        X_train: Any = None,
        groups: Any = None,
    ) -> AcnmlClassifier:
        """Fit the classifier, choose temperature and α on held-out data, and fit the posterior.

        Args:
            X: the inputs.
            y: the labels, of any type.
            sample_weight: weights for the classifier's own `fit`. The curvature and the choices
                count every input once.
            X_train: for `cv="prefit"`, the inputs that the classifier was fitted on.
            groups: the group of every input, for splitters such as `GroupKFold`.
        """
        self._forget()
        self._require_numbers()
        X, y, groups = indexable(X, y, groups)
        if y is None:
            raise ValueError("AcnmlClassifier requires y to be passed, but the target y is None")
        y = _check_y(y, multi_output=False, y_numeric=False)
        check_classification_targets(y)
        validate_data(self, X, skip_check_array=True)
        base = self._base()
        _require_last_step(base)
        if not isinstance(base, (Pipeline, BaseSearchCV)):  # which may take anything
            check_array(X, accept_sparse=True, dtype=None, ensure_all_finite=False, allow_nd=True)
        weights = None if sample_weight is None else _check_sample_weight(sample_weight, X)
        if self.cv == "prefit" or isinstance(base, FrozenEstimator):
            if weights is not None:
                raise ValueError("sample_weight has no effect on a fitted classifier: leave it out")
            return self._fit_around(base, X, y, X_train, groups)
        if X_train is not None:
            raise ValueError('X_train is for cv="prefit" only: leave it out')
        if isinstance(base, nn.Module):
            raise TypeError(
                'a network is taken as trained with cv="prefit" only; to train it, pass a function '
                "factory(features, classes) that returns a new one"
            )
        return self._fit_by_splits(base, X, y, weights, groups)

    def _forget(self) -> None:
        """Remove what a fit before this one has left, so that no failed fit is half of each."""
        fitted = "classes_", "calibrated_", "estimator_", "_fitted"
        for name in (*fitted, "n_features_in_", "feature_names_in_"):
            self.__dict__.pop(name, None)

    def _require_numbers(self) -> None:
        """Raise an error if a setting of the last step is wrong, before classifiers are fitted."""
        checks.require_positive(self.price, "price")
        for name in ("temperature", "prior_precision"):
            if getattr(self, name) is not None:
                checks.require_positive(getattr(self, name), name)

    def _fit_by_splits(
        self, base: Any, X: Any, y: Any, weights: Any, groups: Any
    ) -> AcnmlClassifier:
        classes = np.unique(y)
        if len(classes) < 2:
            raise ValueError(f"y has only one class, {classes.tolist()}: at least 2 are needed")
        splits = self._splits(X, y, groups)
        whole = [] if len(splits) == 1 else [np.arange(len(y))]
        parts = [train for train, _ in splits] + whole
        for rows in parts:
            _require_all_classes(y[rows], classes)
        fits = Parallel(n_jobs=self.n_jobs)(
            delayed(_fitted)(clone(base), X, y, classes, weights, rows) for rows in parts
        )
        labels = np.searchsorted(classes, y)
        folds = [
            (
                own.module,
                own.features(_rows(X, train)),
                (own.features(_rows(X, test)), labels[test]),
            )
            for own, (train, test) in zip(fits, splits, strict=False)
        ]
        return self._choose(fits[-1], classes, _rows(X, parts[-1]), folds)

    def _fit_around(self, base: Any, X: Any, y: Any, X_train: Any, groups: Any) -> AcnmlClassifier:
        """Calibrate a classifier that is fitted already."""
        own = base.estimator if isinstance(base, FrozenEstimator) else base
        if isinstance(own, BaseEstimator):  # not a network
            check_is_fitted(
                own,
                msg="a prefit classifier must be fitted, but this %(name)s is not: fit it first, "
                "or choose another cv",
            )
        fitted = Fitted.of(base)
        known = getattr(fitted.estimator, "classes_", None)
        if known is None:  # a network, whose labels are the indices of its logits
            known = np.arange(logits_of(fitted.module, fitted.features(_rows(X, [0]))).shape[-1])
        else:
            fitted.require_agreement(_rows(X, np.arange(min(COMPARED, len(y)))), len(known))
        classes = np.asarray(known)
        unknown = np.setdiff1d(y, classes)
        if len(unknown):
            raise ValueError(
                f"the classifier was not fitted on class {unknown[0]!r}: drop its rows"
            )
        order = np.argsort(classes)  # the classes of a fitted classifier may be in any order
        labels = order[np.searchsorted(classes, y, sorter=order)]
        features = fitted.features(X)
        if X_train is not None:
            self._require_names(X_train, fitted.estimator)
            folds = [(fitted.module, fitted.features(X_train), (features, labels))]
            return self._choose(fitted, classes, X_train, folds)
        splits = self._splits(X, y, groups, ignore="prefit")
        folds = [
            (fitted.module, features[train], (features[test], labels[test]))
            for train, test in splits
        ]
        return self._choose(fitted, classes, X, folds)

    def _choose(
        self, final: Fitted, classes: NDArray[Any], X: Any, folds: list[Any]
    ) -> AcnmlClassifier:
        """Choose temperature and α on the folds, for the classifier that was fitted on X."""
        settings: dict[str, Any] = {
            "price": self.price,
            "prior_precision": self.prior_precision,
            "temperature": _temperature(folds) if self.temperature is None else self.temperature,
            "progress": False,
        }
        if len(folds) == 1 and folds[0][0] is final.module:
            self.calibrated_: Calibrated = calibrate(*folds[0], **settings, typicality=False)
        else:
            self.calibrated_ = calibrate_folds(final.module, final.features(X), folds, **settings)
        self._fitted, self.estimator_, self.classes_ = final, final.estimator, classes
        return self

    def _base(self) -> Any:
        """Return the estimator to fit."""
        given = self.estimator
        if given is None:
            return LogisticRegression()
        if isinstance(given, nn.Module) or hasattr(given, "fit"):
            return given
        if callable(given):
            return TorchClassifier(given, random_state=self.random_state)
        raise TypeError(
            "estimator must be a classifier or a function factory(features, classes) that returns "
            f"an nn.Module, got {type(given).__name__}"
        )

    def _splits(self, X: Any, y: Any, groups: Any, ignore: str = "") -> list[Any]:
        """Return the training and the held-out indices of every split."""
        cv = None if isinstance(self.cv, str) and self.cv == ignore else self.cv
        if isinstance(cv, numbers.Real) and not isinstance(cv, numbers.Integral):
            cv = StratifiedShuffleSplit(1, test_size=float(cv), random_state=self.random_state)
        names, counts = np.unique(y, return_counts=True)
        rarest = int(counts.argmin())
        folds = cv if isinstance(cv, numbers.Integral) else max(2, min(FOLDS, counts[rarest]))
        if (cv is None or folds is cv) and counts[rarest] < folds:
            raise ValueError(
                f"{folds} folds need {folds} rows of every class, but class {names[rarest]!r} has "
                f"{counts[rarest]}: use fewer folds, give more data, or drop the class"
            )
        splitter = check_cv(folds if cv is None else cv, y, classifier=True)
        splits = list(splitter.split(X, y, groups))
        if not splits:
            raise ValueError(
                "cv has no splits: give at least one pair (training indices, held-out indices)"
            )
        return splits

    def predict_log_proba(self, X: Any) -> NDArray[Any]:
        """Return the logarithms of the probabilities (n, classes)."""
        check_is_fitted(self)
        log_probs: Any = self.calibrated_.log_probs(self._features(X))
        return log_probs

    def predict_proba(self, X: Any) -> NDArray[Any]:
        """Return the probabilities (n, classes)."""
        return np.exp(self.predict_log_proba(X))

    def predict(self, X: Any) -> NDArray[Any]:
        """Return the likeliest label of every input."""
        labels = self.predict_log_proba(X).argmax(1)
        return self.classes_[labels]

    def regret(self, X: Any) -> NDArray[Any]:
        """Return the regret log C(x) (n,), from 0 to log K: high where many labels fit."""
        check_is_fitted(self)
        regret: Any = self.calibrated_.regret(self._features(X))
        return regret

    def _features(self, X: Any) -> Any:
        self._require_names(X, self.estimator_)
        return self._fitted.features(X)

    def _require_names(self, X: Any, estimator: Any) -> None:
        """Raise an error if columns are named or ordered otherwise than in `fit`.

        Networks know no names and take columns in any order. An estimator that knows them decides
        itself: a `ColumnTransformer` finds columns by name, wherever they are.
        """
        if not hasattr(estimator, "feature_names_in_"):
            # Inputs of networks need not be tables, so their number of columns may vary.
            validate_data(self, X, reset=False, skip_check_array=True, ensure_2d=False)

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "calibrated_")

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        base = self._base()
        if isinstance(base, BaseEstimator):
            own = get_tags(base).input_tags
            tags.input_tags.sparse, tags.input_tags.allow_nan = own.sparse, own.allow_nan
        return tags


def _rows(X: Any, rows: Any) -> Any:
    return _safe_indexing(X, rows)


def _fitted(
    estimator: Any, X: Any, y: Any, classes: NDArray[Any], weights: Any, rows: NDArray[Any]
) -> Fitted:
    """Fit an estimator on some rows, take it apart and check it."""
    inputs, labels = _rows(X, rows), y[rows]
    if is_skorch(_last(estimator)):  # it takes arrays in the type of its module, and class indices
        labels = np.searchsorted(classes, labels).astype(np.int64)
        classes = np.arange(len(classes))
        if estimator is _last(estimator):
            inputs = np.require(inputs, np.float32, ["WRITEABLE"])  # as torch needs it
    arguments = {} if weights is None else {_weight_argument(estimator): weights[rows]}
    estimator.fit(inputs, labels, **arguments)
    fitted = Fitted.of(estimator)
    fitted.require_classes(classes)
    fitted.require_agreement(_rows(inputs, np.arange(min(COMPARED, len(rows)))), len(classes))
    return fitted


def _require_all_classes(y: NDArray[Any], classes: NDArray[Any]) -> None:
    """Raise an error if the training part of a split lacks a class."""
    missing = np.setdiff1d(classes, y).tolist()
    if missing:
        raise ValueError(
            f"the training part of a split has no data of class {missing[0]!r}: use fewer folds, "
            "stratified ones, or drop classes with very few data"
        )


def _require_last_step(estimator: Any) -> None:
    """Raise an error if a pipeline ends without a classifier. That of a search may be a setting."""
    while isinstance(estimator, Pipeline):
        name, estimator = estimator.steps[-1]
        if estimator is None or isinstance(estimator, str):
            raise TypeError(
                f"the last step of the pipeline, {name!r}, is {estimator!r}, but it must be a "
                f"classifier. Supported are {SUPPORTED}"
            )


def _last(estimator: Any) -> Any:
    """Return the classifier inside pipelines and searches that are not fitted."""
    if isinstance(estimator, Pipeline):
        return _last(estimator.steps[-1][1])
    return _last(estimator.estimator) if isinstance(estimator, BaseSearchCV) else estimator


def _weight_argument(estimator: Any) -> str:
    """Return under which name `fit` passes weights to the classifier."""
    if get_config()["enable_metadata_routing"]:  # pipelines and searches find it by this name
        return _weight_argument_of(_last(estimator))
    if isinstance(estimator, Pipeline):
        name, last = estimator.steps[-1]
        return f"{name}__{_weight_argument(last)}"
    if isinstance(estimator, BaseSearchCV):
        return _weight_argument(estimator.estimator)
    return _weight_argument_of(estimator)


def _weight_argument_of(estimator: Any) -> str:
    """Return the name for a classifier itself."""
    if not has_fit_parameter(estimator, "sample_weight"):
        raise ValueError(f"{type(estimator).__name__} takes no sample_weight: leave it out")
    return "sample_weight"


def _temperature(folds: list[tuple[nn.Module, Any, tuple[Any, Any]]]) -> float | None:
    """Return 1 and warn if the held-out data cannot decide a temperature; else None."""
    logits = torch.cat([logits_of(module, x) for module, _, (x, _) in folds])
    log_probs = torch.log_softmax(logits, dim=-1)
    labels = torch.from_numpy(np.concatenate([y for _, _, (_, y) in folds]))
    reason = why_no_temperature(log_probs, labels)
    if len(labels) < LEAST_DATA:
        reason = f"{len(labels)} held-out rows are too few to choose a temperature by"
    if reason is None:
        return None
    warnings.warn(f"{reason}; the temperature is left at 1", stacklevel=callers_level())
    return 1.0
