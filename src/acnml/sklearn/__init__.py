"""ACNML for scikit-learn: `AcnmlClassifier` wraps a classifier as `CalibratedClassifierCV` does.

>>> from sklearn.datasets import load_digits
>>> from sklearn.linear_model import LogisticRegression
>>> from sklearn.pipeline import make_pipeline
>>> from sklearn.preprocessing import StandardScaler
>>> from acnml.sklearn import AcnmlClassifier
>>> X, y = load_digits(return_X_y=True)
>>> pipeline = make_pipeline(StandardScaler(), LogisticRegression())
>>> classifier = AcnmlClassifier(pipeline, cv=2, price=0.03)
>>> classifier.fit(X[:1000], y[:1000]).predict_proba(X[1000:]).shape
(797, 10)

Needs the extra `sklearn`. docs/howto/sklearn.md is the how-to.
"""

from acnml._util.extras import needed_by

with needed_by("acnml.sklearn", "acnml[sklearn]"):
    from acnml.sklearn._classifier import AcnmlClassifier
    from acnml.sklearn._modules import to_module
    from acnml.sklearn._torch import TorchClassifier

__all__ = ["AcnmlClassifier", "TorchClassifier", "to_module"]
