"""`import acnml` imports no integration and no package of an extra."""

from __future__ import annotations

import subprocess
import sys

from benchmarks.house import imports, longest_chain

# The agreed number of modules in a chain of imports; `python -m benchmarks.house` counts it, too.
LONGEST = 12

OPTIONAL = {
    "IPython",
    "accelerate",
    "backpack",
    "curvlinops",
    "datasets",
    "laplace",
    "lightning",
    "matplotlib",
    "onnx",
    "onnxruntime",
    "pandas",
    "peft",
    "PIL",
    "pyarrow",
    "pytorch_lightning",
    "ray",
    "rich",
    "scipy",
    "skorch",
    "sklearn",
    "tokenizers",
    "torchmetrics",
    "transformers",
    "typer",
}


def modules_after(statement: str) -> set[str]:
    """The modules that a fresh process has imported after a statement."""
    code = f"{statement}; import sys; print('\\n'.join(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(run.stdout.split())


def test_the_library_imports_no_integration():
    # torch imports some of these packages by itself where they are installed.
    plain, ours = (
        modules_after("import torch, numpy, safetensors, tqdm"),
        modules_after("import acnml"),
    )
    added = ours - plain
    assert not {name.split(".")[0] for name in added} & OPTIONAL
    own = {name.split(".")[1] for name in added if name.startswith("acnml.")}
    ours_optional = {"sklearn", "plots", "transformers", "lightning", "torchmetrics"}
    assert not own & {*ours_optional, "scoring", "ray", "cli"}

    assert {"acnml.conformal", "acnml.metrics", "acnml.tuning"} <= ours  # they need no extra


def test_a_part_can_be_imported_on_its_own():
    assert "acnml.sklearn" in modules_after("import acnml.sklearn")


def test_chains_of_imports_are_short():
    chain = longest_chain(imports())
    assert len(chain) <= LONGEST, " -> ".join(chain)
