"""The README's code runs as it stands, and the names it mentions exist."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import nn

import acnml
from cases import normal

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_the_code_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert len(blocks) == 1
    names = {
        "model": nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).double(),
        "train_loader": [(normal(6, 4), torch.tensor([0, 1, 2, 0, 1, 2]))],
        "validation_loader": [(normal(6, 4, seed=2), torch.tensor([0, 1, 2, 0, 1, 2]))],
        "x": normal(5, 4, seed=1),
    }
    for block in blocks:
        exec(block, names)
    assert names["log_probs"].shape == (5, 3)
    assert names["regret"].shape == (5,)
    assert list(names["posterior"].mean) == ["2.weight", "2.bias"]
    assert torch.equal(names["predict"](names["x"]), names["log_probs"])  # loaded again


def test_the_names_exist():
    mentioned = set(re.findall(r"`(?:acnml\.)?([A-Za-z_]+)(?:\.[a-z]+)?(?:\([^`]*\))?`", README))
    known = set(acnml.__all__) | {"acnml", "alpha", "ACNML_DATA"}
    public = {name for name in mentioned if name[0].isupper() or name.startswith("fit_")}
    assert public <= known


def test_the_files_exist():
    root = Path(__file__).parent.parent
    links = re.findall(r"\]\((?!http)([^)]+)\)", README)
    assert [link for link in links if not (root / link).exists()] == []
