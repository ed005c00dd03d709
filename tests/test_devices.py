"""Everything runs where its model and data are.

On a CPU the tests make a trap of the default device: under `torch.device("meta")`, a tensor that
the library creates without naming a device has no values, and the computation fails. Where a device
exists, the same calls run on it and agree with those of the CPU.
"""

from __future__ import annotations

import itertools

import pytest
import torch

import acnml
from acnml import Acnml, Classifier, Gradient, Linearised, conformal, metrics
from cases import MODELS, POSTERIORS, normal
from test_calibrate import problem

CASES = {case.name: case for case in MODELS}
SOLVERS = {
    "linearised": Linearised(),
    "polished": Linearised("network", polish=3),
    "gradient": Gradient(3, 0.5),
    "reference": acnml.solve.Reference(2, 0.5),
    "influence": acnml.solve.Influence(),
}
CUDA = pytest.param(
    "cuda",
    marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
)


def moved(x, device):
    if isinstance(x, dict):
        return {name: tensor.to(device) for name, tensor in x.items()}
    return tuple(t.to(device) for t in x) if isinstance(x, tuple) else x.to(device)


def predictor(case, posterior, solver, device="cpu"):
    model = case.model()
    q = POSTERIORS[posterior](model).to(device)
    classifier = Classifier(model.to(device))
    return Acnml(classifier, q, SOLVERS[solver], alpha=0.1, on_unsolved="ignore")


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("posterior", POSTERIORS)
@pytest.mark.parametrize("name", ["conv", "sequence"])
def test_a_prediction_needs_no_default_device(name, posterior, solver):
    case = CASES[name]
    predict, x = predictor(case, posterior, solver), case.x(4)
    expected = predictor(case, posterior, solver).solve(x)
    with torch.device("meta"):
        found = predict.solve(x)
    assert torch.equal(found.log_lik, expected.log_lik)
    assert torch.equal(found.residual, expected.residual)


@pytest.mark.parametrize("structure", ["diag", "kron", "ekfac"])
def test_a_fit_needs_no_default_device(structure):
    case = CASES["mlp"]
    classifier, data = Classifier(case.model()), [(case.x(6), torch.arange(6) % 3)]
    expected = acnml.fit_laplace(classifier, data, structure=structure, progress=False)
    with torch.device("meta"):
        found = acnml.fit_laplace(classifier, data, structure=structure, progress=False)
    v = {name: torch.ones_like(tensor) for name, tensor in expected.mean.items()}
    for name, tensor in expected.cov_mv(v).items():
        assert torch.equal(found.cov_mv(v)[name], tensor)


def test_replaced_tensors_move_to_the_device_of_the_models_own():
    """A buffer on the meta device stands for a network on an accelerator, a file is on the CPU."""
    case = CASES["mlp"]
    model, x = case.model(), case.x(2)
    expected = Classifier(model).logits(x)
    model.register_buffer("elsewhere", torch.zeros(3, device="meta"))
    classifier, loaded = Classifier(model), {"elsewhere": torch.ones(3)}
    assert classifier.at(loaded).tensors["elsewhere"].device.type == "meta"
    assert torch.equal(classifier.at(loaded).logits(x), expected)
    assert torch.equal(classifier.logits(x, loaded), expected)


LOG_PROBS = torch.log_softmax(normal(60, 3), -1)
LABELS = torch.arange(60) % 3
BINS = {"summary": metrics.summary, "aurc": metrics.aurc}
SETS = {"all": conformal.fit, "by class": conformal.fit_by_class}


@pytest.mark.parametrize("as_arrays", [False, True])
@pytest.mark.parametrize("metric", BINS)
def test_a_metric_needs_no_default_device(metric, as_arrays):
    data = (LOG_PROBS.numpy(), LABELS.numpy()) if as_arrays else (LOG_PROBS, LABELS)
    expected = BINS[metric](*data)
    with torch.device("meta"):
        found = BINS[metric](*data)
    assert found == expected


@pytest.mark.parametrize("fit", SETS)
def test_prediction_sets_need_no_default_device(fit):
    expected = SETS[fit](LOG_PROBS, LABELS).sets(LOG_PROBS)
    with torch.device("meta"):
        found = SETS[fit](LOG_PROBS, LABELS).sets(LOG_PROBS)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("rule", ["acnml", "closed-form"])
def test_a_calibration_needs_no_default_device(rule):
    model, train, validation, _ = problem()

    def run():
        return acnml.calibrate(model, train, validation, rule=rule, price=0.05, progress=False)

    expected, (x, _) = run(), validation[0]
    with torch.device("meta"):
        found = run()
        module = found.as_module()
        answers, abstains = module(x)[0], found.abstains(x)
    assert found.table == expected.table
    assert torch.equal(found.calibrator.outcomes.regret, expected.calibrator.outcomes.regret)
    assert torch.equal(answers, expected.as_module()(x)[0])
    assert torch.equal(abstains, expected.abstains(x))


def test_states_of_fits_need_no_default_device():
    model = CASES["mlp"].model()
    swag = acnml.Swag(rank=2)
    swag.update(model)
    trainer = acnml.fit.BayesByBackprop(Classifier(model), data=6, seed=0)
    for fit in (swag, trainer):
        expected = fit.state_dict()
        with torch.device("meta"):
            found = fit.state_dict()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("device", [CUDA])
def test_a_module_is_on_the_device_of_its_network(device, tmp_path):
    case = CASES["mlp"]
    model, x = case.model(), case.x(4)
    layer = acnml.last_linear(model)
    q = acnml.fit_laplace(Classifier(model), [x], layers=[layer])
    predict = Acnml(Classifier(model.to(device)).tempered(1.5), q, alpha=0.1)
    module = predict.as_module()
    assert {tensor.device.type for tensor in module.state_dict().values()} == {device}
    torch.testing.assert_close(module(x.to(device))[0], predict(x), rtol=0, atol=1e-5)
    acnml.save(predict.posterior, tmp_path / "q.safetensors")
    loaded = acnml.load(tmp_path / "q.safetensors")
    assert torch.equal(
        predict.classifier.at(loaded.mean).logits(predict.classifier.prepare(x)),
        predict.classifier.logits(predict.classifier.prepare(x)),
    )


@pytest.mark.parametrize("device", [CUDA])
@pytest.mark.parametrize("solver", SOLVERS)
def test_a_device_agrees_with_the_cpu(solver, device):
    for case, posterior in itertools.product(MODELS, POSTERIORS):
        expected = predictor(case, posterior, solver).solve(case.x(4))
        found = predictor(case, posterior, solver, device).solve(moved(case.x(4), device))
        assert found.log_lik.device.type == device
        torch.testing.assert_close(found.log_lik.cpu(), expected.log_lik, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_compiled_network_is_solved_like_the_plain_one(solver):
    case = CASES["mlp"]
    predict = predictor(case, "kronecker_eigen", solver)
    compiled = Classifier(torch.compile(case.model(), backend="eager"))
    q = POSTERIORS["kronecker_eigen"](case.model())
    same = Acnml(compiled, q, SOLVERS[solver], alpha=0.1, on_unsolved="ignore")
    assert torch.equal(same(case.x(4)), predict(case.x(4)))
