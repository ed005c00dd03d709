"""Unusual models: each is handled correctly or raises an error, and is never silently wrong.

First odd ways through the layers, then heads whose outputs are not simply the logits, then models
that are hard to view.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import acnml
from acnml import Acnml, Bma, Classifier, Glm, Gradient, Linearised, Map
from acnml.solve import Reference
from cases import CONV, MODELS, POSTERIORS, TwoLayers, diagonal, normal, seeded

X = normal(3, 6, 4)


class ShapedByInput(TwoLayers):
    """Takes the batch size from its input: parted rows would be folded into positions."""

    def forward(self, x):
        return self.head(torch.tanh(self.body(x)).reshape(x.shape[0], -1, 5).mean(1))


class Attention(nn.Module):
    """Keys have a bias whose gradient is zero but for rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        size = x.shape[0]
        heads = (layer(x).view(size, -1, 2, 2) for layer in (self.q, self.k, self.v))
        q, k, v = (head.transpose(1, 2) for head in heads)
        mixed = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        return self.head(mixed.reshape(size, -1, 4).mean(1))


class StopGradient(nn.Module):
    """A layer whose input depends on adapted weights, unseen by autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.a, self.b = nn.Linear(4, 5), nn.Linear(5, 3), nn.Linear(5, 3)

    def forward(self, x):
        hidden = torch.tanh(self.body(x.mean(1)))
        return self.a(hidden) + self.b(hidden.detach())


class HardGate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x):
        x = x.mean(1)
        gate = self.gate(x)
        return self.b((gate > 0).to(x)) + self.c(x) + gate[:, :3]


class SecondHead(nn.Module):
    """Another head, whose output the logits do not use, and a trunk that has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head, self.other = nn.Linear(4, 5), nn.Linear(5, 3), nn.Linear(5, 2)

    def forward(self, x):
        with torch.no_grad():
            hidden = torch.tanh(self.trunk(x.mean(1)))
        self.other(hidden)
        return self.head(hidden)


class Broadcasting(TwoLayers):
    """Adds what has one row per input to what may have several: one row fits any number."""

    def forward(self, x):
        hidden = torch.tanh(self.body(x))
        return self.head(hidden[torch.arange(len(x)), 2] + hidden.mean(1))


class Twice(TwoLayers):
    """Calls a layer twice: once before the rows part and once behind."""

    def __init__(self) -> None:
        super().__init__(hidden=4)

    def forward(self, x):
        return super().forward(torch.tanh(self.body(x.mean(1))))


ODD = [ShapedByInput, Attention, StopGradient, HardGate, SecondHead, Broadcasting, Twice]


@pytest.mark.parametrize("build", ODD)
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("name", ["diagonal", "kronecker_eigen"])
def test_gradient_is_the_reference(build, size, name):
    model = seeded(build)
    posterior = POSTERIORS[name](model).scaled(0.3)
    expected = Reference(4, 0.3, rows_at_once=1)(Classifier(model), posterior, X[:size])
    for memory in (None, 1):  # all labels of an input at once, or one
        actual = Gradient(4, 0.3, memory)(Classifier(model), posterior, X[:size])
        torch.testing.assert_close(actual.log_lik, expected.log_lik, rtol=0, atol=1e-9)
        torch.testing.assert_close(actual.residual, expected.residual, rtol=0, atol=1e-9)


@pytest.mark.parametrize("build", [each for each in ODD if each is not SecondHead])
def test_kfac_covers_odd_models(build):
    model = build().double()
    posterior = acnml.fit_laplace(Classifier(model), [(X, torch.tensor([0, 1, 2]))])
    assert list(posterior.mean) == [name for name, _ in model.named_parameters()]


class Reused(TwoLayers):
    """Uses a layer's weight once more without calling the layer: blank inputs do not show it."""

    def forward(self, x):
        return self.head(self.body(x).relu() + functional.linear(x, self.body.weight))


@pytest.mark.parametrize("blank", [1, 3])
def test_a_weight_used_otherwise_is_refused_even_if_inputs_are_blank(blank):
    model, x = Reused().double(), normal(3, 4)
    x[:blank] = 0
    with pytest.raises(ValueError, match=r"uses 'body.weight' without calling layer 'body'"):
        Gradient(2, 0.3)(Classifier(model), diagonal(model), x)


def test_a_clamp_behind_the_last_layer_is_not_linear():
    model = nn.Sequential(nn.Linear(4, 3), nn.Hardtanh(-1, 1)).double()
    wide = diagonal(model).scaled(60.0)
    log_lik = Linearised("network")(Classifier(model), wide, normal(2, 4)).log_lik
    best = torch.tensor([1.0, -1.0, -1.0]).double().log_softmax(-1)[0]  # all that the clamp allows
    assert (log_lik <= best + 1e-12).all()


def test_layers_that_are_not_called_are_left_out_of_kfac():
    model = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    whole = nn.Sequential(model, nn.Flatten(), nn.Linear(24, 3)).double()
    posterior = acnml.fit_laplace(Classifier(whole), [(X, torch.tensor([0, 1, 2]))])
    layers = {name.rpartition(".")[0] for name in posterior.mean}
    assert layers == {"0.linear1", "0.linear2", "2"}
    expected = Reference(2, 0.3, rows_at_once=1)(Classifier(whole), posterior, X).log_lik
    actual = Gradient(2, 0.3)(Classifier(whole), posterior, X).log_lik
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-9)


class Checkpointed(TwoLayers):
    """Runs its body again when gradients are taken."""

    def forward(self, x):
        hidden = checkpoint(lambda z: self.body(z).tanh(), x.mean(1), use_reentrant=False)
        return self.head(hidden)


@pytest.mark.parametrize(
    "use",
    [
        lambda c: acnml.fit_laplace(c, [(X, torch.tensor([0, 1, 2]))]),
        lambda c: Acnml(c, diagonal(c.model))(X),
        lambda c: Acnml(c, diagonal(c.model), Reference())(X),
        lambda c: Acnml(c, diagonal(c.model, ["head.weight"]), Reference(rows_at_once=1))(X),
    ],
)
def test_models_that_run_again_for_gradients_are_refused(use):
    with pytest.raises(ValueError, match="switch the model's gradient checkpointing off"):
        use(Classifier(Checkpointed().double()))


# Heads: logits that are linear in the covered layer, but are not simply its outputs -------------

ROWS = normal(3, 4)


class Divided(nn.Module):
    """Has a temperature of its own."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head

    def forward(self, x):
        return self.head(x) / 2.5


class DividedByNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(x) / x.norm(dim=1, keepdim=True)


HEADS = {
    "divided by a norm": (DividedByNorm, ROWS),
    "scores of items": (lambda: nn.Sequential(nn.Linear(4, 1), nn.Flatten()), normal(3, 5, 4)),
    "pairs of scores": (lambda: nn.Sequential(nn.Linear(4, 2), nn.Flatten()), normal(3, 2, 4)),
    "positions of an image": (
        lambda: nn.Sequential(nn.Conv2d(2, 2, 3), nn.Flatten()),
        normal(3, 2, 3, 4),
    ),
    "grouped convolution": (
        lambda: nn.Sequential(nn.Conv2d(4, 4, 3, groups=2), nn.Flatten()),
        normal(3, 4, 3, 3),
    ),
    "batch norm": (lambda: nn.BatchNorm1d(4), ROWS),
    "layer norm": (lambda: nn.LayerNorm(4), ROWS),
}


@pytest.mark.parametrize("name", ["diagonal", "low_rank"])
@pytest.mark.parametrize("head", HEADS)
def test_the_fast_solution_is_the_optimum(head, name):
    build, x = HEADS[head]
    model = seeded(build)
    classifier, posterior = Classifier(model), POSTERIORS[name](model)
    best = Reference(150, 0.2)(classifier, posterior, x)  # the problem is convex
    fast = Linearised(tolerance=1e-12)(classifier, posterior, x)
    torch.testing.assert_close(fast.log_lik, best.log_lik, rtol=0, atol=1e-9)


@pytest.mark.parametrize("rule", [Acnml, Glm])
def test_a_temperature_within_the_model_is_that_of_a_view(rule):
    model = Divided(seeded(lambda: nn.Linear(4, 3)))
    inside = rule(Classifier(model), diagonal(model))
    outside = rule(Classifier(model.head).tempered(2.5), diagonal(model.head))
    torch.testing.assert_close(inside(ROWS), outside(ROWS), rtol=0, atol=1e-6)


class CooledWhenFar(nn.Module):
    """Changes the logits of far inputs in place."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        logits = self.head(x)
        far = x.abs().amax(1) > 5
        if far.any():
            logits[far] *= 0.1
        return logits


def test_logits_changed_in_place_are_noticed_in_any_batch():
    model, far = seeded(CooledWhenFar), 10 * ROWS
    first, later = (Acnml(Classifier(model), diagonal(model)) for _ in range(2))
    later(ROWS)  # the model is checked with inputs that are not changed
    torch.testing.assert_close(later.log_lik(far), first.log_lik(far), rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", ["", "head"])
def test_modules_run_the_hooks_of_the_last_layer_once(name):
    model = seeded(lambda: nn.Linear(4, 3) if name == "" else TwoLayers())
    layer = model.get_submodule(name)
    layer.register_forward_pre_hook(lambda _, args: (2 * args[0] + 1,))
    layer.register_forward_hook(_unchanged)
    x = normal(300, 4)
    labels = (model(x).detach() + normal(300, 3, seed=1)).argmax(-1)
    found = acnml.calibrate(model, (x[:100], labels[:100]), (x[100:], labels[100:]), price=0.05)
    log_probs, regret, _ = found.as_module()(ROWS)
    torch.testing.assert_close(log_probs.double(), found.log_probs(ROWS), rtol=0, atol=1e-5)
    torch.testing.assert_close(regret.double(), found.regret(ROWS), rtol=0, atol=1e-5)
    assert len(layer._forward_pre_hooks) == 1  # the user's model keeps its own


def _unchanged(module, args, output):
    assert torch.equal(output, nn.functional.linear(args[0], module.weight, module.bias))


# Views: in-place changes, wrappers, gradient modes, precisions -----------------------------------


def test_inputs_that_depend_on_each_other_are_refused():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, track_running_stats=False))
    with pytest.raises(ValueError, match=r"layer '1' \(BatchNorm1d\) has no running statistics"):
        Classifier(model)


def test_plain_tensors_that_the_model_writes_to_stay_as_they_are():
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.calls = nn.Linear(4, 3), torch.zeros(1)

        def forward(self, x):
            self.calls += 1
            return self.linear(x)

    model = Counting()
    Map(Classifier(model))(torch.ones(1, 4))
    assert torch.equal(model.calls, torch.zeros(1))


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_works_in_any_gradient_mode(mode):
    model = MODELS[1].model()
    y = torch.tensor([0, 1, 2])
    expected = Acnml(Classifier(model), diagonal(model))(normal(3, 4))
    with mode():
        x = normal(3, 4)
        classifier = Classifier(model)
        torch.testing.assert_close(Acnml(classifier, diagonal(model))(x), expected)
        Bma(classifier, diagonal(model))(x)
        Glm(classifier, diagonal(model))(x)
        acnml.fit_laplace(classifier, [(x, y)])
        acnml.fit_bayes_by_backprop(classifier, [(x, y)], epochs=1)
        acnml.fit_swag(classifier, [(x, y)], epochs=2, learning_rate=0.5)


def test_a_copy_of_a_model_made_in_inference_mode_can_be_used():
    with torch.inference_mode():
        model = CONV.model()
    data = [(CONV.x(), torch.tensor([0, 1, 2]))]
    actual = acnml.fit_laplace(copy.deepcopy(model), data, structure="diag").var
    expected = acnml.fit_laplace(CONV.model(), data, structure="diag").var
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


def test_a_model_may_write_to_its_input():
    class InPlace(TwoLayers):
        def forward(self, x):
            return super().forward(x.sub_(0.5).div_(0.25))

    model, x = InPlace().double(), normal(3, 4)
    given, pure = x.clone(), (normal(3, 4) - 0.5) / 0.25
    plain = nn.Sequential(model.body, nn.Tanh(), model.head)
    for build in (
        Map,
        lambda c: Acnml(c, diagonal(c.model), on_unsolved="ignore"),
        lambda c: Bma(c, diagonal(c.model)),
    ):
        torch.testing.assert_close(
            build(Classifier(model))(x), build(Classifier(plain))(pure), rtol=0, atol=1e-12
        )
    assert torch.equal(x, given)


def test_a_model_that_is_random_in_eval_mode_is_named():
    class Random(TwoLayers):
        def forward(self, x):
            return self.head(functional.dropout(self.body(x), 0.5))

    model = Random().double()
    with pytest.raises(ValueError, match="random even in eval mode"):
        Gradient(2, 0.3)(Classifier(model), diagonal(model), normal(3, 4))


def test_wrappers_are_removed():
    model = nn.Linear(4, 3)
    for wrapped in (nn.DataParallel(model), torch.compile(model, backend="eager")):
        assert Classifier(wrapped).model is model
        swag = acnml.Swag()
        swag.update(wrapped)
        assert list(swag.mean) == ["weight", "bias"]
