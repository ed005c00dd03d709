"""Classifiers that say when they do not know: amortized conditional normalized maximum likelihood.

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

The names below are what most programs need. All others are importable from their rooms, such as
`acnml.posteriors.Affine`, `acnml.predictors.NaiveCnml`, `acnml.fit.fit_curvature` and
`acnml.laplace_torch.from_laplace`.
"""

from acnml import conformal, fit, metrics, tuning
from acnml._util.structure import last_linear
from acnml.calibration import Calibrated, Calibrator, calibrate, fit_calibrator
from acnml.classifier import Classifier
from acnml.export import export_onnx
from acnml.fit import Swag, fit_bayes_by_backprop, fit_laplace, fit_swag
from acnml.posteriors import Diagonal, Full, Kronecker, LowRank
from acnml.predictors import (
    Acnml,
    Bma,
    Ensemble,
    Glm,
    IfComp,
    Map,
    McDropout,
    Modes,
    Pnml,
    Tempered,
    fit_if_comp,
    fit_pnml,
)
from acnml.problem import Problem
from acnml.solve import Gradient, Linearised, UnsolvedWarning
from acnml.storage import load, save

__all__ = [
    "Acnml",
    "Bma",
    "Calibrated",
    "Calibrator",
    "Classifier",
    "Diagonal",
    "Ensemble",
    "Full",
    "Glm",
    "Gradient",
    "IfComp",
    "Kronecker",
    "Linearised",
    "LowRank",
    "Map",
    "McDropout",
    "Modes",
    "Pnml",
    "Problem",
    "Swag",
    "Tempered",
    "UnsolvedWarning",
    "calibrate",
    "conformal",
    "export_onnx",
    "fit",
    "fit_bayes_by_backprop",
    "fit_calibrator",
    "fit_if_comp",
    "fit_laplace",
    "fit_pnml",
    "fit_swag",
    "last_linear",
    "load",
    "metrics",
    "save",
    "tuning",
]
__version__ = "0.2.0.dev0"
