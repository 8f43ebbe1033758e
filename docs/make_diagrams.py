# ruff: noqa: INP001
"""
Write the pictures of ``docs/diagrams`` from what they show: ``python docs/make_diagrams.py``.

Two are drawn from the tables in ``stepengine.machine.protocol``, one from a run and its journal, one from the import contracts.
"""

from __future__ import annotations

import json
import textwrap
import tomllib
from collections.abc import Mapping
from html import escape
from pathlib import Path

import attrs

from stepengine import STEP, AgentDefinition, Engine, Perform, StepContext, Steps, ToolCall, tool
from stepengine.data.yields import YIELDS
from stepengine.journal import MemoryJournal
from stepengine.machine.protocol import FIRST_HOOKS, HOOKS, LAST, ORDER, OWN, SILENT, collect_order_rows
from stepengine.testing import ScriptedModel, text, tool_call

HERE = Path(__file__).parent
FOLDER = HERE / "diagrams"
INK, PAPER, LINE = "#1f2933", "#ffffff", "#9aa5b1"
DOWN, UP, BOX = "#2563a8", "#b4540a", "#e8eef5"
LETTER, ROW = 7.3, 18
GROUPS = {
    "what hooks ask for": HOOKS,
    "what hooks ask for, children aside": FIRST_HOOKS,
    "what the steps of a tool ask for": OWN,
}
"""Sets of effects that stand in a picture by their name, which ``make_step_order.py`` explains."""
FRAME = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}" role="img" \
aria-labelledby="title" font-family="ui-monospace, Menlo, Consolas, monospace" font-size="12" fill="{ink}">
<title id="title">{title}</title>
<defs>
<marker id="down" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">\
<path d="M0 0 8 4 0 8z" fill="{down}"/></marker>
<marker id="up" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">\
<path d="M0 0 8 4 0 8z" fill="{up}"/></marker>
</defs>
<rect width="100%" height="100%" rx="6" fill="{paper}"/>
{parts}
</svg>
"""


def framed(title: str, width: float, height: float, parts: list[str]) -> str:
    """Return a whole picture; *title* says in words what it shows."""
    return FRAME.format(
        title=escape(title), width=width, height=height, parts="\n".join(parts), ink=INK, paper=PAPER, down=DOWN, up=UP
    )


def words(x: float, y: float, said: str, more: str = "") -> str:
    """Return a line of text with its baseline at *y*."""
    return f'<text x="{x:g}" y="{y:g}"{f" {more}" if more else ""}>{escape(said)}</text>'


def box(x: float, y: float, width: float, height: float) -> str:
    """Return a box with its upper left corner at *x*, *y*."""
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" fill="{BOX}" stroke="{LINE}"/>'


# --- the phases of a run ----------------------------------------------------------------------------------------------


def leaving(order: Mapping[str, Mapping[str, str]], state: str, last: str) -> dict[str, list[str]]:
    """Return where a state leads, and what is shown on the way; nothing for an arrow that is taken silently."""
    targets: dict[str, list[str]] = {}
    tokens = order[state]
    for name, group in GROUPS.items():
        if all(tokens.get(token) == state for token in group):
            targets.setdefault(state, []).append(name)
            tokens = {token: target for token, target in tokens.items() if token not in group}
    for token, target in tokens.items():
        targets.setdefault(target, []).append(token.replace(":", " "))
    for target in SILENT.get(state, ()):
        if target in {*order, last}:
            targets.setdefault(target, []).append("(silently)")
    return targets


def phases(title: str, order: Mapping[str, Mapping[str, str]], last: str) -> str:
    """Return states as boxes in the order of the table, each with where it leads; arcs at the left show the same."""
    lane, wide, top = 150.0, 132.0, 14.0
    parts: list[str] = []
    middle: dict[str, float] = {}
    for state in order:
        lines = [
            line
            for target, shown in leaving(order, state, last).items()
            for line in textwrap.wrap(
                f"{'stays' if target == state else target}: {', '.join(shown)}", 92, subsequent_indent="    "
            )
        ]
        tall = max(1, len(lines)) * ROW + 8
        parts += [box(lane, top, wide, tall), words(lane + 8, top + 17, state, 'font-weight="bold"')]
        parts += [words(lane + wide + 14, top + 17 + ROW * number, line) for number, line in enumerate(lines)]
        middle[state] = top + tall / 2
        top += tall + 8
    places = list(order)
    for start in order:
        for target in leaving(order, start, last):
            apart = abs(places.index(target) - places.index(start)) if target in order else 0
            if not apart:
                continue
            kind, colour = ("down", DOWN) if middle[target] > middle[start] else ("up", UP)
            shift = 5 if kind == "down" else -5
            reach = lane - 14 - apart * (lane - 20) / len(order)
            begin, end = middle[start] + shift, middle[target] - shift
            parts.append(
                f'<path d="M{lane:g} {begin:g}C{reach:.1f} {begin:g} {reach:.1f} {end:g} {lane:g} {end:g}"'
                f' fill="none" stroke="{colour}" marker-end="url(#{kind})"/>'
            )
    return framed(title, lane + wide + 14 + 94 * LETTER, top + 6, parts)


# --- one run and its journal ------------------------------------------------------------------------------------------


@tool
def prices(article: str) -> int:
    """Return the price of an article in cents."""
    return {"pear": 250}.get(article, 0)


@attrs.frozen
class Arrow:
    """Something that goes from one lane to another, or what one of them does by itself."""

    start: int
    end: int
    what: str


def grocer(journal: MemoryJournal, said: list[tuple[int, Arrow]]) -> AgentDefinition:
    """Return an agent that writes down what its handler yields and is sent, and how long the journal was then."""

    def stock() -> int:
        return 3

    def steps_of(ctx: StepContext) -> Steps[str]:
        found = yield ToolCall("prices", {"article": ctx.prompt}, include_tool_call=False)
        left = yield Perform(stock)
        yield STEP
        return f"{found.tool_result.data} cents, {left.value} left"

    def handle_steps(ctx: StepContext) -> Steps[str]:
        steps = steps_of(ctx)
        asked = next(steps)
        while True:
            name = "STEP" if asked is STEP else type(asked).__name__
            said.append((len(journal.records()), Arrow(0, 1, f"yield {name}")))
            sent = yield asked
            said.append((len(journal.records()), Arrow(1, 0, type(sent).__name__)))
            try:
                asked = steps.send(sent)
            except StopIteration as end:
                said.append((len(journal.records()), Arrow(0, 1, "return")))
                return str(end.value)

    return AgentDefinition("grocer", model="test/model", tools=[prices], handle_steps=handle_steps)


def exchanges() -> list[Arrow]:
    """Return what goes between handler, machine, journal and world in one run, in the order of its journal."""
    journal, said = MemoryJournal(), list[tuple[int, Arrow]]()
    model = ScriptedModel([tool_call("prices", {"article": "pear"}), text("A pear, then.")])
    with Engine([grocer(journal, said)], models=model) as engine:
        engine.run_sync("grocer", "pear", journal=journal).unwrap()
    arrows: list[Arrow] = []
    records = [record for record in map(json.loads, journal.lines()) if record["kind"] != "blob"]
    for number, record in enumerate(records):
        arrows += [arrow for count, arrow in said if count == number]
        if record["kind"] not in ("intent", "result") or record["seq"] < 0:
            continue
        place = f"#{record['seq']}"
        if record["kind"] == "intent":
            effect = record["effect"]["type"]
            arrows += [Arrow(1, 2, effect), Arrow(2, 2, f"intent {place}"), Arrow(2, 3, effect)]
        else:
            arrows += [Arrow(3, 2, record["value"]["type"]), Arrow(2, 2, f"result {place}"), Arrow(2, 1, "Value")]
    return arrows


def exchange(title: str, arrows: list[Arrow]) -> str:
    """Return arrows between four lanes, from top to bottom."""
    lanes, gap, tall = ("handler", "machine", "journal", "world"), 210.0, 26.0
    at = [70 + gap * number for number in range(len(lanes))]
    height = 70 + tall * len(arrows)
    parts = [
        part
        for x, name in zip(at, lanes, strict=True)
        for part in (
            box(x - 50, 14, 100, 26),
            words(x, 31, name, 'text-anchor="middle" font-weight="bold"'),
            f'<path d="M{x:g} 40V{height - 16:g}" stroke="{LINE}" stroke-dasharray="3 4"/>',
        )
    ]
    for number, arrow in enumerate(arrows):
        y = 66 + tall * number
        start, end = at[arrow.start], at[arrow.end]
        if start == end:
            parts += [box(start - 50, y - 14, 100, 20), words(start, y, arrow.what, 'text-anchor="middle"')]
            continue
        kind, colour = ("down", DOWN) if end > start else ("up", UP)
        parts += [
            f'<path d="M{start:g} {y:g}H{end + (-2 if end > start else 2):g}" stroke="{colour}" marker-end="url(#{kind})"/>',
            words((start + end) / 2, y - 5, arrow.what, 'text-anchor="middle"'),
        ]
    return framed(title, at[-1] + 70, height, parts)


# --- the layers -------------------------------------------------------------------------------------------------------


def make_layers(title: str) -> str:
    """Return the layers of the import contract as rows of boxes, the highest first."""
    project = tomllib.loads((HERE.parent / "pyproject.toml").read_text(encoding="utf-8"))
    (layers,) = [
        contract["layers"]
        for contract in project["tool"]["importlinter"]["contracts"]
        if contract["type"] == "layers" and contract.get("containers") == ["stepengine"]
    ]
    parts: list[str] = []
    for number, layer in enumerate(layers):
        y = 14 + 34.0 * number
        packages = [package.strip(" ()") for package in layer.replace(":", "|").split("|")]
        wide = 700 / len(packages)
        for place, package in enumerate(packages):
            x = 14 + place * wide
            parts += [box(x, y, wide - 6, 28), words(x + wide / 2 - 3, y + 18, package, 'text-anchor="middle"')]
    return framed(title, 722, 14 + 34 * len(layers) + 8, parts)


def pictures() -> dict[str, str]:
    """Return the text of every picture by the name of its file."""
    (step,) = [row for row in YIELDS if row.name == "STEP"]
    return {
        "step.svg": phases(
            "The phases of one step, and what leads from one to the next", collect_order_rows(step), "handler"
        ),
        "run.svg": phases("The phases of a run, and what leads from one to the next", ORDER, LAST),
        "exchange.svg": exchange("What handler, machine, journal and world exchange in one run", exchanges()),
        "layers.svg": make_layers("The layers of the package: imports only go down"),
    }


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, picture in pictures().items():
        (FOLDER / name).write_text(picture, encoding="utf-8")
