"""Pages of reports: well formed, and complete in one file."""

from __future__ import annotations

import re
from html.parser import HTMLParser


class Balance(HTMLParser):
    """Opens and closes tags, and collects ids and what attributes refer to."""

    VOID = frozenset({"meta", "img", "br"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.references: list[str] = []

    def handle_starttag(self, tag, attributes):
        if tag not in self.VOID:
            self.open.append(tag)
        values = dict(attributes)
        self.ids += [values["id"]] if "id" in values else []
        self.references += [values[name] for name in ("href", "src") if name in values]

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def fixed_colours(html: str) -> set[str]:
    """Require a page that is complete in itself; return the colours that ignore its scheme."""
    parsed = Balance()
    parsed.feed(html)
    assert parsed.open == []
    assert len(parsed.ids) == len(set(parsed.ids))
    assert all(reference.startswith(("#", "data:")) for reference in parsed.references)
    targets = {reference[1:] for reference in parsed.references if reference[0] == "#"}
    targets |= set(re.findall(r"url\(#([^)]*)\)", html))
    assert targets <= set(parsed.ids)
    assert not re.search(r"https?:|file:|<script|@import|<link", html)
    return set(re.findall(r"#[0-9a-f]{6}\b", html[html.index("<body>") :]))
