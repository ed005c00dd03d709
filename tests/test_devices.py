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
from acnml import Acnml, Classifier, Gradient, Linearised
from cases import MODELS, POSTERIORS

CASES = {case.name: case for case in MODELS}
SOLVERS = {
    "linearised": Linearised(),
    "polished": Linearised(polish=3),
    "gradient": Gradient(3, 0.5),
    "reference": acnml.Reference(2, 0.5),
    "influence": acnml.Influence(),
}
FITS = {
    "diagonal": acnml.fit_diagonal_laplace,
    "kfac": acnml.fit_kfac_laplace,
    "ekfac": acnml.fit_ekfac_laplace,
}
CUDA = pytest.param(
    "cuda",
    marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
)
MPS = pytest.param(
    "mps", marks=pytest.mark.skip(reason="MPS has no double precision, which the solvers use")
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
@pytest.mark.parametrize("name", ["mlp", "conv", "sequence"])
def test_a_prediction_needs_no_default_device(name, posterior, solver):
    case = CASES[name]
    predict, x = predictor(case, posterior, solver), case.x(4)
    expected = predictor(case, posterior, solver).solve(x)
    with torch.device("meta"):
        found = predict.solve(x)
    assert torch.equal(found.log_lik, expected.log_lik)
    assert torch.equal(found.residual, expected.residual)


@pytest.mark.parametrize("fit", FITS)
def test_a_fit_needs_no_default_device(fit):
    case = CASES["mlp"]
    classifier, data = Classifier(case.model()), [(case.x(6), torch.arange(6) % 3)]
    expected = FITS[fit](classifier, data, progress=False)
    with torch.device("meta"):
        found = FITS[fit](classifier, data, progress=False)
    v = {name: torch.ones_like(tensor) for name, tensor in expected.mean.items()}
    for name, tensor in expected.cov_mv(v).items():
        assert torch.equal(found.cov_mv(v)[name], tensor)


@pytest.mark.parametrize("device", [CUDA, MPS])
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
    predict = predictor(case, "kronecker_factors", solver)
    compiled = Classifier(torch.compile(case.model(), backend="eager"))
    q = POSTERIORS["kronecker_factors"](case.model())
    same = Acnml(compiled, q, SOLVERS[solver], alpha=0.1, on_unsolved="ignore")
    assert torch.equal(same(case.x(4)), predict(case.x(4)))
