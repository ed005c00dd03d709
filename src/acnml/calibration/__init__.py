"""The front door: a trained network and data in, a calibrated predictor and the reasons out.

`calibrate` runs the network once over the validation data and once over the training data. It

1. chooses the temperature T of least validation NLL (Guo et al. 2017),
2. fits a Laplace posterior over the last layer to the tempered likelihood, and in the same pass how
   typical an input's features are (`acnml.Typicality`), which scales α,
3. finds the largest α whose validation NLL is at most `price` nats above that of the tempered
   network, and whose accuracy is not lower beyond sampling error.

Everything but the two passes happens in logit space, on the features of the validation data.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

from torch import nn

from acnml._util import checks
from acnml.calibration._choosing import chosen_result
from acnml.calibration._fitting import RELATIVE_PRIOR, Recipe, checked_places
from acnml.calibration._search import Search
from acnml.calibration._validation import LEAST_DATA, ValidationData
from acnml.calibration.result import Calibrated, CalibrationRow, Score
from acnml.classifier import Classifier
from acnml.fit import Structure
from acnml.typicality import Place

__all__ = [
    "LEAST_DATA",
    "RELATIVE_PRIOR",
    "Calibrated",
    "CalibrationRow",
    "Score",
    "calibrate",
    "calibrate_folds",
]


def calibrate(
    model: nn.Module | Classifier,
    train_loader: Iterable[Any],
    validation_loader: Iterable[Any],
    *,
    price: float = 0.01,
    layer: nn.Module | str | None = None,
    curvature: Structure = "kron",
    prior_precision: float | None = None,
    typicality: bool | Sequence[Place] = True,
    temperature: float | None = None,
    on_error: Literal["raise", "flag"] = "raise",
    progress: bool | None = None,
    distributed: bool = False,
) -> Calibrated:
    """Calibrate a trained network: temperature first, then ACNML on its last layer.

    Args:
        model: the trained network, which returns logits. It is not changed. Give a `Classifier` for
            models whose output is not a tensor.
        train_loader: the training data, all of it and not augmented; labels are not needed. Data in
            memory can be given as `X` or `(X, y)`, tensors or arrays.
        validation_loader: labelled data like the training data that the network was not trained on,
            or `(X, y)`. A few hundred are enough for a rough choice, a few thousand for an exact
            one.
        price: accepted increase of the validation NLL over the best temperature, in nats. A higher
            price gives less confident predictions.
        layer: the last Linear layer, or its name; by default the one that is registered last.
        curvature: "kron", "ekfac", "diag" or "full", see `acnml.fit_curvature`.
        prior_precision: of the Gaussian prior of the last layer's weights. The default is a
            hundredth of the mean eigenvalue of the curvature.
        typicality: weigh every query by how atypical the input's features are, α(x) = α s(x); see
            `acnml.Typicality`. The features are taken at places that are found in the network, or
            name the places. False leaves the weight at α for all inputs.
        temperature: of the network; by default that of least validation NLL. Set it to 1 if the
            validation data are too few to choose it by, or all predicted correctly. The price is
            then counted from the NLL at this temperature.
            A temperature that a `Classifier` already has is not used; pass it here to keep it.
        on_error: what the result does about inputs without an answer, such as NaN: "raise" an
            error, or "flag" them (`predict` returns -1); see `Acnml`. Validation data must all have
            an answer.
        progress: show progress bars; by default in a terminal only.
        distributed: whether this runs in several processes of `torch.distributed`, as `torchrun`
            starts them. Each passes its own part of the training data, which must not overlap, and
            all of the validation data. All get the same result, that of one process with all data.

    Returns:
        The predictor. Print it to see what it was chosen from.

    >>> import torch
    >>> x = torch.randn(2000, 5, generator=torch.Generator().manual_seed(0))
    >>> labels = (x[:, 0] + 0.5 * x[:, 1] > 0).long()
    >>> model = nn.Linear(5, 2)  # stands for a trained network, too confident in the first input
    >>> with torch.no_grad():
    ...     _ = model.weight.copy_(torch.tensor([[-3.0, 0, 0, 0, 0], [3.0, 0, 0, 0, 0]]))
    >>> calibrated = calibrate(model, [(x[:1000], labels[:1000])], [(x[1000:], labels[1000:])])
    >>> calibrated.probs(x[:3]).shape
    torch.Size([3, 2])
    """
    checks.require_positive(price, "price")
    if train_loader is validation_loader:
        raise ValueError(
            "training and validation loader are the same object; the price must be measured on "
            "data that the network was not trained on"
        )
    if temperature is not None:
        checks.require_positive(temperature, "temperature")
    places = checked_places(typicality)
    recipe = Recipe(layer, curvature, prior_precision, places, progress, distributed, on_error)
    network = recipe.network(model)
    validation = ValidationData.of([recipe.outputs(network, validation_loader)], temperature)
    predictor = recipe.fitted(network, train_loader, validation)
    observed = validation.observed_by(predictor.typicality)
    return chosen_result(Search(predictor, observed, (predictor,)), price)


def calibrate_folds(
    model: nn.Module | Classifier,
    train_loader: Iterable[Any],
    folds: Iterable[tuple[nn.Module | Classifier, Iterable[Any], Iterable[Any]]],
    *,
    price: float = 0.01,
    layer: str | None = None,
    curvature: Structure = "kron",
    prior_precision: float | None = None,
    temperature: float | None = None,
    on_error: Literal["raise", "flag"] = "raise",
    progress: bool | None = None,
) -> Calibrated:
    """Calibrate a network that was trained on all data by cross-validation.

    With few data, none can be spared for validation. Instead, every fold has a network that was
    trained without it, and the predictions of these networks for their folds are pooled. They
    decide the temperature and α. The result uses both with the given network, which was trained on
    all data, and a posterior that is fitted on all data. The weight is α for all inputs: typicality
    needs held-out data of the network itself.

    Args:
        model: the network that was trained on all data.
        train_loader: all data.
        folds: for every fold its network, the data that it was trained on, and the validation data.
        price: see `calibrate`, also for all following arguments.
        layer: the name of the last Linear layer; by default the one that is registered last.
        curvature: "kron", "ekfac", "diag" or "full", see `acnml.fit_curvature`.
        prior_precision: of the Gaussian prior of the last layer's weights.
        temperature: of the networks; by default that of least validation NLL.
        on_error: what the result does about inputs without an answer.
        progress: show progress bars; by default in a terminal only.

    >>> import acnml, torch
    >>> x = torch.randn(2000, 4, generator=torch.Generator().manual_seed(0))
    >>> labels = (x[:, 0] + 0.5 * x[:, 1] > 0).long()
    >>> model = torch.nn.Linear(4, 2)  # stands for a trained network
    >>> model.weight.data = torch.tensor([[-3.0, 0.0, 0.0, 0.0], [3.0, 0.0, 0.0, 0.0]])
    >>> halves = (x[:1000], labels[:1000]), (x[1000:], labels[1000:])
    >>> folds = [(model, halves[0], halves[1]), (model, halves[1], halves[0])]
    >>> acnml.calibrate_folds(model, x, folds, price=0.05).probs(x[:3]).shape
    torch.Size([3, 2])
    """
    checks.require_positive(price, "price")
    if temperature is not None:
        checks.require_positive(temperature, "temperature")
    recipe = Recipe(layer, curvature, prior_precision, False, progress, on_error=on_error)
    parts = [(recipe.network(own), train, validation) for own, train, validation in folds]
    if not parts:
        raise ValueError("there are no folds: pass (network, training data, validation data)")
    validation = ValidationData.of(
        [recipe.outputs(network, held_out) for network, _, held_out in parts], temperature
    )
    predictor = recipe.fitted(recipe.network(model), train_loader, validation)
    each = tuple(recipe.fitted(network, train, validation) for network, train, _ in parts)
    return chosen_result(Search(predictor, validation, each), price)
