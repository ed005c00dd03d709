"""Covered layers use their parameters as their kind of layer does, or are refused by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

import acnml
from acnml import Acnml, Classifier, Diagonal, Gradient, Linearised
from cases import TwoLayers, diagonal, normal, seeded

X, Y = normal(6, 4), torch.arange(6) % 3


class CosineHead(nn.Module):
    """Uses its last weight normalised, without calling the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 3, bias=False)

    def forward(self, x):
        hidden = functional.normalize(torch.tanh(self.body(x)) + x.mean(1, keepdim=True))
        return functional.linear(hidden, functional.normalize(self.head.weight))


def unit_posterior(model: nn.Module) -> Diagonal:
    mean = {name: p.detach().clone() for name, p in model.named_parameters()}
    return Diagonal(mean, {name: torch.ones_like(t) for name, t in mean.items()})


@pytest.mark.parametrize("scale", [1.0, 1e8])
@pytest.mark.parametrize(
    "use",
    [
        lambda c, x: acnml.fit_laplace(c, [x]),
        lambda c, x: acnml.fit_laplace(c, [x], structure="diag"),
        lambda c, x: acnml.fit_laplace(c, [x], layers=[c.model.head], structure="diag"),
        lambda c, x: Linearised()(c, unit_posterior(c.model), x),
        lambda c, x: Acnml(c, unit_posterior(c.model), Gradient(1, 0.3))(x),
    ],
)
def test_a_cosine_head_is_refused_whatever_the_scale_of_its_inputs(use, scale):
    classifier, x = Classifier(CosineHead()), scale * X.float()
    with pytest.raises(ValueError, match=r"uses 'head.weight' .*differently from a plain Linear"):
        use(classifier, x)


class Hooked(nn.Module):
    """A hook of the user's changes the output of a layer whose gradient is tiny."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.large, self.tiny = nn.Linear(4, 3), nn.Linear(4, 3)
        self.factor = factor
        self.tiny.register_forward_hook(_halved)

    def forward(self, x):
        return 1e4 * self.large(x) + self.factor * self.tiny(x)


def _halved(module, args, output):
    return output / 2


@pytest.mark.parametrize("factor", [1.0, 1e-3, 1e-6])
def test_every_gradient_is_compared_at_its_own_scale(factor):
    model = Hooked(factor)
    with pytest.raises(ValueError, match=r"layer 'tiny' \(Linear\) uses 'tiny.weight' differently"):
        acnml.fit_laplace(model, [(X.float(), Y)], structure="diag")


class Cancelling(TwoLayers):
    """Gradients that are sums of large terms of opposite sign: rounding is all that is left."""

    def __init__(self) -> None:
        super().__init__(hidden=64)

    def forward(self, x):
        once, again = self.body(x), self.body(x.clone())
        return self.head(1e4 * (once - again) + 1e-3 * once)


@pytest.mark.parametrize("seed", range(2))
def test_rounding_at_the_scale_of_the_terms_is_no_difference(seed):
    model = seeded(Cancelling, seed).float()
    acnml.fit_laplace(model, [(X.float(), Y)], structure="diag")


class LaterBranch(TwoLayers):
    """Inputs beyond a threshold use the weight without calling the layer, or once more."""

    def __init__(self, also: bool) -> None:
        super().__init__(hidden=4)
        self.also = also

    def forward(self, x):
        hidden = torch.tanh(self.body(x))
        if not (x > 10).any():
            return self.head(hidden)
        used = functional.linear(hidden, self.head.weight**2)
        return self.head(hidden) + used if self.also else used


@pytest.mark.parametrize("also", [False, True])
@pytest.mark.parametrize("covered", ["head", "all"])
def test_a_branch_that_is_taken_later_is_noticed_at_once(also, covered):
    model = LaterBranch(also).double()
    names = ["head.weight"] if covered == "head" else ["body.weight", "head.weight"]
    classifier, posterior = Classifier(model), diagonal(model, names)
    predict = Acnml(classifier, posterior, alpha=0.1)
    for _ in range(3):
        predict(X)
    with pytest.raises(ValueError, match=r"uses 'head.weight' without calling layer 'head'"):
        predict(X + 20)
    with pytest.raises(ValueError, match=r"batch 1: .* uses 'head.weight' without calling"):
        acnml.fit_laplace(classifier, [X, X + 20], layers=names, structure="diag")


# Custom layers -----------------------------------------------------------------------------------


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.eye(4))

    def forward(self, x):
        return x @ self.matrix


@pytest.mark.parametrize("structure", ["diag", "kron"])
def test_custom_layers_are_refused_with_other_ways(structure):
    model = nn.Sequential(Custom(), nn.Tanh(), nn.Linear(4, 3))
    classifier, data = Classifier(model), [(X.float(), Y)]
    with pytest.raises(ValueError, match=r"layer '0' \(Custom\) with parameters \['matrix'\]") as e:
        acnml.fit_laplace(classifier, data, structure=structure, layers=[model])
    for way in ('layers="last"', "acnml.fit_swag", "acnml.solve.Reference"):
        assert way in str(e.value)
    # All of these ways are open.
    acnml.fit_laplace(classifier, data, structure=structure, layers="last")
    posterior = acnml.fit_swag(classifier, data, epochs=2, learning_rate=0.5).low_rank()
    predict = Acnml(classifier, posterior, acnml.solve.Reference(1), alpha=0.1)
    assert predict(X).shape == (6, 3)


# Probabilities instead of logits -----------------------------------------------------------------


def ends_in(last: nn.Module, classes: int = 3) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, classes), last)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("classes", [2, 3, 1000])
def test_a_softmax_at_the_end_is_noticed(dtype, classes):
    model = ends_in(nn.Softmax(-1), classes).to(dtype)
    data = [(X, torch.zeros(6, dtype=torch.long))]
    for use in (
        lambda c: acnml.Map(c)(X),
        lambda c: acnml.Map(c.tempered(2.0))(X),
        lambda c: acnml.fit_laplace(c, data),
        lambda c: acnml.fit_swag(c, data, epochs=2, learning_rate=0.5),
        lambda c: acnml.tuning.temperature_by_nll(acnml.Map(c), data),
    ):
        with pytest.raises(ValueError, match="the model's outputs are probabilities"):
            use(Classifier(model))


def test_a_few_outputs_that_happen_to_sum_to_one_are_accepted():
    """Only the rows that are looked at first sum to one."""

    class Lookup(nn.Module):
        def forward(self, x):
            return torch.stack([x[:, 0], x[:, 1]], 1)

    x = torch.rand(50, 2).double() * 3
    x[0], x[1], x[2] = (torch.tensor(row).double() for row in ([0, 1.0], [0.5, 0.5], [0.2, 0.8]))
    acnml.Map(Classifier(Lookup()))(x)


# Functions that a copy of the model shares with the original --------------------------------------


def _lambda(model):
    body = model.body.forward
    model.activation = lambda x: torch.tanh(body(x))


def _hook(model):
    def keep(module, args, output):
        model.kept = output

    model.body.register_forward_hook(keep)


def _named_globally(model):
    source = "def hook(module, args, output): return output + net.head.bias.sum()"
    names = {"net": model}
    exec(source, names)
    model.body.register_forward_hook(names["hook"])


@pytest.mark.parametrize("change", [_lambda, _hook, _named_globally])
def test_functions_that_run_the_original_are_refused(change):
    model = TwoLayers().double()
    change(model)
    with pytest.raises(TypeError, match="refers to the model, so a copy would run the original"):
        Classifier(model)


class Keeping(TwoLayers):
    def keep(self, module, args, output):
        self.kept = output


def test_hooks_that_are_methods_belong_to_the_copy():
    model = Keeping().double()
    model.body.register_forward_hook(model.keep)
    lengths = []
    model.head.register_forward_hook(lambda module, args, output: lengths.append(len(output)))
    log_probs = acnml.Map(Classifier(model))(X)
    assert lengths  # a function without the model is shared
    assert not hasattr(model, "kept")
    torch.testing.assert_close(log_probs, model(X).log_softmax(-1))


def test_plain_tensors_with_gradients_are_constants():
    class Scaled(TwoLayers):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.full((5,), 2.0, dtype=torch.float64, requires_grad=True)
            self.twice = 2 * self.scale

        def forward(self, x):
            return self.head(torch.tanh(self.body(x)) * self.scale * self.twice)

    model = Scaled().double()
    classifier = Classifier(model)
    expected = model(X).log_softmax(-1).detach()
    torch.testing.assert_close(acnml.Map(classifier)(X), expected)
    posterior = acnml.fit_laplace(classifier, [X], layers=[model.head])
    narrow = acnml.Acnml(classifier, posterior, alpha=1e-9)
    torch.testing.assert_close(narrow(X), expected, rtol=0, atol=1e-6)
    assert model.scale.requires_grad
