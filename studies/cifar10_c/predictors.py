"""From a method, which is plain data, to the predictor that it stands for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import acnml
from acnml import Bma, Classifier, FactorBlock, Posterior, Predictor, Solver
from studies.cifar10_c.methods import (
    DROPOUT,
    ENSEMBLE,
    HEAD,
    KFAC,
    SGD,
    STEPS,
    SWA,
    SWAG,
    SWAG_D,
    Method,
)
from studies.cifar10_c.posteriors import (
    curvature,
    head_curvature,
    load_statistics,
    prior_precision,
    renewed,
    swag_diagonal,
    swag_low_rank,
)
from studies.cifar10_c.workshop import Workshop
from studies.store import Artefact
from studies.study.knobs import TAU, TEMPERATURE
from studies.study.saved import load_curvature


def artefacts_of(method: Method, workshop: Workshop) -> tuple[Artefact, ...]:
    """Make, or find, what a method stands on: networks, or SWA and then a posterior."""
    members = range(workshop.study.members)
    makers: Mapping[str, Callable[[], tuple[Artefact, ...]]] = {
        SGD: lambda: (workshop.sgd(),),
        SWA: lambda: (workshop.swa(),),
        DROPOUT: lambda: (workshop.dropout(),),
        ENSEMBLE: lambda: tuple(workshop.swa(member) for member in members),
        SWAG_D: lambda: (workshop.swa(), swag_diagonal(workshop)),
        SWAG: lambda: (workshop.swa(), swag_low_rank(workshop)),
        KFAC: lambda: (workshop.swa(), curvature(workshop)),
        HEAD: lambda: (workshop.swa(), head_curvature(workshop, method.likelihood or 1.0)),
    }
    return makers[method.posterior]()


def predictor(method: Method, workshop: Workshop) -> Predictor:
    """Return the predictor that a method stands for."""
    if method.value is None or method.likelihood is None or method.scale is None:
        raise ValueError(f"choose {method.name}'s {method.knob} first")
    if method.rule == "MC dropout":
        network = workshop.dropout_classifier()
        return acnml.McDropout(network, workshop.study.samples, workshop.seed)
    if method.rule == "MAP":
        return _of_networks(method, method.value, workshop)
    swa, fitted = artefacts_of(method, workshop)
    classifier = workshop.classifier(swa).tempered(method.likelihood)
    posterior = _posterior(method, method.value, fitted, workshop)
    if method.rule == "BMA":
        return _bma(method, classifier, posterior, workshop)
    if method.rule == "GLM":
        return acnml.Glm(classifier, posterior)
    return acnml.Acnml(classifier, posterior, solver_of(method))


def solver_of(method: Method) -> Solver:
    """Return the solver of a method: the paper takes smaller steps for KFAC."""
    if method.solver == STEPS:
        return acnml.Gradient(10, 0.25) if method.posterior == KFAC else acnml.Gradient(5, 0.5)
    return acnml.Linearised()


def _of_networks(method: Method, value: float, workshop: Workshop) -> Predictor:
    each = tuple(
        acnml.Map(workshop.classifier(weights)) for weights in artefacts_of(method, workshop)
    )
    whole = each[0] if len(each) == 1 else acnml.Ensemble(each)
    return acnml.Tempered(whole, value) if method.knob == TEMPERATURE else whole


def _posterior(method: Method, value: float, fitted: Artefact, workshop: Workshop) -> Posterior:
    """Return the posterior as the knob has it; the whole network's KFAC is damped, as in the paper.

    α and the scale of a covariance are the same thing: α log p + log q has the maximiser of
    log p + log q_α with Σ → αΣ.
    """
    tau, scale = prior_precision(workshop), method.scale or 1.0
    if method.posterior == HEAD and method.knob == TAU:
        return load_curvature(fitted).posterior(value)
    if method.posterior == HEAD:
        return load_curvature(fitted).posterior(tau).scaled(value)
    if method.posterior == KFAC:
        return load_curvature(fitted).posterior(tau, FactorBlock.damped).scaled(scale * value)
    return fitted.load_posterior().scaled(value)


def _bma(
    method: Method, classifier: Classifier, posterior: Posterior, workshop: Workshop
) -> Predictor:
    """Return the average over samples, with batch norm renewed for each."""
    build = partial(Bma, classifier, posterior, workshop.study.samples, workshop.seed)
    needs = tuple(artefact.stage for artefact in artefacts_of(method, workshop))
    found = load_statistics(renewed(build, method, needs, workshop), workshop.study.samples)
    statistics = tuple({n: t.to(workshop.device) for n, t in each.items()} for each in found)
    return build(statistics=statistics)
