"""A part of the library whose packages are missing says what to install."""

from __future__ import annotations

import importlib
import sys

import pytest

import acnml
from acnml.laplace_torch import from_laplace

PARTS = {
    "lightning": (("lightning", "pytorch_lightning"), "lightning"),
    "plots": (("matplotlib",), "plots"),
    "ray": (("ray", "pyarrow"), "ray"),
    "scoring": (("pyarrow",), "predict"),
    "sklearn": (("sklearn",), "sklearn"),
    "torchmetrics": (("torchmetrics",), "lightning"),
}


def block(monkeypatch, *packages: str) -> None:
    """Let imports of packages fail, as if they were not installed."""
    loaded = [name for name in sys.modules if name.split(".")[0] in packages]
    for name in (*packages, *loaded):
        monkeypatch.setitem(sys.modules, name, None)


@pytest.fixture(autouse=True)
def _modules():
    """Forget parts of the library that were imported while packages were missing."""
    before = set(sys.modules)
    yield
    for name in [n for n in sys.modules if n.startswith("acnml.") and n not in before]:
        del sys.modules[name]


@pytest.mark.parametrize("part", PARTS)
def test_a_missing_package_is_named_with_its_extra(part, monkeypatch):
    packages, extra = PARTS[part]
    own = f"acnml.{part}"
    for name in [name for name in sys.modules if name == own or name.startswith(f"{own}.")]:
        monkeypatch.delitem(sys.modules, name)
    block(monkeypatch, *packages)
    message = rf"^{own} needs {packages[-1]}[\w.]*: pip install 'acnml\[{extra}\]'$"
    with pytest.raises(ModuleNotFoundError, match=message):
        importlib.import_module(own)


@pytest.mark.parametrize(
    ("use", "package", "message"),
    [
        (lambda: from_laplace(None), "laplace", "from_laplace .* 'laplace-torch'"),
        (lambda: acnml.export_onnx(None, None, ""), "onnx", r"ONNX export .* 'acnml\[onnx\]'"),
        (
            lambda: importlib.import_module("acnml.transformers").loader(None, None, None),
            "transformers",
            r"acnml.transformers .* 'acnml\[transformers\]'",
        ),
    ],
)
def test_a_function_without_its_package(use, package, message, monkeypatch):
    block(monkeypatch, package)
    with pytest.raises(ModuleNotFoundError, match=message) as refused:
        use()
    assert refused.value.name == package
