"""The solver as an `nn.Module`: a fixed number of steps and no data-dependent control flow.

`HeadModule` maps features and logits to ACNML's log-probabilities and regret. It takes the steps of
`acnml.head.solve`, but always the same number of them, so that it can be compiled and exported
together with the network. `HeadModule.residual` measures how far from the optimum this leaves rows.

With many classes it can be enough to solve for some labels, those that can gain most by the bound
of `acnml.head.solve`. As there, the others keep their log-likelihood at the mean, and the bound on
what they would add to C(x) must be negligible.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import final

import torch
from torch import Tensor, nn

from acnml._algebra.convex import UNSOLVED
from acnml._algebra.kernels import (
    DenseKernel,
    DiagonalKernel,
    Kernel,
    ScaledKernel,
    SpectralKernel,
    centred_variances,
)
from acnml.classifier import without_autocast
from acnml.head.ascent import DIAGONAL, Point, Rows, Step, settled
from acnml.head.solve import Start, background

# A step is tried at full length, then at this length; a row for which φ falls either way stays.
SHORT = 0.25

# Changes of φ below this many units of rounding are not significant.
ROUNDING = 16


class KernelModule(nn.Module, ABC):
    """The covariance of a last layer's outputs as a function of its inputs.

    Inputs are features (B, d). A layer with bias has d + 1 inputs: the 1 is appended here.
    """

    @abstractmethod
    def forward(self, features: Tensor) -> Kernel:
        """Return V of inputs."""

    @staticmethod
    def with_bias(features: Tensor, size: int) -> Tensor:
        """Append 1 if the layer has an input more than there are features."""
        if features.shape[1] == size:
            return features
        return torch.cat([features, torch.ones_like(features[:, :1])], dim=1)


@final
class KroneckerKernel(KernelModule):
    """Σ = A⁻¹ ⊗ G⁻¹: V = ⟨a, A⁻¹a⟩ G⁻¹."""

    input_cov: Tensor
    output_cov: Tensor

    def __init__(self, input_cov: Tensor, output_cov: Tensor) -> None:
        super().__init__()
        self.register_buffer("input_cov", input_cov)
        self.register_buffer("output_cov", output_cov)

    def forward(self, features: Tensor) -> ScaledKernel:
        """Return one matrix times a number per input."""
        a = self.with_bias(features, self.input_cov.shape[0])
        return ScaledKernel(self.output_cov, ((a @ self.input_cov) * a).sum(-1))


@final
class EigenKernel(KernelModule):
    """Σ diagonal in the basis U_A ⊗ U_G: V = U_G diag(S (U_Aᵀa)²) U_Gᵀ."""

    input_basis: Tensor
    output_basis: Tensor
    var: Tensor

    def __init__(self, input_basis: Tensor, output_basis: Tensor, var: Tensor) -> None:
        super().__init__()
        self.register_buffer("input_basis", input_basis)
        self.register_buffer("output_basis", output_basis)
        self.register_buffer("var", var)

    def forward(self, features: Tensor) -> SpectralKernel:
        """Return variances in the basis of the outputs."""
        a = self.with_bias(features, self.input_basis.shape[0])
        return SpectralKernel(self.output_basis, (a @ self.input_basis) ** 2 @ self.var.T)


@final
class VarianceKernel(KernelModule):
    """Independent weights with variances S (K, d): V = diag(S a²)."""

    var: Tensor

    def __init__(self, var: Tensor) -> None:
        super().__init__()
        self.register_buffer("var", var)

    def forward(self, features: Tensor) -> DiagonalKernel:
        """Return variances."""
        return DiagonalKernel(self.with_bias(features, self.var.shape[1]) ** 2 @ self.var.T)


@final
class FullKernel(KernelModule):
    """A covariance (K, d, K, d) of all weights: V_ij = Σ_kl a_k Σ_ikjl a_l."""

    cov: Tensor

    def __init__(self, cov: Tensor) -> None:
        super().__init__()
        self.register_buffer("cov", cov)

    def forward(self, features: Tensor) -> DenseKernel:
        """Return a matrix per input."""
        classes, size = self.cov.shape[:2]
        a = self.with_bias(features, size)
        half = a @ self.cov.permute(1, 0, 2, 3).reshape(size, -1)
        return DenseKernel((half.view(-1, classes, classes, size) * a[:, None, None]).sum(-1))


@final
class HeadModule(nn.Module):
    """ACNML for a last layer: (features (B, d), logits (B, K)) to (log_probs (B, K), regret (B,)).

    A third argument, a scale (B,), multiplies α for every input. Features and logits in half
    precision are converted to single precision. The kernel must have the resulting precision:
    single, or double for logits in double precision.

    Args:
        kernel: the covariance of the logits as a function of the features.
        alpha: the weight α of the query; a scale of the covariance.
        steps: Newton steps with the diagonal approximation of V.
        settling: steps before them that solve the nonlinear diagonal problem.
        labels: how many labels to solve for, those that can gain most; None for all. The others
            keep their log-likelihood at the mean.
        negligible: what the labels left out may add to C(x), together and by a bound. An input for
            which it may be more has no answer: it becomes NaN.
    """

    alpha: Tensor

    def __init__(
        self,
        kernel: KernelModule,
        alpha: float = 1.0,
        steps: int = 5,
        settling: int = 1,
        labels: int | None = None,
        negligible: float = 1e-3,
    ) -> None:
        super().__init__()
        if alpha < 0 or steps < 0 or settling < 0 or (labels is not None and labels < 1):
            raise ValueError(
                "alpha, steps and settling must be ≥ 0 and labels ≥ 1, got "
                f"alpha={alpha}, steps={steps}, settling={settling}, labels={labels}"
            )
        self.kernel, self.steps, self.settling = kernel, steps, settling
        self.labels, self.negligible = labels, negligible
        # Where the kernel is and in its precision: α = T⁻² in single precision would limit a module
        # in double precision.
        like = next(kernel.buffers(), torch.zeros((), device="cpu"))
        self.register_buffer("alpha", torch.tensor(alpha, dtype=like.dtype, device=like.device))

    def forward(
        self, features: Tensor, logits: Tensor, scale: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and the regret log C(x)."""
        with without_autocast(logits):
            log_lik, _ = self._solved(features, logits, scale)
            return torch.log_softmax(log_lik, -1), torch.logsumexp(log_lik, -1).clamp(min=0)

    def residual(self, features: Tensor, logits: Tensor, scale: Tensor | None = None) -> Tensor:
        """Return √(FᵀVF) (B, L) of the labels solved for, as in `Solution.residual`."""
        with without_autocast(logits):
            return self._solved(features, logits, scale)[1]

    def _solved(
        self, features: Tensor, logits: Tensor, scale: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return log-likelihoods (B, K) and residuals (B, L)."""
        wide = torch.promote_types(self.alpha.dtype, torch.float32)  # the kernel's
        features, logits = features.to(wide), logits.to(wide)
        kernel: Kernel = self.kernel(features)
        alpha = self.alpha.to(wide).expand(logits.shape[0])
        kernel = kernel.scaled(alpha if scale is None else alpha * scale.to(logits.dtype))
        logits = logits - logits.amax(-1, keepdim=True)
        at_mean = torch.log_softmax(logits, -1)
        var = centred_variances(kernel)
        start = Start.of(logits, kernel, background(logits, at_mean, kernel, var))
        labels, left_out = self._chosen(start, at_mean)
        count = labels.shape[1]
        inputs = torch.arange(logits.shape[0], device=logits.device).unsqueeze(1).expand(-1, count)
        i, y = inputs.reshape(-1), labels.reshape(-1)
        rows = Rows(kernel, i, logits[i], var[i], y.unsqueeze(1))
        point = self._ascended(rows, start.point(rows))
        residual = rows.residual(rows.minus(point.p + point.u)).view(-1, count)
        log_lik = at_mean.scatter(1, labels, point.log_lik.view(-1, count))
        # A module cannot raise. An input with an unsolved label becomes NaN, never the sure answer
        # of the mean; NaN and infinite numbers fail the comparisons.
        solved = (residual <= UNSOLVED).all(-1, keepdim=True) & (left_out <= self.negligible)
        log_lik = torch.where(solved, torch.maximum(log_lik, at_mean), torch.nan)
        return log_lik, residual

    def _chosen(self, start: Start, at_mean: Tensor) -> tuple[Tensor, Tensor]:
        """Return the labels to solve for (B, L), and what the others may add to C(x) (B, 1)."""
        classes = at_mean.shape[1]
        if self.labels is None or self.labels >= classes:
            every = torch.arange(classes, device=at_mean.device).expand(at_mean.shape)
            return every, torch.zeros_like(at_mean[:, :1])
        gains = (start.upper_bound(at_mean).exp() - at_mean.exp()).clamp(min=0)
        labels = gains.topk(self.labels, dim=-1).indices
        return labels, gains.scatter(1, labels, 0.0).sum(-1, keepdim=True)

    def _ascended(self, rows: Rows, point: Point) -> Point:
        for _ in range(self.settling):
            belief = rows.minus(point.u)
            change = belief - settled(rows.logits + point.shift, belief, rows.var)
            point = _guarded(rows, point, Step(change, rows.mv(change)))
        last: Step | None = None
        for _ in range(self.steps):
            gap = rows.minus(point.p + point.u)
            last = DIAGONAL.step(rows, point.p, gap, last)
            point = _guarded(rows, point, last)
        return point


def _guarded(rows: Rows, old: Point, step: Step) -> Point:
    """Take a step at full length, else a short one, else none: φ does not fall, up to rounding."""
    least = old.objective - ROUNDING * torch.finfo(old.u.dtype).eps * (1 + old.objective.abs())
    full = rows.point(old.u + step.u, old.shift + step.shift)
    short = rows.point(old.u + SHORT * step.u, old.shift + SHORT * step.shift)
    return full.where(full.objective >= least, short.where(short.objective >= least, old))
