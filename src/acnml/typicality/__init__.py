"""How typical an input is: scores from features at several places of a network."""

from acnml.typicality.density import Density, Reader
from acnml.typicality.mahalanobis import Typicality, fit_typicality
from acnml.typicality.neighbours import NearestNeighbours, fit_neighbours
from acnml.typicality.places import Place

__all__ = [
    "Density",
    "NearestNeighbours",
    "Place",
    "Reader",
    "Typicality",
    "fit_neighbours",
    "fit_typicality",
]
