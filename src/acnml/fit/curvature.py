"""The curvature of the training loss at the trained weights, without a prior.

`curvature.posterior(prior_precision)` adds a Gaussian prior and returns a Laplace posterior. Many
prior precisions can be tried without another pass over the data. `acnml.save` stores a curvature.

Curvatures are sums over data, so those of disjoint parts of the data add up: `first + second` is
the curvature of both parts together. This is how fits in several processes become one.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, final

import torch
from torch import Tensor

from acnml._algebra.dual import Affine
from acnml._util import checks
from acnml._util.params import Params, add, count, flatten
from acnml.posteriors import Block, Diagonal, EigenBlock, Full, Kronecker, Posterior

if TYPE_CHECKING:
    from typing_extensions import Self

# Makes a block from a layer, its two factors A and G, and a prior precision.
MakeBlock: TypeAlias = Callable[[Affine, Tensor, Tensor, float], Block]

# The least prior precision for a full matrix, in units of its rounding. The variances of
# differences of logits are then accurate to about a hundredth.
ROUNDING = 64


class Curvature(ABC):
    """An approximation H of -∇² log p(D|θ), summed over the data D, at the trained weights θ̂.

    >>> import acnml, torch
    >>> classifier = acnml.Classifier(torch.nn.Linear(4, 3))
    >>> curvature = acnml.kronecker_curvature(classifier, torch.randn(100, 4))
    >>> curvature.posterior(prior_precision=1.0)
    Kronecker(15 parameters: weight … bias)
    >>> curvature.eigenvalues().shape
    torch.Size([15])
    """

    mean: Params

    @abstractmethod
    def posterior(self, prior_precision: float) -> Posterior:
        """Return the Laplace posterior N(θ̂, (H + τI)⁻¹) for the prior N(0, I/τ)."""

    @abstractmethod
    def eigenvalues(self) -> Tensor:
        """Return all eigenvalues of H, one per parameter."""

    @abstractmethod
    def trace(self) -> float:
        """Return the trace of H, the sum of its eigenvalues."""

    @abstractmethod
    def __add__(self, other: Self) -> Self:
        """Return the curvature of two disjoint parts of the data together, at the same weights.

        Both must be fitted with the same classifier: the same weights, which is checked, and the
        same temperature, which a curvature does not know.
        """

    @final
    def mean_eigenvalue(self) -> float:
        """Return the mean eigenvalue of H: a scale for prior precisions."""
        return self.trace() / count(self.mean)

    @final
    def log_evidence(self, prior_precision: float) -> float:
        """Return the Laplace approximation of log p(D), up to a constant that is independent of τ.

        It is -½ (τ‖θ̂‖² - P log τ + log |H + τI|) for P parameters and the prior precision τ. Larger
        values mean that the prior fits better.
        """
        tau = checks.require_positive(prior_precision, "prior_precision")
        theta, eigenvalues = flatten(self.mean, self.mean).double(), self.eigenvalues().double()
        log_det = (eigenvalues + tau).log().sum() - len(theta) * math.log(tau)
        return -0.5 * float(tau * (theta @ theta) + log_det)


@final
@dataclass(frozen=True, eq=False)
class DiagonalCurvature(Curvature):
    """The diagonal of H.

    Args:
        mean: θ̂, the trained weights.
        diagonal: the diagonal of H, with the same names and shapes.

    >>> import acnml, torch
    >>> classifier = acnml.Classifier(torch.nn.Linear(4, 3))
    >>> curvature = acnml.diagonal_curvature(classifier, torch.randn(100, 4))
    >>> curvature.posterior(prior_precision=1.0)
    Diagonal(15 parameters: weight … bias)
    """

    mean: Params
    diagonal: Params

    def __post_init__(self) -> None:
        checks.require_mean(self.mean)
        checks.require_same_names(self.diagonal, self.mean, "diagonal", "mean")
        for name, tensor in self.diagonal.items():
            if tensor.shape != self.mean[name].shape:
                raise ValueError(
                    f"diagonal of {name!r} has shape {tuple(tensor.shape)}, "
                    f"but its mean has shape {tuple(self.mean[name].shape)}: they must be equal"
                )

    def posterior(self, prior_precision: float) -> Diagonal:
        """Return N(θ̂, diag(1 / (h + τ)))."""
        tau = checks.require_positive(prior_precision, "prior_precision")
        return Diagonal(self.mean, {n: 1 / (h + tau) for n, h in self.diagonal.items()})

    def eigenvalues(self) -> Tensor:
        """Return the diagonal."""
        return flatten(self.diagonal, self.mean)

    def trace(self) -> float:
        """Return the sum of the diagonal."""
        return float(self.eigenvalues().double().sum())

    def __add__(self, other: DiagonalCurvature) -> DiagonalCurvature:
        """Return the curvature of two parts of the data together: h₁ + h₂."""
        _require_addable(self, other)
        return DiagonalCurvature(self.mean, add(self.diagonal, other.diagonal))


@final
@dataclass(frozen=True, eq=False)
class FullCurvature(Curvature):
    """The full matrix H, for small layers.

    Args:
        mean: θ̂, the trained weights.
        hessian: H (P, P). Rows and columns follow the order of the parameters in `mean`, each
            flattened.

    >>> import acnml, torch
    >>> classifier = acnml.Classifier(torch.nn.Linear(4, 3))
    >>> curvature = acnml.full_curvature(classifier, torch.randn(100, 4))
    >>> curvature.hessian.shape
    torch.Size([15, 15])
    """

    mean: Params
    hessian: Tensor

    def __post_init__(self) -> None:
        checks.require_mean(self.mean)
        checks.require_symmetric(self.hessian, "hessian", count(self.mean))

    def posterior(self, prior_precision: float) -> Full:
        """Return N(θ̂, (H + τI)⁻¹)."""
        tau = checks.require_positive(prior_precision, "prior_precision")
        self._require_digits(tau)
        eye = torch.eye(len(self.hessian), dtype=torch.float64, device=self.hessian.device)
        factor, failed = torch.linalg.cholesky_ex(self.hessian.double() + tau * eye)
        if bool(failed):
            least, largest = float(self._spectrum[0]), float(self._spectrum[-1])
            rounding = len(self.hessian) * torch.finfo(torch.float64).eps * largest
            raise ValueError(
                f"a prior precision of {tau:.2g} is lost in rounding: the eigenvalues of the "
                f"curvature range from {least:.2g} to {largest:.2g}. Raise prior_precision above "
                f"{1.1 * (max(-least, 0.0) + rounding):.2g}"
            )
        cov = torch.cholesky_inverse(factor)
        return Full(self.mean, ((cov + cov.T) / 2).to(self.hessian.dtype))

    def _require_digits(self, tau: float) -> None:
        """Refuse a prior so weak that the precision of Σ cannot tell the data from it.

        The data say nothing about a change that moves all logits of an input alike, so its variance
        is 1/τ. It cancels in the differences of logits, whose variances are as small as 1/λ_max.
        """
        dtype = self.hessian.dtype
        largest = float(torch.linalg.matrix_norm(self.hessian.double()))  # at least λ_max
        least = ROUNDING * torch.finfo(dtype).eps * largest
        if dtype != torch.float64 and tau < least:
            raise ValueError(
                f"a prior precision of {tau:.2g} is too small for {dtype}: the variances that "
                f"matter would be lost in rounding. Raise prior_precision above {least:.2g}, or "
                "convert the model to double precision by model.double()"
            )

    def eigenvalues(self) -> Tensor:
        """Return the eigenvalues of H."""
        return self._spectrum.clamp(min=0)

    @cached_property
    def _spectrum(self) -> Tensor:
        """The eigenvalues as they are computed, once: rounding may make some negative."""
        return torch.linalg.eigvalsh(self.hessian.double())

    def trace(self) -> float:
        """Return the sum of the diagonal."""
        return float(self.hessian.double().trace())

    def __add__(self, other: FullCurvature) -> FullCurvature:
        """Return the curvature of two parts of the data together: H₁ + H₂."""
        _require_addable(self, other)
        return FullCurvature(self.mean, self.hessian + other.hessian)


class Factors(NamedTuple):
    """The factors of a layer's H ≈ A ⊗ G: second moments of its inputs and output gradients."""

    layer: Affine
    inputs: Tensor  # A ([groups,] in, in)
    gradients: Tensor  # G ([groups,] out, out)


@final
@dataclass(frozen=True, eq=False)
class KroneckerCurvature(Curvature):
    """A Kronecker-factored block of H for every layer (Martens & Grosse 2015).

    Let a be a layer's inputs and δ the gradients at its outputs, for n training examples. A is √n
    times the mean of aaᵀ over examples and positions. G is √n times the mean over examples of the
    sum of δδᵀ over positions (Grosse & Martens 2016 for convolutions). A ⊗ G is therefore a sum
    over the data. Both factors contain √n, which matters if each is damped (Ritter et al. 2018).

    Args:
        mean: θ̂, the trained weights.
        factors: one `Factors` for every layer. Together they must name exactly the parameters in
            `mean`.
        data: the number n of training examples; needed to add curvatures up.
        positions: the number of input vectors a of every layer, n times the positions of an
            example; needed to add curvatures up.

    >>> import acnml, torch
    >>> classifier = acnml.Classifier(torch.nn.Linear(4, 3))
    >>> curvature = acnml.kronecker_curvature(classifier, torch.randn(100, 4))
    >>> [tuple(factor.shape) for factor in curvature.factors[0][1:]]
    [(5, 5), (3, 3)]
    """

    mean: Params
    factors: tuple[Factors, ...]
    data: int | None = None
    positions: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        checks.require_mean(self.mean)
        names = [name for factors in self.factors for name in factors.layer.names]
        checks.require_same_names(names, self.mean, "the factors", "mean")
        if self.data is not None and len(self.positions) != len(self.factors):
            raise ValueError(
                f"there are {len(self.positions)} numbers of positions for {len(self.factors)} "
                "layers: give one for every layer"
            )
        for layer, inputs, gradients in self.factors:
            *groups, out_size, in_size = layer.join(self.mean, self.mean).shape
            expected = (*groups, in_size, in_size), (*groups, out_size, out_size)
            if (inputs.shape, gradients.shape) != expected:
                raise ValueError(
                    f"the factors of {layer.weight!r} have shapes {tuple(inputs.shape)} and "
                    f"{tuple(gradients.shape)}, but its parameters need {expected[0]} and "
                    f"{expected[1]}"
                )

    def posterior(
        self, prior_precision: float, make_block: MakeBlock = EigenBlock.from_factors
    ) -> Kronecker:
        """Return N(θ̂, (H + τI)⁻¹).

        Pass `make_block=FactorBlock.damped` for the factor-damped approximation.
        """
        blocks = (make_block(*factors, prior_precision) for factors in self.factors)
        return Kronecker(self.mean, tuple(blocks))

    def eigenvalues(self) -> Tensor:
        """Return all products of an eigenvalue of A and one of G, for every layer."""
        return torch.cat([(g.unsqueeze(-1) * a.unsqueeze(-2)).flatten() for a, g in self._spectra])

    @cached_property
    def _spectra(self) -> list[tuple[Tensor, Tensor]]:
        """The eigenvalues of A and G for every layer, computed once for any number of priors."""
        return [(_spectrum_of(f.inputs), _spectrum_of(f.gradients)) for f in self.factors]

    def trace(self) -> float:
        """Return the sum over layers and groups of tr(A) tr(G)."""
        return sum(
            float((_trace(factors.inputs) * _trace(factors.gradients)).sum())
            for factors in self.factors
        )

    def __add__(self, other: KroneckerCurvature) -> KroneckerCurvature:
        """Return the curvature of two parts of the data together.

        The sums behind the factors add up: Σ aaᵀ = A N/√n over N positions, and Σ δδᵀ = √n G. So

            A = √n/N (A₁ N₁/√n₁ + A₂ N₂/√n₂)  and  G = (√n₁ G₁ + √n₂ G₂)/√n

        with n = n₁ + n₂ and N = N₁ + N₂. This is not A₁ ⊗ G₁ + A₂ ⊗ G₂, but what a fit on all data
        would have returned.
        """
        _require_addable(self, other)
        if self.data is None or other.data is None:
            raise ValueError(
                "a curvature does not know how many data it was fitted on, so it cannot be added "
                "to another; fit it again with kronecker_curvature"
            )
        if [f.layer for f in self.factors] != [f.layer for f in other.factors]:
            raise ValueError("the curvatures have different layers: fit both in the same way")
        data = self.data + other.data
        positions = tuple(a + b for a, b in zip(self.positions, other.positions, strict=True))
        factors = []
        for index, (layer, A, G) in enumerate(self.factors):
            _, other_A, other_G = other.factors[index]
            own_share = self.positions[index] / math.sqrt(self.data)
            other_share = other.positions[index] / math.sqrt(other.data)
            inputs = A.double() * own_share + other_A.double() * other_share
            inputs = inputs * (math.sqrt(data) / max(positions[index], 1))
            gradients = G.double() * math.sqrt(self.data) + other_G.double() * math.sqrt(other.data)
            gradients = gradients / math.sqrt(data)
            factors.append(Factors(layer, inputs.to(A.dtype), gradients.to(G.dtype)))
        return KroneckerCurvature(self.mean, tuple(factors), data, positions)


def _require_addable(first: Curvature, second: Curvature) -> None:
    """Raise an error unless two curvatures are of one kind, and at the same weights."""
    if type(first) is not type(second):
        kinds = type(first).__name__, type(second).__name__
        raise TypeError(f"a {kinds[0]} and a {kinds[1]} cannot be added: fit both in the same way")
    checks.require_same_names(second.mean, first.mean, "the second curvature", "the first")
    for name, tensor in first.mean.items():
        if not torch.equal(tensor, second.mean[name]):
            raise ValueError(
                f"the curvatures are at different weights, first in {name!r}: only those of one "
                "trained network add up"
            )


@final
@dataclass(frozen=True, eq=False)
class EigenFactors:
    """A layer's H ≈ U diag(s) Uᵀ with U = U_A ⊗ U_G.

    Args:
        layer: the layer.
        input_basis: U_A ([groups,] in, in), orthogonal.
        output_basis: U_G ([groups,] out, out), orthogonal.
        values: s ([groups,] out, in), the eigenvalues.
    """

    layer: Affine
    input_basis: Tensor
    output_basis: Tensor
    values: Tensor


@final
@dataclass(frozen=True, eq=False)
class EkfacCurvature(Curvature):
    """A block U diag(s) Uᵀ of H for every layer, in the eigenbasis of KFAC (George et al. 2018).

    U = U_A ⊗ U_G has the eigenvectors of the factors A ⊗ G of a `KroneckerCurvature`. The
    eigenvalues are the second moments of the gradients in this basis, summed over the data:

        s = diag(Uᵀ H U) = Σ_n (U_Gᵀ g_n U_A)²,

    where g_n are the matrices of gradients whose outer products sum to H. Among all matrices that
    are diagonal in this basis, this one is closest to H (in the Frobenius norm). KFAC's own
    eigenvalues, the products of those of A and G, are one of the others. So EK-FAC is never
    farther from H than KFAC, layer by layer.

    Args:
        mean: θ̂, the trained weights.
        factors: one `EigenFactors` for every layer. Together they must name exactly the parameters
            in `mean`.

    >>> import acnml, torch
    >>> classifier = acnml.Classifier(torch.nn.Linear(4, 3))
    >>> curvature = acnml.ekfac_curvature(classifier, torch.randn(100, 4))
    >>> curvature.posterior(prior_precision=1.0)
    Kronecker(15 parameters: weight … bias)
    """

    mean: Params
    factors: tuple[EigenFactors, ...]

    def __post_init__(self) -> None:
        self.posterior(1.0)  # refuses what does not fit together

    def posterior(self, prior_precision: float) -> Kronecker:
        """Return N(θ̂, (H + τI)⁻¹), whose variances in the eigenbasis are 1 / (s + τ)."""
        tau = checks.require_positive(prior_precision, "prior_precision")
        blocks = (
            EigenBlock(f.layer, f.input_basis, f.output_basis, 1 / (f.values + tau))
            for f in self.factors
        )
        return Kronecker(self.mean, tuple(blocks))

    def eigenvalues(self) -> Tensor:
        """Return s of all layers."""
        return torch.cat([factors.values.flatten() for factors in self.factors])

    def trace(self) -> float:
        """Return the sum of s, which is the exact trace of H."""
        return float(self.eigenvalues().double().sum())

    def __add__(self, other: EkfacCurvature) -> EkfacCurvature:
        """Return the curvature of two parts of the data together: s₁ + s₂, in the same basis."""
        _require_addable(self, other)
        factors = []
        for own, its in zip(self.factors, other.factors, strict=True):
            bases = (own.input_basis, its.input_basis), (own.output_basis, its.output_basis)
            if own.layer != its.layer or not all(torch.equal(*pair) for pair in bases):
                raise ValueError(
                    f"the curvatures have different bases, first for {own.layer.weight!r}, and "
                    "only those in one basis add up; fit the parts with the same `basis`, the "
                    "KroneckerCurvature of all data"
                )
            factors.append(replace(own, values=own.values + its.values))
        return EkfacCurvature(self.mean, tuple(factors))


def _spectrum_of(factor: Tensor) -> Tensor:
    """Return the eigenvalues ([groups,] n) of a Kronecker factor, which has none below zero."""
    return torch.linalg.eigvalsh(factor.double()).clamp(min=0)


def _trace(matrices: Tensor) -> Tensor:
    """Return the traces of matrices ([groups,] n, n)."""
    return matrices.double().diagonal(dim1=-2, dim2=-1).sum(-1)
