"""The built documentation site in a real browser: Chromium opens all its pages."""

from __future__ import annotations

from pathlib import Path

import pytest

from browsing import once
from playground import browser

ROOT = Path(__file__).parents[2]
SITE = ROOT / "build" / "docs"


def missing() -> str | None:
    """What a test in the browser lacks, or None."""
    if reason := browser.lacking():
        return reason
    if not (SITE / "searchindex.js").exists():
        return "the site is not built, run `make docs`"
    built = (SITE / "searchindex.js").stat().st_mtime  # written by every build
    if any(path.stat().st_mtime > built for path in (ROOT / "docs").rglob("*.md")):
        return "the built site is older than its sources, run `make docs`"
    return None


pytestmark = pytest.mark.skipif(
    missing() is not None, reason=f"no test of the site in a browser: {missing()}"
)


def names() -> list[str]:
    """All pages, without the index of names, the playground and Sphinx's own files."""
    found = (path.relative_to(SITE) for path in SITE.rglob("*.html"))
    return sorted(p.as_posix() for p in found if p.parts[0] not in ("playground", "_static"))


@pytest.fixture(scope="session")
def seen(tmp_path_factory, worker_id):
    """What the browser saw; workers share one run."""

    def observe():
        return browser.observe("site.mjs", SITE, names())

    return once("site", tmp_path_factory, worker_id, observe)


def test_nothing_is_wider_than_a_phone(seen):
    assert [page for page in seen["pages"] if page["scrollWidth"] > 0 or page["outside"]] == []
    assert len(seen["pages"]) == len(names())


def test_all_pictures_are_there_and_pages_have_titles(seen):
    assert [page for page in seen["pages"] if page["broken"]] == []
    without = {page["name"] for page in seen["pages"] if not page["title"]}
    assert without == {"search.html"}


def test_pages_need_no_other_host_and_write_no_errors(seen):
    assert seen["foreign"] == []
    assert seen["console"] == []


def test_search_finds_pages(seen):
    assert any("temperature" in title.lower() for title in seen["found"])
    assert len(seen["found"]) > 5
