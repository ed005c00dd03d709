"""Laplace posteriors with diagonal, Kronecker-factored or full covariance.

The precision of the posterior is the curvature of the training loss at the trained weights, summed
over all data, plus the precision τ of the prior N(0, I/τ). A fit takes one pass over the training
data, EK-FAC two. The network runs in eval mode, as in prediction.

In the code, θ̂ are the trained weights, a are the inputs of a layer, and δ are gradients at its
outputs. A `Site` is a layer whose parameters the posterior covers, and a `Tape` is a recorded
forward pass of the network.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, final

import torch
from torch import Tensor

from acnml._engine.gradients import (
    joined_deltas,
    joined_inputs,
    summed_scaling_gradients,
)
from acnml._engine.layers import AFFINE, OTHER_WAYS, SCALING, Site, find_sites, is_plain, names_of
from acnml._engine.recorder import Tape, record, require_tracked
from acnml._engine.trust import require_understood
from acnml._util import checks, processes
from acnml._util.batches import Inputs
from acnml._util.params import Params, count, flatten, widened
from acnml._util.selection import Parameters, last_linear, parameter_names
from acnml.classifier import Classifier, require_classifier
from acnml.fit.batches import over_batches, require_classes
from acnml.fit.curvature import (
    DiagonalCurvature,
    EigenFactors,
    EkfacCurvature,
    Factors,
    FullCurvature,
    KroneckerCurvature,
)
from acnml.fit.fisher import ExactFisher, Fisher, MonteCarloFisher
from acnml.head.features import Features, features, only_linear
from acnml.posteriors import Diagonal, Full, Kronecker
from acnml.typicality.density import Watch

# The results of backward passes: gradients of a batch at the outputs of every layer. There is one
# mapping for each vector that the Fisher estimator yields.
PullBacks: TypeAlias = Iterator[Mapping[Site, list[Tensor]]]

# Maximum size of a chunk of per-example weight gradients, in numbers.
SQUARED_AT_ONCE = 2**24

EXACT = ExactFisher()


def fit_diagonal_laplace(
    classifier: Classifier,
    loader: Iterable[Any],
    *,
    prior_precision: float = 1.0,
    parameters: Parameters = None,
    fisher: Fisher = EXACT,
    progress: bool | None = None,
) -> Diagonal:
    """Return N(θ̂, diag(h + τ)⁻¹), where h is the diagonal of the curvature summed over the data.

    For models in half precision or under autocast, see the note in `fit_kfac_laplace`.

    Args:
        classifier: the trained model.
        loader: the training data, complete and without augmentation.
        prior_precision: τ of the Gaussian prior N(0, I/τ).
        parameters: parameters, their names or submodules to cover; by default the whole model.
        fisher: `ExactFisher()`, `MonteCarloFisher(samples, seed)` or `EmpiricalFisher()`.
        progress: whether to show a progress bar; by default only in a terminal.

    >>> import acnml, torch
    >>> classifier = acnml.Classifier(torch.nn.Linear(4, 3))
    >>> acnml.fit_diagonal_laplace(classifier, torch.randn(100, 4), prior_precision=0.1)
    Diagonal(15 parameters: weight … bias)
    """
    curvature = diagonal_curvature(classifier, loader, parameters, fisher, progress)
    return curvature.posterior(prior_precision)


def fit_kfac_laplace(
    classifier: Classifier,
    loader: Iterable[Any],
    *,
    prior_precision: float = 1.0,
    parameters: Parameters = None,
    fisher: Fisher = EXACT,
    progress: bool | None = None,
) -> Kronecker:
    """Return N(θ̂, (H + τI)⁻¹) with a Kronecker-factored H for every Linear and Conv2d layer.

    The posterior is stored in at least single precision, but activations and gradients have the
    precision of the model. In half precision or under autocast they have two or three significant
    digits. If the posterior covers all layers and τ is small, this is not accurate enough. Then use
    `model.float()` without autocast, both to fit and to predict.

    For the factor-damped form of Ritter et al. (2018), use
    `kronecker_curvature(...).posterior(prior_precision, FactorBlock.damped)`.

    Args:
        classifier: the trained model.
        loader: the training data, complete and without augmentation.
        prior_precision: τ of the Gaussian prior N(0, I/τ).
        parameters: parameters, their names or submodules to cover. The default is all Linear and
            Conv2d layers, except those whose weight is reparametrised (`weight_norm`) or shared
            with another module, such as a head that is tied to an embedding.
        fisher: `ExactFisher()`, `MonteCarloFisher(samples, seed)` or `EmpiricalFisher()`.
        progress: whether to show a progress bar; by default only in a terminal.

    >>> import acnml, torch
    >>> classifier = acnml.Classifier(torch.nn.Linear(4, 3))
    >>> acnml.fit_kfac_laplace(classifier, torch.randn(100, 4), prior_precision=0.1)
    Kronecker(15 parameters: weight … bias)
    """
    curvature = kronecker_curvature(classifier, loader, parameters, fisher, progress)
    return curvature.posterior(prior_precision)


def fit_ekfac_laplace(
    classifier: Classifier,
    loader: Iterable[Any],
    *,
    prior_precision: float = 1.0,
    parameters: Parameters = None,
    fisher: Fisher = EXACT,
    progress: bool | None = None,
) -> Kronecker:
    """Return N(θ̂, (H + τI)⁻¹) with H = U diag(s) Uᵀ for every Linear and Conv2d layer.

    U is the eigenbasis of KFAC, and s are refitted eigenvalues; see `EkfacCurvature`. The posterior
    has the form and the cost of the one from `fit_kfac_laplace`, but every layer's H is closer to
    the exact one. The fit takes two passes over the data. Arguments are those of
    `fit_kfac_laplace`.

    >>> import acnml, torch
    >>> classifier = acnml.Classifier(torch.nn.Linear(4, 3))
    >>> acnml.fit_ekfac_laplace(classifier, torch.randn(100, 4), prior_precision=0.1)
    Kronecker(15 parameters: weight … bias)
    """
    curvature = ekfac_curvature(classifier, loader, parameters, fisher, progress)
    return curvature.posterior(prior_precision)


def fit_full_laplace(
    classifier: Classifier,
    loader: Iterable[Any],
    *,
    prior_precision: float = 1.0,
    parameters: Parameters = None,
    fisher: Fisher = EXACT,
    progress: bool | None = None,
) -> Full:
    """Return N(θ̂, (H + τI)⁻¹) with a dense H for the last layer; see `full_curvature`.

    >>> import acnml, torch
    >>> classifier = acnml.Classifier(torch.nn.Linear(4, 3))
    >>> acnml.fit_full_laplace(classifier, torch.randn(100, 4), prior_precision=0.1)
    Full(15 parameters: weight … bias)
    """
    curvature = full_curvature(classifier, loader, parameters, fisher, progress)
    return curvature.posterior(prior_precision)


@torch.inference_mode(False)
def diagonal_curvature(
    classifier: Classifier,
    loader: Iterable[Any],
    parameters: Parameters = None,
    fisher: Fisher = EXACT,
    progress: bool | None = None,
    watch: Watch | None = None,
    distributed: bool = False,
) -> DiagonalCurvature:
    """Sum the squared gradients of every parameter over the data; see `fit_diagonal_laplace`.

    `watch` sees features from other places of the network in the same pass; for a last layer only.
    `distributed` adds up the sums of all processes of `torch.distributed`, each of which passes its
    own part of the data.

    >>> import acnml, torch
    >>> classifier = acnml.Classifier(torch.nn.Linear(4, 3))
    >>> curvature = acnml.diagonal_curvature(classifier, torch.randn(100, 4))
    >>> [curvature.posterior(tau) for tau in (0.1, 1.0)]  # the data are read only once
    [Diagonal(15 parameters: weight … bias), Diagonal(15 parameters: weight … bias)]
    """
    require_classifier(classifier)
    together = processes.group(distributed)
    names = parameter_names(classifier.model, parameters)
    sites = find_sites(classifier.model, names, AFFINE + SCALING, OTHER_WAYS)
    mean = widened(classifier.copy_parameters(names))
    sums = {name: torch.zeros_like(tensor, dtype=torch.float64) for name, tensor in mean.items()}

    def add_last_layer(batch: LastLayerBatch) -> None:
        matrix = batch.draw_squares().T @ batch.inputs**2
        for name, square in sites[0].layer.split(matrix, mean).items():
            sums[name] += square

    def add_tape(tape: Tape, pull_backs: PullBacks) -> None:
        affine = {site: passed for site, passed in tape.passages.items() if site.is_affine}
        inputs = {site: _wide(joined_inputs(site, passed)) for site, passed in affine.items()}
        for pulled in pull_backs:
            for site, deltas in pulled.items():
                if site in inputs:
                    joined = _wide(joined_deltas(site, deltas))
                    squares = site.layer.split(_squared(inputs[site], joined), mean)
                else:
                    passages = [p._replace(received=_wide(p.received)) for p in tape.passages[site]]
                    grads = summed_scaling_gradients(site, passages, [_wide(d) for d in deltas])
                    squares = {name: (grad**2).sum(0) for name, grad in grads.items()}
                for name, square in squares.items():
                    sums[name] += square

    run = _Run(classifier, sites, fisher, together.rank, progress, watch)
    _over_data(run, loader, add_tape, add_last_layer)
    together.add_up(sums.values())
    return DiagonalCurvature(mean, {name: sums[name].to(mean[name].dtype) for name in names})


@torch.inference_mode(False)
def kronecker_curvature(
    classifier: Classifier,
    loader: Iterable[Any],
    parameters: Parameters = None,
    fisher: Fisher = EXACT,
    progress: bool | None = None,
    watch: Watch | None = None,
    distributed: bool = False,
) -> KroneckerCurvature:
    """Sum the two factors of every layer over the data; see `fit_kfac_laplace`.

    `watch` sees features from other places of the network in the same pass; for a last layer only.
    `distributed` adds up the sums of all processes of `torch.distributed`, each of which passes its
    own part of the data.

    >>> import acnml, torch
    >>> classifier = acnml.Classifier(torch.nn.Linear(4, 3))
    >>> curvature = acnml.kronecker_curvature(classifier, torch.randn(100, 4))
    >>> [curvature.posterior(tau) for tau in (0.1, 1.0)]  # the data are read only once
    [Kronecker(15 parameters: weight … bias), Kronecker(15 parameters: weight … bias)]
    """
    require_classifier(classifier)
    together = processes.group(distributed)
    chosen = _affine_names(classifier) if parameters is None else parameters
    names = parameter_names(classifier.model, chosen)
    way_out = f"KFAC covers Linear and Conv2d: {OTHER_WAYS}"
    sites = find_sites(classifier.model, names, AFFINE, way_out)
    mean = widened(classifier.copy_parameters(names))
    sums = {site: _FactorSums(site, mean) for site in sites}

    def add_last_layer(batch: LastLayerBatch) -> None:
        sums[sites[0]].add_inputs(batch.inputs.unsqueeze(1))
        sums[sites[0]].gradients += batch.draw_sum()

    def add_tape(tape: Tape, pull_backs: PullBacks) -> None:
        for site, passed in tape.passages.items():
            sums[site].add_inputs(_wide(joined_inputs(site, passed)))
        for pulled in pull_backs:
            for site, deltas in pulled.items():
                sums[site].add_gradients(_wide(joined_deltas(site, deltas)))

    run = _Run(classifier, sites, fisher, together.rank, progress, watch)
    data = together.total(_over_data(run, loader, add_tape, add_last_layer))
    for one in sums.values():
        together.add_up([one.inputs, one.gradients])
        one.positions = together.total(one.positions)
    factors = tuple(sums[site].factors(data) for site in sites)
    return KroneckerCurvature(mean, factors, data, tuple(sums[s].positions for s in sites))


@torch.inference_mode(False)
def ekfac_curvature(
    classifier: Classifier,
    loader: Iterable[Any],
    parameters: Parameters = None,
    fisher: Fisher = EXACT,
    progress: bool | None = None,
    watch: Watch | None = None,
    distributed: bool = False,
    basis: KroneckerCurvature | None = None,
) -> EkfacCurvature:
    """Return KFAC's eigenbasis, with eigenvalues refitted in a second pass; see `EkfacCurvature`.

    The gradient of an example is a sum over positions, such as the pixels of a convolution, and is
    squared after this sum. A last layer needs no backward pass. With `MonteCarloFisher` and data in
    a fixed order, both passes draw the same labels.

    The loader is iterated twice. `watch` sees features from other places of the network in the
    first pass; for a last layer only. `distributed` adds up the sums of all processes of
    `torch.distributed`, each of which passes its own part of the data.

    With a `basis`, the curvature of all data or of some, there is no first pass. It must be of the
    same network, and its parameters are covered, so `parameters` is left out. Curvatures of
    disjoint parts of the data add up if they have the same basis.

    >>> import acnml, torch
    >>> classifier = acnml.Classifier(torch.nn.Linear(4, 3))
    >>> curvature = acnml.ekfac_curvature(classifier, torch.randn(100, 4))
    >>> [curvature.posterior(tau) for tau in (0.1, 1.0)]  # without another pass over the data
    [Kronecker(15 parameters: weight … bias), Kronecker(15 parameters: weight … bias)]
    """
    require_classifier(classifier)
    together = processes.group(distributed)
    if basis is None:
        kfac = kronecker_curvature(
            classifier, loader, parameters, fisher, progress, watch, distributed
        )
    else:
        _require_basis(basis, classifier, parameters, watch)
        kfac = basis
    mean = widened(classifier.copy_parameters(kfac.mean))
    like = next(iter(mean.values()))  # a given basis may be of another device or type

    def shared(factor: Tensor) -> Tensor:
        return together.share(_basis(factor).to(like))

    bases = {f.layer: (shared(f.inputs), shared(f.gradients)) for f in kfac.factors}
    sites = find_sites(classifier.model, mean, AFFINE, OTHER_WAYS)
    sums = {site: torch.zeros_like(_matrix(site, mean), dtype=torch.float64) for site in sites}

    def add_last_layer(batch: LastLayerBatch) -> None:
        (site,) = sites
        U_A, U_G = bases[site.layer]
        sums[site] += batch.draw_squares_in(U_G).T @ (batch.inputs @ U_A) ** 2

    def add_tape(tape: Tape, pull_backs: PullBacks) -> None:
        inputs = {
            site: _wide(joined_inputs(site, passed)) @ bases[site.layer][0]
            for site, passed in tape.passages.items()
        }
        for pulled in pull_backs:
            for site, deltas in pulled.items():
                rotated = _wide(joined_deltas(site, deltas)) @ bases[site.layer][1]
                sums[site] += _squared(inputs[site], rotated)

    run = _Run(classifier, sites, fisher, together.rank, progress, None)
    _over_data(run, loader, add_tape, add_last_layer)
    together.add_up(sums.values())
    factors = (
        EigenFactors(site.layer, *bases[site.layer], sums[site].to(_matrix(site, mean).dtype))
        for site in sites
    )
    return EkfacCurvature(mean, tuple(factors))


def _require_basis(
    basis: KroneckerCurvature, classifier: Classifier, parameters: Parameters, watch: Watch | None
) -> None:
    """Raise an error if a basis is not of this network, or if another argument contradicts it."""
    if not isinstance(basis, KroneckerCurvature):
        kind = type(basis).__name__
        raise TypeError(f"basis must be from kronecker_curvature, got a {kind}")
    if watch is not None:
        raise ValueError("with a `basis` there is no first pass to watch: leave out one of them")
    if parameters is not None:
        raise ValueError(
            "with a `basis`, the parameters of the basis are covered: leave out `parameters`"
        )
    own = classifier.parameters
    checks.require_fits(basis.mean, own)
    for name, tensor in basis.mean.items():
        if not torch.equal(own[name].to(tensor), tensor):
            raise ValueError(
                f"the basis was fitted at other weights, first in {name!r}: fit it again with "
                "kronecker_curvature and this classifier"
            )


@torch.inference_mode(False)
def full_curvature(
    classifier: Classifier,
    loader: Iterable[Any],
    parameters: Parameters = None,
    fisher: Fisher = EXACT,
    progress: bool | None = None,
    watch: Watch | None = None,
    distributed: bool = False,
) -> FullCurvature:
    """Sum the full curvature of the last layer over the data.

    For one input it is H ⊗ aaᵀ, with the layer's input a, the Hessian H = (diag(p) - ppᵀ) / T² at
    the layer's outputs and the classifier's temperature T. Memory and time grow with the square of
    the number of parameters.

    Args:
        classifier: the trained model.
        loader: the training data, complete and without augmentation.
        parameters: the last layer; by default `[acnml.last_linear(model)]`.
        fisher: `ExactFisher()`, `MonteCarloFisher(samples, seed)` or `EmpiricalFisher()`.
        progress: whether to show a progress bar; by default only in a terminal.
        watch: sees features from other places of the network in the same pass.
        distributed: add up the sums of all processes of `torch.distributed`, each of which passes
            its own part of the data.

    >>> import acnml, torch
    >>> classifier = acnml.Classifier(torch.nn.Linear(4, 3))
    >>> curvature = acnml.full_curvature(classifier, torch.randn(100, 4))
    >>> [curvature.posterior(tau) for tau in (0.1, 1.0)]  # the data are read only once
    [Full(15 parameters: weight … bias), Full(15 parameters: weight … bias)]
    """
    require_classifier(classifier)
    together = processes.group(distributed)
    chosen = [last_linear(classifier.model)] if parameters is None else parameters
    names = parameter_names(classifier.model, chosen)
    remedy = "full_curvature covers a last Linear layer alone: name it in `parameters`"
    sites = find_sites(classifier.model, names, AFFINE, remedy)
    mean = widened(classifier.copy_parameters(names))
    total = torch.zeros(count(mean), count(mean), dtype=torch.float64, device=classifier.device)

    def add_last_layer(batch: LastLayerBatch) -> None:
        out_size, in_size = sites[0].layer.join(mean, mean).shape
        blocks = _summed_blocks(batch.draw_hessians(), batch.inputs)
        square = blocks.reshape(out_size * in_size, out_size, in_size)
        columns = flatten(sites[0].layer.split(square, mean), mean).T
        rows = flatten(sites[0].layer.split(columns.unflatten(1, (out_size, in_size)), mean), mean)
        total.add_(rows)

    def add_tape(tape: Tape, pull_backs: PullBacks) -> None:
        raise ValueError(f"the logits are not the outputs of {sites[0].name!r} alone; {remedy}")

    run = _Run(classifier, sites, fisher, together.rank, progress, watch)
    _over_data(run, loader, add_tape, add_last_layer)
    together.add_up([total])
    dtype = next(iter(mean.values())).dtype
    return FullCurvature(mean, ((total + total.T) / 2).to(dtype))


@final
@dataclass(frozen=True, eq=False)
class LastLayerBatch:
    """The inputs and outputs of the last layer for a batch, with the curvature at its outputs.

    Every call of a method draws labels anew if the Fisher samples them, and advances the generator.
    """

    inputs: Tensor  # a (B, d [+ 1]); ends with a 1 for a layer with bias
    probs: Tensor  # (B, K), at the classifier's temperature, in double precision
    labels: Tensor | None
    temperature: float
    fisher: Fisher
    generator: torch.Generator

    def draw_sum(self) -> Tensor:
        """Return the curvature at the layer's outputs, summed over the batch: (K, K) in float64."""
        summed = self.fisher.summed(self.probs, self.labels, self.generator)
        return summed / self.temperature**2

    def draw_squares(self) -> Tensor:
        """Return the diagonal of the curvature at the layer's outputs: (B, K)."""
        squares = self.fisher.squares(self.probs, self.labels, self.generator)
        return (squares / self.temperature**2).to(self.inputs.dtype)

    def draw_squares_in(self, basis: Tensor) -> Tensor:
        """Return the diagonal of the curvature at the layer's outputs, in another basis: (B, K)."""
        squares = self.fisher.squares_in(basis, self.probs, self.labels, self.generator)
        return (squares / self.temperature**2).to(self.inputs.dtype)

    def draw_hessians(self) -> Tensor:
        """Return the curvature at the layer's outputs for every input: (B, K, K)."""
        hessians = self.fisher.hessians(self.probs, self.labels, self.generator)
        return (hessians / self.temperature**2).to(self.inputs.dtype)


@final
@dataclass(frozen=True, eq=False)
class _Run:
    """What a pass over the data needs, whatever it sums up."""

    classifier: Classifier
    sites: list[Site]
    fisher: Fisher
    rank: int  # of the process; sampled labels must not be the same in all processes
    progress: bool | None
    watch: Watch | None


def _over_data(
    run: _Run,
    loader: Iterable[Any],
    add_tape: Callable[[Tape, PullBacks], None],
    add_last_layer: Callable[[LastLayerBatch], None],
) -> int:
    """Call one of two functions for every batch; return the number of examples.

    If `sites` is only the last layer, one forward pass is enough, and `add_last_layer` is called.
    Otherwise `add_tape` is called with a recorded forward pass and an iterator of backward passes.
    The model may run under autocast, but the sums do not.
    """
    classifier, sites, fisher, watch = run.classifier, run.sites, run.fisher, run.watch
    if not isinstance(fisher, Fisher):
        raise TypeError(f"fisher must be one such as ExactFisher(), got {fisher!r}")
    seed = fisher.seed if isinstance(fisher, MonteCarloFisher) else 0
    generator = torch.Generator().manual_seed(seed + run.rank)
    names = names_of(sites)
    layer = only_linear(classifier, names)

    def step_last_layer(found: Features, labels: Tensor | None) -> None:
        if labels is not None:
            require_classes(labels, found.logits)
        with torch.autocast(found.logits.device.type, enabled=False):
            probs, inputs = found.logits.double().softmax(-1), _wide(found.inputs)
            temperature = classifier.temperature
            add_last_layer(LastLayerBatch(inputs, probs, labels, temperature, fisher, generator))

    def step_tape(x: Inputs, labels: Tensor | None) -> None:
        tape = record(classifier, sites, x)
        require_tracked(tape)
        logits = tape.logits
        checks.require_finite(logits, "the model's logits are", "check the model and these inputs")
        if labels is not None:
            require_classes(labels, logits)
        with torch.autocast(logits.device.type, enabled=False):
            probs = logits.detach().double().softmax(-1)
            cotangents = fisher.cotangents(probs, labels, generator)
            add_tape(tape, (tape.pulled_back(cotangent) for cotangent in cotangents))

    def step(x: Inputs, labels: Tensor | None) -> None:
        if layer is None and classifier.findings.is_due(names, x):
            require_understood(classifier, sites, x)
        observer = None if watch is None else watch.observer
        found = None if layer is None else features(classifier, layer, x, observer=observer)
        if found is not None:
            step_last_layer(found, labels)
        elif watch is None:
            step_tape(x, labels)
        else:
            raise ValueError("only the fit of a last layer can be watched; leave out `watch`")
        if watch is not None and found is not None and found.observed is not None:
            watch.tell(found.observed)

    return over_batches(classifier, loader, step, "curvature", run.progress)


def _wide(tensor: Tensor) -> Tensor:
    """Convert to at least single precision; half precision has only two or three digits."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


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


def _matrix(site: Site, params: Params) -> Tensor:
    """Return [W b] of an affine layer, ([groups,] out, in)."""
    return site.layer.join(params, params)


def _basis(matrix: Tensor) -> Tensor:
    """Return the eigenvectors of a symmetric matrix, or of one for each group."""
    return torch.linalg.eigh(matrix.double())[1].to(matrix.dtype).contiguous()


@final
class _FactorSums:
    """Running sums of one layer's aaᵀ and δδᵀ, in double precision."""

    def __init__(self, site: Site, mean: Params) -> None:
        matrix = site.layer.join(mean, mean)
        *groups, out_size, in_size = matrix.shape
        self.layer, self.dtype = site.layer, matrix.dtype
        self.inputs = matrix.new_zeros(*groups, in_size, in_size, dtype=torch.float64)
        self.gradients = matrix.new_zeros(*groups, out_size, out_size, dtype=torch.float64)
        self.positions = 0

    def add_inputs(self, inputs: Tensor) -> None:
        self.inputs += _second_moment(inputs)
        self.positions += inputs.shape[0] * inputs.shape[-2]

    def add_gradients(self, grads: Tensor) -> None:
        self.gradients += _second_moment(grads)

    def factors(self, data: int) -> Factors:
        """Return A and G as `KroneckerCurvature` defines them."""
        A = self.inputs / max(self.positions, 1) * math.sqrt(data)
        return Factors(
            self.layer, A.to(self.dtype), (self.gradients / math.sqrt(data)).to(self.dtype)
        )


def _second_moment(vectors: Tensor) -> Tensor:
    """Sum vvᵀ over examples and positions: (B, [groups,] positions, n) to ([groups,] n, n)."""
    rows = vectors.movedim(0, -3).flatten(-3, -2)
    return rows.mT @ rows


def _affine_names(classifier: Classifier) -> list[str]:
    """Return the names of the parameters of all plain Linear and Conv2d layers.

    Layers with a reparametrised weight or a weight that is shared with another module are excluded.
    """
    model, names = classifier.model, set()
    everywhere = model.named_parameters(remove_duplicate=False)
    owners = Counter(id(parameter) for _, parameter in everywhere)
    for prefix, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        is_affine = isinstance(module, AFFINE) and is_plain(module) and "weight" in own
        if is_affine and all(owners[id(parameter)] == 1 for parameter in own.values()):
            names |= {f"{prefix}.{key}" if prefix else key for key in own}
    if not names:
        raise ValueError(
            "KFAC covers Linear and Conv2d layers whose weight is a plain, unshared parameter, "
            f"but {type(model).__name__} has none; use fit_swag, which covers any parameters, or "
            "fit_diagonal_laplace for normalisation layers"
        )
    return [name for name in classifier.parameters if name in names]
