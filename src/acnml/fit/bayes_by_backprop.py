"""Bayes by Backprop: a mean-field Gaussian posterior trained by stochastic gradients.

The objective per training example is the negative evidence lower bound (Blundell et al. 2015)

    E_q[-log p_θ(y|x)] + KL(q ‖ N(0, σ₀² I)) / n,     q = N(μ, diag(s)).

Each step estimates the expectation with one reparameterised sample. The KL divergence is exact.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, final

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional

from acnml._engine.recorder import (
    AFFINE,
    OTHER_WAYS,
    SCALING,
    Site,
    find_sites,
    record,
    require_tracked,
)
from acnml._engine.trust import check
from acnml._util import checks
from acnml._util.arrays import as_tensor
from acnml._util.batches import Inputs, as_inputs, take
from acnml._util.params import Params, normal_like, widened
from acnml._util.structure import Layers, parameter_names
from acnml.classifier import Classifier, Hook, as_classifier
from acnml.fit.batches import (
    batch_sizes,
    checked_labels,
    cross_entropy,
    over_batches,
    require_loader,
)
from acnml.posteriors import Diagonal

# Initial standard deviation as a fraction of the prior's. It is small so that the noise does not
# hide the trained weights in the first steps.
INITIAL_STD = 0.1

# Names and prefixes in a state dict. The prefix comes first because names may contain "/".
MEAN, LOG_VAR, STEPS, GENERATOR = "mean/", "log_var/", "steps", "generator"
MOMENTS = ("exp_avg", "exp_avg_sq")  # Adam's names


def fit_bayes_by_backprop(
    model: nn.Module | Classifier,
    loader: Iterable[Any],
    *,
    epochs: int = 20,
    prior_std: float = 0.1,
    learning_rate: float = 1e-3,
    variance_learning_rate: float | None = None,
    seed: int = 0,
    layers: Layers = None,
    progress: bool | None = None,
) -> Diagonal:
    """Train a mean-field posterior by Adam, starting at the model's weights.

    Adam changes the logarithm of a variance by about the learning rate per step, and the variances
    start at a hundredth of the prior's. They may still be growing at the end of a short fit. To
    check this, compare `posterior.var` after different numbers of epochs. A larger
    `variance_learning_rate` makes them converge faster.

    Weights that the posterior does not cover do not change. To interrupt and resume training, or to
    write your own loop, use `BayesByBackprop`.

    Args:
        model: the network, trained or freshly initialised.
        loader: the training data, with labels. One extra pass counts the examples.
        epochs: number of passes over the data.
        prior_std: see `BayesByBackprop`, also for the following arguments.
        learning_rate: learning rate of Adam.
        variance_learning_rate: learning rate of Adam for the log-variances.
        seed: random seed of the noise.
        layers: layers, parameters or their names to cover; by default the whole model.
        progress: whether to show a progress bar; by default only in a terminal.

    >>> data = [(torch.randn(20, 4), torch.arange(20) % 3) for _ in range(5)]
    >>> acnml.fit_bayes_by_backprop(torch.nn.Linear(4, 3), data, epochs=2)
    Diagonal(15 parameters: weight … bias)
    """
    require_loader(loader, "Bayes by Backprop")
    epochs = checks.require_integer(epochs, "epochs", least=1)
    classifier = as_classifier(model)
    settings = prior_std, learning_rate, variance_learning_rate, seed, layers
    trainer = BayesByBackprop(classifier, sum(batch_sizes(loader)), *settings)
    with torch.inference_mode(False):
        for epoch in range(epochs):
            description = f"epoch {epoch + 1}/{epochs}"
            over_batches(classifier, loader, trainer._step, description, progress)
    return trainer.posterior()


@final
class BayesByBackprop:
    """Train a mean-field posterior N(μ, diag(s)) by Adam, one batch at a time.

    `fit_bayes_by_backprop` is a loop around this class. Use the class to write your own loop, or to
    store the state of training and resume it. A resumed run is bitwise equal to an uninterrupted
    one if it gets the same settings and the same batches.

    The network runs in eval mode: dropout is off and batch norm uses its stored statistics. The
    user's model does not change.

    Args:
        model: the network, trained or freshly initialised. Its weights are the initial μ.
        data: the number n of training examples, which determines the weight of the prior.
        prior_std: σ₀ of the prior N(0, σ₀² I); the ACNML paper uses 0.1.
        learning_rate: learning rate of Adam for μ. With 0, μ stays at the model's weights and only
            the variances are trained.
        variance_learning_rate: learning rate of Adam for log s; by default the same as
            `learning_rate`.
        seed: random seed of the noise.
        layers: layers, parameters or their names to cover; by default the whole model.

    >>> x, labels = torch.randn(8, 4), torch.arange(8) % 3
    >>> trainer = BayesByBackprop(nn.Linear(4, 3), data=8)
    >>> for _ in range(5):
    ...     trainer.step(x, labels)
    >>> trainer.steps
    5
    >>> trainer.posterior()
    Diagonal(15 parameters: weight … bias)

    Store the state with `safetensors.torch.save_file(trainer.state_dict(), path)`, and resume with
    `trainer.load_state_dict(safetensors.torch.load_file(path))`.
    """

    @torch.inference_mode(False)
    def __init__(
        self,
        model: nn.Module | Classifier,
        data: int,
        prior_std: float = 0.1,
        learning_rate: float = 1e-3,
        variance_learning_rate: float | None = None,
        seed: int = 0,
        layers: Layers = None,
    ) -> None:
        self._classifier = classifier = as_classifier(model)
        names = parameter_names(classifier.model, layers)
        self._sites = find_sites(classifier.model, names, AFFINE + SCALING, OTHER_WAYS)
        self._is_tracked = False  # whether gradients were found to reach the layers
        self._data = checks.require_positive(data, "data, the number of training examples,")
        variance = checks.require_positive(prior_std, "prior_std") ** 2
        self._precision = 1 / (variance * data)  # of the prior, per example
        mean = widened(classifier.copy_parameters(names))
        log_var = 2 * math.log(INITIAL_STD * prior_std)
        self._mean = {name: tensor.requires_grad_() for name, tensor in mean.items()}
        self._log_var = {
            name: torch.full_like(tensor, log_var, requires_grad=True)
            for name, tensor in mean.items()
        }
        variance_rate = learning_rate if variance_learning_rate is None else variance_learning_rate
        rates = ((self._mean, learning_rate), (self._log_var, variance_rate))
        groups = [{"params": list(leaves.values()), "lr": rate} for leaves, rate in rates]
        self._optimizer = torch.optim.Adam(groups, fused=True)
        self._generator = Generator().manual_seed(checks.require_integer(seed, "seed"))
        self.steps = 0  # taken so far, including those before resuming

    @torch.inference_mode(False)
    def step(self, x: Inputs, labels: Tensor) -> None:
        """Take one step on a batch of inputs and class indices (B,)."""
        x = self._classifier.prepare(as_inputs(x))
        with torch.enable_grad(), self._classifier.threads_for(x):
            self._step(x, checked_labels(as_tensor(labels, "labels"), x))

    def _step(self, x: Inputs, labels: Tensor | None) -> None:
        """Take one step on inputs and labels that are already checked."""
        classifier, sites = self._classifier, self._sites
        if classifier.findings.is_due(self._mean, x):
            check(classifier, x, sites)
        if not self._is_tracked:
            require_tracked(record(classifier, sites, take(x, slice(0, 1))))
            self._is_tracked = True
        with torch.no_grad():
            var = {name: log_var.exp().requires_grad_() for name, log_var in self._log_var.items()}
        logits = local_reparameterised(classifier, sites, self._mean, var, x, self._generator)
        self._descend(cross_entropy(logits, labels), var)

    def _descend(self, loss: Tensor, var: Params) -> None:
        """Take a step on the objective, given its likelihood term `loss`.

        KL = ½ Σ (s + μ²)/σ₀² - log s + const has the gradients μ/σ₀² with respect to μ and
        ½(s/σ₀² - 1) with respect to log s. This takes fewer passes over the weights than autograd.
        """
        leaves = [*self._mean.values(), *var.values()]
        grads = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
        with torch.no_grad():
            for name, by_mean, by_var in zip(var, grads, grads[len(var) :], strict=False):
                self._mean[name].grad = by_mean.add_(self._mean[name], alpha=self._precision)
                by_log_var = by_var.add_(self._precision / 2).mul_(var[name])
                self._log_var[name].grad = by_log_var.sub_(1 / (2 * self._data))
        self._optimizer.step()
        self.steps += 1

    @torch.inference_mode(False)
    def posterior(self) -> Diagonal:
        """Return the current N(μ, diag(s)); further steps do not change it."""
        mean = {name: tensor.detach().clone() for name, tensor in self._mean.items()}
        return Diagonal(mean, {name: t.detach().exp() for name, t in self._log_var.items()})

    def state_dict(self) -> Params:
        """Return a copy of the state of training, as a flat dict of tensors.

        It contains μ, log s, Adam's moments of both, the number of steps and the state of the noise
        generator. It does not contain the arguments of the constructor.
        """
        state: Params = {STEPS: torch.tensor(self.steps, device="cpu")}
        for name, leaf in self._leaves().items():
            adam = self._optimizer.state.get(leaf, {})
            state[name] = leaf.detach().clone()
            for moment in MOMENTS:  # zero before the first step
                state[f"{moment}/{name}"] = adam.get(moment, torch.zeros_like(leaf)).clone()
        return {**state, GENERATOR: self._generator.get_state()}

    @torch.inference_mode(False)
    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a state that `state_dict` returned for the same model and layers."""
        own = self.state_dict()
        checks.require_same_names(state, own, "the state", "this trainer's state")
        checks.require_fits(dict(state), own)
        self._generator.set_state(state[GENERATOR].cpu())
        self.steps = int(state[STEPS])
        for name, leaf in self._leaves().items():
            leaf.copy_(state[name])
            # Adam counts the steps of each tensor, as a float on the tensor's device.
            step = torch.tensor(float(self.steps), dtype=torch.float32, device=leaf.device)
            moments = {m: state[f"{m}/{name}"].to(leaf, copy=True) for m in MOMENTS}
            self._optimizer.state[leaf] = {"step": step, **moments}

    def _leaves(self) -> Params:
        """Return the tensors that Adam trains, by their names in the state dict."""
        means = {f"{MEAN}{name}": tensor for name, tensor in self._mean.items()}
        return {**means, **{f"{LOG_VAR}{name}": t for name, t in self._log_var.items()}}


def local_reparameterised(
    classifier: Classifier, sites: list[Site], mean: Params, var: Params, x: Inputs, rng: Generator
) -> Tensor:
    """Return logits with noise added at the outputs of affine layers (Kingma et al. 2015).

    For y = Wa with independent weights of means M and variances S, y ~ N(Ma, S a²). Every example
    has its own noise, at the cost of a second matrix product. If a layer has several positions
    (convolutions, sequences), noise is drawn independently at each, as is common. Every output then
    has the correct distribution, but the correlation between positions is ignored. The weights of
    scaling layers, such as batch norm, are sampled directly.
    """
    sampled = dict(mean)
    for name in (name for site in sites if not site.is_affine for name in site.layer.names):
        sampled[name] = mean[name] + var[name].sqrt() * normal_like(mean[name], 1, rng)[0]
    hooks = {site.name: _noisy(site, var, rng) for site in sites if site.is_affine}
    return classifier.hooked(hooks).logits(x, sampled)


def _noisy(site: Site, var: Params, rng: Generator) -> Hook:
    weight_var = var[site.layer.weight]
    bias_var = None if site.layer.bias is None else var[site.layer.bias]

    def hook(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        squares = args[0].to(weight_var.dtype).square()
        if isinstance(module, nn.Conv2d):
            output_var = module._conv_forward(squares, weight_var, bias_var)
        else:
            output_var = functional.linear(squares, weight_var, bias_var)
        # The square root has no derivative at 0, which occurs if all inputs are zero.
        std = (output_var + torch.finfo(output_var.dtype).tiny).sqrt().to(output.dtype)
        return torch.addcmul(output, std, normal_like(output.detach(), 1, rng)[0])

    return hook
