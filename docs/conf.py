"""Sphinx builds the documentation site from this folder: `make docs`."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from sphinx.application import Sphinx

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

import acnml

project = "acnml"
author = copyright = "the acnml authors"
release = version = acnml.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "repository_links",
    "mathml",
    "results",
    "docstrings",
    "pictures",
    "gallery",
]
exclude_patterns = ["_ext"]
PLAYGROUND = Path(__file__).parents[1] / "playground" / "dist"  # made by `make page`

# The reference comes from the docstrings. `Name` in single backticks is a link where it is a name.
default_role = "py:obj"
add_module_names = False
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
maximum_signature_line_length = 90
napoleon_use_rtype = False
napoleon_use_ivar = True

# Markdown
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath", "fieldlist"]
myst_heading_anchors = 4

# Mathematics becomes MathML at build time: pages need no script and no other host.
html_math_renderer = "mathml"

html_theme = "furo"
html_title = f"acnml {version}"
html_static_path = ["_static"]
html_favicon = "_static/icon.svg"
html_css_files = ["site.css"]
html_copy_source = False
html_domain_indices = False  # the reference lists the modules
html_show_sourcelink = False
html_theme_options = {
    "source_repository": "https://github.com/acnml/acnml/",
    "source_branch": "main",
    "source_directory": "docs/",
}


def link_playground(app: Sphinx, name: str, source: list[str]) -> None:
    """Lead from the page about the playground to the playground, where it has been built."""
    if name == "howto/playground" and PLAYGROUND.is_dir():
        title, _, text = source[0].partition("\n")
        link = '<p><a href="../playground/index.html">Open the playground</a></p>'
        source[0] = f"{title}\n\n{link}\n{text}"


def copy_playground(app: Sphinx, exception: Exception | None) -> None:
    """Make the playground a part of the site, where it has been built."""
    if exception is None and app.builder.format == "html" and PLAYGROUND.is_dir():
        shutil.copytree(PLAYGROUND, Path(app.outdir) / "playground", dirs_exist_ok=True)


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", link_playground)
    app.connect("build-finished", copy_playground)
