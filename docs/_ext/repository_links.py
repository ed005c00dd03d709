"""Links from a page to files outside the documentation lead to the repository.

`[the engine](../studies/engine)` works in the repository as it is. The site has no such file, so
the link there leads to the same path on GitHub.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx.errors import ExtensionError

REPOSITORY = "https://github.com/acnml/acnml/blob/main/"
LINK = re.compile(r"(?<!!)(\[[^\]]*\]\()(?![a-z]+:|#)([^)\s#]+)")


def with_links(text: str, page: Path, docs: Path) -> str:
    """Return the text of a page, with links to files outside `docs` as addresses.

    Raises:
        ExtensionError: if a link leads to a file that does not exist.
    """

    def address(match: re.Match[str]) -> str:
        target = (page.parent / match[2]).resolve()
        if not target.exists():
            raise ExtensionError(f"{page}: {match[2]} does not exist")
        if target.is_relative_to(docs) and target.is_file():
            return match[0]
        return match[1] + REPOSITORY + target.relative_to(docs.parent).as_posix()

    return LINK.sub(address, text)


def _rewrite(app: Sphinx, name: str, source: list[str]) -> None:
    source[0] = with_links(source[0], Path(app.env.doc2path(name)), Path(app.srcdir))


def setup(app: Sphinx) -> dict[str, Any]:
    """Called by Sphinx."""
    app.connect("source-read", _rewrite)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
