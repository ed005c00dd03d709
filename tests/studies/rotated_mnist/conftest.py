"""The tiny study's data and its one whole run: tests read it, and change only copies of it."""

from __future__ import annotations

import pytest
from studies.rotated_mnist.results import collect
from studies.rotated_mnist.run import run
from studies.rotated_mnist.shifts import load_data
from studies.study.artefacts import Finished, Making

from stores import store_in

from .tiny import TINY


@pytest.fixture(autouse=True, scope="package")
def no_mnist(tmp_path_factory):
    patch = pytest.MonkeyPatch()
    patch.setenv("ACNML_DATA", str(tmp_path_factory.mktemp("empty")))
    yield
    patch.undo()


@pytest.fixture(scope="package")
def data(no_mnist):
    return load_data(TINY)


@pytest.fixture(scope="package")
def finished(tmp_path_factory, data):
    """A whole run, its folder and results."""
    out = tmp_path_factory.mktemp("finished")
    run(TINY, data, Making(store_in(out, TINY)))
    return out, collect(TINY, data, Finished(store_in(out, TINY)))
