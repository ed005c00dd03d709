"""Choose the temperature T that calibrates a predictor."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from acnml._util import checks
from acnml.predictors import Predictor
from acnml.predictors.base import require_predictor
from acnml.tuning._validation import Validation
from acnml.tuning.choice import Choice
from acnml.tuning.sweep import Scores, score

# Advice if there is no best temperature.
INSTEAD = "set the temperature yourself, e.g. to 1"


@torch.inference_mode(False)
def temperature_by_nll(
    predictor: Predictor, loader: Iterable[Any], progress: bool | None = None
) -> Choice[Scores]:
    """Return the temperature with the lowest validation NLL (Guo et al. 2017).

    It minimises -1/N Σ log softmax(log p(·|x) / T)_y by L-BFGS. The NLL is convex in 1/T, so there
    is only one minimum. Use the result as `Tempered(predictor, T)`. If it was chosen for
    `Map(classifier)`, it can also be used as `classifier.tempered(T)`. Other predictors and fits
    then use the tempered likelihood.

    Args:
        predictor: the predictor to calibrate.
        loader: validation data, with labels. One pass is made.
        progress: whether to show a progress bar; by default only in a terminal.

    >>> import acnml, torch
    >>> x = torch.randn(500, 4, generator=torch.Generator().manual_seed(0))
    >>> labels = (x[:, :3] + 0.5 * x[:, 1:]).argmax(-1)
    >>> model = torch.nn.Linear(4, 3)
    >>> model.weight.data = torch.eye(3, 4)
    >>> classifier = acnml.Classifier(model)
    >>> posterior = acnml.fit_laplace(classifier, x[:250])
    >>> validation = [(x[250:], labels[250:])]
    >>> choice = acnml.tuning.temperature_by_nll(acnml.Map(classifier), validation)
    >>> tempered = classifier.tempered(choice.value)
    """
    require_predictor(predictor)
    log_probs, labels = Validation(loader, progress).predictions(predictor, "temperature")
    log_probs, labels = log_probs.double().clone(), labels.clone()  # may be inference tensors
    _require_optimal_temperature(log_probs, labels)
    *tried, optimum = _descend(log_probs, labels)
    table = tuple(
        score(t, torch.log_softmax(log_probs / t, dim=-1), labels)
        for t in sorted({1.0, *tried, optimum})
    )
    return Choice(optimum, table, "the temperature of least validation NLL; 1 changes nothing")


@torch.inference_mode(False)
def least_nll_temperature(log_probs: Tensor, labels: Tensor, instead: str = INSTEAD) -> float:
    """Return the temperature with the lowest NLL for log-probabilities (N, K) in float64.

    If there is none, the error advises to do something else instead.
    """
    log_probs, labels = log_probs.clone(), labels.clone()  # may be inference tensors
    _require_optimal_temperature(log_probs, labels, instead)
    return _descend(log_probs, labels)[-1]


def why_no_temperature(log_probs: Tensor, labels: Tensor) -> str | None:
    """Return why the NLL is lowest in the limit T → 0 or T → ∞; None if it has a minimum."""
    of_label = log_probs.gather(1, labels.unsqueeze(1)).squeeze(1)
    if (of_label == log_probs.amax(1)).all():
        return (
            "every validation point is predicted correctly, so the NLL decreases as T → 0 and "
            "there is no best temperature"
        )
    if of_label.mean() <= log_probs.mean():
        return "the labels are no more probable than other classes, so the NLL is lowest for T → ∞"
    return None


def _require_optimal_temperature(log_probs: Tensor, labels: Tensor, instead: str = INSTEAD) -> None:
    """Raise an error if the NLL is lowest in the limit T → 0 or T → ∞."""
    checks.require_finite(
        log_probs, "log-probabilities are", "use a predictor whose probabilities are not zero"
    )
    reason = why_no_temperature(log_probs, labels)
    if reason is not None:
        raise ValueError(
            f"{reason}; check that the labels belong to the inputs, use more validation data, or "
            f"{instead}"
        )


def _descend(log_probs: Tensor, labels: Tensor) -> list[float]:
    """Return the temperatures that L-BFGS tries, the optimal one last."""
    # Start where the standard deviation of the logits is 1, so that their scale does not matter.
    start = (log_probs - log_probs.mean(1, keepdim=True)).std(correction=0).log()
    log_temperature = start.clone().requires_grad_()
    optimizer = torch.optim.LBFGS(
        [log_temperature],
        max_iter=100,
        tolerance_grad=1e-12,
        tolerance_change=0.0,  # the NLL stops changing long before its derivative is zero
        line_search_fn="strong_wolfe",
    )
    tried = []

    def closure() -> float:
        tried.append(log_temperature.exp().item())
        loss = functional.cross_entropy(log_probs / log_temperature.exp(), labels)
        (log_temperature.grad,) = torch.autograd.grad(loss, log_temperature)
        return loss.item()

    optimizer.step(closure)
    return [*tried, log_temperature.exp().item()]
