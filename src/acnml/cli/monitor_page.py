"""The report of `acnml monitor`: one HTML file with its curves, without scripts or other files."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

# A curve is as wide as a phone's screen, so that its text is legible there. On wider screens, two
# stand beside each other.
WIDTH, HEIGHT = 360, 190
LEFT, RIGHT, TOP, BOTTOM = 46, 8, 10, 28

# Evidence is drawn up to this multiple of the alarm.
HIGHEST = 4

ALARM = 'stroke="var(--alarm)" stroke-dasharray="5 4"'

STYLE = """
:root { color-scheme: light dark; --soft: #59616b; --line: #dfe3e8; --curve: #0072b2;
  --alarm: #c0392b; }
@media (prefers-color-scheme: dark) { :root { --soft: #a9b0b9; --line: #363c44; --curve: #5ab4ea;
  --alarm: #ff8a75; } }
body { max-width: 60rem; margin: 0 auto; padding: 1rem; font: 1rem/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; }
h2 { font-size: 1.05rem; margin: 0; }
.finding { border-left: 4px solid var(--curve); padding-left: 0.75rem; font-size: 1.1rem; }
.changed { border-color: var(--alarm); }
.curves { display: grid; gap: 1.5rem 2rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 22rem), 1fr)); }
.curves p, footer { color: var(--soft); font-size: 0.875rem; margin: 0.25rem 0; }
svg { width: 100%; }
svg text { fill: var(--soft); font-size: 12px; }
.scroll { overflow-x: auto; margin: 2rem 0; }
table { font-size: 0.875rem; font-variant-numeric: tabular-nums; }
th, td { padding: 0.25rem 0.75rem 0.25rem 0; text-align: right; white-space: nowrap; }
th:first-child { text-align: left; }
"""

Reader = Callable[[Mapping[str, Any]], float]


def page(content: Mapping[str, Any]) -> str:
    """Return the report of the content of monitor.json."""
    windows = content["windows"]
    limit = -math.log10(content["level"])

    def curve(title: str, about: str, read: Reader, **more: Any) -> str:
        return _curve(title, about, windows, [float(read(each)) for each in windows], **more)

    curves = [
        curve(
            "Expected accuracy",
            "The mean confidence, and its interval. After a change, the truth is usually lower.",
            lambda w: w["accuracy"]["accuracy"],
            band=[(w["accuracy"]["low"], w["accuracy"]["high"]) for w in windows],
        ),
        curve(
            "Evidence of a change",
            f"log10 of the odds, up to {HIGHEST * limit:.3g}. The alarm is at {limit:.3g}: false "
            f"in at most {100 * content['level']:g}\u00a0% of all streams without a change.",
            lambda w: min(w["evidence"], HIGHEST * limit),
            limit=limit,
        ),
        curve(
            "Share that abstains",
            "Predictions that are less certain than most validation data.",
            lambda w: w["abstained"],
        ),
        curve(
            "Atypicality",
            "The mean score: about 1 for data like the training data.",
            lambda w: w["score"],
        ),
    ]
    changed = " changed" if content["changed_at"] is not None else ""
    body = (
        f'<h1>Monitor</h1>\n<p class="finding{changed}">{escape(content["finding"])}</p>\n'
        f'<div class="curves">{"".join(curves)}</div>\n{_table(windows)}\n'
        "<footer>Classes: how far the predicted classes are from those of the validation data "
        "(total variation). The same numbers are in monitor.json.</footer>"
    )
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>Monitor</title>\n<style>{STYLE}</style>\n</head>\n"
        f"<body>\n{body}\n</body>\n</html>\n"
    )


def _curve(
    title: str,
    about: str,
    windows: Sequence[Mapping[str, Any]],
    values: Sequence[float],
    band: Sequence[tuple[float, float]] = (),
    limit: float | None = None,
) -> str:
    """Return a figure with a curve over the windows; dashed: the alarm, and the limit for it."""
    known = [v for v in [*values, *(end for pair in band for end in pair)] if math.isfinite(v)]
    ticks = _ticks([*known, *([0.0, limit] if limit is not None else [])])
    low, high = ticks[0], ticks[-1]

    def x(index: int) -> float:
        share = index / (len(values) - 1) if len(values) > 1 else 0.5
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        return TOP + (high - value) / (high - low) * (HEIGHT - TOP - BOTTOM)

    def path(points: Sequence[tuple[int, float]]) -> str:
        return " ".join(f"{x(i):.1f},{y(v):.1f}" for i, v in points if math.isfinite(v))

    def line(x1: float, x2: float, y1: float, y2: float, look: str) -> str:
        ends = f'x1="{x1:.1f}" x2="{x2:.1f}" y1="{y1:.1f}" y2="{y2:.1f}"'
        return f"<line {ends} {look}/>"

    parts = []
    for tick in ticks:
        parts.append(line(LEFT, WIDTH - RIGHT, y(tick), y(tick), 'stroke="var(--line)"'))
        label = f'<text x="{LEFT - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">'
        parts.append(f"{label}{round(tick, 9):g}</text>")
    if band:
        lower = [(i, pair[0]) for i, pair in enumerate(band)]
        upper = [(i, pair[1]) for i, pair in reversed([*enumerate(band)])]
        outline = path([*lower, *upper])
        parts.append(f'<polygon points="{outline}" fill="var(--curve)" opacity="0.2"/>')
    if limit is not None:
        parts.append(line(LEFT, WIDTH - RIGHT, y(limit), y(limit), ALARM))
    parts += [
        line(x(i), x(i), TOP, HEIGHT - BOTTOM, ALARM) for i, w in enumerate(windows) if w["alarm"]
    ]
    points = path([*enumerate(values)])
    parts.append(
        f'<polyline points="{points}" fill="none" stroke="var(--curve)" stroke-width="2"/>'
    )
    if len(values) < 40:
        parts += [
            f'<circle cx="{x(i):.1f}" cy="{y(v):.1f}" r="2.5" fill="var(--curve)"/>'
            for i, v in enumerate(values)
            if math.isfinite(v)
        ]
    ends = [(LEFT, "start", windows[:1]), (WIDTH - RIGHT, "end", windows[1:][-1:])]
    parts += [
        f'<text x="{at}" y="{HEIGHT - 8}" text-anchor="{side}">{escape(str(each["name"]))}</text>'
        for at, side, found in ends
        for each in found
    ]
    svg = (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">'
        f"{''.join(parts)}</svg>"
    )
    return f"<section><h2>{escape(title)}</h2>{svg}<p>{escape(about)}</p></section>"


def _ticks(values: Sequence[float]) -> list[float]:
    """Return round numbers from below the smallest value to above the largest one."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    width = (high - low) or abs(high) or 1.0
    power = 10.0 ** math.floor(math.log10(width / 3))
    step = next(power * nice for nice in (1, 2, 5, 10) if width <= 4 * power * nice)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [step * number for number in range(first, max(last, first + 1) + 1)]


def _table(windows: Sequence[Mapping[str, Any]]) -> str:
    """Return the windows as a table."""
    columns: dict[str, Callable[[Mapping[str, Any]], str]] = {
        "answers": lambda w: f"{w['count']:,}",
        "accuracy": lambda w: f"{w['accuracy']['accuracy']:.3f}",
        "interval": lambda w: f"{w['accuracy']['low']:.3f} to {w['accuracy']['high']:.3f}",
        "abstained": lambda w: f"{w['abstained']:.3f}",
        "score": lambda w: f"{w['score']:.2f}",
        "classes": lambda w: f"{w['classes']:.3f}",
        "evidence": lambda w: f"{w['evidence']:.2f}",
    }
    head = "".join(f'<th scope="col">{name}</th>' for name in ("window", *columns))
    lines = [f"<tr>{head}</tr>"]
    for each in windows:
        cells = "".join(f"<td>{show(each)}</td>" for show in columns.values())
        lines.append(f'<tr><th scope="row">{escape(str(each["name"]))}</th>{cells}</tr>')
    return f'<div class="scroll"><table>{"".join(lines)}</table></div>'
