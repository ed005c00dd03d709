"""The import rules of docs/architecture.md, checked on the source files."""

from __future__ import annotations

import ast
from pathlib import Path

import acnml
import studies

ROOT = Path(acnml.__file__).parent
STUDIES = Path(studies.__file__).parent
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in ROOT.rglob("*.py")
}

STUDY_FILES = sorted(STUDIES.rglob("*.py"))

# A room of the library -> the other rooms that it may import.
MODEL = {"_util", "classifier"}
MAY_KNOW = {
    "metrics": set(),
    "_util": set(),
    "_algebra": {"_util"},
    "atypicality": {"_util"},
    "classifier": {"_util"},
    "features": MODEL,
    "posteriors": {"_util", "_algebra"},
    "solution": {"_util"},
    "_engine": MODEL | {"_algebra", "posteriors", "solution"},
    "problem": MODEL | {"_algebra", "_engine", "posteriors", "solution"},
    "solve": MODEL | {"_algebra", "_engine", "posteriors", "problem", "solution"},
    "fit": MODEL | {"_algebra", "_engine", "posteriors", "problem"},
    "calibration": MODEL
    | {"_engine", "atypicality", "decisions", "features", "fit", "metrics", "solve"},
    "predictors": MODEL
    | {"_engine", "calibration", "fit", "posteriors", "problem", "solution", "solve"},
    "storage": MODEL
    | {"_algebra", "atypicality", "calibration", "decisions", "features", "fit", "posteriors"}
    | {"predictors", "solve"},
    "export": {"_util", "calibration", "storage"},
    "exact": MODEL | {"posteriors"},
    "laplace_torch": {"_util", "_algebra", "posteriors"},
    "lightning": {"_util", "calibration", "fit", "storage"},
    "torchmetrics": {"_util", "metrics"},
    "transformers": MODEL | {"calibration", "storage"},
    "tuning": {"problem", "_util", "calibration", "fit", "metrics", "predictors", "solution"},
    "conformal": {"_util", "metrics"},
    "decisions": {"_util"},
    "plots": {"_util", "metrics", "calibration"},
    "sklearn": MODEL | {"atypicality", "calibration"},
    "scoring": MODEL | {"calibration", "predictors", "solution", "solve", "storage"},
    "ray": {"_util", "predictors", "scoring"},
}
NEVER_IN_THE_LIBRARY = {
    *("PIL", "argparse", "matplotlib", "rich", "typer", "pickle", "random", "sklearn"),
    "scipy",
}
OUTSIDE = {"cli", "__main__"}
# Optional parts -> the packages that they are for. No other part may import them, see
# tests/test_imports.py.
OPTIONAL = {"sklearn": {"sklearn", "scipy"}, "plots": {"matplotlib"}, "scoring": {"PIL"}}
BUILT_ON = {"ray": {"scoring"}}  # optional parts that use another one
OPEN_BY_NATURE = {"ABC", "Protocol", "NamedTuple", "Enum"}  # bases whose classes need no @final


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


def test_the_library_does_not_know_the_outside():
    wrong = []
    for name in LIBRARY:
        part = name.split(".")[0]
        foreign = {imported.split(".")[0] for imported in imports(MODULES[name])}
        known = own_parts(MODULES[name])
        wrong += [f"{name} imports {each}" for each in known & OUTSIDE]
        packages = (foreign - OPTIONAL.get(part, set())) & NEVER_IN_THE_LIBRARY
        wrong += [f"{name} imports {each}" for each in packages]
        parts = known & set(OPTIONAL) - {part} - BUILT_ON.get(part, set())
        wrong += [f"{name} imports {each}" for each in parts]
    assert wrong == []


def test_nothing_in_the_wheel_imports_a_study():
    knows = {name: {each.split(".")[0] for each in imports(path)} for name, path in MODULES.items()}
    assert [name for name, imported in knows.items() if "studies" in imported] == []


def test_parts_know_only_what_they_may():
    parts = {name: name.split(".")[0] for name in LIBRARY if name != "__init__"}
    known = {name: own_parts(MODULES[name]) - {part} for name, part in parts.items()}
    wrong = {name: more for name, part in parts.items() if (more := known[name] - MAY_KNOW[part])}
    assert wrong == {}


def test_rooms_form_no_cycle():
    """A room is a package, or a module directly in `acnml`."""
    known = {
        room: set().union(*(own_parts(p) for n, p in MODULES.items() if n.split(".")[0] == room))
        for room in {name.split(".")[0] for name in MODULES} - {"__init__"}
    }
    known = {room: parts - {room, "__init__"} for room, parts in known.items()}
    while any(not parts for parts in known.values()):  # take away what imports nothing that is left
        free = {room for room, parts in known.items() if not parts}
        known = {room: parts - free for room, parts in known.items() if room not in free}
    assert known == {}


def global_effects(tree: ast.Module, allowed: set[str]) -> list[str]:
    """Calls that print or seed the global random state."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            call = node.func
            called = call.id if isinstance(call, ast.Name) else getattr(call, "attr", "")
            on_torch = isinstance(call, ast.Name) or ast.unparse(call).startswith(("torch.", "np."))
            forbidden = called in {"print", "manual_seed", "seed"} - allowed
            if forbidden and on_torch and "Generator(" not in ast.unparse(call):
                found.append(ast.unparse(node))
    return found


def test_no_prints_and_no_global_random_state():
    # _util.torch_state is the one place that seeds the global state, and it restores it.
    allowed = {"_util.torch_state": {"manual_seed", "seed"}}
    found = {
        name: calls
        for name in LIBRARY
        if (calls := global_effects(ast.parse(MODULES[name].read_text()), allowed.get(name, set())))
    }
    assert found == {}


def names(nodes: list[ast.expr]) -> set[str]:
    """The plain names of bases or decorators: `Stage` for `pipeline.Stage[Row]`."""
    return {ast.unparse(node).split("[")[0].split("(")[0].split(".")[-1] for node in nodes}


def neither_abstract_nor_final(trees: dict[str, ast.Module]) -> list[str]:
    """Classes that are neither marked as final nor extended by another class."""
    classes = [
        (module, node)
        for module, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    ]
    extended = {name for _, node in classes for name in names(node.bases)}
    return [
        f"{module}.{node.name}"
        for module, node in classes
        if "final" not in names(node.decorator_list)
        and node.name not in extended
        and not names(node.bases) & OPEN_BY_NATURE
    ]


def test_every_class_is_abstract_or_final():
    trees = {str(path): ast.parse(path.read_text()) for path in (*MODULES.values(), *STUDY_FILES)}
    assert neither_abstract_nor_final(trees) == []
