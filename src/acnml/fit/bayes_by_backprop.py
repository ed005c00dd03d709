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
from torch import Tensor, nn
from torch.nn import functional

from acnml._engine.layers import AFFINE, OTHER_WAYS, SCALING, Site, find_sites
from acnml._engine.recorder import record, require_tracked
from acnml._engine.trust import require_understood
from acnml._util import checks
from acnml._util.batches import Inputs, as_inputs, as_tensor, require_loader, take
from acnml._util.params import Params, normal_like, widened, zip_with
from acnml._util.passes import batch_sizes
from acnml._util.selection import Parameters, listed, parameter_names
from acnml.classifier import Classifier, Hook, require_classifier
from acnml.fit.batches import checked_labels, cross_entropy, once, over_batches
from acnml.posteriors import Diagonal

# Initial standard deviation as a fraction of the prior's. It is small so that the noise does not
# hide the trained weights in the first steps.
INITIAL_STD = 0.1


def fit_bayes_by_backprop(
    classifier: Classifier,
    loader: Iterable[Any],
    *,
    epochs: int = 20,
    prior_std: float = 0.1,
    learning_rate: float = 1e-3,
    seed: int = 0,
    parameters: Parameters = None,
    progress: bool | None = None,
    variance_learning_rate: float | None = None,
) -> Diagonal:
    """Train a mean-field posterior by Adam, starting at the classifier's weights.

    Adam changes the logarithm of a variance by about the learning rate per step, and the variances
    start at a hundredth of the prior's. They may still be growing at the end of a short fit. To
    check this, compare `posterior.var` after different numbers of epochs. A larger
    `variance_learning_rate` makes them converge faster.

    The network runs in eval mode: dropout is off and batch norm uses its stored statistics. Weights
    that the posterior does not cover do not change. To interrupt and resume training, or to write
    your own loop, use `BayesByBackprop`.

    Args:
        classifier: the model, trained or freshly initialised.
        loader: the training data, with labels. One extra pass counts the examples.
        epochs: number of passes over the data.
        prior_std: σ₀ of the prior N(0, σ₀² I); the ACNML paper uses 0.1.
        learning_rate: learning rate of Adam.
        seed: random seed of the noise.
        parameters: parameters, their names or submodules to cover; by default the whole model.
        progress: whether to show a progress bar; by default only in a terminal.
        variance_learning_rate: learning rate of Adam for the log-variances; by default the same as
            `learning_rate`.

    >>> import acnml, torch
    >>> data = [(torch.randn(20, 4), torch.arange(20) % 3) for _ in range(5)]
    >>> classifier = acnml.Classifier(torch.nn.Linear(4, 3))
    >>> acnml.fit_bayes_by_backprop(classifier, data, epochs=2)
    Diagonal(15 parameters: weight … bias)
    """
    require_loader(loader, "Bayes by Backprop")
    epochs = checks.require_integer(epochs, "epochs", least=1)
    # Check all settings before the pass over the data that counts the examples.
    parameters = listed(parameters)
    _covered_sites(classifier, parameters)
    _require_settings(prior_std, learning_rate, variance_learning_rate)
    trainer = BayesByBackprop(
        classifier,
        sum(batch_sizes(loader)),
        prior_std,
        learning_rate,
        variance_learning_rate,
        seed,
        parameters,
    )
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

    The network runs in eval mode, and the user's model does not change.

    Args:
        classifier: the model, trained or freshly initialised. Its weights are the initial μ.
        data: the number n of training examples, which determines the weight of the prior.
        prior_std: σ₀ of the prior N(0, σ₀² I); the ACNML paper uses 0.1.
        learning_rate: learning rate of Adam for μ. With 0, μ stays at the model's weights and only
            the variances are trained.
        variance_learning_rate: learning rate of Adam for log s; by default the same as
            `learning_rate`.
        seed: random seed of the noise.
        parameters: parameters, their names or submodules to cover; by default the whole model.

    >>> x, labels = torch.randn(8, 4), torch.arange(8) % 3
    >>> trainer = BayesByBackprop(Classifier(nn.Linear(4, 3)), data=8)
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
        classifier: Classifier,
        data: int,
        prior_std: float = 0.1,
        learning_rate: float = 1e-3,
        variance_learning_rate: float | None = None,
        seed: int = 0,
        parameters: Parameters = None,
    ) -> None:
        sites = _covered_sites(classifier, parameters)
        checks.require_positive(data, "data, the number of training examples,")
        _require_settings(prior_std, learning_rate, variance_learning_rate)
        variance_rate = learning_rate if variance_learning_rate is None else variance_learning_rate
        # Use the order of the model's parameters, which may differ from that of the sites.
        covered = {name for site in sites for name in site.layer.names}
        names = [name for name in classifier.parameters if name in covered]
        mean = widened(classifier.copy_parameters(names))
        self._classifier, self._sites = classifier, sites
        self._field = _MeanField(mean, prior_std, data, learning_rate, variance_rate)
        self._generator = torch.Generator().manual_seed(checks.require_integer(seed, "seed"))
        self._check_once = once(lambda x: _require_tracked(classifier, sites, x))

    @property
    def steps(self) -> int:
        """The number of steps taken so far, including those before resuming."""
        return self._field.steps

    @torch.inference_mode(False)
    def step(self, x: Inputs, labels: Tensor) -> None:
        """Take one step on a batch of inputs and class indices (B,)."""
        x = self._classifier.prepare(as_inputs(x))
        with torch.enable_grad():
            self._step(x, checked_labels(as_tensor(labels, "labels"), x))

    @torch.inference_mode(False)
    def posterior(self) -> Diagonal:
        """Return the current N(μ, diag(s)); further steps do not change it."""
        return self._field.posterior()

    def state_dict(self) -> Params:
        """Return a copy of the state of training, as a flat dict of tensors.

        It contains μ, log s, Adam's moments of both, the number of steps and the state of the noise
        generator. It does not contain the arguments of the constructor.
        """
        return {**self._field.state_dict(), GENERATOR: self._generator.get_state()}

    @torch.inference_mode(False)
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a state that `state_dict` returned for the same model and parameters."""
        own = self.state_dict()
        checks.require_same_names(state, own, "the state", "this trainer's state")
        for name, tensor in own.items():
            given = state[name]
            if (given.shape, given.dtype) != (tensor.shape, tensor.dtype):
                raise ValueError(
                    f"{name!r} of the state has shape {tuple(given.shape)} and type {given.dtype}, "
                    f"but this trainer needs {tuple(tensor.shape)} and {tensor.dtype}; load a "
                    "state of the same model in the same precision"
                )
        self._generator.set_state(state[GENERATOR].cpu())
        self._field.load_state_dict(state)

    def _step(self, x: Inputs, labels: Tensor | None) -> None:
        """Take one step on inputs and labels that are already checked."""
        if self._classifier.findings.is_due(self._field.mean, x):
            require_understood(self._classifier, self._sites, x)
        self._check_once(x)
        field, var = self._field, self._field.variances()
        logits = local_reparameterised(
            self._classifier, self._sites, field.mean, var, x, self._generator
        )
        field.step(cross_entropy(logits, labels), var)


def _covered_sites(classifier: Classifier, parameters: Parameters) -> list[Site]:
    """Return the modules whose parameters are trained, or raise an error if one is unsupported."""
    require_classifier(classifier)
    names = parameter_names(classifier.model, parameters)
    return find_sites(classifier.model, names, AFFINE + SCALING, OTHER_WAYS)


def _require_settings(
    prior_std: float, learning_rate: float, variance_learning_rate: float | None
) -> None:
    checks.require_positive(prior_std, "prior_std")
    rates = {"learning_rate": learning_rate, "variance_learning_rate": variance_learning_rate}
    for name, rate in rates.items():
        if rate is not None and not 0 <= rate < math.inf:
            raise ValueError(f"{name} must be finite and not negative, got {rate}")


def _require_tracked(classifier: Classifier, sites: list[Site], x: Inputs) -> None:
    """Raise an error if no gradient reaches a layer."""
    require_tracked(record(classifier, sites, take(x, slice(0, 1))))


def local_reparameterised(
    classifier: Classifier,
    sites: list[Site],
    mean: Params,
    var: Params,
    x: Inputs,
    generator: torch.Generator,
) -> Tensor:
    """Return logits with noise added at the outputs of affine layers (Kingma et al. 2015).

    For y = Wa with independent weights of means M and variances S, y ~ N(Ma, S a²). Every example
    has its own noise, at the cost of a second matrix product. If a layer has several positions
    (convolutions, sequences), noise is drawn independently at each, as is common. Every output then
    has the correct distribution, but the correlation between positions is ignored. The weights of
    scaling layers, such as batch norm, are sampled directly.
    """
    scaling = [name for site in sites if not site.is_affine for name in site.layer.names]
    sampled = reparameterised(
        {n: mean[n] for n in scaling}, {n: var[n] for n in scaling}, generator
    )
    hooks = {site.name: _noisy(site, var, generator) for site in sites if site.is_affine}
    return classifier.hooked(hooks).logits(x, {**mean, **sampled})


def reparameterised(mean: Params, var: Params, generator: torch.Generator) -> Params:
    """Draw one sample μ + √s ⊙ ε of the weights, for all examples of a batch."""
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
        # The square root has no derivative at 0, which occurs if all inputs are zero.
        std = (output_var + torch.finfo(output_var.dtype).tiny).sqrt().to(output.dtype)
        return torch.addcmul(output, std, normal_like(output.detach(), 1, generator)[0])

    return hook


# Names and prefixes in a state dict. The prefix comes first because names may contain "/".
MEAN, LOG_VAR, STEPS, GENERATOR = "mean/", "log_var/", "steps", "generator"
MOMENTS = ("exp_avg", "exp_avg_sq")  # Adam's names


@final
class _MeanField:
    """μ and log s, trained by Adam, with an explicit gradient of the KL divergence.

    KL = ½ Σ (s + μ²)/σ₀² - log s + const has the gradients μ/σ₀² with respect to μ and
    ½(s/σ₀² - 1) with respect to log s. This takes fewer passes over the weights than autograd.
    """

    def __init__(
        self,
        mean: Params,
        prior_std: float,
        data: int,
        learning_rate: float,
        variance_learning_rate: float,
    ) -> None:
        self.mean = {name: tensor.requires_grad_() for name, tensor in mean.items()}
        initial = 2 * math.log(INITIAL_STD * prior_std)
        self.log_var = {n: torch.full_like(t, initial, requires_grad=True) for n, t in mean.items()}
        self.prior_precision_per_datum, self.data = 1 / (prior_std**2 * data), data
        self.steps = 0
        groups = [
            {"params": list(self.mean.values()), "lr": learning_rate},
            {"params": list(self.log_var.values()), "lr": variance_learning_rate},
        ]
        self.optimizer = torch.optim.Adam(groups, fused=True)

    @torch.no_grad()
    def variances(self) -> Params:
        """Return s as leaf tensors that require gradients."""
        return {name: log_var.exp().requires_grad_() for name, log_var in self.log_var.items()}

    def step(self, loss: Tensor, var: Params) -> None:
        """Take a step on the objective, given its likelihood term `loss`."""
        leaves = [*self.mean.values(), *var.values()]
        grads = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
        by_mean, by_var = grads[: len(var)], grads[len(var) :]
        for name, mean_grad, var_grad in zip(var, by_mean, by_var, strict=True):
            self._add_divergence(name, mean_grad, var_grad, var[name])
        self.optimizer.step()
        self.steps += 1

    @torch.no_grad()
    def _add_divergence(self, name: str, mean_grad: Tensor, var_grad: Tensor, var: Tensor) -> None:
        precision = self.prior_precision_per_datum
        self.mean[name].grad = mean_grad.add_(self.mean[name], alpha=precision)
        by_log_var = var_grad.add_(precision / 2).mul_(var)
        self.log_var[name].grad = by_log_var.sub_(1 / (2 * self.data))

    def posterior(self) -> Diagonal:
        """Return a copy of N(μ, diag(s))."""
        mean = {name: tensor.detach().clone() for name, tensor in self.mean.items()}
        return Diagonal(
            mean, {name: log_var.detach().exp() for name, log_var in self.log_var.items()}
        )

    def state_dict(self) -> Params:
        """Return copies of μ, log s, Adam's moments and the number of steps."""
        state: Params = {STEPS: torch.tensor(self.steps, device="cpu")}
        for prefix, leaf in self._leaves().items():
            adam = self.optimizer.state.get(leaf, {})
            state[prefix] = leaf.detach().clone()
            for moment in MOMENTS:  # zero before the first step
                state[f"{moment}/{prefix}"] = adam.get(moment, torch.zeros_like(leaf)).clone()
        return state

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore a state whose names, shapes and types are already checked."""
        self.steps = int(state[STEPS])
        for prefix, leaf in self._leaves().items():
            leaf.copy_(state[prefix])
            # Adam counts the steps of each tensor, as a float on the tensor's device.
            step = torch.tensor(float(self.steps), dtype=torch.float32, device=leaf.device)
            moments = {m: state[f"{m}/{prefix}"].to(leaf.device, copy=True) for m in MOMENTS}
            self.optimizer.state[leaf] = {"step": step, **moments}

    def _leaves(self) -> dict[str, Tensor]:
        """Return the tensors that Adam trains, by their names in the state dict."""
        means = {f"{MEAN}{name}": tensor for name, tensor in self.mean.items()}
        return {**means, **{f"{LOG_VAR}{name}": t for name, t in self.log_var.items()}}
