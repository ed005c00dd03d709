"""Gaussian posteriors over weights. They are independent of any model and data."""

from acnml._algebra.dual import Affine
from acnml.posteriors.base import Posterior
from acnml.posteriors.diagonal import Diagonal
from acnml.posteriors.full import Full
from acnml.posteriors.kronecker import EigenBlock, Kronecker
from acnml.posteriors.low_rank import LowRank

__all__ = [
    "Affine",
    "Diagonal",
    "EigenBlock",
    "Full",
    "Kronecker",
    "LowRank",
    "Posterior",
]
