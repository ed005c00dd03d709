"""Classifiers that say when they do not know: amortized conditional normalized maximum likelihood.

>>> import torch, acnml
>>> model = torch.nn.Linear(4, 3)
>>> classifier = acnml.Classifier(model)
>>> mean = classifier.copy_parameters(["weight", "bias"])
>>> posterior = acnml.Diagonal(mean, var={name: torch.ones_like(t) for name, t in mean.items()})
>>> predict = acnml.Acnml(classifier, posterior)
>>> log_probs = predict(torch.randn(5, 4))
>>> log_probs.shape
torch.Size([5, 3])

Inputs are a tensor, a tuple or a mapping of tensors. The model is called as `model(x)`, `model(*x)`
or `model(**x)`. A loader is any iterable of batches: pairs (inputs, labels), tuples
(x1, x2, ..., labels), or mappings that hold the inputs and, under "labels" or "label", the labels.
Labels are a tensor of class indices (B,). Where no training by SGD takes place, a data set in
memory can stand for a loader: a tuple (X, y), or X alone where labels are not needed. A list is
always a loader.

Predictors, fits, `calibrate`, `tuning`, `metrics`, `conformal` and `export_onnx` take NumPy arrays
in place of tensors. `Classifier`, solvers, posteriors and `exact` take tensors only. Predictors
return arrays for arrays and tensors for tensors. Floating point inputs are converted to the model's
type.
"""

from acnml import conformal, fit, metrics, tuning
from acnml._algebra.dual import Affine
from acnml._util.selection import last_linear
from acnml.atypicality import Atypicality, Moments
from acnml.calibration import Answer, Calibrated, Calibrator, calibrate, fit_calibrator
from acnml.classifier import Classifier
from acnml.export import Exported, export_onnx
from acnml.features import Place
from acnml.fit import (
    BayesByBackprop,
    Swag,
    batch_norm_statistics,
    fit_bayes_by_backprop,
    fit_curvature,
    fit_laplace,
    fit_swag,
)
from acnml.fit.refitting import Refit
from acnml.laplace_torch import from_laplace, to_laplace
from acnml.posteriors import (
    Diagonal,
    EigenBlock,
    FactorBlock,
    Full,
    Kronecker,
    LowRank,
    Posterior,
)
from acnml.predictors import (
    Acnml,
    Bma,
    Ensemble,
    Glm,
    IfComp,
    LogitSampling,
    Map,
    McDropout,
    Modes,
    NaiveCnml,
    NaiveCnmlMax,
    Pnml,
    Predictor,
    Probit,
    Tempered,
    fit_if_comp,
    fit_pnml,
)
from acnml.problem import Problem
from acnml.solution import Solution, UnsolvedError, UnsolvedWarning
from acnml.solve.base import Solver
from acnml.solve.gradient import Gradient
from acnml.solve.influence import Influence
from acnml.solve.linearised import Linearised
from acnml.solve.reference import Reference
from acnml.storage import StorageError, load, save

__all__ = [
    "Acnml",
    "Affine",
    "Answer",
    "Atypicality",
    "BayesByBackprop",
    "Bma",
    "Calibrated",
    "Calibrator",
    "Classifier",
    "Diagonal",
    "EigenBlock",
    "Ensemble",
    "Exported",
    "FactorBlock",
    "Full",
    "Glm",
    "Gradient",
    "IfComp",
    "Influence",
    "Kronecker",
    "Linearised",
    "LogitSampling",
    "LowRank",
    "Map",
    "McDropout",
    "Modes",
    "Moments",
    "NaiveCnml",
    "NaiveCnmlMax",
    "Place",
    "Pnml",
    "Posterior",
    "Predictor",
    "Probit",
    "Problem",
    "Reference",
    "Refit",
    "Solution",
    "Solver",
    "StorageError",
    "Swag",
    "Tempered",
    "UnsolvedError",
    "UnsolvedWarning",
    "batch_norm_statistics",
    "calibrate",
    "conformal",
    "export_onnx",
    "fit",
    "fit_bayes_by_backprop",
    "fit_calibrator",
    "fit_curvature",
    "fit_if_comp",
    "fit_laplace",
    "fit_pnml",
    "fit_swag",
    "from_laplace",
    "last_linear",
    "load",
    "metrics",
    "save",
    "to_laplace",
    "tuning",
]
__version__ = "0.2.0.dev0"
