"""The metadata of a build for the package index: links that work there, and the project's URLs.

The backend of pyproject.toml builds them here, in this process.
"""

from __future__ import annotations

import email
import re
from email.message import Message
from pathlib import Path

import pytest

import acnml

ROOT = Path(__file__).parents[2]
RAW = f"https://raw.githubusercontent.com/acnml/acnml/v{acnml.__version__}/"
PAGES = f"https://github.com/acnml/acnml/blob/v{acnml.__version__}/"
# All targets of links and images, in Markdown and HTML.
TARGETS = re.compile(r"""\]\(\s*([^)\s]+)|\b(?:src|href)=["']([^"']+)""")


def targets(markdown: str) -> list[str]:
    """Where links and images lead to, in their order."""
    return [one or other for one, other in TARGETS.findall(markdown)]


def built(root: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Message:
    pytest.importorskip("hatch_fancy_pypi_readme", reason="needs the build backend's plugin")
    backend = pytest.importorskip("hatchling.build", reason="needs the build backend")
    monkeypatch.chdir(root)
    name = backend.prepare_metadata_for_build_wheel(str(folder))
    return email.message_from_string((folder / name / "METADATA").read_text(encoding="utf-8"))


@pytest.fixture
def metadata(tmp_path, monkeypatch) -> Message:
    return built(ROOT, tmp_path, monkeypatch)


def test_every_link_of_the_readme_is_absolute_in_the_metadata(metadata):
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


def test_the_project_has_its_urls(metadata):
    urls = dict(line.split(", ") for line in metadata.get_all("Project-URL"))
    assert set(urls) == {"Homepage", "Source", "Documentation", "Changelog", "Issues"}
    assert urls.pop("Documentation") == "https://acnml.github.io/acnml/"
    assert all(url.startswith("https://github.com/acnml/acnml") for url in urls.values())
