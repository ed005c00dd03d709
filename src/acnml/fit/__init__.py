"""Fit posteriors to a network and its training data: Laplace, SWAG, Bayes by Backprop."""

from acnml.fit.batch_norm import batch_norm_statistics
from acnml.fit.bayes_by_backprop import BayesByBackprop, fit_bayes_by_backprop
from acnml.fit.curvature import (
    Basis,
    Curvature,
    DiagonalCurvature,
    Factors,
    FullCurvature,
    KroneckerCurvature,
)
from acnml.fit.fisher import EmpiricalFisher, ExactFisher, Fisher, MonteCarloFisher
from acnml.fit.laplace import Structure, fit_curvature, fit_laplace
from acnml.fit.refitting import Refit
from acnml.fit.swag import Swag, fit_swag

__all__ = [
    "Basis",
    "BayesByBackprop",
    "Curvature",
    "DiagonalCurvature",
    "EmpiricalFisher",
    "ExactFisher",
    "Factors",
    "Fisher",
    "FullCurvature",
    "KroneckerCurvature",
    "MonteCarloFisher",
    "Refit",
    "Structure",
    "Swag",
    "batch_norm_statistics",
    "fit_bayes_by_backprop",
    "fit_curvature",
    "fit_laplace",
    "fit_swag",
]
