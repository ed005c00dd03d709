"""Bayes by Backprop: a mean-field Gaussian posterior trained by stochastic gradients.

Minimised, per datum, is the negative evidence lower bound (Blundell et al. 2015)

    E_q[-log p_θ(y|x)] + KL(q ‖ N(0, σ₀² I)) / n,     q = N(μ, diag(s)),

where one reparameterised sample a step estimates the expectation and the divergence is exact.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional

from acnml._engine.gradients import require_understood
from acnml._engine.layers import AFFINE, SCALING, Site, find_sites
from acnml._engine.recorder import record, require_tracked
from acnml._util import checks
from acnml._util.batches import Inputs, take
from acnml._util.params import Params, normal_like, widened, zip_with
from acnml._util.selection import Parameters, parameter_names
from acnml.classifier import Classifier, Hook, require_classifier
from acnml.fitting.batches import count_data, cross_entropy, once, over_batches
from acnml.posteriors import Diagonal

# Where training starts: standard deviations as a share of the prior's, small enough that the first
# steps see the mean through the noise.
INITIAL_STD = 0.1


@torch.inference_mode(False)
def fit_bayes_by_backprop(
    classifier: Classifier,
    loader: Iterable[Any],
    epochs: int = 20,
    prior_std: float = 0.1,
    learning_rate: float = 1e-3,
    seed: int = 0,
    parameters: Parameters = None,
    progress: bool | None = None,
) -> Diagonal:
    """Train a mean-field posterior by Adam, starting at the classifier's weights.

    Adam moves the logarithm of a variance by about the learning rate a step, and it starts at a
    hundredth of the prior's: a short fit ends with variances that training has only begun to widen.
    Look at `posterior.var` and train on if they still grow.

    The network runs in eval mode: dropout is off and batch norm keeps its statistics. Weights that
    the posterior does not cover stay as they are.

    Args:
        classifier: the model, trained or as initialised.
        loader: the training data, with labels; gone through once more to count it.
        epochs: passes over the data.
        prior_std: σ₀ of the prior N(0, σ₀² I); the paper takes 0.1.
        learning_rate: of Adam.
        seed: of the noise.
        parameters: parameters, their names or submodules to cover; all of the model's by default.
        progress: show a progress bar; by default in a terminal only.
    """
    require_classifier(classifier)
    checks.require_positive(prior_std, "prior_std")
    names = parameter_names(classifier.model, parameters)
    sites = find_sites(classifier.model, names, AFFINE + SCALING, "leave it out of `parameters`")
    data = count_data(loader)
    generator = torch.Generator().manual_seed(seed)
    mean = widened(classifier.copy_parameters(names))
    field = _MeanField(mean, prior_std, data, learning_rate)

    check_once = once(lambda x: _require_trainable(classifier, sites, x))

    def step(x: Inputs, labels: Tensor | None) -> None:
        check_once(x)
        var = field.variances()
        logits = local_reparameterised(classifier, sites, field.mean, var, x, generator)
        field.step(cross_entropy(logits, labels), var)

    for epoch in range(epochs):
        over_batches(classifier, loader, step, f"epoch {epoch + 1}/{epochs}", progress)
    return field.posterior()


def _require_trainable(classifier: Classifier, sites: list[Site], x: Inputs) -> None:
    """Refuse layers on which the divergence alone would act, or noise be put where none belongs."""
    require_understood(classifier, sites, x)
    require_tracked(record(classifier, sites, take(x, slice(0, 1))))


def local_reparameterised(
    classifier: Classifier,
    sites: list[Site],
    mean: Params,
    var: Params,
    x: Inputs,
    generator: torch.Generator,
) -> Tensor:
    """Return logits with noise drawn at the outputs of affine layers (Kingma et al. 2015).

    For y = Wa with independent weights, y ~ N(Ma, S a²): every example has noise of its own, at the
    price of one more matrix product. Over several positions (convolutions, sequences) the noise is
    drawn independently at each, as is usual: every output is distributed as it should be, but that
    positions share their weights is not seen. Scaling layers are sampled plainly.
    """
    scaling = [name for site in sites if not site.is_affine for name in site.layer.names]
    sampled = reparameterised(
        {n: mean[n] for n in scaling}, {n: var[n] for n in scaling}, generator
    )
    hooks = {site.name: _noisy(site, var, generator) for site in sites if site.is_affine}
    with classifier.hooked(hooks):
        return classifier.logits(x, {**mean, **sampled})


def reparameterised(mean: Params, var: Params, generator: torch.Generator) -> Params:
    """Return one draw μ + √s ⊙ ε of the weights, for all examples of a batch."""
    noise = {name: normal_like(tensor, 1, generator)[0] for name, tensor in mean.items()}
    return zip_with(lambda m, s, e: m + s.sqrt() * e, mean, var, noise)


def _noisy(site: Site, var: Params, generator: torch.Generator) -> Hook:
    weight_var = var[site.layer.weight]
    bias_var = None if site.layer.bias is None else var[site.layer.bias]

    def hook(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        squares = args[0].to(weight_var.dtype).square()
        if isinstance(module, nn.Conv2d):
            output_var = module._conv_forward(squares, weight_var, bias_var)
        else:
            output_var = functional.linear(squares, weight_var, bias_var)
        # The root has no derivative at 0, where an input is all zeros.
        std = (output_var + torch.finfo(output_var.dtype).tiny).sqrt().to(output.dtype)
        return torch.addcmul(output, std, normal_like(output.detach(), 1, generator)[0])

    return hook


@final
class _MeanField:
    """μ and log s under Adam, with the divergence's gradient written out.

    KL = ½ Σ (s + μ²)/σ₀² - log s + const has the gradients μ/σ₀² by μ and ½(s/σ₀² - 1) by log s: a
    few passes over the weights, where autograd would take a dozen.
    """

    def __init__(self, mean: Params, prior_std: float, data: int, learning_rate: float) -> None:
        self.mean = {name: tensor.requires_grad_() for name, tensor in mean.items()}
        initial = 2 * math.log(INITIAL_STD * prior_std)
        self.log_var = {n: torch.full_like(t, initial, requires_grad=True) for n, t in mean.items()}
        self.prior_precision_per_datum, self.data = 1 / (prior_std**2 * data), data
        leaves = [*self.mean.values(), *self.log_var.values()]
        self.optimizer = torch.optim.Adam(leaves, lr=learning_rate, fused=True)

    @torch.no_grad()
    def variances(self) -> Params:
        """Return s as leaves to differentiate by."""
        return {name: log_var.exp().requires_grad_() for name, log_var in self.log_var.items()}

    def step(self, loss: Tensor, var: Params) -> None:
        """Take a step down the bound, of which `loss` is the likelihood's part."""
        leaves = [*self.mean.values(), *var.values()]
        grads = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
        by_mean, by_var = grads[: len(var)], grads[len(var) :]
        for name, mean_grad, var_grad in zip(var, by_mean, by_var, strict=True):
            self._add_divergence(name, mean_grad, var_grad, var[name])
        self.optimizer.step()

    @torch.no_grad()
    def _add_divergence(self, name: str, mean_grad: Tensor, var_grad: Tensor, var: Tensor) -> None:
        precision = self.prior_precision_per_datum
        self.mean[name].grad = mean_grad.add_(self.mean[name], alpha=precision)
        by_log_var = var_grad.add_(precision / 2).mul_(var)
        self.log_var[name].grad = by_log_var.sub_(1 / (2 * self.data))

    def posterior(self) -> Diagonal:
        """Return N(μ, diag(s))."""
        mean = {name: tensor.detach() for name, tensor in self.mean.items()}
        return Diagonal(
            mean, {name: log_var.detach().exp() for name, log_var in self.log_var.items()}
        )
