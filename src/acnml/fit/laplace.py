"""Laplace posteriors with diagonal, Kronecker-factored or full covariance.

The precision of the posterior is the curvature of the training loss at the trained weights, summed
over all data, plus the precision τ of the prior N(0, I/τ). A fit takes one pass over the training
data, EK-FAC two. The network runs in eval mode, as in prediction.

A structure decides what is summed up: `_Squares` for "diag" and "ekfac", `_Factors` for "kron",
`_Outers` for "full". Each adds a batch in one of two ways. If the posterior covers the last layer
alone, its inputs and the logits are enough. Otherwise there is a recorded forward pass (`Tape`),
and backward passes pull gradients back to the outputs of every layer.

In the code, θ̂ are the trained weights, a are the inputs of a layer, and δ are gradients at its
outputs. A `Site` is a layer whose parameters the posterior covers.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, TypeAlias, final, get_args

import torch
from torch import Tensor, nn

from acnml._algebra.dual import Affine
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
    summed_scaling_gradients,
)
from acnml._engine.trust import require_understood
from acnml._util import checks, processes
from acnml._util.batches import Inputs
from acnml._util.params import Params, count, flatten, widened
from acnml._util.structure import Layers, parameter_names
from acnml.classifier import Classifier, as_classifier, without_autocast
from acnml.fit.batches import over_batches, require_classes
from acnml.fit.curvature import (
    Curvature,
    DiagonalCurvature,
    EigenFactors,
    EkfacCurvature,
    Factors,
    FullCurvature,
    KroneckerCurvature,
    require_same_weights,
    threads_for_algebra,
)
from acnml.fit.fisher import ExactFisher, Fisher, Outputs
from acnml.posteriors.base import Posterior
from acnml.problem import features, only_linear

Structure: TypeAlias = Literal["diag", "kron", "ekfac", "full"]

# The results of backward passes: gradients of a batch at the outputs of every layer. There is one
# mapping for each vector that the Fisher estimator yields.
PullBacks: TypeAlias = Iterator[Mapping[Site, list[Tensor]]]

# Eigenvectors (U_A, U_G) of the factors of every layer.
Bases: TypeAlias = Mapping[Affine, tuple[Tensor, Tensor]]

# Maximum size of a chunk of per-example weight gradients, in numbers.
SQUARED_AT_ONCE = 2**24

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
        structure: what H is approximated by, see `fit_curvature`.
        layers: what the posterior covers, see `fit_curvature`.
        prior_precision: τ of the Gaussian prior N(0, I/τ).
        fisher: `ExactFisher()`, `MonteCarloFisher(samples, seed)` or `EmpiricalFisher()`, all in
            `acnml.fit`.
        progress: whether to show a progress bar; by default only in a terminal.

    >>> import acnml, torch
    >>> model, x = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Linear(5, 3)), torch.eye(4)
    >>> acnml.fit_laplace(model, x, prior_precision=0.1)
    Kronecker(43 parameters: 0.weight … 1.bias)
    >>> acnml.fit_laplace(model, x, structure="diag", layers="last")
    Diagonal(18 parameters: 1.weight … 1.bias)
    >>> sampled = acnml.fit.MonteCarloFisher(samples=2)
    >>> acnml.fit_laplace(model, x, structure="full", fisher=sampled)
    Full(18 parameters: 1.weight … 1.bias)
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
    basis: KroneckerCurvature | None = None,
    distributed: bool = False,
    progress: bool | None = None,
) -> Curvature:
    """Sum the curvature H of the training loss over the data; `posterior` adds a prior.

    Structures, and what they cover by default:

    - `"diag"`: the diagonal of H; all Linear, Conv2d and normalisation layers.
    - `"kron"`: KFAC, a Kronecker product for every layer (`KroneckerCurvature`); all Linear and
      Conv2d layers, except those whose weight is reparametrised (`weight_norm`) or shared with
      another module, such as a head that is tied to an embedding.
    - `"ekfac"`: the eigenvectors of `"kron"` with eigenvalues refitted in a second pass over the
      data (`EkfacCurvature`). Every layer's H is closer to the exact one.
    - `"full"`: all of H, for the last Linear layer alone. Memory and time grow with the square of
      the number of parameters.

    Fits of the last layer need no backward passes, whatever the structure.

    The sums are in double precision and the result in at least single precision, but activations
    and gradients have the precision of the model. In half precision or under autocast they have two
    or three significant digits. If the posterior covers all layers and τ is small, this is not
    accurate enough. Then use `model.float()` without autocast, both to fit and to predict.

    Args:
        model: see `fit_laplace`, also for `data`, `fisher` and `progress`.
        data: the training data.
        structure: "diag", "kron", "ekfac" or "full".
        layers: layers, parameters, their names or a list of these; "last" for the last Linear
            layer.
        fisher: the estimator of the curvature at the logits.
        basis: for "ekfac", a curvature of the same network with structure "kron", of all data or of
            some. There is then no first pass, and its layers are covered. Curvatures of disjoint
            parts of the data add up if they have the same basis.
        distributed: whether to add up the sums of all processes of `torch.distributed`, each of
            which passes its own part of the data.
        progress: whether to show a progress bar.

    >>> import acnml, torch
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
    if basis is not None and (structure != "ekfac" or layers is not None):
        raise ValueError('`basis` is for structure="ekfac" and has its layers: leave out `layers`')
    classifier, together = as_classifier(model), processes.Group(distributed)
    if structure == "ekfac" and basis is None:
        first = fit_curvature(
            classifier,
            data,
            layers=layers,
            fisher=fisher,
            distributed=distributed,
            progress=progress,
        )
        assert isinstance(first, KroneckerCurvature)
        basis = first
    names = list(basis.mean) if basis is not None else _covered(classifier, structure, layers)
    mean = widened(classifier.copy_parameters(names))
    kinds = AFFINE + SCALING if structure == "diag" else AFFINE
    covers = "Linear and Conv2d" if structure != "diag" else "Linear, Conv2d and normalisation"
    way_out = f'structure="{structure}" covers {covers} layers: {OTHER_WAYS}'
    sites = find_sites(classifier.model, names, kinds, way_out)
    sums: _Sums
    with threads_for_algebra(mean):
        if basis is not None:
            checks.require_fits(basis.mean, mean)
            require_same_weights(basis.mean, mean, "the basis")
            sums = _Squares(sites, mean, _shared_bases(basis, mean, together))
        else:
            sums = {"diag": _Squares, "kron": _Factors, "full": _Outers}[structure](sites, mean)
    examples = _over_data(classifier, data, sums, fisher, together.rank, progress)
    with threads_for_algebra(mean):
        together.add_up(sums.tensors())
        return sums.curvature(together.total(examples))


def _covered(classifier: Classifier, structure: Structure, layers: Layers) -> list[str]:
    """Return the names of the parameters that a fit covers."""
    if layers is None and structure == "full":
        layers = "last"
    elif layers is None and structure != "diag":
        layers = _affine_names(classifier.model)
    return parameter_names(classifier.model, layers)


def _affine_names(model: nn.Module) -> list[str]:
    """Return the names of the parameters of all plain Linear and Conv2d layers.

    Layers with a reparametrised weight or a weight that is shared with another module are excluded.
    """
    names: list[str] = []
    everywhere = model.named_parameters(remove_duplicate=False)
    owners = Counter(id(parameter) for _, parameter in everywhere)
    for prefix, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        is_affine = isinstance(module, AFFINE) and is_plain(module) and "weight" in own
        if is_affine and all(owners[id(parameter)] == 1 for parameter in own.values()):
            names += [f"{prefix}.{key}" if prefix else key for key in own]
    if not names:
        raise ValueError(
            f"{type(model).__name__} has no Linear or Conv2d layer whose weight is a plain, "
            "unshared parameter; use acnml.fit_swag, which covers any parameters, or "
            'structure="diag" for normalisation layers'
        )
    return names


# One pass over the data --------------------------------------------------------------------------


class _Sums(ABC):
    """What a structure adds up over the data, in double precision."""

    def __init__(self, sites: Sequence[Site], mean: Params) -> None:
        self.sites, self.mean = sites, mean

    @abstractmethod
    def add_last_layer(self, inputs: Tensor, outputs: Outputs, fisher: Fisher) -> None:
        """Add a batch, if the only site is the last layer.

        Its inputs a (B, d [+ 1]) end with a 1 for a layer with bias. Its outputs are the logits.
        """

    @abstractmethod
    def add_tape(self, tape: Tape, pull_backs: PullBacks) -> None:
        """Add a batch for any sites."""

    @abstractmethod
    def tensors(self) -> Iterable[Tensor]:
        """Return all sums, for several processes to add up in place."""

    @abstractmethod
    def curvature(self, data: int) -> Curvature:
        """Return the result, for so many training examples."""


def _over_data(
    classifier: Classifier,
    data: Iterable[Any],
    sums: _Sums,
    fisher: Fisher,
    rank: int,
    progress: bool | None,
) -> int:
    """Add every batch to the sums; return the number of examples.

    The model may run under autocast, but the sums do not. The rank of the process is part of the
    seed, because sampled labels must not be the same in all processes.
    """
    generator = torch.Generator().manual_seed(getattr(fisher, "seed", 0) + rank)
    names = names_of(sums.sites)
    layer = only_linear(classifier, names)

    def outputs(logits: Tensor, labels: Tensor | None) -> Outputs:
        if labels is not None:
            require_classes(labels, logits)
        return Outputs(logits.double().softmax(-1), labels, generator, classifier.temperature)

    def step(x: Inputs, labels: Tensor | None) -> None:
        found = None if layer is None else features(classifier, layer, x)
        if found is None:
            return step_all_layers(x, labels)
        with without_autocast(found.logits):
            sums.add_last_layer(_wide(found.inputs), outputs(found.logits, labels), fisher)

    def step_all_layers(x: Inputs, labels: Tensor | None) -> None:
        if layer is None and classifier.findings.is_due(names, x):
            require_understood(classifier, sums.sites, x)
        tape = record(classifier, sums.sites, x)
        require_tracked(tape)
        logits = tape.logits.detach()
        checks.require_finite(logits, "the model's logits are", "check the model and these inputs")
        with without_autocast(logits):
            vectors = fisher.vectors(outputs(logits, labels))
            sums.add_tape(tape, (tape.pulled_back(s) for s in vectors))

    return over_batches(classifier, data, step, "curvature", progress)


def _wide(tensor: Tensor) -> Tensor:
    """Convert to at least single precision; half precision has only two or three digits."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


# Squares: "diag" and "ekfac" ---------------------------------------------------------------------


@final
class _Squares(_Sums):
    """Squared gradients of every parameter, for affine layers in a basis U_A ⊗ U_G or as they are.

    The gradient of an example is a sum over positions, such as the pixels of a convolution, and is
    squared after this sum.
    """

    def __init__(self, sites: Sequence[Site], mean: Params, bases: Bases | None = None) -> None:
        super().__init__(sites, mean)
        self.bases = bases
        self.squares = {n: torch.zeros_like(t, dtype=torch.float64) for n, t in mean.items()}

    def add_last_layer(self, inputs: Tensor, outputs: Outputs, fisher: Fisher) -> None:
        (site,) = self.sites
        U_A, U_G = self._basis(site)
        squares = (fisher.squares(outputs, U_G) / outputs.temperature**2).to(inputs.dtype)
        self._add(site, squares.T @ _rotated(inputs, U_A) ** 2)

    def add_tape(self, tape: Tape, pull_backs: PullBacks) -> None:
        affine = {site: passed for site, passed in tape.passages.items() if site.is_affine}
        inputs = {
            site: _rotated(_wide(joined_inputs(site, passed)), self._basis(site)[0])
            for site, passed in affine.items()
        }
        for pulled in pull_backs:
            for site, deltas in pulled.items():
                if site in inputs:
                    joined = _rotated(_wide(joined_deltas(site, deltas)), self._basis(site)[1])
                    self._add(site, _squared(inputs[site], joined))
                else:
                    passages = [p._replace(received=_wide(p.received)) for p in tape.passages[site]]
                    grads = summed_scaling_gradients(site, passages, [_wide(d) for d in deltas])
                    for name, grad in grads.items():
                        self.squares[name] += (grad**2).sum(0)

    def tensors(self) -> Iterable[Tensor]:
        return self.squares.values()

    def curvature(self, data: int) -> Curvature:
        squares = {name: self.squares[name].to(tensor.dtype) for name, tensor in self.mean.items()}
        if self.bases is None:
            return DiagonalCurvature(self.mean, squares)
        layers = (site.layer for site in self.sites)
        factors = (EigenFactors(a, *self.bases[a], a.join(squares, self.mean)) for a in layers)
        return EkfacCurvature(self.mean, tuple(factors))

    def _basis(self, site: Site) -> tuple[Tensor, Tensor] | tuple[None, None]:
        return (None, None) if self.bases is None else self.bases[site.layer]

    def _add(self, site: Site, matrix: Tensor) -> None:
        """Add squares of an affine layer, ([groups,] out, in)."""
        for name, square in site.layer.split(matrix, self.mean).items():
            self.squares[name] += square


def _shared_bases(basis: KroneckerCurvature, mean: Params, together: processes.Group) -> Bases:
    """Return the eigenvectors of the factors of every layer, the same in all processes."""
    like = next(iter(mean.values()))  # a given basis may be of another device or type

    def eigenvectors(factor: Tensor) -> Tensor:
        found = torch.linalg.eigh(factor.double())[1].to(factor.dtype).contiguous()
        return together.share(found.to(like))

    return {f.layer: (eigenvectors(f.inputs), eigenvectors(f.gradients)) for f in basis.factors}


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
    n_examples = max(1, SQUARED_AT_ONCE // per_example)
    parts = zip(deltas.split(n_examples), inputs.split(n_examples), strict=True)
    return torch.stack([((d.mT @ a) ** 2).sum(0) for d, a in parts]).sum(0)


# Factors: "kron" ---------------------------------------------------------------------------------


@final
class _Factors(_Sums):
    """The sums of aaᵀ and of δδᵀ of every layer, over examples and positions."""

    def __init__(self, sites: Sequence[Site], mean: Params) -> None:
        super().__init__(sites, mean)
        self.inputs, self.gradients = dict[Site, Tensor](), dict[Site, Tensor]()
        for site in sites:
            *groups, out_size, in_size = (matrix := site.layer.join(mean, mean)).shape
            zeros = partial(matrix.new_zeros, dtype=torch.float64)
            self.inputs[site] = zeros(*groups, in_size, in_size)
            self.gradients[site] = zeros(*groups, out_size, out_size)
        self.positions = torch.zeros(len(sites), dtype=torch.int64, device="cpu")

    def add_last_layer(self, inputs: Tensor, outputs: Outputs, fisher: Fisher) -> None:
        (site,) = self.sites
        self._add_inputs(site, inputs.unsqueeze(1))
        self.gradients[site] += fisher.summed(outputs) / outputs.temperature**2

    def add_tape(self, tape: Tape, pull_backs: PullBacks) -> None:
        for site, passed in tape.passages.items():
            self._add_inputs(site, _wide(joined_inputs(site, passed)))
        for pulled in pull_backs:
            for site, deltas in pulled.items():
                self.gradients[site] += _second_moment(_wide(joined_deltas(site, deltas)))

    def _add_inputs(self, site: Site, inputs: Tensor) -> None:
        self.inputs[site] += _second_moment(inputs)
        self.positions[self.sites.index(site)] += inputs.shape[0] * inputs.shape[-2]

    def tensors(self) -> Iterable[Tensor]:
        return [*self.inputs.values(), *self.gradients.values(), self.positions]

    def curvature(self, data: int) -> Curvature:
        """Return A and G as `KroneckerCurvature` defines them."""
        positions, factors = tuple(self.positions.tolist()), []
        for site, n in zip(self.sites, positions, strict=True):
            A = self.inputs[site] / max(n, 1) * math.sqrt(data)
            G = self.gradients[site] / math.sqrt(data)
            dtype = self.mean[site.layer.weight].dtype
            factors.append(Factors(site.layer, A.to(dtype), G.to(dtype)))
        return KroneckerCurvature(self.mean, tuple(factors), data, positions)


def _second_moment(vectors: Tensor) -> Tensor:
    """Sum vvᵀ over examples and positions: (B, [groups,] positions, n) to ([groups,] n, n)."""
    rows = vectors.movedim(0, -3).flatten(-3, -2)
    return rows.mT @ rows


# Outer products: "full" --------------------------------------------------------------------------


@final
class _Outers(_Sums):
    """The sum of H ⊗ aaᵀ over inputs a of the last layer, with the Hessian H at its outputs."""

    def __init__(self, sites: Sequence[Site], mean: Params) -> None:
        super().__init__(sites, mean)
        like = next(iter(mean.values()))
        self.total = like.new_zeros(count(mean), count(mean), dtype=torch.float64)

    def add_last_layer(self, inputs: Tensor, outputs: Outputs, fisher: Fisher) -> None:
        hessians = fisher.hessians(outputs) / outputs.temperature**2
        blocks = _summed_blocks(hessians.to(inputs.dtype), inputs)
        matrix = blocks.shape[:2]  # of the layer: rows and columns in the order of [W b]
        columns = self._in_order(blocks.flatten(0, 1)).T
        self.total += self._in_order(columns.unflatten(1, matrix))

    def _in_order(self, matrices: Tensor) -> Tensor:
        """Flatten matrices [W b] (n, out, in) to (n, P), in the order of the mean."""
        return flatten(self.sites[0].layer.split(matrices, self.mean), self.mean)

    def add_tape(self, tape: Tape, pull_backs: PullBacks) -> None:
        raise ValueError(
            f'the logits are not the outputs of {self.sites[0].name!r} alone; structure="full" '
            "covers the last Linear layer alone: name it in `layers`"
        )

    def tensors(self) -> Iterable[Tensor]:
        return [self.total]

    def curvature(self, data: int) -> Curvature:
        dtype = next(iter(self.mean.values())).dtype
        return FullCurvature(self.mean, ((self.total + self.total.T) / 2).to(dtype))


def _summed_blocks(hessians: Tensor, inputs: Tensor) -> Tensor:
    """Return Σ H ⊗ aaᵀ over a batch, (K, d, K, d), for H (B, K, K) and a (B, d).

    H is symmetric, so the blocks of the class pairs c ≤ c' are enough. They are computed for one
    class c at a time: all at once, the weighted inputs H_cc' a would be K²Bd numbers.
    """
    (_, classes, _), size = hessians.shape, inputs.shape[1]
    blocks = inputs.new_empty(classes, size, classes, size)
    for c in range(classes):
        weighted = hessians[:, c, c:, None] * inputs.unsqueeze(1)  # (B, K - c, d)
        block = (weighted.flatten(1).T @ inputs).unflatten(0, (-1, size))
        blocks[c:, :, c] = block
        blocks[c, :, c:] = block.transpose(0, 1)
    return blocks
