"""ACNML for scikit-learn: `AcnmlClassifier` wraps a classifier as `CalibratedClassifierCV` does.

>>> from sklearn.datasets import load_digits
>>> from sklearn.linear_model import LogisticRegression
>>> from sklearn.pipeline import make_pipeline
>>> from sklearn.preprocessing import StandardScaler
>>> from acnml.sklearn import AcnmlClassifier
>>> X, y = load_digits(return_X_y=True)
>>> classifier = AcnmlClassifier(make_pipeline(StandardScaler(), LogisticRegression()), cv=2)
>>> classifier.fit(X[:600], y[:600]).predict_proba(X[600:]).shape
(1197, 10)

Needs the extra `sklearn`. docs/sklearn.md is the how-to.
"""

from acnml.sklearn._classifier import AcnmlClassifier
from acnml.sklearn._modules import to_module
from acnml.sklearn._torch import TorchClassifier

__all__ = ["AcnmlClassifier", "TorchClassifier", "to_module"]
