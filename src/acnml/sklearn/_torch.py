"""TorchClassifier: a network from a factory, trained by AdamW, as a scikit-learn classifier."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
from torch import Tensor, nn
from torch.nn import functional

from acnml._util import checks
from acnml._util.batches import CHUNK
from acnml._util.seeding import seeded


@final
class TorchClassifier(ClassifierMixin, BaseEstimator):
    """A network that is trained by AdamW on the cross-entropy, in shuffled batches.

    This is the plain training of small networks on data in memory, with the defaults of
    `MLPClassifier`. For schedules, early stopping or an accelerator, use skorch's
    `NeuralNetClassifier(module, criterion=torch.nn.CrossEntropyLoss)`, or train the network
    yourself and pass it to `acnml.calibrate`.

    Inputs should be standardised, e.g. by a `StandardScaler` before it in a pipeline.

    Args:
        factory: `factory(features, classes)` returns the untrained network, which maps inputs
            (B, features) to logits (B, classes). None makes one hidden layer of 100 units.
        epochs: passes over the data.
        learning_rate: of AdamW.
        batch_size: of the training.
        weight_decay: of AdamW.
        random_state: seed of the initial weights, of the order of data and of dropout.

    Attributes:
        module_: the trained network, in eval mode.
        classes_: the labels.

    >>> import torch
    >>> from acnml.sklearn import TorchClassifier
    >>> X, y = torch.randn(60, 4).numpy(), ["a", "b", "c"] * 20
    >>> classifier = TorchClassifier(torch.nn.Linear, epochs=2, random_state=0).fit(X, y)
    >>> classifier.predict_proba(X).shape
    (60, 3)
    """

    def __init__(
        self,
        factory: Callable[[int, int], nn.Module] | None = None,
        *,
        epochs: int = 200,
        learning_rate: float = 1e-3,
        batch_size: int = 200,
        weight_decay: float = 1e-4,
        random_state: Any = None,
    ) -> None:
        self.factory = factory
        self.epochs = epochs
        self.learning_rate = learning_rate
        self.batch_size = batch_size
        self.weight_decay = weight_decay
        self.random_state = random_state

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> TorchClassifier:
        """Train a new network."""
        self.__dict__.pop("module_", None)  # a fit that fails must not leave the network before it
        self._require_numbers()
        X, y = validate_data(self, X, y, dtype=np.float64)
        check_classification_targets(y)
        classes, labels = np.unique(y, return_inverse=True)
        if len(classes) < 2:
            raise ValueError(f"y has only one class, {classes.tolist()}: two are needed")
        weights = _check_sample_weight(sample_weight, X, dtype=np.float64)
        seed = int(check_random_state(self.random_state).randint(2**31))
        with seeded(seed):
            module = (self.factory or _one_hidden_layer)(X.shape[1], len(classes))
            dtype = next((p.dtype for p in module.parameters()), torch.float32)
            x, w = (torch.tensor(array, dtype=dtype) for array in (X, weights))
            self._train(module.train(), x, torch.tensor(labels), w)
        self.classes_, self.module_ = classes, module.eval()
        return self

    def _require_numbers(self) -> None:
        for name in ("epochs", "batch_size"):
            checks.require_integer(getattr(self, name), name, 1)
        checks.require_positive(self.learning_rate, "learning_rate")
        decay = self.weight_decay
        if not (isinstance(decay, numbers.Real) and 0 <= decay < math.inf):
            raise ValueError(f"weight_decay must be a finite number of at least 0, got {decay!r}")

    def _train(self, module: nn.Module, x: Tensor, labels: Tensor, weights: Tensor) -> None:
        optimizer = torch.optim.AdamW(
            module.parameters(), lr=self.learning_rate, weight_decay=self.weight_decay
        )
        classes = int(labels.max()) + 1
        for epoch in range(self.epochs):
            for rows in _shuffled(len(x), int(self.batch_size)):
                logits = _one_per_class(module(x[rows]), classes)
                losses = functional.cross_entropy(logits, labels[rows], reduction="none")
                if not torch.isfinite(losses).all():
                    raise ValueError(
                        f"the training diverged: the loss is not finite in epoch {epoch + 1}; "
                        "lower the learning rate, or standardise the inputs"
                    )
                optimizer.zero_grad()
                (losses @ weights[rows] / weights.mean() / len(rows)).backward()
                optimizer.step()

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "module_")

    @torch.no_grad()
    def predict_proba(self, X: Any) -> NDArray[np.float64]:
        """Return the softmax of the network's logits."""
        check_is_fitted(self)
        x = torch.tensor(validate_data(self, X, reset=False, dtype=np.float64))
        dtype = next((p.dtype for p in self.module_.parameters()), torch.float32)
        logits = torch.cat([self.module_(part) for part in x.to(dtype).split(CHUNK)])
        return torch.softmax(logits.double(), dim=-1).numpy()

    def predict(self, X: Any) -> NDArray[Any]:
        """Return the likeliest label of every input."""
        labels = self.predict_proba(X).argmax(1)
        return self.classes_[labels]


def _one_per_class(logits: Tensor, classes: int) -> Tensor:
    """Return the logits, or raise an error: the cross-entropy takes too many of them silently."""
    if logits.ndim != 2 or logits.shape[1] != classes:
        raise ValueError(
            f"the network of the factory returns a tensor {tuple(logits.shape)}, but there are "
            f"{classes} classes: factory(features, classes) must return a network that maps inputs "
            "(B, features) to logits (B, classes)"
        )
    return logits


def _shuffled(count: int, batch_size: int) -> list[Tensor]:
    """Return shuffled indices in batches.

    A last batch of one row joins the one before it: batch normalisation has no variance for it.
    """
    parts = list(torch.randperm(count).split(batch_size))
    if batch_size > 1 and len(parts) > 1 and len(parts[-1]) == 1:
        last = parts.pop()
        parts[-1] = torch.cat([parts[-1], last])
    return parts


def _one_hidden_layer(features: int, classes: int) -> nn.Module:
    return nn.Sequential(nn.Linear(features, 100), nn.ReLU(), nn.Linear(100, classes))
