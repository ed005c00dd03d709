"""Records on disk: whole, or known to be damaged."""

from __future__ import annotations

import pytest
import torch

import acnml
from cases import MODELS, POSTERIORS
from studies.files import write_file
from studies.store import Content, DamagedError, Stage
from studies.store.record import encode, read_header, read_record


def test_content_comes_back_as_it_was(tmp_path):
    shared = torch.arange(6.0, dtype=torch.float64).reshape(2, 3)
    tensors = {
        "a": shared,
        "transposed": shared.T,
        "scalar": torch.tensor(True),
        "half": torch.ones(2, dtype=torch.bfloat16, requires_grad=True),
        "empty": torch.zeros(0, 4),
    }
    header, data = encode(Content(tensors, {"chosen": (1, None)}), {"stage": "x"})
    write_file(tmp_path / "record", data)
    record = read_record(tmp_path / "record")
    assert record.header == read_header(tmp_path / "record") == header
    assert record.content.facts == {"chosen": [1, None]}
    assert record.content.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(record.content.tensors[name], tensor)
        assert record.content.tensors[name].dtype == tensor.dtype


def test_the_hash_is_that_of_the_content_alone():
    tensors, facts = {"a": torch.ones(2)}, {"b": 1}
    first, _ = encode(Content(tensors, facts), {"seconds": 1.5})
    second, _ = encode(Content(tensors, facts), {"seconds": 2.5})
    assert first["content_hash"] == second["content_hash"]
    others = [
        Content({"a": torch.tensor([1, 1.5])}, facts),
        Content({"a": torch.ones(2).double()}, facts),
        Content({"a": torch.ones(2, 1)}, facts),
        Content({"b": torch.ones(2)}, facts),
        Content(tensors, {"b": 2}),
        Content(tensors, facts, {"b": "1"}),
    ]
    hashes = {encode(content, {})[0]["content_hash"] for content in others}
    assert len(hashes | {first["content_hash"]}) == 7


def test_no_byte_can_change_unnoticed(tmp_path):
    content = Content({"a": torch.arange(3.0), "b": torch.ones(1).double()}, {"best": 0.5})
    header, data = encode(content, {"seconds": 1.25})
    path = tmp_path / "record"
    damaged = 0
    for position in range(len(data)):
        for flip in (1, 32, 128):
            path.write_bytes(
                data[:position] + bytes([data[position] ^ flip]) + data[position + 1 :]
            )
            try:
                record = read_record(path)
            except DamagedError:
                damaged += 1
                continue
            # What is left are bytes that mean the same, as e+1 does for E+1 in JSON.
            assert record.header == header
            assert all(torch.equal(record.content.tensors[n], content.tensors[n]) for n in "ab")
    assert damaged > 2.9 * len(data)


@pytest.mark.parametrize("name", POSTERIORS)
def test_an_artefact_of_a_posterior_is_a_file_that_acnml_loads(store, name):
    posterior = POSTERIORS[name](MODELS[1].model())
    artefact = store.make(Stage("fit"), lambda _: Content.of_saved(posterior, {"tau": 3}))
    assert artefact.facts == {"tau": 3}
    for loaded in (artefact.load_saved(), acnml.load(artefact.path)):
        drawn = loaded.sample(2, torch.Generator().manual_seed(0))
        expected = posterior.sample(2, torch.Generator().manual_seed(0))
        assert all(torch.equal(drawn[key], expected[key]) for key in expected)
