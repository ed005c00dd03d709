"""Laplace posteriors with diagonal, Kronecker-factored or full covariance.

The precision of the posterior is the curvature of the training loss at the trained weights, summed
over all data, plus the precision τ of the prior N(0, I/τ). A fit takes one pass over the training
data, EK-FAC two. The network runs in eval mode, as in prediction.

For every batch there is a recorded forward pass (`Tape`), and a backward pass for every class or
sampled label pulls gradients back to the outputs of every layer.

In the code, θ̂ are the trained weights, a are the inputs of a layer, and δ are gradients at its
outputs. A `Site` is a layer whose parameters the posterior covers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias, final, get_args

import torch
from torch import Tensor, nn

from acnml._engine.recorder import (
    AFFINE,
    OTHER_WAYS,
    SCALING,
    Site,
    Tape,
    find_sites,
    is_plain,
    joined_deltas,
    joined_inputs,
    names_of,
    record,
    require_tracked,
    scaling_gradients,
)
from acnml._engine.trust import check
from acnml._util import checks
from acnml._util.batches import Inputs
from acnml._util.params import Params, count, flatten, widened
from acnml._util.structure import Layers, parameter_names
from acnml.classifier import Classifier, as_classifier, without_autocast
from acnml.fit.batches import over_batches, require_classes
from acnml.fit.curvature import (
    Basis,
    Curvature,
    DiagonalCurvature,
    Factors,
    FullCurvature,
    KroneckerCurvature,
)
from acnml.fit.fisher import ExactFisher, Fisher
from acnml.posteriors.base import Posterior
from acnml.posteriors.kronecker import eigh

Structure: TypeAlias = Literal["diag", "kron", "ekfac", "full"]

# The results of backward passes: gradients of a batch at the outputs of every layer. There is one
# mapping for each vector that the Fisher estimator yields.
PullBacks: TypeAlias = Iterator[Mapping[Site, list[Tensor]]]

# Maximum size of a chunk of per-example weight gradients, in numbers.
AT_ONCE = 2**24

EXACT = ExactFisher()


def fit_laplace(
    model: nn.Module | Classifier,
    data: Iterable[Any],
    *,
    structure: Structure = "kron",
    layers: Layers = None,
    prior_precision: float = 1.0,
    fisher: Fisher = EXACT,
    progress: bool | None = None,
) -> Posterior:
    """Return the Laplace posterior N(θ̂, (H + τI)⁻¹), with the curvature H summed over the data.

    To choose τ, or to fit parts of the data one by one, use `fit_curvature`:
    `fit_laplace(...)` is `fit_curvature(...).posterior(prior_precision)`.

    Args:
        model: the trained network. Give a `Classifier` to set a temperature or `get_logits`.
        data: the training data, complete and without augmentation: a loader, `X` or `(X, y)`.
        structure: "diag", "kron", "ekfac" or "full", see `fit_curvature`.
        layers: layers, parameters, their names or a list of these; "last" for the last Linear
            layer.
        prior_precision: τ of the Gaussian prior N(0, I/τ).
        fisher: the estimator of the curvature at the logits: `ExactFisher()`,
            `MonteCarloFisher(samples, seed)` or `EmpiricalFisher()`, all in `acnml.fit`.
        progress: whether to show a progress bar; by default only in a terminal.

    >>> model, x = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Linear(5, 3)), torch.eye(4)
    >>> acnml.fit_laplace(model, x, prior_precision=0.1)
    Kronecker(43 parameters: 0.weight … 1.bias)
    >>> acnml.fit_laplace(model, x, structure="diag", layers="last")
    Diagonal(18 parameters: 1.weight … 1.bias)
    """
    curvature = fit_curvature(
        model, data, structure=structure, layers=layers, fisher=fisher, progress=progress
    )
    return curvature.posterior(prior_precision)


@torch.inference_mode(False)
def fit_curvature(
    model: nn.Module | Classifier,
    data: Iterable[Any],
    *,
    structure: Structure = "kron",
    layers: Layers = None,
    fisher: Fisher = EXACT,
    progress: bool | None = None,
) -> Curvature:
    """Sum the curvature H of the training loss over the data; `posterior` adds a prior.

    Structures, and what they cover by default:

    - `"diag"`: the diagonal of H; all Linear, Conv2d and normalisation layers.
    - `"kron"`: KFAC, a Kronecker product for every layer (`KroneckerCurvature`); all Linear and
      Conv2d layers, except those whose weight is reparametrised (`weight_norm`) or shared with
      another module, such as a head that is tied to an embedding.
    - `"ekfac"`: the eigenvectors of `"kron"` with eigenvalues refitted in a second pass over the
      data (`DiagonalCurvature`). Every layer's H is closer to the exact one, but the curvatures of
      parts of the data do not add up.
    - `"full"`: all of H; the last Linear layer. Memory and time grow with the square of the number
      of parameters.

    The sums are in double precision and the result in at least single precision, but activations
    and gradients have the precision of the model. In half precision or under autocast they have two
    or three significant digits. If the posterior covers all layers and τ is small, this is not
    accurate enough. Then use `model.float()` without autocast, both to fit and to predict.

    Args:
        model: see `fit_laplace`, also for the following arguments.
        data: the training data.
        structure: what H is approximated by.
        layers: what the curvature covers.
        fisher: the estimator of the curvature at the logits.
        progress: whether to show a progress bar.

    >>> model, x = torch.nn.Linear(4, 3), torch.randn(100, 4)
    >>> curvature = acnml.fit.fit_curvature(model, x)
    >>> [curvature.posterior(tau) for tau in (0.1, 1.0)]  # without another pass over the data
    [Kronecker(15 parameters: weight … bias), Kronecker(15 parameters: weight … bias)]
    >>> both = acnml.fit.fit_curvature(model, x[:30]) + acnml.fit.fit_curvature(model, x[30:])
    >>> abs(both.log_evidence(1.0) - curvature.log_evidence(1.0)) < 1e-3
    True
    """
    if structure not in get_args(Structure):
        raise ValueError(f"structure must be one of {get_args(Structure)}, got {structure!r}")
    classifier = as_classifier(model)
    bases: tuple[Basis, ...] = ()
    if structure == "ekfac":
        kron = fit_curvature(classifier, data, layers=layers, fisher=fisher, progress=progress)
        assert isinstance(kron, KroneckerCurvature)
        factors = (each.normalised for each in kron.factors)
        bases = tuple(Basis(layer, eigh(A)[1], eigh(G)[1]) for layer, A, G in factors)
    names = _covered(classifier.model, structure, layers)
    mean = widened(classifier.copy_parameters(names))
    covers = "Linear, Conv2d and normalisation" if structure == "diag" else "Linear and Conv2d"
    kinds = AFFINE + SCALING if structure == "diag" else AFFINE
    way_out = f'structure="{structure}" covers {covers} layers: {OTHER_WAYS}'
    sums = SUMS[structure](find_sites(classifier.model, names, kinds, way_out), mean, bases)
    _add_data(sums, classifier, data, fisher, progress)
    return sums.total.with_sums(_like(mean))


def _covered(model: nn.Module, structure: Structure, layers: Layers) -> list[str]:
    """Return the names of the parameters that a fit covers."""
    if layers is not None or structure == "diag":
        return parameter_names(model, layers)
    if structure == "full":
        return parameter_names(model, "last")
    names: list[str] = []
    owners = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    for prefix, module in model.named_modules():
        own = dict(module.named_parameters(prefix, recurse=False))
        is_affine = (
            isinstance(module, AFFINE) and is_plain(module) and "weight" in module._parameters
        )
        if is_affine and all(owners[id(parameter)] == 1 for parameter in own.values()):
            names += own
    if not names:
        raise ValueError(
            f"{type(model).__name__} has no Linear or Conv2d layer whose weight is a plain, "
            "unshared parameter; use acnml.fit_swag, which covers any parameters, or "
            'structure="diag" for normalisation layers'
        )
    return names


# One pass over the data --------------------------------------------------------------------------


class _Sums(ABC):
    """Adds batches to a curvature, in place and in double precision.

    Attributes:
        sites: the covered layers.
        total: the curvature of all batches so far.
    """

    sites: Sequence[Site]
    total: Curvature

    @abstractmethod
    def __init__(self, sites: Sequence[Site], mean: Params, bases: Sequence[Basis]) -> None: ...

    @abstractmethod
    def add(self, tape: Tape, pull_backs: PullBacks) -> None:
        """Add a batch."""


def _add_data(
    sums: _Sums,
    classifier: Classifier,
    data: Iterable[Any],
    fisher: Fisher,
    progress: bool | None,
) -> None:
    """Add every batch to the sums. The model may run under autocast, but the sums do not."""
    generator = torch.Generator().manual_seed(getattr(fisher, "seed", 0))

    def step(x: Inputs, labels: Tensor | None) -> None:
        if is_due := classifier.findings.is_due(names_of(sums.sites), x):
            check(classifier, x, sums.sites)
        tape = record(classifier, sums.sites, x)
        require_tracked(tape)
        logits = tape.logits.detach()
        checks.require_finite(logits, "the model's logits are", "check the model and these inputs")
        if is_due:
            check(classifier, x, logits=logits)
        if labels is not None:
            require_classes(labels, logits)
        with without_autocast(logits):
            vectors = fisher.vectors(logits.double().softmax(-1), labels, generator)
            sums.add(tape, (tape.pulled_back(s) for s in vectors))

    over_batches(classifier, data, step, "curvature", progress)


def _wide(tensor: Tensor) -> Tensor:
    """Convert to at least single precision; half precision has only two or three digits."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _like(mean: Params) -> Callable[[Tensor], Tensor]:
    """Return a function that converts sums to the precision of the weights; counts stay."""
    dtype = next(iter(mean.values())).dtype
    return lambda total: total.to(dtype) if total.is_floating_point() else total


@final
class _SummedSquares(_Sums):
    """Squared gradients of every parameter, for affine layers in a basis U_A ⊗ U_G or as they are.

    The gradient of an example is a sum over positions, such as the pixels of a convolution, and is
    squared after this sum.
    """

    def __init__(self, sites: Sequence[Site], mean: Params, bases: Sequence[Basis]) -> None:
        self.sites, self.bases = sites, {basis.layer: basis for basis in bases}
        self.squares = {n: torch.zeros_like(t, dtype=torch.float64) for n, t in mean.items()}
        self.total = DiagonalCurvature(mean, self.squares, tuple(bases))

    def add(self, tape: Tape, pull_backs: PullBacks) -> None:
        inputs = {
            site: _rotated(_wide(joined_inputs(site, passed)), self._basis(site)[0])
            for site, passed in tape.passages.items()
            if site.is_affine
        }
        for pulled in pull_backs:
            for site, deltas in pulled.items():
                if site in inputs:
                    joined = _rotated(_wide(joined_deltas(site, deltas)), self._basis(site)[1])
                    self._add(site, _squared(inputs[site], joined))
                else:
                    received = [_wide(one.received)[:, None] for one in tape.passages[site]]
                    grads = scaling_gradients(site, received, [_wide(d)[:, None] for d in deltas])
                    for name, grad in grads.items():
                        self.squares[name] += (grad**2).sum((0, 1))

    def _basis(self, site: Site) -> tuple[Tensor, Tensor] | tuple[None, None]:
        return self.bases[site.layer][1:] if self.bases else (None, None)

    def _add(self, site: Site, matrix: Tensor) -> None:
        """Add squares of an affine layer, ([groups,] out, in)."""
        for name, square in site.layer.split(matrix, self.total.mean).items():
            self.squares[name] += square


def _rotated(vectors: Tensor, basis: Tensor | None) -> Tensor:
    return vectors if basis is None else vectors @ basis


def _squared(inputs: Tensor, deltas: Tensor) -> Tensor:
    """Return the squared per-example gradients of an affine layer, summed over the batch.

    Inputs (B, [groups,] positions, in) and deltas (B, [groups,] positions, out) become
    ([groups,] out, in).
    """
    if inputs.shape[-2] == 1:  # (δ aᵀ)² = δ² (a²)ᵀ, summed over examples by one matrix product
        return (deltas**2).squeeze(-2).movedim(0, -1) @ (inputs**2).squeeze(-2).movedim(0, -2)
    per_example = deltas[0, ..., 0, :].numel() * inputs.shape[-1]
    n_examples = max(1, AT_ONCE // per_example)
    parts = zip(deltas.split(n_examples), inputs.split(n_examples), strict=True)
    return torch.stack([((d.mT @ a) ** 2).sum(0) for d, a in parts]).sum(0)


@final
class _SummedFactors(_Sums):
    """The sums of aaᵀ and of δδᵀ of every layer, over examples and positions."""

    def __init__(self, sites: Sequence[Site], mean: Params, bases: Sequence[Basis]) -> None:
        factors = []
        for site in sites:
            matrix = site.layer.join(mean, mean).double()
            *groups, out_size, in_size = matrix.shape
            A, G = (matrix.new_zeros(*groups, size, size) for size in (in_size, out_size))
            counts = torch.zeros(2, dtype=torch.int64, device="cpu")
            factors.append(Factors(site.layer, A, G, counts))
        self.sites, self.factors = sites, dict(zip(sites, factors, strict=True))
        self.total = KroneckerCurvature(mean, tuple(factors))

    def add(self, tape: Tape, pull_backs: PullBacks) -> None:
        for site, passed in tape.passages.items():
            self._add_inputs(site, _wide(joined_inputs(site, passed)))
        for pulled in pull_backs:
            for site, deltas in pulled.items():
                moment = _second_moment(_wide(joined_deltas(site, deltas)))
                self.factors[site].gradients.add_(moment)

    def _add_inputs(self, site: Site, inputs: Tensor) -> None:
        examples, positions = inputs.shape[0], inputs.shape[-2]
        self.factors[site].inputs.add_(_second_moment(inputs))
        counts = torch.tensor([examples, examples * positions], device="cpu")
        self.factors[site].counts.add_(counts)


def _second_moment(vectors: Tensor) -> Tensor:
    """Sum vvᵀ over examples and positions: (B, [groups,] positions, n) to ([groups,] n, n)."""
    rows = vectors.movedim(0, -3).flatten(-3, -2)
    return rows.mT @ rows


@final
class _SummedOuters(_Sums):
    """The outer products of the gradients of every example, over all parameters together."""

    def __init__(self, sites: Sequence[Site], mean: Params, bases: Sequence[Basis]) -> None:
        self.sites, size = sites, count(mean)
        self.hessian = next(iter(mean.values())).new_zeros(size, size, dtype=torch.float64)
        self.total = FullCurvature(mean, self.hessian)

    def add(self, tape: Tape, pull_backs: PullBacks) -> None:
        mean = self.total.mean
        inputs = {s: _wide(joined_inputs(s, passed)) for s, passed in tape.passages.items()}
        for pulled in pull_backs:
            gradients: Params = {}
            for site, deltas in pulled.items():
                matrix = _wide(joined_deltas(site, deltas)).mT @ inputs[site]
                gradients |= site.layer.split(matrix, mean)
            flat = flatten(gradients, mean)
            self.hessian += flat.T @ flat


SUMS: Mapping[str, type[_Sums]] = {
    "diag": _SummedSquares,
    "kron": _SummedFactors,
    "ekfac": _SummedSquares,
    "full": _SummedOuters,
}
