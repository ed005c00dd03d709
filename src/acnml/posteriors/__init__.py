"""What a posterior is: Gaussian algebra that knows no model and no data."""

from acnml.posteriors.base import Posterior
from acnml.posteriors.diagonal import Diagonal
from acnml.posteriors.full import Full
from acnml.posteriors.kronecker import Block, EigenBlock, FactorBlock, Kronecker
from acnml.posteriors.low_rank import LowRank

__all__ = [
    "Block",
    "Diagonal",
    "EigenBlock",
    "FactorBlock",
    "Full",
    "Kronecker",
    "LowRank",
    "Posterior",
]
