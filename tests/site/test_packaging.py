"""What the wheel, the source distribution and their metadata hold, by the build backend."""

from __future__ import annotations

import email
import re
from pathlib import Path

import pytest

import acnml
from pages import ROOT

pytest.importorskip("hatch_fancy_pypi_readme", reason="needs the build backend's plugin")
backend = pytest.importorskip("hatchling.build", reason="needs the build backend")
builders = pytest.importorskip("hatchling.builders.wheel")
sdist = pytest.importorskip("hatchling.builders.sdist")

RAW = f"https://raw.githubusercontent.com/acnml/acnml/v{acnml.__version__}/"
PAGES = f"https://github.com/acnml/acnml/blob/v{acnml.__version__}/"
# All targets of links and images, in Markdown and HTML.
TARGETS = re.compile(r"""\]\(\s*([^)\s]+)|\b(?:src|href)=["']([^"']+)""")


def files_of(builder) -> set[str]:
    """Paths inside the archive, as the build backend would write them."""
    return {Path(file.distribution_path).as_posix() for file in builder.recurse_included_files()}


def test_the_wheel_holds_the_library_and_the_source_distribution_the_studies():
    wheel = files_of(builders.WheelBuilder(str(ROOT)))
    assert "acnml/__init__.py" in wheel
    assert {path.split("/")[0] for path in wheel} == {"acnml"}
    assert not [path for path in wheel if {"studies", "playground"} & set(path.split("/"))]
    files = ("studies/__main__.py", "src/acnml/__init__.py", "tests/site/pages.py", "conftest.py")
    assert set(files) <= files_of(sdist.SdistBuilder(str(ROOT)))


def targets(markdown: str) -> list[str]:
    """Where links and images lead to, in their order."""
    return [one or other for one, other in TARGETS.findall(markdown)]


def test_every_link_of_the_metadata_works_on_the_package_index(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    name = backend.prepare_metadata_for_build_wheel(str(tmp_path))
    metadata = email.message_from_string((tmp_path / name / "METADATA").read_text("utf-8"))
    assert metadata["Description-Content-Type"] == "text/markdown"
    given, found = targets((ROOT / "README.md").read_text()), targets(metadata.get_payload())
    assert len(given) > 5
    for before, after in zip(given, found, strict=True):
        if before.startswith(("https://", "http://", "mailto:", "#")):
            assert after == before
        else:
            base = RAW if before.endswith((".png", ".svg", ".gif", ".jpg")) else PAGES
            assert after == base + before
            assert (ROOT / before.split("#")[0]).exists()
    urls = dict(line.split(", ") for line in metadata.get_all("Project-URL"))
    assert set(urls) == {"Homepage", "Source", "Documentation", "Changelog", "Issues"}
    assert urls.pop("Documentation") == "https://acnml.github.io/acnml/"
    assert all(url.startswith("https://github.com/acnml/acnml") for url in urls.values())
