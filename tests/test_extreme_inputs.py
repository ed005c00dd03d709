"""Inputs of any size: larger ones are answered with more caution, or refused; never surer."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from torch import nn

import acnml
from acnml import Acnml, Classifier, Diagonal
from acnml._util.checks import RowsError
from acnml.solve.logits import solve
from cases import normal

RAY = torch.tensor([[1.0, -0.7]])
GROWING = [10.0**e for e in (0, 0.5, 1, 1.5, 2, 3, 4, 6, 8, 10, 15, 18, 19.3, 25, 38)]
TINY = [1e-45, 1e-40, 1e-20, 1e-6]


def unit_variances() -> Acnml:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Linear(2, 3)
    mean = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    posterior = Diagonal(mean, {name: torch.ones_like(t) for name, t in mean.items()})
    return Acnml(Classifier(model), posterior)


def laplace() -> Acnml:
    classifier = unit_variances().classifier
    data = [normal(20, 2).float()]
    return Acnml(classifier, acnml.fit_laplace(classifier, data, progress=False))


def calibrated(rule: str = "acnml") -> acnml.Calibrated:
    model, x = unit_variances().classifier.model, normal(400, 2, seed=1).float()
    labels = (model(x).detach() + normal(400, 3, seed=2).float()).argmax(-1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # 400 points are few
        return acnml.calibrate(model, [x], [(x, labels)], rule=rule, progress=False)


def answered(predict, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and regret."""
    found = predict.solve(x) if isinstance(predict, Acnml) else predict(x)
    return found.log_probs, found.regret


each_predictor = pytest.mark.parametrize("make", [unit_variances, laplace, calibrated])


def at(scale: float) -> torch.Tensor:
    return (RAY.double() * scale).float()


@each_predictor
def test_larger_inputs_are_answered_with_more_caution_or_refused(make):
    predict, last, refused = make(), 0.0, False
    for scale in GROWING:
        try:
            log_probs, regret = answered(predict, at(scale))
        except RowsError:  # by the solver, or because s(x) overflows
            refused = True
            continue
        assert not refused, f"{scale} is answered, but a smaller input was refused"
        assert log_probs.isfinite().all()
        assert last - 1e-4 <= regret.item() <= math.log(3) + 1e-6
        last = regret.item()
    assert refused


@each_predictor
def test_tiny_inputs_are_answered_like_zero(make):
    predict = make()
    expected, _ = answered(predict, torch.zeros(1, 2))
    for scale in TINY:
        torch.testing.assert_close(answered(predict, at(scale))[0], expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("rule", ["acnml", "closed-form"])
def test_the_module_gives_the_same_answer_or_nan(rule):
    predict = calibrated(rule)
    module = predict.as_module()
    for scale in [*TINY, *GROWING]:
        with torch.no_grad():
            log_probs, regret, _ = module(at(scale))
        if log_probs.isnan().any():
            assert scale > 100
            assert log_probs.isnan().all()
            assert regret.isnan().all()
        else:
            expected, _ = answered(predict, at(scale))
            torch.testing.assert_close(log_probs, expected, rtol=0, atol=1e-3)
    assert log_probs.isnan().all()


def test_the_exported_file_gives_nan_as_well(tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    path = acnml.export_onnx(calibrated(), normal(4, 2).float(), tmp_path / "model.onnx").path
    session = onnxruntime.InferenceSession(str(path))
    both = torch.cat([at(1.0), at(2e19)])
    found = session.run(None, {session.get_inputs()[0].name: both.numpy()})
    for tensor in map(torch.from_numpy, found):
        assert tensor[0].isfinite().all()
        assert tensor[1].isnan().all()


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
@pytest.mark.parametrize("classes", [3, 70])
def test_a_kernel_that_is_not_finite_spoils_its_own_input_only(bad, classes):
    logits, var = normal(3, classes), normal(3, classes, seed=1).exp()
    expected = solve(logits, torch.diag_embed(var))
    var[1, 2] = bad
    found = solve(logits, torch.diag_embed(var))
    assert not (found.residual[1] <= torch.inf).any()
    assert found.log_lik[1].isnan().all()
    for i in (0, 2):
        torch.testing.assert_close(found.log_lik[i], expected.log_lik[i], rtol=0, atol=1e-9)
