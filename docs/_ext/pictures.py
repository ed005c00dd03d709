"""Pictures that are too wide for a phone get the class `wide`: site.css lets them scroll there."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx

WIDE = 900  # pixels: several plots beside each other


def width(picture: Path) -> int:
    """Return the width of a PNG file in pixels, which its first bytes hold."""
    found: int = struct.unpack(">I", picture.read_bytes()[16:20])[0]
    return found


def _mark(app: Sphinx, document: nodes.document) -> None:
    for image in document.findall(nodes.image):
        picture = Path(app.srcdir, image["uri"])
        if picture.suffix == ".png" and not image["classes"] and width(picture) >= WIDE:
            image["classes"].append("wide")


def setup(app: Sphinx) -> dict[str, Any]:
    """Called by Sphinx."""
    app.connect("doctree-read", _mark)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
