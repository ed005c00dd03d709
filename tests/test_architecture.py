"""Who may know whom: the rules of docs/architecture.md, read off the imports."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import acnml

ROOT = Path(acnml.__file__).parent
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in ROOT.rglob("*.py")
}

# A part of the library -> the parts of it that it may import; parts not named here are free.
MODEL = {"params", "checks", "batches", "classifier"}
MAY_KNOW = {
    "params": set(),
    "metrics": set(),
    "batches": set(),
    "random": set(),
    "progress": set(),
    "memory": set(),
    "checks": {"params"},
    "selection": {"checks"},
    "dual": {"params"},
    "rules": set(),
    "actions": {"params", "dual", "rules"},
    "kernels": set(),
    "classifier": {"params", "checks", "batches"},
    "batch_norm": MODEL,
    "layers": MODEL | {"dual"},
    "posteriors": {"params", "dual", "actions", "rules", "kernels", "checks", "posteriors"},
    "inference": MODEL
    | {"dual", "layers", "posteriors", "selection", "progress", "random", "inference"},
    "solvers": MODEL
    | {"dual", "actions", "rules", "kernels", "layers", "memory", "posteriors", "solvers"},
    "linearisation": MODEL | {"posteriors", "solvers", "layers"},
    "predictors": MODEL
    | {"batch_norm", "linearisation", "posteriors", "progress", "random", "solvers", "predictors"}
    | {"naive_cnml", "selection"},
    "naive_cnml": MODEL | {"inference", "memory", "progress", "random", "selection"},
    "exact": {"checks", "classifier", "memory", "posteriors", "exact"},
    "tuning": {"batches", "checks", "inference", "metrics", "predictors", "progress", "tuning"},
}
NEVER_IN_THE_LIBRARY = {
    "argparse",
    "matplotlib",
    "rich",
    "typer",
    "pickle",
    "random",
    "sklearn",
    "scipy",
}
OUTSIDE = {"experiments", "cli", "__main__"}


def imports(path: Path) -> set[str]:
    """Full names of what a file imports, `acnml.x.y` for our own."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def own_parts(path: Path) -> set[str]:
    parts = {name.split(".")[1] for name in imports(path) if name.startswith("acnml.")}
    known = {name.split(".")[0] for name in MODULES}
    return parts & known


LIBRARY = sorted(name for name in MODULES if name.split(".")[0] not in OUTSIDE)


@pytest.mark.parametrize("name", LIBRARY)
def test_the_library_does_not_know_the_outside(name):
    assert not own_parts(MODULES[name]) & OUTSIDE
    foreign = {imported.split(".")[0] for imported in imports(MODULES[name])}
    assert not foreign & NEVER_IN_THE_LIBRARY


@pytest.mark.parametrize("name", [n for n in LIBRARY if n.split(".")[0] in MAY_KNOW])
def test_parts_know_only_what_they_may(name):
    assert own_parts(MODULES[name]) <= MAY_KNOW[name.split(".")[0]]


@pytest.mark.parametrize("name", LIBRARY)
def test_no_prints_and_no_global_random_state(name):
    # acnml.random is the one place that seeds the global state, and it restores it.
    forbidden = {"print"} if name == "random" else {"print", "manual_seed", "seed"}
    for node in ast.walk(ast.parse(MODULES[name].read_text())):
        if isinstance(node, ast.Call):
            call = node.func
            called = call.id if isinstance(call, ast.Name) else getattr(call, "attr", "")
            on_torch = isinstance(call, ast.Name) or ast.unparse(call).startswith(("torch.", "np."))
            is_generator = "Generator()" in ast.unparse(call)
            assert not (called in forbidden and on_torch and not is_generator), f"{name}: {called}"


def test_files_stay_small():
    long = {name: len(p.read_text().splitlines()) for name, p in MODULES.items()}
    assert {name: lines for name, lines in long.items() if lines > 350} == {}
