"""Pnml: predictive NML of a last layer in closed form (Bibas, Feder & Hassner 2021)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from acnml._engine.recorder import Site
from acnml._util import checks
from acnml._util.batches import Inputs, arrays_for_arrays, in_chunks
from acnml._util.structure import Layers, parameter_names
from acnml.calibration.calibrator import closed_form
from acnml.classifier import Classifier, require_classifier
from acnml.fit.batches import over_batches
from acnml.predictors.base import NmlPredictor
from acnml.problem import LastLayer, at_last_layer, only_linear

# The default ridge as a share of the mean squared feature, summed over the data.
RELATIVE_RIDGE = 1e-6


@final
@dataclass(frozen=True, eq=False)
class Pnml(NmlPredictor):
    """p(y|x) ∝ p_y / (p_y + p_y^h (1 - p_y)), with h = l / (1 + l) and the leverage l of the input.

    The leverage is l(x) = c · aᵀ(XᵀX + λI)⁻¹a for the input a of the last layer and the matrix X of
    all its training inputs. Refit only the weights of label y by least squares: the layer's
    training outputs stay fixed, and the target at x is log p_y = 0. This moves the output by
    -h log p_y, and the probability of y to the expression above, its genie probability. The regret
    log C(x) is the paper's score for inputs that are out of distribution.

    Args:
        classifier: the model.
        parameters: the names of the parameters of its last Linear layer.
        input_cov: (XᵀX + λI)⁻¹, in double precision; ends with the bias if the layer has one.
        c: a weight of the leverage; 1 in the paper. Larger is more cautious, and c → 0 is the
            network.

    >>> pnml = acnml.fit_pnml(classifier, x)
    >>> bool((pnml.regret(x) >= 0).all())
    True
    """

    classifier: Classifier
    parameters: tuple[str, ...]
    input_cov: Tensor
    c: float = 1.0

    def __post_init__(self) -> None:
        require_classifier(self.classifier)
        checks.require_positive(self.c, "c")
        own = self.input_cov.to(self.classifier.device).double().contiguous()
        object.__setattr__(self, "parameters", tuple(self.parameters))
        object.__setattr__(self, "input_cov", own)

    @arrays_for_arrays
    @torch.inference_mode(False)
    @torch.no_grad()
    def log_lik(self, x: Inputs) -> Tensor:
        """Return the logarithms of the genie probabilities (B, K)."""
        found = self._at_last_layer(x)
        wide = torch.promote_types(found.logits.dtype, torch.float32)
        return closed_form(found.logits.double(), self.c * self._leverage(found)).to(wide)

    @arrays_for_arrays
    @torch.inference_mode(False)
    @torch.no_grad()
    def leverage(self, x: Inputs) -> Tensor:
        """Return aᵀ(XᵀX + λI)⁻¹a (B,), without the weight c."""
        return self._leverage(self._at_last_layer(x))

    def _at_last_layer(self, x: Inputs) -> LastLayer:
        site = _last_layer(self.classifier, self.parameters)
        prepared = self.classifier.prepare(x)
        parts = in_chunks(prepared, lambda chunk: _at_last_layer(self.classifier, site, chunk))
        return LastLayer(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))

    def _leverage(self, found: LastLayer) -> Tensor:
        a = found.inputs.double()
        return ((a @ self.input_cov) * a).sum(-1).clamp(min=0)


@torch.inference_mode(False)
def fit_pnml(
    classifier: Classifier,
    loader: Iterable[Any],
    *,
    ridge: float | None = None,
    c: float = 1.0,
    layers: Layers = "last",
    progress: bool | None = None,
) -> Pnml:
    """Sum aaᵀ over the training data and return a `Pnml` predictor. Labels are not needed.

    Args:
        classifier: the trained model.
        loader: the training data, complete and without augmentation.
        ridge: λ. The default is a millionth of the mean diagonal of XᵀX: the paper has the
            pseudo-inverse of XᵀX, the limit λ → 0. Choose a larger one if features hardly vary.
        c: a weight of the leverage.
        layers: the last layer, or its name.
        progress: whether to show a progress bar; by default only in a terminal.

    >>> acnml.fit_pnml(classifier, x)(x[:5]).shape
    torch.Size([5, 3])
    """
    require_classifier(classifier)
    site = _last_layer(classifier, parameter_names(classifier.model, layers))
    sums: list[Tensor] = []

    def step(x: Inputs, labels: Tensor | None) -> None:
        a = _at_last_layer(classifier, site, x).inputs.double()
        sums[:] = [sum(sums, a.T @ a)]

    over_batches(classifier, loader, step, "features", progress)
    (total,) = sums
    added = RELATIVE_RIDGE * float(total.diagonal().mean()) if ridge is None else ridge
    checks.require_positive(added, "ridge")
    eye = torch.eye(len(total), dtype=total.dtype, device=total.device)
    factor, failed = torch.linalg.cholesky_ex(total + added * eye)
    if bool(failed):
        raise ValueError(f"a ridge of {added:.2g} is lost in rounding: choose a larger one")
    return Pnml(classifier, site.layer.names, torch.cholesky_inverse(factor), c)


def _last_layer(classifier: Classifier, names: Sequence[str]) -> Site:
    site = only_linear(classifier, names)
    if site is None:
        raise ValueError(
            f"pNML covers a last Linear layer alone, not {list(names)}: name the parameters of the "
            "last layer"
        )
    return site


def _at_last_layer(classifier: Classifier, site: Site, x: Inputs) -> LastLayer:
    found = at_last_layer(classifier, site, x)
    if found is None:
        raise ValueError(
            f"the logits are not the outputs of {site.name!r} alone: name the last layer in "
            "`layers`"
        )
    return found
