"""Every public name has a runnable example in its docstring.

`--doctest-modules` runs the examples of classes and functions. It passes over functions that a
decorator such as `torch.no_grad` wraps, so these run here.
"""

from __future__ import annotations

import doctest
import importlib
import inspect
import re
import sys
from pathlib import Path

import pytest

import acnml
from example_names import example_names

SUBMODULES = (
    *("conformal", "decisions", "exact", "metrics", "plots", "predictors", "ray"),
    *("scoring", "solve", "storage", "tuning", "laplace_torch", "lightning", "sklearn"),
    *("torchmetrics", "transformers"),
)


def own_names(module: object) -> list[str]:
    """Return the public classes and functions of a module: `__all__`, or what it defines."""
    listed = getattr(module, "__all__", None) or [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", "") == module.__name__
    ]
    values = {name: getattr(module, name) for name in listed}
    return [n for n, v in values.items() if inspect.isclass(v) or inspect.isfunction(v)]


@pytest.mark.parametrize("name", own_names(acnml))
def test_names_of_the_package_have_an_example(name):
    check(getattr(acnml, name))


@pytest.mark.filterwarnings("ignore")  # of other packages, when they are imported
@pytest.mark.parametrize("module", SUBMODULES)
def test_names_of_submodules_have_an_example(module):
    try:
        imported = importlib.import_module(f"acnml.{module}")
    except ImportError as error:
        if error.name == f"acnml.{module}":
            raise
        pytest.skip(str(error))
    for name in own_names(imported):
        check(getattr(imported, name))


def check(value: object) -> None:
    text = inspect.cleandoc(value.__doc__ or "")
    assert ">>> " in text, f"{value!r} has no example"
    inner = inspect.unwrap(value)
    if inner is not value:
        names = vars(sys.modules[inner.__module__]) | example_names()
        example = doctest.DocTestParser().get_doctest(text, names, inner.__name__, None, None)
        failures, _ = doctest.DocTestRunner().run(example)
        assert failures == 0


def test_the_reference_lists_every_name():
    pages = (Path(__file__).parents[2] / "docs" / "reference").glob("*.md")
    listed = set(re.findall(r"^\.\. auto\w+:: (\w+)$", "".join(p.read_text() for p in pages), re.M))
    assert set(own_names(acnml)) <= listed


def test_the_package_exports_what_most_programs_need_and_no_more():
    assert len(acnml.__all__) <= 40
