"""Fitted scikit-learn classifiers as torch modules that return the same logits.

`Fitted` takes a fitted estimator apart: the transformers before the classifier, and the classifier
as a module. A classifier can be converted if its probabilities are the softmax of a last linear
layer. `Fitted.require_agreement` compares the probabilities of both on data, so that a conversion
is right or refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from scipy import sparse
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.frozen import FrozenEstimator
from sklearn.linear_model import LogisticRegression, SGDClassifier
from sklearn.model_selection._search import BaseSearchCV
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import Pipeline
from sklearn.utils import check_array
from sklearn.utils.validation import validate_data
from torch import Tensor, nn

from acnml._util import checks
from acnml._util.batches import chunks
from acnml.classifier import Classifier
from acnml.sklearn._torch import TorchClassifier

SUPPORTED = (
    "LogisticRegression, LogisticRegressionCV, LinearDiscriminantAnalysis, binary "
    "SGDClassifier(loss='log_loss'), MLPClassifier, skorch's NeuralNetClassifier, TorchClassifier, "
    "and pipelines and searches that end in one of them"
)

# The curvature of the last layer has a factor of this many rows and columns.
WIDEST = 10_000

# Largest difference in probability between an estimator and its module: rounding, in double
# precision, and where the inputs or the module are in single precision.
DOUBLE, SINGLE = 1e-9, 1e-4

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "identity": nn.Identity,
    "logistic": nn.Sigmoid,
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
}


@final
@dataclass(frozen=True, eq=False)
class Fitted:
    """A fitted estimator, taken apart.

    Attributes:
        estimator: the estimator.
        transformers: what X passes through before it reaches the classifier.
        classifier: the classifier, without pipelines and searches around it.
        module: the classifier as a module that returns logits.
    """

    estimator: Any
    transformers: tuple[Any, ...]
    classifier: Any
    module: nn.Module

    @staticmethod
    def of(estimator: Any) -> Fitted:
        """Take a fitted estimator apart."""
        transformers, classifier = _unwrapped(estimator)
        return Fitted(estimator, tuple(transformers), classifier, _converted(classifier))

    def features(self, X: Any) -> Any:
        """Return what the module takes, for the inputs of the estimator."""
        for step in self.transformers:
            X = step.transform(X)
        if hasattr(self.classifier, "n_features_in_"):
            X = validate_data(self.classifier, X, reset=False, accept_sparse="csr", dtype="numeric")
        elif not isinstance(X, np.ndarray):
            X = check_array(X, accept_sparse="csr", allow_nd=True, dtype="numeric")
        if X.ndim == 2 and X.shape[1] > WIDEST:
            raise ValueError(
                f"the classifier has {X.shape[1]} features; the posterior is dense and takes at "
                f"most {WIDEST}: reduce them before, e.g. by TruncatedSVD"
            )
        dense = X.toarray() if sparse.issparse(X) else X
        dtype = np.float32 if self._is_single else np.float64
        return np.require(dense, dtype, ["C_CONTIGUOUS", "WRITEABLE"])  # as torch needs it

    def require_classes(self, classes: NDArray[Any]) -> None:
        """Raise an error unless the estimator has these classes, in this order.

        A frozen classifier has those of its own training data.
        """
        own, given = np.asarray(self.estimator.classes_).tolist(), classes.tolist()
        if own != given:
            raise ValueError(
                f"this {type(self.classifier).__name__} has the classes {own}, but y has {given}: "
                "give data of all its classes, or a classifier that was fitted on those of y"
            )

    def require_agreement(self, X: Any, classes: int) -> None:
        """Raise an error unless module and estimator have the same probabilities for X.

        Both must have one for each of the classes.
        """
        kind = type(self.classifier).__name__
        found = torch.softmax(self._finite_logits(X), dim=-1).numpy()
        if found.shape[1] != classes:
            raise ValueError(
                f"this {kind} has {found.shape[1]} logits, but there are {classes} classes: give "
                f"its last layer {classes} outputs"
            )
        expected = self.estimator.predict_proba(X)
        if found.shape != expected.shape:
            raise ValueError(
                f"{kind} returned probabilities for {expected.shape[1]} classes, but its module "
                f"has {found.shape[1]} logits"
            )
        difference = float(np.abs(found - expected).max())
        is_single = self._is_single or expected.dtype == np.float32
        if not difference <= (SINGLE if is_single else DOUBLE):
            raise ValueError(
                f"the probabilities of this {kind} are not the softmax of its last layer (they "
                f"differ by {difference:.2g}), so ACNML does not apply. Supported are {SUPPORTED}"
            )

    def _finite_logits(self, X: Any) -> Tensor:
        kind, features = type(self.classifier).__name__, self.features(X)
        checks.require_finite(
            torch.from_numpy(features), f"the inputs of this {kind} are", "remove or impute them"
        )
        return checks.require_finite(
            logits_of(self.module, features),
            f"the logits of this {kind} are",
            "its training diverged: lower its learning rate, or standardise the inputs",
        )

    @property
    def _is_single(self) -> bool:
        return any(p.dtype == torch.float32 for p in self.module.parameters())


@torch.no_grad()
def logits_of(module: nn.Module, features: NDArray[Any]) -> Tensor:
    """Return the logits (n, K) of a module in eval mode, in double precision and on the CPU.

    The module may be on another device. It is neither run nor changed: `Classifier` runs a copy of
    its structure.
    """
    classifier = Classifier(module)
    parts = chunks(torch.from_numpy(features))
    return torch.cat([classifier.logits(classifier.prepare(x)).cpu().double() for x in parts])


def to_module(estimator: Any) -> nn.Module:
    """Return a fitted classifier as a module: inputs (B, d) -> logits (B, K).

    The softmax of the logits equals `predict_proba`, in double precision for scikit-learn's own
    estimators. A binary classifier with one decision value z has the logits [0, z]. Of a pipeline,
    the last step is converted; it takes what the steps before it return.

    >>> from acnml.sklearn import to_module
    >>> from sklearn.linear_model import LogisticRegression
    >>> to_module(LogisticRegression().fit([[0.0], [1.0], [2.0]], ["a", "b", "b"]))
    Linear(in_features=1, out_features=2, bias=True)
    """
    return Fitted.of(estimator).module


def is_skorch(estimator: Any) -> bool:
    """Whether an estimator is one of skorch, which need not be installed."""
    return any(base.__module__.startswith("skorch.") for base in type(estimator).__mro__)


def _unwrapped(estimator: Any) -> tuple[list[Any], Any]:
    """Return the transformers and the classifier inside pipelines, searches and frozen ones."""
    if isinstance(estimator, Pipeline):
        before, classifier = _unwrapped(estimator.steps[-1][1])
        return [estimator[:-1], *before] if len(estimator.steps) > 1 else before, classifier
    if isinstance(estimator, BaseSearchCV):
        return _unwrapped(estimator.best_estimator_)
    if isinstance(estimator, FrozenEstimator):
        return _unwrapped(estimator.estimator)
    return [], estimator


def _converted(classifier: Any) -> nn.Module:
    kind = type(classifier).__name__
    if isinstance(classifier, nn.Module):
        return classifier
    if isinstance(classifier, TorchClassifier):
        module: nn.Module = classifier.module_
        return module
    if isinstance(classifier, (LogisticRegression, LinearDiscriminantAnalysis)):
        _refuse_one_against_rest(classifier)
        return _linear(classifier.coef_, classifier.intercept_)
    if isinstance(classifier, SGDClassifier):
        return _of_sgd(classifier)
    if isinstance(classifier, MLPClassifier):
        return _of_mlp(classifier)
    if is_skorch(classifier):
        return _of_skorch(classifier)
    raise TypeError(f"{kind} cannot be converted to a torch module. Supported are {SUPPORTED}")


def _linear(weights: ArrayLike, bias: ArrayLike) -> nn.Linear:
    """Return a layer; one row of weights w becomes the rows 0 and w, for the logits [0, z]."""
    w, b = np.atleast_2d(np.asarray(weights, dtype=np.float64)), np.asarray(bias, dtype=np.float64)
    b = np.broadcast_to(b, len(w))  # a single number if there is no intercept
    if len(w) == 1:
        w, b = np.concatenate([np.zeros_like(w), w]), np.concatenate([[0.0], b])
    layer = nn.utils.skip_init(nn.Linear, w.shape[1], len(w), dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor(w))
        layer.bias.copy_(torch.tensor(b))
    return layer


def _refuse_one_against_rest(classifier: Any) -> None:
    """Old versions of scikit-learn can fit one binary model per class."""
    several = len(classifier.classes_) > 2
    is_binary = getattr(classifier, "solver", "") == "liblinear"
    if several and (is_binary or getattr(classifier, "multi_class", "") == "ovr"):
        raise ValueError(
            f"this {type(classifier).__name__} has one binary model per class (one-vs-rest), whose "
            "probabilities are not a softmax; use solver='lbfgs' without multi_class='ovr'"
        )


def _of_sgd(classifier: Any) -> nn.Module:
    if classifier.loss != "log_loss":
        raise ValueError(
            f"SGDClassifier(loss={classifier.loss!r}) is not a model of probabilities; "
            "use loss='log_loss'"
        )
    if len(classifier.classes_) > 2:
        raise ValueError(
            f"SGDClassifier fits one binary model for each of its {len(classifier.classes_)} "
            "classes (one-vs-rest), whose probabilities are not a softmax; use LogisticRegression, "
            "or MLPClassifier(hidden_layer_sizes=()), a softmax model that is trained by SGD"
        )
    return _linear(classifier.coef_, classifier.intercept_)


def _of_mlp(classifier: Any) -> nn.Module:
    outputs = classifier.coefs_[-1].shape[1]
    if classifier.out_activation_ == "logistic" and outputs > 1:
        raise ValueError("this MLPClassifier has several labels per input; ACNML takes one")
    layers: list[nn.Module] = []
    parts = zip(classifier.coefs_, classifier.intercepts_, strict=True)
    *hidden, (weights, bias) = parts
    for own_weights, own_bias in hidden:
        layers += [_hidden(own_weights, own_bias), ACTIVATIONS[classifier.activation]()]
    return nn.Sequential(*layers, _linear(weights.T, bias))


def _hidden(weights: NDArray[Any], bias: NDArray[Any]) -> nn.Linear:
    layer = nn.utils.skip_init(nn.Linear, *weights.shape, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(torch.from_numpy(weights.T))
        layer.bias.copy_(torch.from_numpy(bias))
    return layer


def _of_skorch(net: Any) -> nn.Module:
    """Return the module of a NeuralNetClassifier, without a softmax at its end."""
    criterion = type(net.criterion_).__name__
    module: nn.Module = net.module_
    if criterion == "CrossEntropyLoss":
        return module
    if criterion == "NLLLoss" and isinstance(module, nn.Sequential):
        *layers, last = module
        if isinstance(last, (nn.Softmax, nn.LogSoftmax)):
            return nn.Sequential(*layers)
    raise ValueError(
        f"the module of this {type(net).__name__} with criterion {criterion} does not return one "
        "logit per class; use NeuralNetClassifier(module, criterion=torch.nn.CrossEntropyLoss) and "
        "a module without a softmax at its end"
    )
