"""The README's code runs as it stands, and the names it mentions exist."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import torch

import acnml
from cases import normal
from test_calibrate import problem

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_the_code_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert len(blocks) == 1
    model, train, validation, _ = problem()
    names = {
        "model": model,
        "train_loader": train,
        "validation_loader": validation,
        "x": normal(5, 4, seed=1),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # 500 validation data are few for a price of 0.01 nats
        for block in blocks:
            exec(block, names)
    assert names["probs"].shape == (5, 3)
    assert names["regret"].shape == names["unsure"].shape == (5,)
    assert torch.equal(names["calibrated"].probs(names["x"]), names["probs"])  # loaded again


def test_the_names_exist():
    mentioned = set(re.findall(r"`(?:acnml\.)?([A-Za-z_]+)(?:\.[a-z]+)?(?:\([^`]*\))?`", README))
    known = set(acnml.__all__) | {"acnml", "alpha", "ACNML_DATA"}
    public = {name for name in mentioned if name[0].isupper() or name.startswith("fit_")}
    assert public <= known


def test_the_files_exist():
    root = Path(__file__).parent.parent
    links = re.findall(r"\]\((?!http)([^)]+)\)", README)
    assert [link for link in links if not (root / link).exists()] == []
