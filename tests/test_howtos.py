"""The code of the how-to pages runs as it stands, on small data."""

from __future__ import annotations

import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from cases import normal

DOCS = Path(__file__).parent.parent / "docs"

# Packages that `import acnml` must not load, because they are optional.
OPTIONAL = {
    "transformers",
    "datasets",
    "peft",
    "lightning",
    "pytorch_lightning",
    "torchmetrics",
    "laplace",
}


def run(page: str, names: dict[str, Any]) -> dict[str, Any]:
    """Run all blocks of a page with these names."""
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), flags=re.DOTALL)
    assert blocks
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the packages, and about few validation data
        torch.manual_seed(0)
        for block in blocks:
            exec(block, names)
    return names


def test_nothing_optional_is_imported():
    code = f"import sys, acnml; print(sorted({OPTIONAL!r} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_transformers(tmp_path, monkeypatch):
    for package in ("transformers", "peft", "datasets"):
        pytest.importorskip(package)
    import test_transformers as tiny

    monkeypatch.chdir(tmp_path)
    model = tiny.bert()
    tokenizer = tiny.make_tokenizer()
    parts = [tiny.dataset(model, tokenizer, 80, seed) for seed in (0, 1)]
    names = {"model": model, "tokenizer": tokenizer, "train": parts[0], "validation": parts[1]}
    names = run("howto/transformers.md", names)
    assert len(names["answers"]) == len(names["out_of_scope"]) == len(names["ranked"]) == 2
    again = names["ask"](["a good film", "so so"])
    assert again == names["answers"]


def loaders() -> dict[str, Any]:
    x, noise = normal(600, 4, seed=0).float(), normal(600, 3, seed=1).float()
    labels = (2 * x[:, :3] + noise).argmax(-1)
    train, validation = (TensorDataset(x[s], labels[s]) for s in (slice(0, 200), slice(200, None)))
    return {
        "train_loader": DataLoader(train, batch_size=50),
        "validation_loader": DataLoader(validation, batch_size=100),
        "x": x[:5],
    }


def test_lightning(tmp_path, monkeypatch):
    pytest.importorskip("lightning")
    import test_lightning as small

    monkeypatch.chdir(tmp_path)
    names = run("howto/lightning.md", {**loaders(), "module": small.Network()})
    assert torch.equal(names["again"].probs(names["x"]), names["probs"])
    assert names["swag"].swag.updates == 3
    log_probs = torch.cat([names["again"](x) for x, _ in names["validation_loader"]])
    labels = torch.cat([labels for _, labels in names["validation_loader"]])
    scores = names["scores"].compute()
    for name in ("nll", "brier", "ece", "aurc"):
        expected = getattr(names["acnml"].metrics, name)(log_probs, labels)
        assert scores[name].item() == pytest.approx(expected, rel=1e-12)


def test_laplace_torch():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("laplace", reason="laplace-torch is not installed")
    from test_laplace_torch import mlp

    model, data = mlp().float(), loaders()
    for x, labels in list(data["train_loader"]) * 20:
        loss = torch.nn.functional.cross_entropy(model(x), labels)
        for parameter, gradient in zip(
            model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True
        ):
            parameter.data -= 0.1 * gradient
    names = run("howto/laplace-torch.md", {**data, "model": model})
    assert names["same"].abs().max() < 1e-5
    assert names["probs"].shape == (5, 3)
