"""`import acnml` imports no integration and no package of an extra."""

from __future__ import annotations

import subprocess
import sys

from benchmarks.house import imports, longest_chain

# The agreed number of modules in a chain of imports; `python -m benchmarks.house` counts it, too.
LONGEST = 12

OPTIONAL = {
    *("IPython", "accelerate", "backpack", "curvlinops", "datasets", "laplace"),
    *("lightning", "matplotlib", "onnx", "onnxruntime", "pandas", "peft", "PIL", "pyarrow"),
    *("pytorch_lightning", "ray", "rich", "scipy", "skorch", "sklearn", "tokenizers"),
    *("torchmetrics", "transformers", "typer"),
}


def test_the_library_imports_no_integration():
    """In a fresh process; torch imports some of these packages by itself where it finds them."""
    code = """
import sys, torch, numpy, safetensors, tqdm
before = {*sys.modules}
import acnml
print("\\n".join({*sys.modules} - before))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    added = set(run.stdout.split())
    assert not {name.split(".")[0] for name in added} & OPTIONAL
    own = {name.split(".")[1] for name in added if name.startswith("acnml.")}
    ours_optional = {"sklearn", "plots", "transformers", "lightning", "torchmetrics"}
    assert not own & {*ours_optional, "scoring", "ray", "cli"}
    assert {"conformal", "metrics", "tuning"} <= own  # they need no extra


def test_chains_of_imports_are_short():
    chain = longest_chain(imports())
    assert len(chain) <= LONGEST, " -> ".join(chain)
