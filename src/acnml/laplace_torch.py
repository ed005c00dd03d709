"""Posteriors from laplace-torch: `from_laplace`.

Both libraries describe a Gaussian over weights, in different conventions:

- laplace-torch has one vector of parameters, in the order of `model.parameters()`, and counts only
  those that require gradients. Here parameters have names.
- It stores the curvature H and computes the precision H / (σ² T) + P₀ when it is needed, where T is
  a temperature of the likelihood and P₀ a prior precision for all parameters, for each layer or for
  each parameter. Here a posterior has its final covariance. So change the prior precision or the
  temperature first and convert then.
- Its Kronecker factors G ⊗ A (outputs first) of a weight come with a block of their own for the
  bias, G. In the eigenbasis of G both are diagonal, so one `EigenBlock` for [W b] is exactly the
  same covariance.

Nothing of laplace-torch is imported before the function is called.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from acnml._algebra.dual import Affine
from acnml._util.messages import needed_by
from acnml._util.params import Params, unflatten
from acnml.posteriors import Diagonal, EigenBlock, Full, Kronecker, Posterior

if TYPE_CHECKING:
    from laplace.baselaplace import ParametricLaplace


def from_laplace(la: ParametricLaplace) -> Posterior:
    """Return the posterior of a fitted Laplace approximation of laplace-torch.

    It is `Diagonal` for the structure "diag", `Kronecker` for "kron" and `Full` for "full", of all
    weights or of the last layer. Its parameters have the names that they have in the model that
    `la` was made from: `acnml.Glm(acnml.Classifier(model), from_laplace(la))` is the prediction
    `la(x, link_approx="probit")`.

    >>> import warnings
    >>> loader = torch.utils.data.DataLoader(list(zip(torch.randn(30, 4), [0, 1, 2] * 10)), 10)
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    >>> with warnings.catch_warnings():
    ...     warnings.simplefilter("ignore")
    ...     from laplace import Laplace
    ...     la = Laplace(model, "classification", hessian_structure="kron")
    ...     la.fit(loader)
    >>> from_laplace(la)
    Kronecker(27 parameters: 2.weight … 2.bias)
    """
    with needed_by("from_laplace", "laplace-torch"):
        import laplace

    if not isinstance(la, laplace.ParametricLaplace) or isinstance(la, laplace.SubnetLaplace):
        raise _unknown(la)
    if str(getattr(la.likelihood, "value", la.likelihood)) != "classification":
        raise ValueError(f"acnml is for classification, but the likelihood is {la.likelihood!r}")
    if not la.n_data:
        raise ValueError("the Laplace approximation is not fitted: call la.fit(train_loader) first")
    mean = unflatten(la.mean.detach().clone(), _parameters(la))
    if isinstance(la, laplace.DiagLaplace):
        return Diagonal(mean, unflatten(la.posterior_variance.detach(), mean))
    if isinstance(la, laplace.FullLaplace):
        cov = la.posterior_covariance.detach()
        return Full(mean, (cov + cov.T) / 2)
    if isinstance(la, laplace.KronLaplace):
        return Kronecker(mean, tuple(_blocks(la, mean)))
    raise _unknown(la)


# Parameters -------------------------------------------------------------------------------------


def _parameters(la: Any) -> Params:
    """Return the parameters in laplace-torch's order, by their names in the user's model."""
    import laplace

    if isinstance(la, laplace.LLLaplace):
        prefix = f"{la.model._last_layer_name}." if la.model._last_layer_name else ""
        named = la.model.last_layer.named_parameters()
        return {f"{prefix}{name}": parameter.detach() for name, parameter in named}
    named = la.model.named_parameters()
    return {name: parameter.detach() for name, parameter in named if parameter.requires_grad}


def _unknown(la: Any) -> TypeError:
    return TypeError(
        f"a {type(la).__name__} has no counterpart in acnml: use laplace.Laplace(model, "
        "'classification', ...) of all weights or the last layer, with a hessian_structure of "
        "'diag', 'kron' or 'full'"
    )


# Kronecker factors ------------------------------------------------------------------------------


def _layers(la: Any, like: Params) -> Iterator[tuple[Affine, list[int]]]:
    """Yield the layers, with the positions of their weight and bias in the list of parameters."""
    import laplace

    model: nn.Module = la.model.model if isinstance(la, laplace.LLLaplace) else la.model
    places = {name: index for index, name in enumerate(like)}
    for name, index in places.items():
        module = model.get_submodule(name.rpartition(".")[0])
        bias = f"{name.removesuffix('weight')}bias"
        if not isinstance(module, (nn.Linear, nn.Conv2d)) or getattr(module, "groups", 1) > 1:
            raise ValueError(
                f"{name!r} belongs to a {type(module).__name__}, which has no Kronecker block: use "
                "hessian_structure='diag' or 'full'"
            )
        if name.endswith("weight"):
            own = Affine(name, bias if bias in places else None)
            yield own, [index] if own.bias is None else [index, places[bias]]
        elif name.removesuffix("bias") + "weight" not in places:
            raise ValueError(f"{name!r} is covered without its weight: let both require gradients")


def _blocks(la: Any, mean: Params) -> Iterator[EigenBlock]:
    precision = la.posterior_precision
    for layer, (own, *bias) in _layers(la, mean):
        output_basis, input_basis = precision.eigenvectors[own]
        var = _inverse(precision, own)
        if bias:
            input_basis = torch.block_diag(input_basis, torch.ones(1, 1).to(input_basis))
            (basis,) = precision.eigenvectors[bias[0]]
            var_bias = _in_basis(basis, _inverse(precision, bias[0]), output_basis, layer.bias)
            var = torch.cat([var, var_bias.unsqueeze(1)], dim=1)
        yield EigenBlock(layer, input_basis.detach(), output_basis.detach(), var.detach())


def _inverse(precision: Any, index: int) -> Tensor:
    """Return the eigenvalues of the covariance of a parameter, (out, in) or (out,)."""
    values, delta = precision.eigenvalues[index], precision.deltas[index]
    if len(values) == 1:
        return 1 / (values[0] + delta)
    if precision.damping:
        return 1 / torch.outer(*(each + delta.sqrt() for each in values))
    return 1 / (torch.outer(*values) + delta)


def _in_basis(basis: Tensor, var: Tensor, other: Tensor, name: str | None) -> Tensor:
    """Return the variances of U diag(s) Uᵀ in another basis, in which it must be diagonal too."""
    rotation = other.mT @ basis
    rotated = (rotation * var) @ rotation.mT
    variances = rotated.diagonal()
    remainder = (rotated - torch.diag(variances)).abs().max()
    if remainder > torch.finfo(var.dtype).eps ** 0.5 * var.max():
        raise ValueError(
            f"the factor of {name!r} has another eigenbasis than that of its weight, so the two "
            "have no common block: use hessian_structure='full'"
        )
    return variances
