"""Finding, for every label of every input, the weights that explain it best."""

from acnml.problem import LogitSolver
from acnml.solution import UNSOLVED, Solution, UnsolvedError, UnsolvedWarning
from acnml.solve.base import Solver
from acnml.solve.gradient import Gradient
from acnml.solve.influence import Influence
from acnml.solve.linearised import Linearised
from acnml.solve.reference import Reference

__all__ = [
    "UNSOLVED",
    "Gradient",
    "Influence",
    "Linearised",
    "LogitSolver",
    "Reference",
    "Solution",
    "Solver",
    "UnsolvedError",
    "UnsolvedWarning",
]
