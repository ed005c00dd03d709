"""Posteriors of laplace-torch: the linearised prediction of both libraries is the same."""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import acnml
from acnml import Classifier, Full, Glm, Kronecker
from acnml.laplace_torch import from_laplace
from cases import normal
from predicting import moments_of

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of its dependencies, about torch.jit
    laplace = pytest.importorskip("laplace", reason="laplace-torch is not installed")

pytestmark = pytest.mark.filterwarnings("ignore")  # of laplace-torch and its backends


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def without_bias() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(4, 5, bias=False), nn.Tanh(), nn.Linear(5, 3, bias=False)
    ).double()


def convolution() -> nn.Module:
    torch.manual_seed(2)
    layers = (nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 2, 2, padding=1), nn.ReLU(), nn.Flatten())
    return nn.Sequential(*layers, nn.Linear(18, 3)).double()


X, LABELS = normal(40, 4, seed=3), torch.arange(40) % 3
STRUCTURES = ("diag", "kron", "full")


def fitted(model: nn.Module, **options):
    la = laplace.Laplace(model, "classification", **options)
    la.fit(DataLoader(TensorDataset(X, LABELS), batch_size=16))
    return la


def require_same_prediction(la, model: nn.Module, posterior: acnml.posteriors.Posterior) -> None:
    x, classifier = 3 * normal(7, 4, seed=4), Classifier(model)
    mean, cov = la._glm_predictive_distribution(x)
    moments = moments_of(classifier, posterior, x)
    torch.testing.assert_close(moments.logits, mean, rtol=0, atol=1e-12)
    torch.testing.assert_close(moments.kernel, cov, rtol=1e-9, atol=1e-12)
    theirs = la(x, pred_type="glm", link_approx="probit")
    torch.testing.assert_close(Glm(classifier, posterior)(x).exp(), theirs, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("build", "weights", "structure"),
    list(itertools.product((mlp, without_bias, convolution), ("all", "last_layer"), STRUCTURES)),
)
def test_the_linearised_prediction_is_the_same(build, weights, structure):
    model = build()
    options = {"prior_precision": 0.3, "temperature": 0.7, "prior_mean": 0.1}
    la = fitted(model, subset_of_weights=weights, hessian_structure=structure, **options)
    posterior = from_laplace(la)
    kinds = {"diag": acnml.Diagonal, "kron": Kronecker, "full": Full}
    assert isinstance(posterior, kinds[structure])
    require_same_prediction(la, model, posterior)


@pytest.mark.parametrize("backend", ["BackPackGGN", "CurvlinopsEF", "AsdlGGN"])
def test_kronecker_factors_of_other_backends(backend):
    model, kind = mlp(), getattr(laplace.curvature, backend)
    la = fitted(model, hessian_structure="kron", backend=kind, subset_of_weights="all")
    require_same_prediction(la, model, from_laplace(la))


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_prior_for_every_layer(structure):
    model = mlp()
    prior = torch.tensor([0.1, 0.5, 2.0, 3.0], dtype=torch.float64)
    la = fitted(model, subset_of_weights="all", hessian_structure=structure, prior_precision=prior)
    require_same_prediction(la, model, from_laplace(la))
    if structure != "kron":
        la.prior_precision = torch.linspace(0.1, 2, 43, dtype=torch.float64)
        require_same_prediction(la, model, from_laplace(la))


def test_damping_is_what_the_precision_says():
    model = mlp()
    la = fitted(model, subset_of_weights="all", hessian_structure="kron", damping=True)
    require_same_prediction(la, model, from_laplace(la))
    precision = la.posterior_precision
    precision.damping = True  # laplace-torch 0.3 drops it where it adds the prior
    la.__class__ = type("Damped", (type(la),), {"posterior_precision": precision})
    require_same_prediction(la, model, from_laplace(la))


def test_our_curvature_is_theirs():
    model = mlp()
    options = {"subset_of_weights": "last_layer", "hessian_structure": "full"}
    # The default backend computes the full matrix in single precision.
    la = fitted(model, prior_precision=0.5, backend=laplace.curvature.BackPackGGN, **options)
    ours = acnml.fit_laplace(model, [(X, LABELS)], structure="full", prior_precision=0.5)
    torch.testing.assert_close(from_laplace(la).cov, ours.cov, rtol=1e-9, atol=1e-12)


# Refusals ----------------------------------------------------------------------------------------


def test_what_cannot_be_converted():
    model = mlp()
    with pytest.raises(TypeError, match="a Linear has no counterpart in acnml"):
        from_laplace(nn.Linear(2, 2))
    unfitted = laplace.Laplace(
        model, "classification", subset_of_weights="all", hessian_structure="diag"
    )
    with pytest.raises(ValueError, match=r"not fitted: call la\.fit\(train_loader\) first"):
        from_laplace(unfitted)
    with pytest.raises(ValueError, match="acnml is for classification"):
        from_laplace(laplace.Laplace(model, "regression"))
    subnetwork = fitted(
        model,
        subset_of_weights="subnetwork",
        hessian_structure="full",
        subnetwork_indices=torch.tensor([0, 3]),
    )
    with pytest.raises(TypeError, match=r"has no counterpart in acnml: use .* all weights or"):
        from_laplace(subnetwork)
