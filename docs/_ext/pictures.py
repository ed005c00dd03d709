"""Pictures that are too wide for a phone get the class `wide`: site.css lets them scroll there."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx

WIDE = 900  # pixels


def is_wide(picture: Path) -> bool:
    """Whether a PNG file is; its first bytes hold its width and its height."""
    width, height = struct.unpack(">II", picture.read_bytes()[16:24])
    return bool(width >= WIDE and width > 1.25 * height)


def _mark(app: Sphinx, document: nodes.document) -> None:
    for image in document.findall(nodes.image):
        picture = Path(app.srcdir, image["uri"])
        if picture.suffix == ".png" and not image["classes"] and is_wide(picture):
            image["classes"].append("wide")


def setup(app: Sphinx) -> dict[str, Any]:
    """Called by Sphinx."""
    app.connect("doctree-read", _mark)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
