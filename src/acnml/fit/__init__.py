"""Fit posteriors to a classifier and its training data: Laplace, SWAG, Bayes by Backprop."""

from acnml.fit.batch_norm import batch_norm_statistics
from acnml.fit.bayes_by_backprop import BayesByBackprop, fit_bayes_by_backprop
from acnml.fit.curvature import (
    Curvature,
    DiagonalCurvature,
    EigenFactors,
    EkfacCurvature,
    Factors,
    FullCurvature,
    KroneckerCurvature,
)
from acnml.fit.fisher import EmpiricalFisher, ExactFisher, Fisher, MonteCarloFisher
from acnml.fit.laplace import (
    diagonal_curvature,
    ekfac_curvature,
    fit_diagonal_laplace,
    fit_ekfac_laplace,
    fit_full_laplace,
    fit_kfac_laplace,
    full_curvature,
    kronecker_curvature,
)
from acnml.fit.swag import Swag, collect_swag, fit_swag

__all__ = [
    "BayesByBackprop",
    "Curvature",
    "DiagonalCurvature",
    "EigenFactors",
    "EkfacCurvature",
    "EmpiricalFisher",
    "ExactFisher",
    "Factors",
    "Fisher",
    "FullCurvature",
    "KroneckerCurvature",
    "MonteCarloFisher",
    "Swag",
    "batch_norm_statistics",
    "collect_swag",
    "diagonal_curvature",
    "ekfac_curvature",
    "fit_bayes_by_backprop",
    "fit_diagonal_laplace",
    "fit_ekfac_laplace",
    "fit_full_laplace",
    "fit_kfac_laplace",
    "fit_swag",
    "full_curvature",
    "kronecker_curvature",
]
