"""
A sheet as pictures: lines over two logarithmic axes, in SVG, without a library.

Each line has a colour, a mark and its name at its end, so that it can be told without colours.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple
from xml.sax.saxutils import escape

from benchmarks.peers import AGENTS, label
from benchmarks.sheet import Key, Sheet

WIDTH, HEIGHT = 760, 440
LEFT, RIGHT, TOP, BOTTOM = 70, 170, 50, 56
GAP = 15
"""Pixels between the names at the ends of two lines."""

COLOURS = {
    "stepengine": "#0b6e4f",
    "bu_agent_sdk": "#1f77b4",
    "langgraph": "#9467bd",
    "smolagents": "#8c564b",
    "pydantic_ai": "#d62728",
    "openai_agents": "#ff7f0e",
    "google_adk": "#7f7f7f",
    "vcrpy": "#d62728",
}
MARKS = "osd^"
Point = tuple[float, float]


class Plot(NamedTuple):
    """What a picture shows: lines by engine."""

    title: str
    across: str
    up: str
    lines: Mapping[str, list[Point]]


class Axis:
    """
    A logarithmic axis that shows whole decades.

    Args:
        values: What must fit.
        start: The pixel of its beginning.
        end: The pixel of its end.
    """

    def __init__(self, values: list[float], start: float, end: float) -> None:
        self.low = math.floor(math.log10(min(values)))
        self.high = max(math.ceil(math.log10(max(values))), self.low + 1)
        self.start, self.end = start, end

    def at(self, value: float) -> float:
        """Return the pixel of a value."""
        share = (math.log10(value) - self.low) / (self.high - self.low)
        return round(self.start + share * (self.end - self.start), 1)

    @property
    def ticks(self) -> list[float]:
        """Return the decades."""
        return [10.0**power for power in range(self.low, self.high + 1)]


def mark(kind: str, x: float, y: float, colour: str) -> str:
    """Return the mark of a point."""
    paint = f'fill="{colour}"'
    if kind == "o":
        return f'<circle cx="{x}" cy="{y}" r="4" {paint}/>'
    if kind == "s":
        return f'<rect x="{x - 3.5:.1f}" y="{y - 3.5:.1f}" width="7" height="7" {paint}/>'
    corners = [(0, -5), (5, 0), (0, 5), (-5, 0)] if kind == "d" else [(0, -5), (5, 4), (-5, 4)]
    return f'<polygon points="{" ".join([f"{x + a:.1f},{y + b:.1f}" for a, b in corners])}" {paint}/>'


def apart(ends: Mapping[str, float]) -> dict[str, float]:
    """Return where names stand, moved down where two would meet, and all up again where the last would leave the picture."""
    placed: dict[str, float] = {}
    last = -math.inf
    for name, y in sorted(ends.items(), key=lambda item: item[1]):
        last = placed[name] = max(y, last + GAP)
    over = max(0.0, last - (HEIGHT - BOTTOM)) if placed else 0.0
    return {name: y - over for name, y in placed.items()}


def number(value: float) -> str:
    """Return a tick's number."""
    return f"{value:,.0f}" if value >= 1 else f"{value:g}"


def frame(plot: Plot, across: Axis, up: Axis) -> list[str]:
    """Return the axes with their names."""
    parts = []
    for value in up.ticks:
        y = up.at(value)
        parts.append(f'<line x1="{LEFT}" y1="{y}" x2="{WIDTH - RIGHT}" y2="{y}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4}" text-anchor="end">{number(value)}</text>')
    for value in across.ticks:
        x = across.at(value)
        parts.append(f'<line x1="{x}" y1="{TOP}" x2="{x}" y2="{HEIGHT - BOTTOM}" stroke="#eee"/>')
        parts.append(f'<text x="{x}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{number(value)}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 14}" text-anchor="middle">{escape(plot.across)}</text>')
    parts.append(f'<text x="{LEFT - 54}" y="{TOP - 12}">{escape(plot.up)}</text>')
    parts.append(f'<text x="{LEFT - 54}" y="20" font-size="15" font-weight="bold">{escape(plot.title)}</text>')
    return parts


def drawn(plot: Plot) -> str:
    """Return the picture."""
    points = [point for line in plot.lines.values() for point in line]
    across = Axis([x for x, _ in points], LEFT, WIDTH - RIGHT)
    up = Axis([y for _, y in points], HEIGHT - BOTTOM, TOP)
    parts = frame(plot, across, up)
    names = apart({name: up.at(line[-1][1]) for name, line in plot.lines.items()})
    for index, (name, line) in enumerate(plot.lines.items()):
        colour, kind = COLOURS.get(name, "#444"), MARKS[index % len(MARKS)]
        placed = [(across.at(x), up.at(y)) for x, y in line]
        thick = 3 if name == "stepengine" else 1.6
        shown = " ".join([f"{x},{y}" for x, y in placed])
        parts.append(f'<polyline points="{shown}" fill="none" stroke="{colour}" stroke-width="{thick}"/>')
        parts += [mark(kind, x, y, colour) for x, y in placed]
        (x, y), text_y = placed[-1], names[name]
        end = WIDTH - RIGHT + 14
        parts.append(
            f'<line x1="{x + 6}" y1="{y}" x2="{end - 2}" y2="{text_y:.1f}" stroke="{colour}" stroke-width="0.6"/>'
        )
        bold = ' font-weight="bold"' if name == "stepengine" else ""
        parts.append(f'<text x="{end}" y="{text_y + 4:.1f}" fill="{colour}"{bold}>{escape(label(name))}</text>')
    told = escape(f"{plot.up} over {plot.across}; the table beside it holds the figures.")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'role="img" font-family="sans-serif" font-size="12"><title>{escape(plot.title)}</title><desc>{told}</desc>\n'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def lines(sheet: Sheet, work: str, what: str, engines: tuple[str, ...]) -> dict[str, list[Point]]:
    """Return the points of engines by size, those with one point or none left out."""
    found = {}
    for engine in engines:
        counts = sheet.counts(work, what)
        points = [(float(n), y) for n in counts if (y := sheet.median(Key(work, what, engine, n)))]
        if len(points) > 1:
            found[engine] = points
    return found


def plots(sheet: Sheet) -> dict[str, str]:
    """Return the pictures by the name of their files."""
    everyone = ("stepengine", *AGENTS)
    wanted = {
        "steps.svg": Plot(
            "A step of a longer and longer run",
            "steps of the run",
            "CPU microseconds of a step",
            lines(sheet, "W1", "step", everyone),
        ),
        "fan-out.svg": Plot(
            "Many runs at once",
            "runs at once, 5 steps each",
            "CPU milliseconds of a run",
            lines(sheet, "W2", "run", everyone),
        ),
        "replay.svg": Plot(
            "Playing recorded traffic, bodies matched",
            "requests in the cassette",
            "CPU seconds",
            lines(sheet, "W4", "cassette, playing", ("stepengine", "vcrpy")),
        ),
    }
    return {name: drawn(plot) for name, plot in wanted.items() if plot.lines}
