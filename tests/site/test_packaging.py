"""What the wheel and the source distribution hold."""

from __future__ import annotations

from pathlib import Path

import pytest

builders = pytest.importorskip("hatchling.builders.wheel")
sdist = pytest.importorskip("hatchling.builders.sdist")
ROOT = Path(__file__).parents[2]


def files_of(builder) -> set[str]:
    """Paths inside the archive, as the build backend would write them."""
    return {Path(file.distribution_path).as_posix() for file in builder.recurse_included_files()}


def test_the_wheel_holds_the_library_and_no_study():
    files = files_of(builders.WheelBuilder(str(ROOT)))
    assert "acnml/__init__.py" in files
    assert {path.split("/")[0] for path in files} == {"acnml"}
    assert not [path for path in files if {"studies", "demo", "playground"} & set(path.split("/"))]


def test_the_source_distribution_holds_the_studies():
    files = files_of(sdist.SdistBuilder(str(ROOT)))
    expected = (
        "studies/__main__.py",
        "src/acnml/__init__.py",
        "tests/site/test_packaging.py",
        "conftest.py",
    )
    assert set(expected) <= files
