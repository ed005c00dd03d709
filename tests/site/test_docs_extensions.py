"""Links to the repository, mathematics as MathML, and the gallery."""

from __future__ import annotations

import json

import pytest

from pages import ROOT

pytest.importorskip("sphinx", reason="needs the extra docs")

from sphinx.errors import ExtensionError

import gallery
import pictures
from docstrings import as_rst
from repository_links import REPOSITORY, with_links

DOCS = ROOT / "docs"


def rewritten(text: str) -> str:
    return with_links(text, DOCS / "howto" / "data.md", DOCS)


def test_links_out_of_the_documentation_lead_to_the_repository():
    assert rewritten("[a](../../studies/engine)") == f"[a]({REPOSITORY}studies/engine)"
    assert rewritten("[a](../results/toy)") == f"[a]({REPOSITORY}docs/results/toy)"  # a folder
    assert rewritten("[a](../../README.md#x)") == f"[a]({REPOSITORY}README.md#x)"
    for other in ("[a](sklearn.md#part)", "[a](https://x.org/y)", "![a](../images/demo.png)"):
        assert rewritten(other) == other
    with pytest.raises(ExtensionError, match=r"nowhere\.md does not exist"):
        rewritten("[a](nowhere.md)")


def test_mathematics_in_docstrings_is_literal():
    text = "It solves\n\n    θ = argmax\n\nfor |x| and `a|b`.\n\nArgs:\n    x: (*, n)."
    expected = (
        "It solves\n\n::\n\n    θ = argmax\n\nfor \\|x\\| and `a|b`.\n\nArgs:\n    x: (\\*, n)."
    )
    assert as_rst(text.splitlines()) == expected.splitlines()


def test_wide_pictures():
    assert pictures.is_wide(DOCS / "images" / "demo.png")
    assert not pictures.is_wide(DOCS / "images" / "demo-narrow.png")
    assert not pictures.is_wide(DOCS / "images" / "performance.png")  # as high as it is wide


# The gallery


@pytest.mark.parametrize("example", gallery.examples(), ids=lambda example: example.name)
def test_examples_of_the_gallery_are_short_and_become_notebooks(example):
    assert len(example.code.splitlines()) <= 40
    assert example.title
    assert example.text
    notebook = example.notebook()
    assert [cell["cell_type"] for cell in notebook["cells"]] == ["markdown", "code", "code"]
    assert notebook["cells"][-1]["source"] == example.code.rstrip()
    assert notebook == json.loads(json.dumps(notebook))
    assert f"{example.name}.ipynb" in example.page("")


def test_the_gallery_shows_all_examples():
    index = gallery.thumbnails()
    assert all(f'href="{example.name}.html"' in index for example in gallery.examples())
    assert gallery.MARKER in (gallery.PAGES / "index.md").read_text()
