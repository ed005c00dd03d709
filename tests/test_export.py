"""A calibrated network as a module and as an ONNX file gives its own probabilities."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import acnml
from acnml import Classifier
from acnml._util.torch_state import seeded
from cases import normal
from test_calibrate import joined, problem

RULES = ("acnml", "closed-form", "density-temperature")


@pytest.fixture(scope="module")
def data():
    """A network in single precision, training and validation data, and other inputs."""
    model, *loaders = problem()
    train, validation, test = (tuple(part.float() for part in joined(each)) for each in loaders)
    plain = nn.Sequential(model.body, nn.Tanh(), model.head).float()
    return plain, (train[0], train[1].long()), (validation[0], validation[1].long()), test[0]


@pytest.fixture(scope="module")
def calibrated(data):
    model, train, validation, x = data
    return acnml.calibrate(model, train, validation, price=0.02), x


class Text(nn.Module):
    """A mean over tokens that are not masked."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, 8), nn.Linear(8, 3)

    def forward(self, input_ids, attention_mask):
        mask = attention_mask.unsqueeze(-1).float()
        total = (self.embedding(input_ids) * mask).sum(1)
        return self.head(torch.tanh(total / mask.sum(1)))


@pytest.fixture(scope="module")
def calibrated_text():
    with seeded(0):
        model = Text()
        ids, mask = torch.randint(0, 50, (900, 7)), torch.ones(900, 7, dtype=torch.long)
        mask[:, 5:] = torch.randint(0, 2, (900, 2))
        x = {"input_ids": ids, "attention_mask": mask}
        model.head.weight.data *= 10
        labels = (model(**x).detach() + torch.randn(900, 3)).argmax(-1)
    parts = [{name: tensor[s] for name, tensor in x.items()} for s in (slice(400), slice(400, 900))]
    found = acnml.calibrate(
        model, (parts[0], labels[:400]), (parts[1], labels[400:]), price=0.05, temperature=1.0
    )
    return found, parts[1]


def assert_same(found, calibrated, x, atol=1e-5):
    """Log-probabilities, regret and score are those of the calibrated network."""
    expected = calibrated(x)
    wanted = (expected.probs, expected.regret, expected.score)
    found = (torch.as_tensor(found[0]).exp(), *map(torch.as_tensor, found[1:]))
    for own, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(own, other.to(own.dtype), rtol=1e-4, atol=atol)


@pytest.mark.parametrize("rule", RULES)
def test_the_module_gives_the_same_answers(rule, data):
    model, train, validation, x = data
    found = acnml.calibrate(model, train, validation, price=0.02, rule=rule)
    assert_same(found.as_module()(x), found, x)


def test_a_module_takes_mappings_as_keywords_and_as_one(calibrated_text):
    found, x = calibrated_text
    module = found.as_module()
    assert_same(module(**x), found, x)
    assert all(torch.equal(a, b) for a, b in zip(module(x), module(**x), strict=True))


def test_it_is_a_module_like_others(calibrated):
    found, x = calibrated
    module = found.as_module()
    assert not any(each.training for each in module.train().modules())
    outer = nn.Sequential(nn.Identity(), module)
    assert_same(outer(x), found, x)
    again = found.as_module()
    again.load_state_dict(module.state_dict())
    before = found.probs(x)
    with torch.no_grad():
        again.network[2].weight.zero_()  # a copy: the calibrated network does not change
    assert torch.equal(found.probs(x), before)
    assert_same(copy.deepcopy(module)(x), found, x)


def test_it_compiles_and_exports_in_one_graph(calibrated):
    found, x = calibrated
    module = found.as_module()
    batch = torch.export.Dim("batch")
    program = torch.export.export(module, (x[:4],), dynamic_shapes={"args": ({0: batch},)})
    for size in (1, 2, 9):
        assert_same(program.module()(x[:size]), found, x[:size])
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    assert_same(compiled(x), found, x)


def test_a_module_leaves_autocast(calibrated):
    """The network may run in half precision, but nothing is solved in it."""
    found, x = calibrated
    module = found.as_module()
    with torch.autocast("cpu", torch.bfloat16):
        log_probs, regret, score = module(x)
    assert log_probs.dtype == regret.dtype == score.dtype == torch.float32
    torch.testing.assert_close(log_probs.exp(), found.probs(x), rtol=0, atol=0.03)


class Converting(nn.Module):
    """Returns logits in another precision than that of its weights."""

    def __init__(self, network: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.network, self.dtype = network, dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.network(x).to(self.dtype)


@pytest.mark.parametrize("own", [torch.float32, torch.bfloat16])
def test_a_network_may_convert_its_logits(own, data):
    model, train, validation, x = data
    network = copy.deepcopy(model).to(own)
    train, validation, x = (
        (train[0].to(own), train[1]),
        (validation[0].to(own), validation[1]),
        x.to(own),
    )
    wider = torch.float32 if own is torch.bfloat16 else torch.float64
    plain, converted = (
        acnml.calibrate(each, train, validation, price=0.02)
        for each in (network, Converting(network, wider))
    )
    torch.testing.assert_close(converted.probs(x).float(), plain.probs(x), rtol=0, atol=1e-4)
    assert_same(converted.as_module()(x), converted, x)


def test_outputs_that_are_objects(data):
    model, train, validation, x = data

    class Output(nn.Module):
        def __init__(self):
            super().__init__()
            self.network = model

        def forward(self, x):
            return SimpleNamespace(logits=self.network(x))

    classifier = Classifier(Output(), lambda output: output.logits)
    found = acnml.calibrate(classifier, train, validation, price=0.02)
    assert_same(found.as_module()(x), found, x)


def session(path):
    return pytest.importorskip("onnxruntime").InferenceSession(str(path))


@pytest.fixture
def exporter():
    for package in ("onnx", "onnxruntime", "onnxscript"):
        pytest.importorskip(package, reason="needs the extra `onnx`")


@pytest.mark.usefixtures("exporter")
@pytest.mark.parametrize("rule", RULES)
def test_onnx_file(rule, data, tmp_path):
    model, train, validation, x = data
    found = acnml.calibrate(model, train, validation, price=0.02, rule=rule)
    exported = acnml.export_onnx(found, x[:8], tmp_path / "model.onnx")
    assert exported.difference < 1e-4
    assert b".py" not in exported.path.read_bytes()  # no stack traces of the user's files
    for size in (1, 3, 100):
        assert_same(session(exported.path).run(None, {"input": x[:size].numpy()}), found, x[:size])
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]


@pytest.mark.usefixtures("exporter")
def test_onnx_file_of_a_text_model_takes_texts_of_any_length(calibrated_text, tmp_path):
    found, x = calibrated_text
    example = {name: tensor[:4] for name, tensor in x.items()}
    exported = acnml.export_onnx(found, example, tmp_path / "model.onnx")
    longer = {name: torch.cat([tensor, tensor], 1)[:9, :11] for name, tensor in x.items()}
    inputs = {name: tensor.numpy() for name, tensor in longer.items()}
    assert_same(session(exported.path).run(None, inputs), found, longer)


@pytest.mark.usefixtures("exporter")
def test_a_model_that_fixes_its_batch_is_refused(data, tmp_path):
    network, train, validation, x = data

    class Fixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.network = network

        def forward(self, x):
            return self.network(x * torch.ones(int(x.shape[0]), 1))

    found = acnml.calibrate(Fixed(), train, validation, price=0.02)
    with pytest.raises(ValueError, match=r"does not run on a batch of 1: (.|\n)*len\(x\)"):
        acnml.export_onnx(found, x[:8], tmp_path / "model.onnx")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("exporter")
def test_an_operation_that_the_runtime_lacks_is_explained(data, tmp_path):
    network, train, validation, _ = data
    wide = [(x.double(), y) for x, y in (train, validation)]
    squashed = nn.Sequential(network[0], nn.Softplus(), nn.Tanh(), network[2])
    found = acnml.calibrate(copy.deepcopy(squashed).double(), *wide, price=0.02)
    message = r"onnxruntime cannot run the exported model: (.|\n)*Softplus(.|\n)*model\.float\(\)"
    with pytest.raises(ValueError, match=message):
        acnml.export_onnx(found, normal(4, 4), tmp_path / "model.onnx")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("exporter")
def test_a_failed_export_leaves_nothing(calibrated, tmp_path, monkeypatch):
    found, x = calibrated
    with pytest.raises(ValueError, match="at least two inputs"):
        acnml.export_onnx(found, x[:1], tmp_path / "model.onnx")
    monkeypatch.setattr("acnml.export.LARGEST_DIFFERENCE", -1.0)
    with pytest.raises(ValueError, match=r"differs by .* in probability"):
        acnml.export_onnx(found, x[:8].numpy(), tmp_path / "model.onnx")
    assert list(tmp_path.iterdir()) == []
