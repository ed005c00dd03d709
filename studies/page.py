"""A self-contained HTML page: one file, no scripts, no fonts or images from elsewhere.

The stylesheet follows the reader's light or dark scheme, and so do the figures: their colours are
turned into the page's CSS variables when they are put inline.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Mapping
from html import escape

NUMBER = r"-?\d+\.\d+"
STYLESHEET = """
:root {
  color-scheme: light dark;
  --ink: #22262b; --soft: #59616b; --faint: #8a9099; --line: #e2e5e9;
  --paper: #ffffff; --card: #f5f7f9; --accent: #0072b2;
  --map: #c85400; --bma: #b3578a; --acnml: #0072b2; --last-layer: #00815e;
  --temperature: #8f6a00;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ink: #e8eaed; --soft: #a9b0b9; --faint: #8a9099; --line: #31363d;
    --paper: #15181c; --card: #1e2227; --accent: #5ab4ea;
    --map: #f58b42; --bma: #e39cc3; --acnml: #56aee6; --last-layer: #35c398;
    --temperature: #e8bd4a;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--paper); color: var(--ink);
  font: 1.0625rem/1.6 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif;
}
main { max-width: 58rem; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; }
h1 { font-size: 2.1rem; line-height: 1.2; margin: 0 0 1rem; letter-spacing: -0.015em; }
h2 { font-size: 1.35rem; line-height: 1.3; margin: 3rem 0 0.5rem; letter-spacing: -0.01em; }
p, figcaption { max-width: 43rem; }
p { margin: 0.6rem 0; }
figure { margin: 1.25rem 0 0; }
figcaption { color: var(--soft); font-size: 0.95rem; margin-top: 0.5rem; }
svg { display: block; width: 100%; height: auto; }
.finding {
  border-left: 4px solid var(--accent); background: var(--card);
  padding: 1rem 1.25rem; border-radius: 0 8px 8px 0; font-size: 1.15rem; max-width: none;
}
.panels { display: grid; gap: 1.5rem; }
.panels { grid-template-columns: repeat(auto-fit, minmax(min(100%, 22rem), 1fr)); }
.small.panels { grid-template-columns: repeat(auto-fit, minmax(13rem, 1fr)); gap: 1rem; }
.scroll { overflow-x: auto; }
.scroll > svg { min-width: 34rem; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
caption { text-align: left; color: var(--soft); font-size: 0.95rem; padding-bottom: 0.5rem;
  max-width: 43rem; }
th, td { padding: 0.3rem 0.75rem; text-align: right; white-space: nowrap; }
th:first-child { text-align: left; padding-left: 0; }
thead th { color: var(--soft); font-weight: 500; border-bottom: 1px solid var(--line); }
tbody th { font-weight: 500; }
.thirds { display: grid; gap: 1.5rem; grid-template-columns: repeat(3, 1fr); }
.view { display: grid; grid-template-columns: 5.5rem 1fr; gap: 0.9rem; align-items: center; }
.view img { width: 5.5rem; height: 5.5rem; border-radius: 6px; }
.view p { grid-column: 1 / -1; margin: 0; font-size: 0.95rem; color: var(--soft); }
.bars { display: grid; gap: 0.3rem; font-size: 0.82rem; line-height: 1.2; }
.bar { display: grid; grid-template-columns: 1fr auto; }
.track { grid-column: 1 / -1; height: 0.4rem; border-radius: 3px; background: var(--line); }
.fill { display: block; height: 100%; border-radius: 3px; }
footer { margin-top: 3rem; border-top: 1px solid var(--line); }
footer p { color: var(--soft); font-size: 0.9rem; }
code { font-size: 0.92em; }
pre { font-size: 0.8rem; line-height: 1.5; background: var(--card); border-radius: 8px;
  padding: 0.9rem 1.1rem; overflow-x: auto; margin: 1rem 0; }
@media (max-width: 50rem) { .thirds { grid-template-columns: 1fr; } }
@media (max-width: 34rem) {
  main { padding: 1.5rem 1rem 3rem; }
  h1 { font-size: 1.65rem; }
  th, td { padding: 0.3rem 0 0.3rem 0.3rem; font-size: 0.7rem; }
  pre { font-size: 0.7rem; }
}
"""


def page(title: str, finding: str, sections: Iterable[str]) -> str:
    """Return a whole document: a title and what was found, both text, then sections of HTML."""
    body = "\n".join(
        [
            f"<h1>{escape(title)}</h1>",
            f'<p class="finding">{escape(finding)}</p>',
            *filter(None, sections),
        ]
    )
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>acnml: {escape(title)}</title>\n<style>{STYLESHEET}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def inline(text: str) -> str:
    """Turn `*…*`, `**…**` and code of a text into HTML.

    >>> inline("**0.5** < *p* of `probs`")
    '<strong>0.5</strong> &lt; <em>p</em> of <code>probs</code>'
    """
    html = re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", escape(text, quote=False))
    html = re.sub(r"\*(.+?)\*", r"<em>\1</em>", html)
    return re.sub(r"`(.+?)`", r"<code>\1</code>", html)


def inline_svg(svg: str, name: str, description: str, colours: Mapping[str, str]) -> str:
    """Turn an SVG document into an element of a page.

    Args:
        svg: the document.
        name: a word of its own on the page, put before the document's ids to keep them apart.
        description: what the figure shows, for those who cannot see it.
        colours: hexadecimal colours -> the CSS variables to use in their place.
    """
    element = _compact(svg[svg.index("<svg") :])
    element = re.sub(r' xmlns(:\w+)?="[^"]*"', "", element).replace("xlink:href", "href")
    element = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", element)
    element = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", element)
    element = re.sub(r'( id="|href="#|url\(#)', rf"\g<1>{name}-", element)
    for colour, variable in colours.items():
        element = element.replace(colour, f"var(--{variable})")
    return element.replace("<svg", f'<svg role="img" aria-label="{escape(description)}"', 1)


def _compact(svg: str) -> str:
    """Shorten a document to about half: coordinates to 0.01 points, no indentation."""

    def shorter(path: re.Match[str]) -> str:
        joined = " ".join(path[1].split())
        return (
            f' d="{re.sub(NUMBER, lambda n: f"{float(n[0]):.2f}".rstrip("0").rstrip("."), joined)}"'
        )

    svg = re.sub(r' d="([^"]*)"', shorter, re.sub(r"<!--.*?-->", "", svg))
    return re.sub(r">\s+<", "><", svg)


def inline_png(png: bytes, description: str) -> str:
    """Return an image element that carries its own data."""
    data = base64.b64encode(png).decode()
    return f'<img src="data:image/png;base64,{data}" alt="{escape(description)}">'
