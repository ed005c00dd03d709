"""Values as trees of JSON data, with their tensors apart: what a file may hold, and how.

A stored value is a tree of frozen dataclasses and named tuples. Each tensor is stored under its
path in the tree ("posterior/mean/fc.weight"). A network is not stored, only its description.
"""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from torch import Tensor

from acnml._algebra.dual import Affine
from acnml._util.params import Params
from acnml.calibration import Calibrated, CalibrationRow
from acnml.calibration.result import changed_tensor
from acnml.classifier import Classifier
from acnml.fit import (
    Curvature,
    DiagonalCurvature,
    EigenFactors,
    EkfacCurvature,
    Factors,
    FullCurvature,
    KroneckerCurvature,
    Swag,
)
from acnml.posteriors import Diagonal, EigenBlock, FactorBlock, Full, Kronecker, LowRank, Posterior
from acnml.predictors import (
    Acnml,
    Bma,
    DensityTempered,
    Ensemble,
    Glm,
    IfComp,
    LogitSampling,
    Map,
    McDropout,
    Modes,
    Pnml,
    Predictor,
    Probit,
    Tempered,
)
from acnml.solvers import Gradient, Influence, Linearised, Reference
from acnml.storage import network
from acnml.typicality import Density, NearestNeighbours, Place, Reader, Typicality

# Values that can be loaded without a network.
Standalone: TypeAlias = Posterior | Curvature | Swag
STANDALONE = (Posterior, Curvature, Swag)

# Values that are stored without their network.
NEEDS_NETWORK = (Predictor, Density)

# The only classes that a file may contain. Loading constructs no others.
KINDS = {
    kind.__name__: kind
    for kind in (
        *(Diagonal, Full, Kronecker, LowRank, FactorBlock, EigenBlock, Affine),
        *(DiagonalCurvature, FullCurvature, KroneckerCurvature, Factors, Swag),
        *(EkfacCurvature, EigenFactors),
        *(Reference, Gradient, Linearised, Influence),
        *(Map, Bma, Acnml, Ensemble, Tempered, DensityTempered, McDropout),
        *(Glm, Probit, LogitSampling),
        *(IfComp, Pnml, Modes),
        *(Calibrated, CalibrationRow),
        *(Typicality, NearestNeighbours, Reader, Place),
    )
}

# Makes a classifier of the fields of a stored one.
Restore: TypeAlias = Callable[..., Classifier]


# What tells networks apart: two heads of one module with different get_logits count as two.
Identity: TypeAlias = tuple[int, Callable[[Any], Tensor]]


def identity(classifier: Classifier) -> Identity:
    """Return what all classifiers of the same network share."""
    return id(classifier.model), classifier._get_logits


def encode(value: Any, path: str, tensors: Params, networks: Sequence[Identity] = ()) -> Any:
    """Convert a value to JSON, and add its tensors to `tensors` under their paths.

    If there are several networks, every classifier gets the index of its own.
    """
    if isinstance(value, Tensor):
        tensors[path] = value.detach().cpu().clone().contiguous()
        return {"tensor": path}
    if isinstance(value, Classifier):
        overrides = encode(value.overrides, path, tensors)
        tree = {"kind": "Classifier", "overrides": overrides, "temperature": value.temperature}
        return {**tree, "index": networks.index(identity(value))} if len(networks) > 1 else tree
    if KINDS.get(type(value).__name__) is type(value):  # not another class of that name
        if isinstance(value, Calibrated):
            value.require_current()  # the file would certify the mixture of two networks
        parts = _encode_items(fields(value), path, tensors, networks)
        tree = {"kind": type(value).__name__, **parts}
        classifier = getattr(value, "classifier", None)
        described = isinstance(value, Density) and path  # by the predictor around it
        if isinstance(classifier, Classifier) and "classifier" in tree and not described:
            tree["classifier"]["network"] = network.describe(classifier, _replaced(value))
        return tree
    if isinstance(value, Mapping):
        return {"map": _encode_items(value, path, tensors, networks)}
    if isinstance(value, (tuple, list)):
        return list(_encode_items(dict(enumerate(value)), path, tensors, networks).values())
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, numbers.Real):  # including NumPy numbers
        return int(value) if isinstance(value, numbers.Integral) else float(value)
    raise TypeError(
        f"cannot store {path or 'a value'} of type {type(value).__name__}; "
        f"supported types are {', '.join(KINDS)}. "
        "Save the posterior, if there is one, and construct the rest again after loading"
    )


def fields(value: Any) -> dict[str, Any]:
    """Return the arguments from which a stored value is constructed."""
    if isinstance(value, Swag):
        return {"state": value.state_dict()}
    if isinstance(value, (Factors, EigenFactors)):
        return value._asdict()
    return {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}


def _encode_items(
    items: Mapping[Any, Any], path: str, tensors: Params, networks: Sequence[Identity]
) -> dict[str, Any]:
    prefix = f"{path}/" if path else ""
    return {str(k): encode(item, f"{prefix}{k}", tensors, networks) for k, item in items.items()}


def _replaced(predictor: Any) -> set[str]:
    """Return the names of those tensors of the network that the file contains."""
    posterior = getattr(predictor, "posterior", None)
    statistics = getattr(predictor, "statistics", ())
    names = {*(posterior.mean if posterior else ()), *(statistics[0] if statistics else ())}
    return names | set(predictor.classifier.overrides)


def decode(tree: Any, tensors: Params, restore: Restore) -> Any:
    """Invert `encode`; `restore` makes a classifier of each stored one."""
    if isinstance(tree, list):
        return tuple(decode(item, tensors, restore) for item in tree)
    if not isinstance(tree, dict):
        return tree
    if "tensor" in tree:
        return tensors[tree["tensor"]]
    if "map" in tree:
        return {key: decode(item, tensors, restore) for key, item in tree["map"].items()}
    kind, network = tree["kind"], tree.get("network")
    arguments = {
        name: decode(item, tensors, restore)
        for name, item in tree.items()
        if name not in ("kind", "network")
    }
    if kind == "Classifier":
        return restore(network=network, **arguments)
    build = Swag.from_state_dict if kind == Swag.__name__ else KINDS[kind]
    value = build(**arguments)
    return _with_own_layer(value) if isinstance(value, Calibrated) else value


def _with_own_layer(value: Calibrated) -> Calibrated:
    """Put the last layer of the file into a network that was built without its weights."""
    if changed_tensor(value) is None:
        return value
    return replace(value, predictor=value.predictor.at(value.predictor.posterior.mean))


def count_networks(tree: Any) -> int:
    """Return how many networks the classifiers of a stored value have."""
    if not isinstance(tree, (dict, list)):
        return 0
    items = list(tree.values()) if isinstance(tree, dict) else tree
    is_classifier = isinstance(tree, dict) and tree.get("kind") == "Classifier"
    own = int(tree.get("index", 0)) + 1 if isinstance(tree, dict) and is_classifier else 0
    return max([own, *map(count_networks, items)])
