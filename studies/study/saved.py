"""What is kept of predictions and curvatures, and how it is read again.

Of ACNML the log-likelihoods log p_θ̂_y(y|x) are kept before they are normalised, so that both the
probabilities and the regret follow. Of a plain network the energy is kept beside.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from acnml import Acnml, Affine, Map, Predictor
from acnml._util.params import Params
from acnml.fitting.curvature import Factors, KroneckerCurvature
from studies.store import Artefact, Content
from studies.training.state import below


@torch.no_grad()
def outputs(predict: Predictor, images: Tensor) -> Params:
    """Return what is saved of a batch of predictions."""
    if isinstance(predict, Acnml):
        return {"log_lik": predict.log_lik(images)}
    if isinstance(predict, Map):
        logits = predict.classifier.logits(images)
        log_probs = torch.log_softmax(logits, dim=-1)
        return {"log_probs": log_probs, "energy": -torch.logsumexp(logits, dim=-1)}
    return {"log_probs": predict(images)}


def log_probs_of(tensors: Mapping[str, Tensor]) -> Tensor:
    """Return the log-probabilities of saved predictions."""
    if "log_lik" in tensors:
        return torch.log_softmax(tensors["log_lik"], dim=-1)
    return tensors["log_probs"]


def curvature_content(curvature: KroneckerCurvature) -> Content:
    """Return a curvature as tensors: the mean, and both factors of every layer."""
    tensors = {f"mean/{name}": tensor for name, tensor in curvature.mean.items()}
    for layer, inputs, gradients in curvature.factors:
        tensors |= {f"inputs/{layer.weight}": inputs, f"gradients/{layer.weight}": gradients}
    layers = [[layer.weight, layer.bias] for layer, _, _ in curvature.factors]
    return Content(tensors, {"layers": layers})


def load_curvature(artefact: Artefact) -> KroneckerCurvature:
    """Invert `curvature_content`."""
    tensors = artefact.load()

    def factors(weight: str, bias: str | None) -> Factors:
        parts: tuple[Tensor, Tensor] = (tensors[f"inputs/{weight}"], tensors[f"gradients/{weight}"])
        return Factors(Affine(weight, bias), *parts)

    mean = below("mean/", tensors)
    return KroneckerCurvature(mean, tuple(factors(*layer) for layer in artefact.facts["layers"]))
