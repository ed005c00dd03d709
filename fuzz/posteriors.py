"""Generated posteriors: every kind, over all layers, the last one, or some; wide and narrow."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import Tensor, nn

from acnml import Classifier, Diagonal, Full, Kronecker, LowRank, fit_laplace
from acnml._util.batches import size
from acnml._util.params import Params
from acnml.posteriors import Affine, EigenBlock, Posterior
from fuzz.networks import Network
from fuzz.oracles import in_double

LARGEST_FULL = 150  # parameters of a dense covariance


def affine_layers(model: nn.Module) -> list[Affine]:
    """Return all Linear and Conv2d layers that own their weights."""
    own = dict(model.named_parameters())
    layers = []
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        if isinstance(module, (nn.Linear, nn.Conv2d)) and f"{prefix}weight" in own:
            bias = None if module.bias is None else f"{prefix}bias"
            layers.append(Affine(f"{prefix}weight", bias, getattr(module, "groups", 1)))
    return layers


def _spd(*shape: int) -> Tensor:
    """Return a symmetric positive definite matrix, or a batch of them."""
    root = torch.randn(*shape, shape[-1], dtype=torch.float64)
    return root @ root.mT / shape[-1] + 0.3 * torch.eye(shape[-1], dtype=torch.float64)


def _diagonal(mean: Params, _: list[Affine]) -> Posterior:
    return Diagonal(mean, {n: torch.randn_like(t).exp() for n, t in mean.items()})


def _low_rank(mean: Params, _: list[Affine]) -> Posterior:
    directions = {n: torch.randn(2, *t.shape, dtype=t.dtype) for n, t in mean.items()}
    return LowRank(mean, {n: torch.rand_like(t) for n, t in mean.items()}, directions)


def _full(mean: Params, _: list[Affine]) -> Posterior:
    return Full(mean, _spd(sum(t.numel() for t in mean.values())))


def _kronecker(
    block: Callable[..., EigenBlock],
) -> Callable[[Params, list[Affine]], Posterior]:
    def build(mean: Params, layers: list[Affine]) -> Posterior:
        blocks = []
        for layer in layers:
            *groups, outs, ins = layer.join(mean, mean).shape
            blocks.append(block(layer, _spd(*groups, ins), _spd(*groups, outs), 1.5))
        return Kronecker({n: mean[n] for layer in layers for n in layer.names}, tuple(blocks))

    return build


def _ekfac(net: Network, names: list[str], precision: float) -> Posterior:
    """Fit a posterior to the inputs of a network, in double precision."""
    model, inputs = in_double(net)
    data = [(inputs, torch.zeros(size(inputs), dtype=torch.long))]
    return fit_laplace(
        model, data, structure="ekfac", layers=names, prior_precision=precision, progress=False
    )


KINDS: dict[str, Callable[[Params, list[Affine]], Posterior]] = {
    "diagonal": _diagonal,
    "low_rank": _low_rank,
    "full": _full,
    "factors": _kronecker(EigenBlock.damped),
    "eigen": _kronecker(EigenBlock.from_factors),
}


def posterior(rng: random.Random, net: Network) -> tuple[str, Posterior]:
    """Generate a posterior in double precision; return what it is called in a report, and it."""
    kind, cover = rng.choice([*KINDS, "ekfac"]), rng.choice(["all", "last", "last", "some"])
    model, layers = net.model, affine_layers(net.model)
    if cover == "last":
        layers = layers[-1:]
    elif cover == "some":
        layers = rng.sample(layers, rng.randrange(1, len(layers) + 1))
    names = [name for layer in layers for name in layer.names]
    if cover == "all" and kind not in ("factors", "eigen", "ekfac"):
        names = [name for name, _ in model.named_parameters()]
    mean = {n: t.double() for n, t in Classifier(model).copy_parameters(names).items()}
    if kind == "full" and sum(t.numel() for t in mean.values()) > LARGEST_FULL:
        kind = "diagonal"
    torch.manual_seed(rng.randrange(2**31))
    if kind == "ekfac":
        precision = 10 ** rng.uniform(-1.5, 6)
        try:
            return f"ekfac over {cover}, τ={precision:.2g}", _ekfac(net, names, precision)
        except ValueError:  # `fuzz/family.py` looks at what a fit refuses
            kind = "eigen"
    variance = 10 ** rng.uniform(-6, 1.5)
    return f"{kind} over {cover} ×{variance:.2g}", KINDS[kind](mean, layers).scaled(variance)
