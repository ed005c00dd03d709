"""A predictor as a module and as an ONNX file gives the predictor's probabilities."""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import acnml
from acnml import Acnml, Classifier, Gradient, Linearised
from acnml._util.seeding import seeded
from cases import CONV, LINEAR, MLP, MODELS, POSTERIORS, affine_layers, normal
from studies.data import cifar10
from studies.data.folder import data_folder
from studies.models import MODELS as NETWORKS
from test_calibrate import joined, problem

HEADS = ["diagonal", "kronecker_factors", "kronecker_eigen", "full"]


def head_posterior(model: nn.Module, kind: str) -> acnml.posteriors.Posterior:
    """A posterior over the last layer alone, under the names that the model has for it."""
    layer = affine_layers(model)[-1]
    module = model.get_submodule(layer.weight.rpartition(".")[0])
    data = [(normal(40, module.in_features), torch.arange(40) % module.out_features)]
    structure = {"diagonal": "diag", "full": "full"}.get(kind, "kron")
    curvature = acnml.fit.fit_curvature(module, data, structure=structure)
    block = (acnml.posteriors.FactorBlock.damped,) if kind == "kronecker_factors" else ()
    posterior = curvature.posterior(1.0, *block)
    from test_solvers import renamed

    return renamed(posterior, {n.rpartition(".")[2]: n for n in layer.names})


@pytest.mark.parametrize("case", MODELS, ids=lambda case: case.name)
@pytest.mark.parametrize("kind", HEADS)
def test_the_module_gives_the_predictors_numbers(case, kind):
    model, x = case.model(), case.x(7)
    predict = Acnml(Classifier(model).tempered(1.4), head_posterior(model, kind), alpha=0.5)
    args, kwargs = ((), x) if isinstance(x, dict) else (x if isinstance(x, tuple) else (x,), {})
    module = predict.as_module()
    log_probs, regret = module(*args, **kwargs)
    torch.testing.assert_close(log_probs.exp(), predict(x).exp(), rtol=0, atol=1e-5)
    torch.testing.assert_close(regret, predict.regret(x), rtol=0, atol=1e-5)
    assert module.residual(*args, **kwargs).max() < 1e-2


def test_some_of_many_labels_are_enough_where_they_are_for_the_predictor():
    model = nn.Linear(4, 80).double()
    nn.init.normal_(model.weight, std=3.0, generator=torch.Generator().manual_seed(0))
    nn.init.zeros_(model.bias)
    solver, x = acnml.Linearised(negligible=0.01), normal(12, 4)
    predict = Acnml(Classifier(model), POSTERIORS["kronecker_eigen"](model), solver, alpha=0.1)
    needed = (predict.solve(x).omitted == 0).sum(-1)
    log_probs, _ = predict.as_module(labels=4)(x)
    enough = needed <= 4
    assert 0 < enough.sum() < len(x)
    assert torch.equal(~log_probs.isnan().any(-1), enough)
    assert (log_probs.exp() - predict(x).exp())[enough].abs().max() <= 0.01
    assert predict.as_module()(x)[0].isfinite().all()


@pytest.mark.parametrize("setting", [{"labels": 5.0}, {"labels": 0}, {"steps": 2.5}, {"steps": -1}])
def test_settings_of_a_module_are_checked(setting):
    model = MLP.model()
    predict = Acnml(Classifier(model), head_posterior(model, "full"))
    with pytest.raises((TypeError, ValueError), match=f"^{next(iter(setting))} must be"):
        predict.as_module(**setting)


def test_it_is_a_module_like_others():
    model, x = MLP.model(), MLP.x(5)
    predict = Acnml(Classifier(model), head_posterior(model, "diagonal"), alpha=0.3)
    module = predict.as_module()
    assert not module.training
    assert set(dict(module.named_parameters())) >= {"linear.weight", "linear.bias"}
    half = module.float()
    torch.testing.assert_close(half(x.float())[0].double(), predict(x), rtol=0, atol=1e-4)
    first = nn.Sequential(nn.Identity(), predict.as_module())
    assert first(x)[0].shape == (5, 3)
    again = predict.as_module()
    again.load_state_dict(predict.as_module().state_dict())
    before = predict(x)
    with torch.no_grad():
        again.linear.weight.zero_()  # a copy: neither model nor predictor changes
    assert torch.equal(predict(x), before)


class Reads(nn.Module):
    """A network that reads attributes of its last layer."""

    def __init__(self):
        super().__init__()
        self.body, self.last = nn.Linear(4, 6), nn.Linear(6, 3)
        self.last.scale = 2.0  # an attribute that users may add

    def forward(self, x):
        own = self.last
        features = own.scale * torch.tanh(self.body(x.to(own.weight.dtype)))
        return own(features.view(-1, own.in_features)).view(-1, len(own.bias))


def head_predictor(model, x, **settings):
    classifier = Classifier(model).tempered(1.4)
    last = acnml.last_linear(model)
    posterior = acnml.fit_laplace(classifier, x, layers=[last])
    return Acnml(classifier, posterior, alpha=0.3, **settings)


def test_a_network_may_read_its_last_layer(tmp_path):
    class Wide(Reads):  # as many classes as features, so that the last view fits both
        def __init__(self):
            super().__init__()
            self.last = nn.Linear(6, 6)
            self.last.scale = 2.0

    x = normal(40, 4).float()
    predict = head_predictor(Wide(), x)
    module = predict.as_module()
    torch.testing.assert_close(module(x)[0], predict(x), rtol=0, atol=1e-5)
    # The layer is in the module once: by name, in copies, and in the file.
    names = [name for name in module.state_dict() if name.startswith(("trunk.", "linear."))]
    assert names == ["trunk.body.weight", "trunk.body.bias", "linear.weight", "linear.bias"]
    double = copy.deepcopy(module).double()
    assert double.trunk.last.weight is double.linear.weight
    torch.testing.assert_close(double(x)[0].float(), predict(x), rtol=0, atol=1e-5)
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x)[0], predict(x), rtol=0, atol=1e-5)
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    exported = acnml.export_onnx(predict, x[:8], tmp_path / "model.onnx")
    assert exported.difference < 1e-5
    weights = [one.name for one in onnx.load(exported.path).graph.initializer]
    assert [name for name in weights if "last" in name] == []
    assert weights.count("linear.weight") == 1


@pytest.mark.parametrize("place", ["", "1", "1.0"])
def test_typicality_of_logits_cannot_become_a_module(place):
    """The trunk of a module returns features where the network returns logits."""
    model, x = (
        nn.Sequential(nn.Linear(4, 3), nn.Sequential(nn.Linear(3, 3))).double(),
        normal(40, 4),
    )
    read = acnml.fit_typicality(Classifier(model), x, x, places=[acnml.features.Place(place)])
    with pytest.raises(ValueError, match=r"which are logits.*Place\('1.0', is_input=True\)"):
        head_predictor(model, x, typicality=read).as_module()
    received = acnml.features.Place("1.0", is_input=True)
    read = acnml.fit_typicality(Classifier(model), x, x, places=[received])
    predict = head_predictor(model, x, typicality=read)
    torch.testing.assert_close(predict.as_module()(x)[0], predict(x), rtol=0, atol=1e-5)


def test_a_network_that_does_more_with_its_logits_cannot_become_a_module():
    class Halved(nn.Module):
        def __init__(self):
            super().__init__()
            self.last = nn.Linear(4, 3).double()

        def forward(self, x):
            return 0.5 * self.last(x)

    x = normal(40, 4)
    predict = head_predictor(Halved(), x)
    predict(x)
    with pytest.raises(ValueError, match="the logits are not the outputs of layer 'last'"):
        predict.as_module()


class Converting(nn.Module):
    """Returns logits in another precision than that of its weights."""

    def __init__(self, network: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.network, self.dtype = network, dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.network(x).to(self.dtype)


@pytest.mark.parametrize(("own", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
def test_a_network_may_convert_its_logits(own, tolerance):
    """Probabilities are those of the network that does not convert, up to rounding."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 6, generator=generator)
    y = (x[:, :3] + torch.randn(400, 3, generator=generator)).argmax(1)
    with seeded(0):
        network = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.Adam(network.parameters(), 0.05)
    for _ in range(40):
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(x[:200]), y[:200]).backward()
        optimizer.step()
    network, x = network.to(own), x.to(own)
    wider = torch.float32 if own is torch.bfloat16 else torch.float64
    plain, converted = (
        acnml.calibrate(each, x[:200], (x[200:], y[200:]), price=0.02)
        for each in (network, Converting(network, wider))
    )
    torch.testing.assert_close(
        converted.probs(x).float(), plain.probs(x).float(), rtol=0, atol=tolerance
    )
    log_probs, regret = converted.as_module(steps=50)(x)
    torch.testing.assert_close(log_probs.exp().to(wider), converted.probs(x), rtol=0, atol=1e-4)
    torch.testing.assert_close(regret.to(wider), converted.regret(x), rtol=0, atol=1e-3)


def test_a_module_leaves_autocast(calibrated):
    """The network may run in half precision, but the head does not solve in it."""
    predict, x = calibrated[0], calibrated[1]
    module = predict.as_module()
    features, logits, scale = module._features(x)
    expected = module.head(features, logits, scale)
    with torch.autocast("cpu", torch.bfloat16):
        found = module.head(features, logits, scale)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("curvature", ["kron", "full"])
def test_a_predictor_leaves_autocast(curvature):
    """Features may come in half precision, but the kernel and the typicality do not."""
    model = MLP.model().float()
    x = MLP.x(300).float()
    labels = (model(x).detach() + normal(300, 3, seed=1)).argmax(-1)
    data = x[:100], (x[100:], labels[100:])
    predict = acnml.calibrate(model, *data, price=0.1, curvature=curvature).predictor
    found = predict.features(x)
    expected, score = predict.solve_features(found).log_lik, predict.typicality(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(predict.solve_features(found).log_lik, expected)
        assert predict.typicality(x).dtype == score.dtype


def test_a_module_in_double_precision_has_a_double_temperature():
    model, x = MLP.model(), MLP.x(7)
    predict = Acnml(Classifier(model).tempered(1.4), head_posterior(model, "diagonal"), alpha=0.5)
    module = predict.as_module(steps=20)
    assert module.head.alpha.dtype == torch.float64
    assert module.head.alpha.item() == 1.4**-2
    exact = replace(predict, solver=Linearised(tolerance=1e-12))
    torch.testing.assert_close(module(x)[0], exact(x), rtol=0, atol=1e-10)


def test_it_compiles_and_exports_in_one_graph():
    model, x = CONV.model().float(), CONV.x(4).float()
    predict = Acnml(Classifier(model), head_posterior(CONV.model(), "kronecker_eigen"), alpha=0.4)
    module = predict.as_module()
    expected = module(x)
    batch = torch.export.Dim("batch")
    program = torch.export.export(module, (x,), dynamic_shapes={"args": ({0: batch},)})
    for size in (1, 2, 9):
        found = program.module()(CONV.x(size).float())
        torch.testing.assert_close(found[0], module(CONV.x(size).float())[0], rtol=0, atol=1e-5)
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x)[0], expected[0], rtol=0, atol=1e-5)


@pytest.fixture(scope="module")
def calibrated():
    """In single precision, as networks are: onnxruntime lacks some operations in double."""
    model, *loaders = problem()
    single = [[(x.float(), y) for x, y in loader] for loader in loaders]
    train, validation, test = single
    plain = nn.Sequential(model.body, nn.Tanh(), model.head).float()
    return acnml.calibrate(plain, train, validation, price=0.02), joined(test)[0]


def test_a_model_that_fixes_its_batch_is_refused(tmp_path):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model, *loaders = problem()  # it counts its inputs with len(x)
    train, validation, _ = ([(x.float(), y) for x, y in loader] for loader in loaders)
    predict = acnml.calibrate(model.float(), train, validation, price=0.02)
    with pytest.raises(ValueError, match=r"does not run on a batch of 1: (.|\n)*len\(x\)"):
        acnml.export_onnx(predict, train[0][0], tmp_path / "model.onnx")
    assert list(tmp_path.iterdir()) == []


def test_onnx_file(calibrated, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    predict, x = calibrated
    exported = acnml.export_onnx(predict, x[:8], tmp_path / "model.onnx")
    assert exported.difference < 1e-4
    assert exported.residual < 0.01
    assert b".py" not in exported.path.read_bytes()  # no stack traces of the user's files
    session = onnxruntime.InferenceSession(str(exported.path))
    for size in (1, 3, 100):
        (name,) = (each.name for each in session.get_inputs())
        log_probs, regret = session.run(None, {name: x[:size].numpy()})
        expected = predict.solve(x[:size])
        found = torch.from_numpy(log_probs).exp()
        torch.testing.assert_close(found, expected.log_probs.exp(), rtol=0, atol=1e-4)
        torch.testing.assert_close(torch.from_numpy(regret), expected.regret, rtol=0, atol=1e-4)
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]


def assert_double_file(exported, predict, x):
    """The file gives the predictor's numbers in double precision."""
    import onnxruntime

    assert exported.difference < 1e-5
    session = onnxruntime.InferenceSession(str(exported.path))
    (name,) = (each.name for each in session.get_inputs())
    log_probs, regret = (torch.from_numpy(each) for each in session.run(None, {name: x.numpy()}))
    assert log_probs.dtype == regret.dtype == torch.float64
    expected = predict.solve(x)
    torch.testing.assert_close(log_probs.exp(), expected.log_probs.exp(), rtol=0, atol=1e-5)
    torch.testing.assert_close(regret, expected.regret, rtol=0, atol=1e-5)
    # The module takes the same steps, so its numbers are the same up to rounding.
    module = predict.as_module()(x)
    for found, own in zip((log_probs, regret), module, strict=True):
        torch.testing.assert_close(found, own.detach(), rtol=0, atol=1e-9)


def test_onnx_file_in_double_precision(tmp_path):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model, train, validation, test = problem()
    plain = nn.Sequential(model.body, nn.Tanh(), model.head)
    predict, x = acnml.calibrate(plain, train, validation, price=0.02), joined(test)[0]
    assert x.dtype == torch.float64
    assert_double_file(acnml.export_onnx(predict, x[:8], tmp_path / "model.onnx"), predict, x)


def test_onnx_file_of_a_scikit_learn_classifier(tmp_path):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    pytest.importorskip("sklearn", reason="needs scikit-learn")
    from acnml.sklearn import AcnmlClassifier

    _, train, *_ = problem()
    x, y = joined(train)
    predict = AcnmlClassifier(cv=2, price=0.1).fit(x.numpy(), y.numpy()).calibrated_
    exported = acnml.export_onnx(predict, x[:8].numpy(), tmp_path / "model.onnx")
    assert_double_file(exported, predict, x)


def test_an_operation_that_the_runtime_lacks_is_explained(tmp_path):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model = nn.Sequential(nn.Linear(4, 5), nn.Softplus(), nn.Linear(5, 3)).double()
    predict = Acnml(Classifier(model), head_posterior(model, "diagonal"), alpha=0.1)
    message = r"onnxruntime cannot run the exported model: (.|\n)*Softplus(.|\n)*model\.float\(\)"
    with pytest.raises(ValueError, match=message):
        acnml.export_onnx(predict, normal(4, 4), tmp_path / "model.onnx")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not cifar10.available(), reason="needs CIFAR-10 in ACNML_DATA")
def test_a_real_network_on_real_images(tmp_path):
    """ResNet-20 on CIFAR-10: the file gives the predictor's probabilities, also on noise."""
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    description = NETWORKS["resnet20"]
    network = description.trained(data_folder() / "weights")
    test, train = cifar10.load("test"), cifar10.load("train")

    def inputs(images):
        return description.normalise(cifar10.to_unit(images))

    validation = [(inputs(test.inputs[:500]), test.labels[:500])]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # 500 images are few for a price of 0.01 nats
        predict = acnml.calibrate(network, [inputs(train.inputs[:300])], validation)
    exported = acnml.export_onnx(predict, validation[0][0][:4], tmp_path / "resnet20.onnx")
    assert exported.difference < 1e-4
    session = onnxruntime.InferenceSession(str(exported.path))
    (name,) = (each.name for each in session.get_inputs())
    for x in (inputs(test.inputs[500:600]), 3 * normal(20, 3, 32, 32).float()):
        log_probs, regret = session.run(None, {name: x.numpy()})
        expected = predict.solve(x)
        found = torch.from_numpy(log_probs).exp()
        torch.testing.assert_close(found, expected.log_probs.exp(), rtol=0, atol=1e-4)
        torch.testing.assert_close(torch.from_numpy(regret), expected.regret, rtol=0, atol=1e-4)


def test_too_few_labels_on_the_example_are_refused(tmp_path):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model = nn.Linear(4, 80)
    predict = Acnml(Classifier(model), POSTERIORS["kronecker_eigen"](model), alpha=0.1)
    with pytest.raises(ValueError, match="some inputs of the example unsolved; take more steps"):
        acnml.export_onnx(predict, normal(4, 4).float(), tmp_path / "few.onnx", labels=2)
    assert not list(tmp_path.iterdir())


def test_a_failed_export_leaves_nothing(calibrated, tmp_path, monkeypatch):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    predict, x = calibrated
    with pytest.raises(ValueError, match="at least two inputs"):
        acnml.export_onnx(predict, x[:1], tmp_path / "model.onnx")
    monkeypatch.setattr("acnml.export.LARGEST_DIFFERENCE", 0.0)
    with pytest.raises(ValueError, match=r"differs by .* in probability"):
        acnml.export_onnx(predict, 3 * x[:8], tmp_path / "model.onnx", steps=0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("get_logits", [None, lambda output: output.logits])
def test_outputs_that_are_objects(get_logits):
    class Output(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(4, 3).double()

        def forward(self, x):
            return SimpleNamespace(logits=self.head(x))

    model = Output()
    classifier = Classifier(model, get_logits)
    posterior = acnml.fit_laplace(classifier, [(normal(20, 4), torch.arange(20) % 3)])
    predict = Acnml(classifier, posterior, alpha=0.2)
    x = normal(5, 4, seed=4)
    torch.testing.assert_close(predict.as_module()(x)[0], predict(x), rtol=0, atol=1e-5)


def test_an_example_may_be_an_array(tmp_path):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model, x = nn.Linear(4, 3), normal(4, 4).float().numpy()
    predictor = Acnml(Classifier(model), POSTERIORS["diagonal"](model), alpha=0.1)
    assert acnml.export_onnx(predictor, x, tmp_path / "model.onnx").difference < 1e-5
    with pytest.raises(ValueError, match="an example of at least two inputs"):
        acnml.export_onnx(predictor, x[:1], tmp_path / "model.onnx")


def test_labels_that_both_leave_out_do_not_stop_an_export(tmp_path):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    torch.manual_seed(0)
    model = nn.Linear(4, 80)
    solver = acnml.Linearised(negligible=0.02)
    predict = Acnml(Classifier(model), POSTERIORS["kronecker_eigen"](model), solver, alpha=0.01)
    x = 3 * normal(4, 4).float()
    needed = int((predict.solve(x).omitted == 0).sum(-1).max())
    exported = acnml.export_onnx(predict, x, tmp_path / "few.onnx", labels=needed)
    assert needed < 80
    assert exported.difference <= 0.02


def test_only_what_has_a_module_is_exported(tmp_path):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model = LINEAR.model()
    message = r"only the result of acnml\.calibrate and an Acnml can be exported, got a Map"
    with pytest.raises(TypeError, match=message):
        acnml.export_onnx(acnml.Map(Classifier(model)), LINEAR.x(4), tmp_path / "model.onnx")


def test_refusals():
    model = MLP.model()
    everywhere = Acnml(Classifier(model), POSTERIORS["kronecker_eigen"](model), alpha=0.1)
    with pytest.raises(ValueError, match="only ACNML with a posterior over the last Linear layer"):
        everywhere.as_module()
    model = LINEAR.model()
    steps = Acnml(Classifier(model), POSTERIORS["diagonal"](model), Gradient(), alpha=0.1)
    with pytest.raises(ValueError, match="only ACNML with a posterior over the last Linear layer"):
        steps.as_module()
    with pytest.raises(TypeError, match="a LowRank posterior cannot be exported"):
        Acnml(Classifier(model), POSTERIORS["low_rank"](model), alpha=0.1).as_module()
