"""Unusual models: each is handled correctly or raises an error, and is never silently wrong."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import acnml
from acnml import Acnml, Classifier, Gradient, Linearised
from acnml.solve import Reference
from cases import POSTERIORS, diagonal, normal

X = normal(3, 6, 4)


class ShapedByInput(nn.Module):
    """Takes the batch size from its input: parted rows would be folded into positions."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 5), nn.Linear(5, 3)

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


class Broadcasting(nn.Module):
    """Adds what has one row per input to what may have several: one row fits any number."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x):
        hidden = torch.tanh(self.body(x))
        return self.head(hidden[torch.arange(len(x)), 2] + hidden.mean(1))


class Twice(nn.Module):
    """Calls a layer twice: once before the rows part and once behind."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.body(torch.tanh(self.body(x.mean(1))))))


ODD = [ShapedByInput, Attention, StopGradient, HardGate, SecondHead, Broadcasting, Twice]


@pytest.mark.parametrize("build", ODD)
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("name", ["diagonal", "kronecker_eigen"])
def test_gradient_is_the_reference(build, size, name):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = build().double()
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


def test_kfac_refuses_a_layer_that_no_gradient_reaches():
    with pytest.raises(ValueError, match=r"layer 'trunk' runs under torch.no_grad\(\)"):
        acnml.fit_laplace(Classifier(SecondHead().double()), [(X, torch.tensor([0, 1, 2]))])


class Reused(nn.Module):
    """Uses a layer's weight once more without calling the layer: blank inputs do not show it."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.head(self.body(x).relu() + functional.linear(x, self.body.weight))


@pytest.mark.parametrize("blank", [1, 3])
def test_a_weight_used_otherwise_is_refused_even_if_inputs_are_blank(blank):
    model, x = Reused().double(), normal(3, 4)
    x[:blank] = 0
    with pytest.raises(ValueError, match=r"uses 'body.weight' without calling layer 'body'"):
        Gradient(2, 0.3)(Classifier(model), diagonal(model), x)


def test_a_shared_weight_is_left_out_of_kfac_by_default():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    model[2].weight = model[0].weight
    loader = [(normal(3, 4), torch.tensor([0, 1, 2]))]
    posterior = acnml.fit_laplace(Classifier(model.double()), loader)
    assert list(posterior.mean) == ["4.weight", "4.bias"]


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


class Checkpointed(nn.Module):
    """Runs its body again when gradients are taken."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 5), nn.Linear(5, 3)

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
