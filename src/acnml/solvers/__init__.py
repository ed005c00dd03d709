"""Finding, for every label of every input, the weights that explain it best."""

from acnml._algebra.convex import UNSOLVED
from acnml.solvers.base import Solution, Solver, UnsolvedError, UnsolvedWarning
from acnml.solvers.gradient import Gradient
from acnml.solvers.influence import Influence
from acnml.solvers.linearised import Linearised
from acnml.solvers.reference import Reference

__all__ = [
    "UNSOLVED",
    "Gradient",
    "Influence",
    "Linearised",
    "Reference",
    "Solution",
    "Solver",
    "UnsolvedError",
    "UnsolvedWarning",
]
