"""Models that could mislead: each is handled rightly or refused, never silently wrong."""

from __future__ import annotations

import copy
import json

import pytest
import safetensors.torch
import torch
from torch import nn
from torch.nn import functional

import acnml
from acnml import (
    Acnml,
    Bma,
    Classifier,
    Gradient,
    Linearised,
    LowRank,
    Map,
    Reference,
    StorageError,
)
from acnml.kernels import DenseKernel
from acnml.solvers.newton import solve_logits
from cases import MODELS, POSTERIORS, diagonal, normal

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
    posterior = acnml.fit_kfac_laplace(Classifier(model), [(X, torch.tensor([0, 1, 2]))])
    assert list(posterior.mean) == [name for name, _ in model.named_parameters()]


def test_kfac_refuses_a_layer_that_no_gradient_reaches():
    with pytest.raises(ValueError, match=r"layer 'trunk' runs under torch.no_grad\(\)"):
        acnml.fit_kfac_laplace(Classifier(SecondHead().double()), [(X, torch.tensor([0, 1, 2]))])


class Reused(nn.Module):
    """Uses a layer's weight once more without calling the layer: blank inputs do not show it."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.head(self.body(x).relu() + functional.linear(x, self.body.weight))


def test_a_weight_used_otherwise_is_refused_though_the_first_input_is_blank():
    model, x = Reused().double(), normal(3, 4)
    x[0] = 0
    with pytest.raises(ValueError, match=r"layer 'body' \(Linear\) uses 'body.weight' otherwise"):
        Gradient(2, 0.3)(Classifier(model), diagonal(model), x)


def test_a_batch_of_blank_inputs_proves_nothing():
    model = Reused().double()
    classifier = Classifier(model)
    Gradient(2, 0.3)(classifier, diagonal(model), torch.zeros(2, 4).double())
    with pytest.raises(ValueError, match=r"uses 'body.weight' otherwise"):
        Gradient(2, 0.3)(classifier, diagonal(model), normal(2, 4))


def test_a_model_may_write_to_its_input():
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(4, 5), nn.Linear(5, 3)

        def forward(self, x):
            return self.head(torch.tanh(self.body(x.sub_(0.5).div_(0.25))))

    model, x = InPlace().double(), normal(3, 4)
    given, pure = x.clone(), (normal(3, 4) - 0.5) / 0.25
    plain = nn.Sequential(model.body, nn.Tanh(), model.head)
    for build in (Map, lambda c: Acnml(c, diagonal(c.model)), lambda c: Bma(c, diagonal(c.model))):
        torch.testing.assert_close(
            build(Classifier(model))(x), build(Classifier(plain))(pure), rtol=0, atol=1e-12
        )
    assert torch.equal(x, given)


def test_a_model_that_is_random_in_eval_mode_is_named():
    class Random(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(4, 5), nn.Linear(5, 3)

        def forward(self, x):
            return self.head(functional.dropout(self.body(x), 0.5))

    model = Random().double()
    with pytest.raises(ValueError, match="random even in eval mode"):
        Gradient(2, 0.3)(Classifier(model), diagonal(model), normal(3, 4))


def test_a_shared_weight_is_left_out_of_kfac_by_default():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    model[2].weight = model[0].weight
    loader = [(normal(3, 4), torch.tensor([0, 1, 2]))]
    posterior = acnml.fit_kfac_laplace(Classifier(model.double()), loader)
    assert list(posterior.mean) == ["4.weight", "4.bias"]


def test_running_out_of_memory_is_not_the_models_fault():
    class Large(nn.Linear):
        def forward(self, x):
            raise torch.OutOfMemoryError("no memory")

    with pytest.raises(torch.OutOfMemoryError):
        Map(Classifier(Large(4, 3)))(normal(2, 4))


def test_inputs_of_a_model_in_two_precisions_stay_as_they_are():
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk, self.head = nn.Linear(4, 4).bfloat16(), nn.Linear(4, 3)

        def forward(self, x):
            return self.head(self.trunk(x.bfloat16()).float() + x)

    model, x = Mixed(), normal(5, 4).float()
    expected = model(x).log_softmax(-1)
    torch.testing.assert_close(Map(Classifier(model))(x), expected, rtol=0, atol=1e-6)


def test_wrappers_are_taken_off():
    model = nn.Linear(4, 3)
    for wrapped in (nn.DataParallel(model), torch.compile(model, backend="eager")):
        assert Classifier(wrapped).model is model
        swag = acnml.Swag()
        swag.update(wrapped)
        assert list(swag.mean) == ["weight", "bias"]


def test_a_clamp_behind_the_last_layer_is_not_linear():
    model = nn.Sequential(nn.Linear(4, 3), nn.Hardtanh(-1, 1)).double()
    wide = diagonal(model).scaled(60.0)
    log_lik = Linearised()(Classifier(model), wide, normal(2, 4)).log_lik
    best = torch.tensor([1.0, -1.0, -1.0]).double().log_softmax(-1)[0]  # all that the clamp allows
    assert (log_lik <= best + 1e-12).all()


def test_subclasses_that_compute_something_else_are_refused_whatever_the_input():
    class Squared(nn.Linear):
        def forward(self, x):
            return functional.linear(x, self.weight**2, self.bias)

    model = Squared(4, 3).double()
    with pytest.raises(ValueError, match=r"layer '' \(Squared\)"):
        Linearised()(Classifier(model), diagonal(model), torch.zeros(1, 4).double())
    assert isinstance(Acnml(Classifier(model), diagonal(model)).solver, Reference)


def test_layers_that_are_not_called_are_left_out_of_kfac():
    model = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    whole = nn.Sequential(model, nn.Flatten(), nn.Linear(24, 3)).double()
    posterior = acnml.fit_kfac_laplace(Classifier(whole), [(X, torch.tensor([0, 1, 2]))])
    layers = {name.rpartition(".")[0] for name in posterior.mean}
    assert layers == {"0.linear1", "0.linear2", "2"}
    expected = Reference(2, 0.3, rows_at_once=1)(Classifier(whole), posterior, X).log_lik
    actual = Gradient(2, 0.3)(Classifier(whole), posterior, X).log_lik
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-9)


def test_reparametrised_weights_are_left_out_of_kfac():
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.Linear(4, 3))
    posterior = acnml.fit_kfac_laplace(Classifier(model), [(normal(3, 4), torch.tensor([0, 1, 2]))])
    assert list(posterior.mean) == ["1.weight", "1.bias"]


def test_inputs_that_depend_on_each_other_are_refused():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, track_running_stats=False))
    with pytest.raises(ValueError, match=r"layer '1' \(BatchNorm1d\) has no running statistics"):
        Classifier(model)


def test_functions_that_hold_on_to_the_model_are_refused():
    class Closure(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)
            self.block = lambda x: self.linear(x)

        def forward(self, x):
            return self.block(x)

    with pytest.raises(TypeError, match="attribute 'block' of module '' is a function that"):
        Classifier(Closure())


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


def test_data_parallel_is_unwrapped_and_scripts_are_refused():
    model = nn.Linear(4, 3)
    assert Classifier(nn.DataParallel(model)).model is model
    with pytest.warns(DeprecationWarning, match="torch.jit"):
        scripted = torch.jit.script(model)
    with pytest.raises(TypeError, match="scripted or traced"):
        Classifier(scripted)


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
        acnml.Glm(classifier, diagonal(model))(x)
        acnml.fit_kfac_laplace(classifier, [(x, y)])
        acnml.fit_bayes_by_backprop(classifier, [(x, y)], epochs=1)
        acnml.fit_swag(classifier, [(x, y)], epochs=2)


@pytest.mark.parametrize("scale", [1e4, 1e6])
def test_newton_solves_large_low_rank_kernels(scale):
    root = normal(20, 10, 3)
    logits, kernel = normal(20, 10, seed=1), scale * root @ root.mT
    solved = solve_logits(logits, DenseKernel(kernel), torch.arange(10), 1e-5, 50)
    assert solved.residual.max() < 1e-2


def test_newton_solves_far_inputs_or_says_so():
    model = nn.Linear(3, 10, bias=False)
    classifier = Classifier(model)
    mean = classifier.copy_parameters(["weight"])
    directions = {"weight": normal(3, 10, 3).float()}
    wide = LowRank(mean, {"weight": torch.full_like(mean["weight"], 1e-6)}, directions)
    solution = Acnml(classifier, wide).solve(100 * normal(6, 3).float())
    assert solution.residual.max() < 0.1
    with pytest.raises(ValueError, match="not solved after 1 Newton steps: a residual of"):
        Acnml(classifier, wide, Linearised(newton_steps=1))(100 * normal(6, 3).float())


@pytest.mark.parametrize(
    "value",
    [
        {"kind": []},
        {"kind": "Affine", "weight": "w"},
        {"kind": "Diagonal", "mean": {"tensor": "mean/weight"}, "var": {"map": {}}},
        {"kind": "Diagonal", "mean": {"kind": "Classifier", "overrides": {"map": {}}}, "var": 3},
        3,
    ],
)
def test_headers_that_were_tampered_with_are_storage_errors(value, tmp_path):
    path = tmp_path / "posterior.safetensors"
    header = json.dumps({"format_version": 1, "value": value})
    safetensors.torch.save_file({"mean/weight": torch.ones(2)}, path, {"acnml": header})
    with pytest.raises(StorageError):
        acnml.load(path)


def test_a_stored_predictor_with_a_foreign_solver_is_a_storage_error(tmp_path):
    model, path = MODELS[1].model(), tmp_path / "predictor.safetensors"
    acnml.save(Acnml(Classifier(model), diagonal(model)), path)
    with safetensors.safe_open(path, "pt") as file:
        header = json.loads(file.metadata()["acnml"])
    changed = copy.deepcopy(header)
    changed["value"]["solver"] = "rm -rf"
    tensors = safetensors.torch.load_file(path)
    safetensors.torch.save_file(tensors, path, {"acnml": json.dumps(changed)})
    with pytest.raises(StorageError, match="solver must be a solver"):
        acnml.load(path, Classifier(model))
