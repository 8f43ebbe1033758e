"""
A sheet as tables: the promises, the figures, and what each work measured. Written as plain text or as Markdown.

The median stands in a cell; behind a ratio stands its spread, least to most.
"""

from __future__ import annotations

from typing import NamedTuple

from benchmarks.judging import FIGURES, PROMISES, SPEAKING, TOKENS, judge
from benchmarks.peers import AGENTS, SDKS, label
from benchmarks.sheet import Key, Sheet, Spread
from benchmarks.starts import PARTS

DASH = "-"
SOME_WEIGHT = 0.5
"""Megabytes from which on a package is named."""


class Table(NamedTuple):
    """A table; the first column is text, the others are figures."""

    title: str
    header: list[str]
    rows: list[list[str]]

    def text(self) -> str:
        """Return it for a terminal."""
        widths = [max(len(row[i]) for row in [self.header, *self.rows]) for i in range(len(self.header))]
        lines = [self.header, ["-" * width for width in widths], *self.rows]
        shown = [
            "  " + "  ".join([cell.ljust(w) for cell, w in zip(row, widths, strict=True)]).rstrip() for row in lines
        ]
        return "\n".join([self.title, *shown])

    def markdown(self) -> str:
        """Return it for a page."""
        lines = [self.header, ["---"] * len(self.header), *self.rows]
        return "\n".join(["| " + " | ".join([cell or " " for cell in row]) + " |" for row in lines])


def short(value: float) -> str:
    """Return a figure in three digits, as people read it."""
    if value == 0:
        return "0"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    digits = 1 if abs(value) >= 10 else 2 if abs(value) >= 1 else 3
    return f"{value:.{digits}f}" if abs(value) >= 0.001 else f"{value:.2g}"


def cell(sheet: Sheet, key: Key) -> str:
    """Return a figure, if there is one."""
    found = sheet.median(key)
    return DASH if found is None else short(found)


def ranged(spread: Spread | None) -> str:
    """Return a ratio with its spread, if there is one."""
    if spread is None:
        return DASH
    low, high = short(spread.least), short(spread.most)
    return short(spread.median) if low == high else f"{short(spread.median)} ({low} to {high})"


def promises(sheet: Sheet) -> Table:
    """Return the table of the promises."""
    rows = [
        [promise.row, f"{promise.what}: {figure.what}", ranged(found), f"{figure.most:g}", verdict.word]
        for verdict in judge(sheet)
        for promise, figure, found in (verdict,)
    ]
    return Table("Promises", ["row", "what", "median (least to most)", "at most", "verdict"], rows)


def summary(sheet: Sheet) -> tuple[list[str], int]:
    """Return one line for each promise and one that counts them, and how many failed; one that was not measured has."""
    lines, failed = [], 0
    for promise in PROMISES:
        verdicts = [verdict for verdict in judge(sheet) if verdict.promise is promise]
        passes = all(verdict.word == "holds" for verdict in verdicts)
        failed += not passes
        parts = [f"{figure.what} {ranged(found)} (at most {figure.most:g})" for _, figure, found in verdicts]
        lines.append(f"{'passed' if passes else 'FAILED'}  {promise.row:<15}  {promise.what}: {', '.join(parts)}")
    return [*lines, f"{len(PROMISES) - failed} passed, {failed} failed"], failed


def other_figures(sheet: Sheet) -> Table:
    """Return the table of what no promise is about."""
    rows = [[figure.what, f"{ranged(figure.spread(sheet))} {figure.unit}".strip()] for figure in FIGURES]
    return Table("Figures", ["what", "median (least to most)"], rows)


def sizes(sheet: Sheet, work: str, what: str) -> list[int]:
    """Return the sizes of a table."""
    return sheet.counts(work, what)


def growth(sheet: Sheet, key: Key, counts: list[int]) -> str:
    """Return what the largest size that was measured costs by the smallest, and which it was."""
    had = [count for count in counts if sheet.median(key._replace(count=count)) is not None]
    if len(had) < 2:
        return DASH
    found = sheet.ratio(key._replace(count=had[-1]), key._replace(count=had[0]))
    return DASH if found is None else f"{short(found.median)}x at {had[-1]:,}"


def steps(sheet: Sheet) -> Table:
    """Return W1."""
    counts = sizes(sheet, "W1", "step")
    reference = 300 if 300 in counts else 100
    rows = []
    for engine in sheet.engines("W1", "step"):
        key = Key("W1", "step", engine, 0)
        versus = sheet.ratio(key._replace(count=reference), Key("W1", "step", "stepengine", reference))
        cells = [cell(sheet, key._replace(count=count)) for count in counts]
        rows.append([label(engine), *cells, growth(sheet, key, counts), ranged(versus)])
    header = ["engine", *[f"N={count:,}" for count in counts], "growth", f"of stepengine's, N={reference}"]
    return Table("W1: CPU microseconds of a step of a run of N steps, in process", header, rows)


def runs(sheet: Sheet) -> Table:
    """Return W2."""
    counts = sizes(sheet, "W2", "run")
    reference = 100 if 100 in counts else max(counts, default=0)
    rows = []
    for engine in sheet.engines("W2", "run"):
        key = Key("W2", "run", engine, 0)
        versus = sheet.ratio(key._replace(count=reference), Key("W2", "run", "stepengine", reference))
        rows.append([label(engine), *[cell(sheet, key._replace(count=count)) for count in counts], ranged(versus)])
    header = ["engine", *[f"{count:,} at once" for count in counts], f"of stepengine's, {reference:,} at once"]
    return Table("W2: CPU milliseconds of each of so many concurrent runs of 5 steps", header, rows)


def http(sheet: Sheet, work: str, what: str, title: str, word: str) -> Table:
    """Return W3 or W6: the protocols with both clients, then the peers."""
    counts = sizes(sheet, work, what)
    rows = []
    for protocol in SDKS:
        for client in ("bare", "stepengine", "stepengine_run"):
            key = Key(work, what, f"{client}, {protocol}", 0)
            if not any(sheet.median(key._replace(count=count)) for count in counts):
                continue
            bare = key._replace(engine=f"bare, {protocol}", count=100)
            ratio = DASH if client == "bare" else ranged(sheet.ratio(key._replace(count=100), bare))
            name = "stepengine, a whole run" if client == "stepengine_run" else label(client)
            rows.append([name, protocol, *[cell(sheet, key._replace(count=count)) for count in counts], ratio])
    for engine in AGENTS:
        key, protocol = Key(work, what, engine, 0), "google" if engine == "google_adk" else "openai_chat"
        if any(sheet.median(key._replace(count=count)) for count in counts):
            ratio = sheet.ratio(key._replace(count=100), Key(work, what, f"bare, {protocol}", 100))
            cells = [cell(sheet, key._replace(count=count)) for count in counts]
            rows.append([label(engine), protocol, *cells, ranged(ratio)])
    header = ["client", "protocol", *[f"{word}={count:,}" for count in counts], f"of the SDK's loop, {word}=100"]
    return Table(title, header, rows)


JOURNALS = {
    "no journal": "no journal",
    "memory": "recorded, in memory",
    "file, to the system": "recorded, a file given to the system",
    "file, to the system, five keys": "the same, while the process knows five keys",
    "file, to the disk": "recorded, a file on the disk",
    "sqlite": "recorded, SQLite",
    "replay, memory": "replayed from memory",
    "replay, file": "replayed from a file",
    "reading the file": "reading the file alone",
    "floor, no journal": "floor: a generator with new states, asked by an asyncio loop",
    "floor, memory": "floor: its four records kept",
    "floor, file": "floor: its four lines written",
    "floor, replay": "floor: four lines read and compared",
}


def journals(sheet: Sheet) -> Table:
    """Return the journals of W4."""
    counts = sizes(sheet, "W4", "no journal")
    rows = [
        [name, *[cell(sheet, Key("W4", what, "stepengine", count)) for count in counts]]
        for what, name in JOURNALS.items()
    ]
    header = ["what", *[f"N={count:,}" for count in counts]]
    return Table("W4: CPU microseconds of a step, a model call and a tool call, of a run of N steps", header, rows)


def cassettes(sheet: Sheet) -> Table:
    """Return the cassettes of W4."""
    counts = sizes(sheet, "W4", "cassette, playing")
    rows = []
    for player in ("vcrpy", "stepengine"):
        for what in ("loading", "playing"):
            keys = [Key("W4", f"cassette, {what}", player, count) for count in counts]
            rows.append([f"{player}, {what}", *[cell(sheet, key) for key in keys]])
    rows.append(["the file, MB", *[cell(sheet, Key("W4", "cassette", "stepengine", count)) for count in counts]])
    header = ["player", *[f"{count:,} requests" for count in counts]]
    return Table("W4: CPU seconds of a cassette of growing requests, bodies matched", header, rows)


def imports(sheet: Sheet) -> Table:
    """Return W5."""
    base = Key("W5", "import", "stepengine", 1)
    rows = [
        [
            label(name),
            cell(sheet, Key("W5", "import", name, 1)),
            ranged(sheet.ratio(Key("W5", "import", name, 1), base)),
        ]
        for name in sheet.engines("W5", "import")
    ]
    return Table("W5: CPU milliseconds of an import", ["import", "ms", "of stepengine's"], rows)


def starts(sheet: Sheet) -> list[Table]:
    """Return W7."""
    base = Key("W7", "start", PARTS, 1)
    names = sheet.engines("W7", "start")
    rows = [[name, cell(sheet, key := Key("W7", "start", name, 1)), ranged(sheet.ratio(key, base))] for name in names]
    parts = sorted(sheet.engines("W7", "weight"), key=lambda name: -_weight(sheet, name))
    heavy = [[name, short(_weight(sheet, name))] for name in parts if _weight(sheet, name) >= SOME_WEIGHT]
    rest = sum([_weight(sheet, name) for name in parts if _weight(sheet, name) < SOME_WEIGHT])
    return [
        Table("W7: CPU milliseconds of a whole process", ["start", "ms", f"of {PARTS}"], rows),
        Table(
            "W7: megabytes of an installation without extras", ["package", "MB"], [*heavy, ["all others", short(rest)]]
        ),
    ]


def watchers(sheet: Sheet) -> list[Table]:
    """Return W8."""
    found = []
    for protocol in SPEAKING:
        of = ("W8", f"token, {protocol}")
        rows = []
        for who in sheet.engines(*of):
            key = Key(*of, who, TOKENS)
            rows.append([who, cell(sheet, key), ranged(sheet.ratio(key, key._replace(engine="floor")))])
        found.append(
            Table(f"W8: CPU microseconds of a streamed token, {protocol}", ["who", "us", "of the floor"], rows)
        )
    rows = []
    for who in sheet.engines("W8", "step"):
        key = Key("W8", "step", who, 1_000)
        rows.append([who, cell(sheet, key), ranged(sheet.ratio(key, key._replace(engine="run")))])
    return [*found, Table("W8: CPU microseconds of a step of W1", ["who", "us", "of one that nobody watches"], rows)]


def _weight(sheet: Sheet, name: str) -> float:
    found = sheet.spread(Key("W7", "weight", name, 1))
    return 0 if found is None else found.median


def gaps(sheet: Sheet) -> Table:
    """Return what was not measured, and why."""
    rows = [[gap.work, label(gap.engine), gap.why] for gap in sheet.gaps]
    return Table("Not measured", ["work", "engine", "why"], rows)


def works(sheet: Sheet) -> dict[str, list[Table]]:
    """Return the tables of all works, those without figures left out."""
    w3 = "W3: client CPU milliseconds of an HTTP step of a run of N steps"
    w6 = "W6: CPU milliseconds of one call behind n messages, over a socket"
    found = {
        "W1": [steps(sheet)],
        "W2": [runs(sheet)],
        "W3": [http(sheet, "W3", "steps", w3, "N")],
        "W4": [journals(sheet), cassettes(sheet)],
        "W5": [imports(sheet)],
        "W6": [http(sheet, "W6", "behind", w6, "n")],
        "W7": starts(sheet),
        "W8": watchers(sheet),
    }
    measured = {key.work for key in sheet.samples}
    return {work: tables for work, tables in found.items() if work in measured}


def everything(sheet: Sheet) -> str:
    """Return all tables as text."""
    tables = [table for of in works(sheet).values() for table in of]
    shown = [*tables, *([gaps(sheet)] if sheet.gaps else []), other_figures(sheet), promises(sheet)]
    return "\n\n".join([table.text() for table in shown])
