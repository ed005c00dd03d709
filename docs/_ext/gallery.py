"""The gallery: examples of `examples/gallery` are run, and become pages with picture and notebook.

A source file has a docstring (title, text) and code that ends with a figure. The build runs it,
unless it has been run before with the same library, and writes `docs/gallery/<name>.md`, `.png` and
`.ipynb`. A warning or an error of an example fails the build.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import io
import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from sphinx.application import Sphinx

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "examples" / "gallery"
PAGES = ROOT / "docs" / "gallery"
LIBRARY = ROOT / "src" / "acnml"
MARKER = "<!-- gallery -->"  # where the index has its pictures

# In this order on the page; a file that is not named comes last.
ORDER = (
    "reliability",
    "rotation",
    "unknown_classes",
    "price_frontier",
    "accuracy_without_labels",
    "conformal_sets",
    "monitoring",
    "segmentation",
    "thousand_classes",
    "plane",
)


@final
@dataclass(frozen=True)
class Example:
    """A source file, cut into its parts."""

    name: str
    title: str
    text: str
    code: str

    @staticmethod
    def of(path: Path) -> Example:
        """Read a source file."""
        source = path.read_text(encoding="utf-8")
        tree = ast.parse(source)
        title, _, text = (ast.get_docstring(tree) or "").partition("\n\n")
        assert tree.body[0].end_lineno
        code = "\n".join(source.splitlines()[tree.body[0].end_lineno :]).strip() + "\n"
        return Example(path.stem, title.rstrip("."), " ".join(text.split()), code)

    @property
    def digest(self) -> str:
        """What decides the picture: the example and the library."""
        library = (path.read_bytes() for path in sorted(LIBRARY.rglob("*.py")))
        return hashlib.sha256(self.code.encode() + b"".join(library)).hexdigest()

    def notebook(self) -> dict[str, Any]:
        """Return the example as a Jupyter notebook."""
        install = "%pip install acnml[plots] scikit-learn"
        cells = [
            ("markdown", f"# {self.title}\n\n{self.text}"),
            ("code", install),
            ("code", self.code.rstrip()),
        ]
        return {
            "nbformat": 4,
            "nbformat_minor": 5,
            "metadata": {"kernelspec": {"name": "python3", "display_name": "Python 3"}},
            "cells": [_cell(f"part-{i}", kind, text) for i, (kind, text) in enumerate(cells)],
        }

    def page(self, printed: str) -> str:
        """Return the page."""
        output = f"```output\n{printed}```\n\n" if printed else ""
        return (
            f"# {self.title}\n\n{self.text}\n\n![{self.title}]({self.name}.png)\n\n"
            f"```python\n{self.code}```\n\n{output}"
            f"{{download}}`Download it as a notebook <{self.name}.ipynb>`, or see "
            "[all examples](index.md).\n"
        )


def _cell(key: str, kind: str, text: str) -> dict[str, Any]:
    common = {"id": key, "cell_type": kind, "metadata": {}, "source": text}
    return {**common, "outputs": [], "execution_count": None} if kind == "code" else common


def examples() -> list[Example]:
    """Return all examples in the order of the page."""
    found = [Example.of(path) for path in sorted(SOURCES.glob("*.py"))]
    place = {name: i for i, name in enumerate(ORDER)}
    return sorted(found, key=lambda example: place.get(example.name, len(place)))


def run(example: Example, picture: Path) -> str:
    """Run an example, save its figure, and return what it prints."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.close("all")
    with contextlib.redirect_stdout(io.StringIO()) as printed, warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        exec(compile(example.code, f"{example.name}.py", "exec"), {"__name__": "__main__"})
    pyplot.gcf().savefig(picture, dpi=130)
    pyplot.close("all")
    return "".join(f"{line.rstrip()}\n" for line in printed.getvalue().splitlines())


def make(example: Example) -> None:
    """Write page, picture and notebook, unless they are of this source."""
    done = PAGES / f"{example.name}.digest"
    if not (done.exists() and done.read_text() == example.digest):
        printed = run(example, PAGES / f"{example.name}.png")
        (PAGES / f"{example.name}.txt").write_text(printed, encoding="utf-8")
    printed = (PAGES / f"{example.name}.txt").read_text(encoding="utf-8")
    notebook = json.dumps(example.notebook(), indent=1, ensure_ascii=False)
    (PAGES / f"{example.name}.ipynb").write_text(notebook, encoding="utf-8")
    (PAGES / f"{example.name}.md").write_text(example.page(printed), encoding="utf-8")
    done.write_text(example.digest)


def thumbnails() -> str:
    """Return the pictures of the index, and its table of contents."""
    found = examples()
    cards = "".join(
        f'<a class="card" href="{e.name}.html"><img src="../_images/{e.name}.png" '
        f'alt="" loading="lazy"><span>{e.title}</span></a>\n'
        for e in found
    )
    names = "\n".join(e.name for e in found)
    return f'<div class="gallery">\n{cards}</div>\n\n```{{toctree}}\n:hidden:\n\n{names}\n```\n'


def _make_all(app: Sphinx) -> None:
    for example in examples():
        make(example)


def _fill(app: Sphinx, name: str, source: list[str]) -> None:
    if name == "gallery/index":
        source[0] = source[0].replace(MARKER, thumbnails())


def setup(app: Sphinx) -> dict[str, Any]:
    """Called by Sphinx."""
    app.connect("builder-inited", _make_all)
    app.connect("source-read", _fill)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
