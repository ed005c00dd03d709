"""CNML, CNMAP and NML solved exactly, for logistic regression: what ACNML approximates."""

from acnml.exact.laplace import Laplace, laplace
from acnml.exact.nml import Nml, nml
from acnml.exact.problem import LogisticProblem, with_intercept
from acnml.exact.refit import Fit, Refits, cnml, fit

__all__ = [
    "Fit",
    "Laplace",
    "LogisticProblem",
    "Nml",
    "Refits",
    "cnml",
    "fit",
    "laplace",
    "nml",
    "with_intercept",
]
