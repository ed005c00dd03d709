"""Posteriors from laplace-torch and back: `from_laplace` and `to_laplace`.

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
- A subnetwork is a list of positions in the vector. The rest has variance 0 here.

Nothing of laplace-torch is imported before one of the functions is called.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from acnml._algebra.dual import Affine
from acnml._util.messages import needed_by
from acnml._util.params import Params, count, flatten, unflatten
from acnml.posteriors import Diagonal, EigenBlock, Full, Kronecker, LowRank, Posterior

if TYPE_CHECKING:
    from laplace.baselaplace import ParametricLaplace


def from_laplace(la: ParametricLaplace) -> Posterior:
    """Return the posterior of a fitted Laplace approximation of laplace-torch.

    | hessian_structure | all weights, last layer | subnetwork |
    |---|---|---|
    | "diag" | `Diagonal` | `Diagonal` |
    | "kron" | `Kronecker` | - |
    | "full" | `Full` | `LowRank`, with one direction for each weight of the subnetwork |

    Its parameters have the names that they have in the model that `la` was made from:
    `acnml.Glm(acnml.Classifier(model), from_laplace(la))` is the prediction
    `la(x, link_approx="probit")`.

    >>> import acnml, torch, warnings
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

    _require_fitted(la)
    mean = unflatten(la.mean.detach().clone(), _parameters(la))
    if isinstance(la, laplace.SubnetLaplace):
        return _subnetwork(la, mean)
    if isinstance(la, laplace.DiagLaplace):
        return Diagonal(mean, unflatten(la.posterior_variance.detach(), mean))
    if isinstance(la, laplace.FullLaplace):
        cov = la.posterior_covariance.detach()
        return Full(mean, (cov + cov.T) / 2)
    if isinstance(la, laplace.KronLaplace):
        return Kronecker(mean, tuple(_blocks(la, mean)))
    raise _unknown(la)


def to_laplace(posterior: Posterior, la: ParametricLaplace) -> Any:
    """Return a copy of a fitted Laplace approximation with this posterior in place of its own.

    For scripts that compare the predictions of both libraries. Any posterior fits into
    `hessian_structure="full"`, a `Diagonal` into "diag", and a `Kronecker` posterior into "kron" if
    its weights and biases are independent, as laplace-torch requires; those from `from_laplace`
    are. Prior precision and temperature stay as they are; the curvature is what remains.

    Args:
        posterior: covers the same parameters, with the model's weights as its mean.
        la: a fitted approximation over these parameters. It is not changed.

    >>> import acnml, torch, warnings
    >>> loader = torch.utils.data.DataLoader(list(zip(torch.randn(30, 4), [0, 1, 2] * 10)), 10)
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    >>> with warnings.catch_warnings():
    ...     warnings.simplefilter("ignore")
    ...     from laplace import Laplace
    ...     la = Laplace(model, "classification", hessian_structure="full")
    ...     la.fit(loader)
    >>> classifier = acnml.Classifier(model)
    >>> posterior = acnml.fit_laplace(classifier, torch.randn(30, 4), structure="full")
    >>> to_laplace(posterior, la)(torch.randn(5, 4)).shape
    torch.Size([5, 3])
    """
    with needed_by("to_laplace", "laplace-torch"):
        import laplace

    _require_fitted(la)
    like = _parameters(la)
    _require_at_the_mean(posterior, like, isinstance(la, laplace.SubnetLaplace))
    other = copy.copy(la)
    other._posterior_scale = None
    if isinstance(la, laplace.KronLaplace):
        _set_factors(other, posterior, like)
    elif isinstance(la, laplace.DiagLaplace):
        if not isinstance(posterior, Diagonal):
            kind = type(posterior).__name__
            raise TypeError(f"a {kind} posterior is not diagonal: use hessian_structure='full'")
        zeros = {name: torch.zeros_like(tensor) for name, tensor in like.items()}
        var = _part(la, flatten({**zeros, **posterior.var}, like))
        other.H = (1 / var - la.prior_precision_diag) / la._H_factor
    elif isinstance(la, laplace.FullLaplace):
        cov = _part(la, _part(la, _dense(posterior, like)).T)
        precision = torch.cholesky_inverse(torch.linalg.cholesky(cov))
        other.H = (precision - torch.diag(la.prior_precision_diag)) / la._H_factor
    else:
        raise _unknown(la)
    return other


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


def _module(la: Any, name: str) -> nn.Module:
    """Return the module that owns a parameter."""
    import laplace

    model: nn.Module = la.model.model if isinstance(la, laplace.LLLaplace) else la.model
    return model.get_submodule(name.rpartition(".")[0])


def _require_fitted(la: Any) -> None:
    from laplace.baselaplace import ParametricLaplace

    if not isinstance(la, ParametricLaplace):
        raise _unknown(la)
    if str(getattr(la.likelihood, "value", la.likelihood)) != "classification":
        raise ValueError(f"acnml is for classification, but the likelihood is {la.likelihood!r}")
    if not la.n_data:
        raise ValueError("the Laplace approximation is not fitted: call la.fit(train_loader) first")


def _unknown(la: Any) -> TypeError:
    return TypeError(
        f"a {type(la).__name__} has no counterpart in acnml: use laplace.Laplace(model, "
        "'classification', ...) with a hessian_structure of 'diag', 'kron' or 'full'"
    )


def _require_at_the_mean(posterior: Posterior, like: Params, is_part: bool) -> None:
    """Raise an error unless the posterior stands on the weights that laplace-torch runs."""
    missing = set() if is_part else set(like) - set(posterior.mean)
    extra = set(posterior.mean) - set(like)
    if missing or extra:
        raise ValueError(
            "the posterior and the Laplace approximation cover different parameters: only the "
            f"first has {sorted(extra)}, only the second has {sorted(missing)}"
        )
    for name, mean in posterior.mean.items():
        if not torch.equal(mean.to(like[name]), like[name]):
            raise ValueError(
                f"the mean of {name!r} is not the weight of the model inside the Laplace "
                "approximation: load the mean into the model first"
            )


# Kronecker factors ------------------------------------------------------------------------------


def _layers(la: Any, like: Params) -> Iterator[tuple[Affine, list[int]]]:
    """Yield the layers, with the positions of their weight and bias in the list of parameters."""
    places = {name: index for index, name in enumerate(like)}
    for name, index in places.items():
        module = _module(la, name)
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


def _set_factors(la: Any, posterior: Posterior, like: Params) -> None:
    """Replace the factors of a copy by those of a Kronecker posterior."""
    from laplace.utils.matrix import Kron, KronDecomposed

    blocks = {b.layer: b for b in posterior.blocks} if isinstance(posterior, Kronecker) else {}
    prior = la.prior_precision.expand(len(like))
    vectors: list[list[Tensor]] = [[] for _ in like]
    values: list[list[Tensor]] = [[] for _ in like]
    for layer, (own, *bias) in _layers(la, like):
        block = blocks.get(layer)
        if not isinstance(block, EigenBlock) or (bias and not _is_apart(block.input_basis)):
            raise TypeError(
                f"laplace-torch keeps the weight and the bias of a layer independent, which the "
                f"posterior of {layer.weight!r} is not: use hessian_structure='full'"
            )
        inputs = block.input_basis[:-1, :-1] if bias else block.input_basis
        vectors[own] = [block.output_basis, inputs]
        curvature = (1 / block.var[:, : len(inputs)] - prior[own]) / la._H_factor
        values[own] = _rank_one(curvature, layer.weight)
        for each in bias:
            vectors[each] = [block.output_basis]
            values[each] = [(1 / block.var[:, -1] - prior[each]) / la._H_factor]
    la.H = KronDecomposed(vectors, values)
    la.H_facs = Kron(
        [
            [(q * w) @ q.mT for q, w in zip(own, eigenvalues, strict=True)]
            for own, eigenvalues in zip(vectors, values, strict=True)
        ]
    )


def _is_apart(basis: Tensor) -> bool:
    """Whether the last direction of a basis is the last axis, that of the bias."""
    unit = torch.zeros_like(basis[-1])
    unit[-1] = 1
    return torch.equal(basis[-1], unit) and torch.equal(basis[:, -1], unit)


def _rank_one(matrix: Tensor, name: str) -> list[Tensor]:
    """Return a and b ≥ 0 with matrix = a bᵀ."""
    U, S, Vh = torch.linalg.svd(matrix, full_matrices=False)
    if len(S) > 1 and S[1] > torch.finfo(S.dtype).eps ** 0.5 * S[0]:
        raise ValueError(
            f"the posterior of {name!r} is not a product of two factors plus the prior precision "
            "of the Laplace approximation: set the same prior precision, or use "
            "hessian_structure='full'"
        )
    sign = -1 if bool(U[:, 0].sum() < 0) else 1
    return [sign * U[:, 0] * S[0].sqrt(), sign * Vh[0] * S[0].sqrt()]


# Subnetworks and dense matrices -----------------------------------------------------------------


def _subnetwork(la: Any, mean: Params) -> Diagonal | LowRank:
    """Return a posterior in which only some weights of some layers vary."""
    import laplace

    places = la.backend.subnetwork_indices
    varies = torch.zeros(count(mean), dtype=torch.bool)
    varies[places] = True
    touched = {
        name.rpartition(".")[0] for name, each in unflatten(varies, mean).items() if each.any()
    }
    covered = {n: tensor for n, tensor in mean.items() if n.rpartition(".")[0] in touched}

    def spread(values: Tensor) -> Params:
        """Write values (*batch, S) of the subnetwork into zeros of all parameters."""
        whole = torch.zeros(*values.shape[:-1], count(mean)).to(values)
        whole[..., places] = values
        named = unflatten(whole, mean)
        return {name: named[name] for name in covered}

    if isinstance(la, laplace.DiagLaplace):
        return Diagonal(covered, spread(la.posterior_variance.detach()))
    zeros = {name: torch.zeros_like(tensor) for name, tensor in covered.items()}
    return LowRank(covered, zeros, spread(la.posterior_scale.detach().T))


def _dense(posterior: Posterior, like: Params) -> Tensor:
    """Return the covariance (P, P) in the order of `like`, zero for what is not covered."""
    own = posterior.mean
    eye = torch.eye(count(own), dtype=posterior.dtype, device=next(iter(own.values())).device)
    cov = flatten(posterior.cov_mv(unflatten(eye, own)), own)
    places = unflatten(torch.arange(count(like)), like)
    index = flatten({name: places[name] for name in own}, own)
    whole = torch.zeros(count(like), count(like)).to(cov)
    whole[index.unsqueeze(1), index] = cov
    return whole


def _part(la: Any, values: Tensor) -> Tensor:
    """Return the entries of a subnetwork along the last dimension; all others must be zero."""
    places = getattr(la.backend, "subnetwork_indices", None)
    if places is None:
        return values
    rest = values.clone()
    rest[..., places] = 0
    if bool(rest.any()):
        raise ValueError(
            "the posterior has variance outside of the subnetwork of the Laplace approximation: "
            "fit it on the parameters of the subnetwork only"
        )
    return values[..., places]
