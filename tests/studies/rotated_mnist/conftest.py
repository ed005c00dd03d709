"""The tiny study, its data and its one whole run: tests read it, and change only copies of it."""

from __future__ import annotations

import pytest

from stores import store_in
from studies.engine.results import collect
from studies.engine.run import run
from studies.engine.workshop import Finished, Making
from studies.rotated_mnist.study import build

from .tiny import TINY


@pytest.fixture(autouse=True, scope="package")
def no_mnist(tmp_path_factory):
    patch = pytest.MonkeyPatch()
    patch.setenv("ACNML_DATA", str(tmp_path_factory.mktemp("empty")))
    yield
    patch.undo()


@pytest.fixture(scope="package")
def study(no_mnist):
    return build(TINY)


@pytest.fixture(scope="package")
def data(study, tmp_path_factory):
    return study.load(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="package")
def finished(tmp_path_factory, study, data):
    """A whole run, its folder and results."""
    out = tmp_path_factory.mktemp("finished")
    run(study, data, Making(store_in(out, TINY)))
    return out, collect(study, data, Finished(store_in(out, TINY)))
