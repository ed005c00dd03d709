"""Exact CNML, CNMAP, NML and NMAP for logistic regression, as references for ACNML.

CNML (conditional normalized maximum likelihood) refits the model to the training set plus the query
once per label and normalises the resulting likelihoods. CNMAP adds a prior. NML treats whole label
sequences, and NMAP is NML with a prior. ACNML approximates CNML and CNMAP without refitting.
"""

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
