"""Sphinx builds the documentation site from this folder: `make docs`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

import acnml

project = "acnml"
author = "the acnml developers"
release = version = acnml.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "repository_links",
    "mathml",
    "results",
]
exclude_patterns = ["_ext"]

# Markdown
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath", "fieldlist"]
myst_heading_anchors = 4

# Mathematics becomes MathML at build time: pages need no script and no other host.
html_math_renderer = "mathml"

html_theme = "furo"
html_title = f"acnml {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {
    "source_repository": "https://github.com/acnml/acnml/",
    "source_branch": "main",
    "source_directory": "docs/",
}
