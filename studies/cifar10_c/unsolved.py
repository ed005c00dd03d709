"""ACNML where its solver finds no solution: the study goes on, and counts such images.

With a wide posterior the paper's iteration can diverge, and Newton's method can stop far from an
optimum. Any label could then be explained about as well: all get the same likelihood.
"""

from __future__ import annotations

import torch
from torch import Tensor

from acnml import Acnml, Predictor, UnsolvedError
from acnml._util.params import Params
from studies.study.saved import outputs

UNSOLVED = "unsolved"


def outputs_or_uniform(predict: Predictor, images: Tensor) -> Params:
    """Return what is saved of predictions; of ACNML also which images it has left unsolved."""
    if not isinstance(predict, Acnml):
        return outputs(predict, images)
    whole = _solved(predict, images)
    if whole is not None:
        return {"log_lik": whole, UNSOLVED: torch.zeros(len(images))}
    rows = [_solved(predict, image[None]) for image in images]
    classes = predict.classifier.logits(images[:1]).shape[1]
    uniform = torch.zeros(1, classes, device=images.device)
    log_lik = torch.cat([uniform if row is None else row for row in rows])
    return {"log_lik": log_lik, UNSOLVED: torch.tensor([float(row is None) for row in rows])}


def _solved(predict: Acnml, images: Tensor) -> Tensor | None:
    """Return the log-likelihoods; None where the solver itself says that it has none."""
    try:
        return predict.log_lik(images)
    except UnsolvedError:
        return None
