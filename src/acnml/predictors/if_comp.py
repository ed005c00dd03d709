"""IfComp: influence functions with EK-FAC and a temperature (Ng, Grosse & Ghassemi 2024)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from acnml._util import checks
from acnml._util.batches import Inputs, arrays_for_arrays
from acnml._util.structure import Layers
from acnml.classifier import Classifier, require_classifier
from acnml.fit.fisher import Fisher, MonteCarloFisher
from acnml.fit.laplace import fit_curvature
from acnml.posteriors.base import Posterior
from acnml.predictors.base import NmlPredictor, matched, of_labels
from acnml.problem import Problem, of_problems
from acnml.solve.influence import self_influence

# The default damping as a share of the mean eigenvalue of the curvature.
RELATIVE_DAMPING = 1e-2


@final
@dataclass(frozen=True, eq=False)
class IfComp(NmlPredictor):
    """p(y|x) = softmax((z + c n) / T), with the self-influence n_y of every label.

        n_y = gᵀ (F + λI)⁻¹ g,    g = ∇_θ log softmax(z / T)_y

    Here z are the logits of the network, T is a temperature, F is the Fisher matrix summed over the
    training data and λ is a damping. This is `Acnml(classifier.tempered(T), posterior, Influence(),
    alpha=c / T)`: ACNML to first order. A higher T makes n depend less on what the network
    predicts, and more on how the input differs from the training data. The authors use temperatures
    up to 1,000 for their scores.

    Args:
        classifier: the model, with its temperature T.
        posterior: N(θ̂, (F + λI)⁻¹) over some or all weights.
        c: the weight of the self-influence. Larger is more cautious. Choose it on validation data,
            for example with `acnml.tuning.within_price`.

    >>> if_comp = acnml.fit_if_comp(classifier, x, c=0.01)
    >>> bool((if_comp.ood_score(x) >= 0).all())
    True
    """

    classifier: Classifier
    posterior: Posterior
    c: float = 1.0

    def __post_init__(self) -> None:
        require_classifier(self.classifier)
        checks.require_positive(self.c, "c")
        object.__setattr__(self, "posterior", matched(self.posterior, self.classifier))

    @property
    def alpha(self) -> float:
        """The weight c / T of the self-influence, which is ACNML's α."""
        return self.c / self.classifier.temperature

    @arrays_for_arrays
    def log_lik(self, x: Inputs) -> Tensor:
        """Return log softmax(z / T)_y + (c / T) n_y before it is normalised (B, K).

        It can exceed 0, and so the regret can exceed log K.
        """
        log_probs, gain = self._terms(x, self.alpha)
        return log_probs + gain

    @arrays_for_arrays
    def influence(self, x: Inputs) -> Tensor:
        """Return the self-influence n_y of every label (B, K)."""
        return self._terms(x)[1]

    @arrays_for_arrays
    def ood_score(self, x: Inputs) -> Tensor:
        """Return Σ_y p_y n_y (B,), with p = softmax(z / T): higher is more out of distribution.

        To first order in c this is T/c times the regret.
        """
        log_probs, influence = self._terms(x)
        return (log_probs.exp() * influence).sum(-1)

    @arrays_for_arrays
    def mislabel_score(self, x: Inputs, labels: Any) -> Tensor:
        """Return -log p_y + (c / T) Σ_i p_i n_i (B,): higher for labels that are likely wrong.

        It is the loss at temperature T plus the regret, to first order in c. `complexity` also has
        what the label itself gains.
        """
        log_probs, influence = self._terms(x)
        expected = (log_probs.exp() * influence).sum(-1)
        return self.alpha * expected - of_labels(log_probs, x, labels)

    @torch.inference_mode(False)
    @torch.no_grad()
    def _terms(self, x: Inputs, weight: float = 1.0) -> tuple[Tensor, Tensor]:
        """Return log softmax(z / T)_y and the weighted n_y of every label, (B, K) each."""

        def found(part: Problem) -> Tensor:
            return self_influence(part.scaled(weight))

        log_probs, gain = torch.cat(of_problems(self.classifier, self.posterior, x, found), dim=1)
        return log_probs, gain


def fit_if_comp(
    classifier: Classifier,
    loader: Iterable[Any],
    *,
    temperature: float = 1.0,
    c: float = 1.0,
    damping: float | None = None,
    layers: Layers = None,
    fisher: Fisher | None = None,
    progress: bool | None = None,
) -> IfComp:
    """Fit EK-FAC to the tempered likelihood and return an `IfComp` predictor.

    Args:
        classifier: the trained model.
        loader: the training data, complete and without augmentation. It is iterated twice.
        temperature: T. The temperature of least validation NLL is a good choice for probabilities
            (`acnml.tuning.temperature_by_nll`), a high one for `ood_score`.
        c: the weight of the self-influence.
        damping: λ, added to the Fisher matrix summed over the data. The default is a hundredth of
            its mean eigenvalue.
        layers: see `fit_curvature`. The default is all Linear and Conv2d layers; "last" is much
            faster.
        fisher: by default `MonteCarloFisher()`, one sampled label for every example.
        progress: whether to show a progress bar; by default only in a terminal.

    >>> acnml.fit_if_comp(classifier, x, temperature=2.0)(x).shape
    torch.Size([100, 3])
    """
    require_classifier(classifier)
    tempered = classifier.tempered(temperature)
    chosen = MonteCarloFisher() if fisher is None else fisher
    curvature = fit_curvature(
        tempered, loader, structure="ekfac", layers=layers, fisher=chosen, progress=progress
    )
    added = RELATIVE_DAMPING * curvature.mean_eigenvalue() if damping is None else damping
    return IfComp(tempered, curvature.posterior(added), c)
