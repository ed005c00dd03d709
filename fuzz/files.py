"""Mutated files: flipped, cut, spliced and rewritten ones are refused, or hold what was stored."""

from __future__ import annotations

import copy
import random
import tempfile
import warnings
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

import acnml
from acnml import Acnml, Classifier, IfComp, Map, Modes, Tempered
from acnml._util.params import map_tensors
from acnml.solve import Influence
from fuzz.networks import network
from fuzz.outcome import Outcome, WrongError, refused_or, require
from fuzz.posteriors import posterior

STORED = 12  # different files, so that most of the time is spent on mutations


@lru_cache(maxsize=STORED)
def _stored(number: int) -> tuple[bytes, Any, Classifier | list[Classifier] | None]:
    """Return the bytes of a file, the value in it, and its network."""
    rng = random.Random(number)
    net = network(rng)
    vars(net.model)["_scale"] = 1.0  # a setting that a copy must share
    _, q = posterior(rng, net)
    classifier = Classifier(net.model)
    values: list[Any] = [
        *(q, Map(classifier)),
        *(Acnml(classifier, q, alpha=0.5), Tempered(Map(classifier), 2.0)),
        *(IfComp(classifier, q, 0.5), Modes((Acnml(classifier, q, Influence()),))),
    ]
    value = values[number % len(values)]
    given = None if value is q else [classifier] if isinstance(value, Modes) else classifier
    with tempfile.TemporaryDirectory() as folder:
        acnml.save(value, Path(folder) / "file")
        return (Path(folder) / "file").read_bytes(), value, given


def _flip(rng: random.Random, content: bytearray) -> None:
    for _ in range(rng.choice([1, 1, 1, 2, 8])):
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)


def _set_bytes(rng: random.Random, content: bytearray) -> None:
    place = rng.randrange(len(content))
    content[place : place + rng.randrange(1, 9)] = rng.randbytes(rng.randrange(9))


def _cut(rng: random.Random, content: bytearray) -> None:
    del content[rng.randrange(len(content)) :]


def _extend(rng: random.Random, content: bytearray) -> None:
    content += rng.choice([b"\0", b" ", b"}", rng.randbytes(100)])


def _splice(rng: random.Random, content: bytearray) -> None:
    other, place = _stored(rng.randrange(STORED))[0], rng.randrange(len(content))
    content[place:] = other[place:]


def _swap_blocks(rng: random.Random, content: bytearray) -> None:
    a, b = (8 * rng.randrange(max(1, len(content) // 8)) for _ in range(2))
    content[a : a + 8], content[b : b + 8] = content[b : b + 8], content[a : a + 8]


def _header_length(rng: random.Random, content: bytearray) -> None:
    content[:8] = rng.choice([0, 1, len(content), 2**40, 2**63 - 1, 2**64 - 1]).to_bytes(
        8, "little"
    )


def _replace_word(rng: random.Random, content: bytearray) -> None:
    """Change a word of the header and keep its length, as only a person would."""
    words = [(b"F32", b"I32"), (b"F64", b"I64"), (b"mean", b"mear"), (b"acnml", b"acnmk")]
    words += [(b"format_version", b"format_versioN"), (b"kind", b"find"), (b"alpha", b"alphb")]
    words += [(b": 2,", b": 1,"), (b": 2,", b": 3,"), (b"checksum", b"checksun"), (b"0.5", b"0.6")]
    old, new = rng.choice(words)
    content[:] = bytes(content).replace(old, new, rng.choice([1, -1]))


def _nothing(rng: random.Random, content: bytearray) -> None:
    """Leave the file as it is: it must load."""


MUTATIONS: list[Callable[[random.Random, bytearray], None]] = [
    *(_flip, _flip, _flip, _set_bytes, _cut, _extend),
    *(_splice, _swap_blocks, _header_length, _replace_word, _nothing),
]


def mutated_file(seed: int) -> tuple[str, Outcome]:
    """Mutate a stored file, or change its network, and load it."""
    rng = random.Random(seed)
    if rng.random() < 0.1:
        return _for_another_network(rng)
    number, mutate = rng.randrange(STORED), rng.choice(MUTATIONS)
    original, value, classifier = _stored(number)
    content = bytearray(original)
    mutate(rng, content)
    name = f"file {number} ({type(value).__name__}), {mutate.__name__[1:]}"

    def run() -> Outcome:
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("error")
            path = Path(folder) / "file"
            path.write_bytes(content)
            loaded = acnml.load(path) if classifier is None else acnml.load(path, classifier)
        require(bytes(content) == original, f"{name}: a changed file was loaded")
        require(_tensors(loaded) == _tensors(value), f"{name}: not what was stored")
        return Outcome.EQUAL

    outcome = refused_or(run)
    require(outcome is Outcome.REFUSED or bytes(content) == original, name)
    require(outcome is Outcome.EQUAL or bytes(content) != original, f"{name}: refused")
    return name, outcome


def _for_another_network(rng: random.Random) -> tuple[str, Outcome]:
    """Change a setting of the network, or a weight that is not in the file, in its last digit."""
    number = rng.choice([each for each in range(STORED) if _stored(each)[2] is not None])
    content, value, classifier = _stored(number)
    first = classifier[0] if isinstance(classifier, list) else classifier
    assert first is not None
    model = copy.deepcopy(first.model)
    of: Any = value.predictors[0] if isinstance(value, Modes) else value
    known = set() if isinstance(of, (Map, Tempered)) else set(of.posterior.mean)
    free = [tensor for name, tensor in model.named_parameters() if name not in known]
    is_weight = bool(free) and rng.random() < 0.7
    if is_weight:
        weights = rng.choice(free).data.view(-1)
        place = rng.randrange(len(weights))
        weights[place] = torch.nextafter(weights[place], torch.full_like(weights[place], 1e6))
    else:
        vars(model)["_scale"] = 5.0
    name = f"file {number} ({type(value).__name__}), another {'weight' if is_weight else 'setting'}"
    other = Classifier(model)

    def run() -> Outcome:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "file"
            path.write_bytes(content)
            acnml.load(path, [other] if isinstance(classifier, list) else other)
        raise WrongError(f"{name}: loaded")

    return name, refused_or(run)


def _tensors(value: Any) -> list[bytes]:
    """Return the bytes of all tensors in a value, in a fixed order."""
    found: list[bytes] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return tensor

    if isinstance(value, acnml.posteriors.Posterior):
        map_tensors(value, note)
    elif isinstance(value, (Acnml, IfComp)):
        map_tensors(value.posterior, note)
    elif isinstance(value, Modes):
        found += [part for member in value.predictors for part in _tensors(member)]
    return found
