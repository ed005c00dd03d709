"""Predictions in blocks: joined, computed again where damaged, refused where they do not fit."""

from __future__ import annotations

import pytest
import torch

from studies.store import Stage

from .parts import DAMAGES


@pytest.mark.parametrize(("inputs", "block"), [(1, 1), (5, 1), (5, 2), (5, 5), (5, 99)])
def test_blocks_join_to_the_whole(store, inputs, block):
    x = torch.randn(inputs, 3, generator=torch.Generator().manual_seed(0))
    artefact = store.predict(
        Stage("predict"), inputs, block, lambda rows: {"x": x[rows], "sum": x[rows].sum(1)}
    )
    assert artefact.facts["inputs"] == inputs
    assert torch.equal(artefact.load()["x"], x)
    assert torch.equal(artefact.load()["sum"], x.sum(1))


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_block_is_computed_again_and_no_other(store, tmp_path, damage):
    computed: list[int] = []

    def compute(rows: slice) -> dict[str, torch.Tensor]:
        computed.append(rows.start)
        if rows.start == 3 and len(computed) == 4:
            raise KeyboardInterrupt
        return {"rows": torch.arange(rows.start, rows.stop)}

    with pytest.raises(KeyboardInterrupt):
        store.predict(Stage("predict"), 5, 1, compute)
    DAMAGES[damage](sorted(tmp_path.glob("artefacts/*/parts/*"))[1])
    artefact = store.predict(Stage("predict"), 5, 1, compute)
    assert computed == [0, 1, 2, 3, 1, 3, 4]
    assert torch.equal(artefact.load()["rows"], torch.arange(5))


def test_the_number_of_inputs_belongs_to_the_settings(store):
    store.predict(Stage("predict"), 2, 2, lambda rows: {"p": torch.ones(2)})
    with pytest.raises(ValueError, match="finished for 2 inputs, now there are 3"):
        store.predict(Stage("predict"), 3, 3, lambda rows: {"p": torch.ones(3)})
