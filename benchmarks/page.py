"""
Writes ``benchmarks/RESULTS.md`` and its pictures from a file of figures; every number of the page comes from there.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks import plots, tables
from benchmarks.peers import AGENTS, label
from benchmarks.sheet import Key, Sheet, Spread

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "benchmarks" / "RESULTS.md"
PLOTS = ROOT / "benchmarks" / "pictures"
MEASURED = ROOT / "benchmarks" / "measured.json"

OPENING = """# Benchmarks

What an engine costs beside the model: CPU, never waiting. stepengine runs beside {peers} and bare loops over the official
SDKs, each of them in an environment of its own, written as its own documentation advises, with telemetry off and limits raised. A
measurement counts only when the work was done: the number of model calls, every result of a tool, and the final text are looked at.

This page is made by `python -m benchmarks page` from [`{file}`]({file}), where every sample stands.
[What stepengine does better](../docs/better.md) has what no number shows.

{machine}
"""

READING = """
## How to read it

- Absolute times drift with the machine and what else runs on it. In each round everything is measured once, one after another, each in a process of
  its own, and ratios are taken within rounds: the median of them stands first, the least and the most in brackets. In W1 and W2, stepengine and the
  fastest peer are measured five times alternately in each round, and the least of each counts.
- Times are CPU of the process that is measured: its own threads count, a server or a database beside it does not.
- Who is slow took part in fewer rounds, and in sizes only as far as one run stays below a cap. [What was left out](#not-measured)
  is named.
- A model that answers in process or on loopback answers at once. With a real model these costs are a small part of what you wait for: they
  tell how many runs one process carries, and what a long conversation does to it.
"""

PROMISES = """## Promises

The [specification](../docs/spec/performance.md) promises these ratios, judged by the median. `python -m benchmarks promises` measures all of
them in one run.
"""
FIGURES = """
## Figures

Nothing here is promised. A figure without a unit is a ratio of two costs, or a count.
"""

WORDS = {
    "W1": (
        "Steps, and growth with history",
        (
            "Each reply asks for one call of `add(a: int, b: int)`, whose input is validated; the model answers in process. stepengine stands"
            " there without a handler, and with one that yields every step. The bare generator is the floor: no engine, no"
            " validation, no state."
        ),
    ),
    "W2": (
        "Many runs at once",
        "Concurrent runs of 5 such steps in one process, on one event loop where the engine has one.",
    ),
    "W3": (
        "Steps over HTTP",
        (
            "The same run through the engine's own provider, against a server on loopback that speaks the provider's protocol. The SDKs"
            " transform the whole conversation on every call; stepengine keeps the bytes of each message and sends their sum through the"
            " SDK's own client."
        ),
    ),
    "W4": (
        "Recording and replaying",
        (
            "A step is two effects, each with an intent and a result. The cassette holds the requests of a growing conversation; vcrpy is told"
            " to match bodies, since it plays anything otherwise. It compares each request with all that were recorded; a replay"
            " transport looks it up."
        ),
    ),
    "W5": ("Imports", "CPU of a process that imports it, less that of one that imports nothing."),
    "W6": (
        "One call behind a long conversation",
        (
            "A conversation of n messages is there already, and one more call is made. For stepengine the provider alone, as the SDKs, and a whole"
            " run, as the peers."
        ),
    ),
    "W7": (
        "Until something happens",
        (
            "CPU of whole processes, each beside the least code that does the same with the same packages; `first effect` is what `stepengine"
            " run` has spent when an agent's first effect begins. What is installed is measured without extras and without compiled modules;"
            " anthropic, openai and google-genai with what they need alone are the SDKs, which are part of every installation."
        ),
    ),
    "W8": (
        "Who watches",
        (
            "One reply of 2,000 tokens over a socket, each in a piece of its own. The floor reads the lines with the HTTP library and takes the"
            " text out of each with jiter, and nothing else; `run` is a run that nobody watches, `observed` shows each event to an observer,"
            " `stream` gives them to a reader of `engine.stream`. Events are kept free of the provider's key."
        ),
    ),
}
PICTURES = {
    "W1": ("steps.svg", "CPU of a step over the length of the run, both axes logarithmic"),
    "W2": ("fan-out.svg", "CPU of a run over how many run at once, both axes logarithmic"),
    "W4": ("replay.svg", "CPU of playing a cassette over the number of its requests, both axes logarithmic"),
}

AGAIN = """
## Again, on your machine

```console
python -m benchmarks.peers --make .peers
python -m benchmarks renew --peers .peers
python -m benchmarks promises --peers .peers
```

The first makes the environments, from PyPI, with the versions above; the second measures everything, which took {minutes} minutes here, beside
what else ran, and writes the figures and this page; the last measures the promises alone, in a few minutes, and exits with 1 if one is broken. `python -m benchmarks --quick`
takes a part of that and writes nothing, `--only w1` measures one work.
Another price is that of durability: `python -m benchmarks.durable` measures it, see [operating durable runs](../docs/durable-operations.md#capacity).
"""


def machine(sheet: Sheet) -> str:
    """Return what it ran on and which versions, in a paragraph and a table."""
    of = sheet.about["machine"]
    loads = [of.get(f"load at the {end}") for end in ("start", "end")]
    shown = " and ".join([f"{load[0]:g}" for load in loads if load])
    idle = f" The load of the machine was {shown} at its start and end (one minute's mean)." if shown else ""
    line = (
        f"Measured on {sheet.about['date']}: {of['processor']}, {of['cores']} cores, {of['memory, GiB']} GiB, {of['system']},"
        f" {of['python']}, niceness {of['niceness']}.{idle}"
    )
    rows = []
    for name, versions in sheet.about["versions"].items():
        if versions:
            rows.append([label(name), ", ".join([f"{package} {version}" for package, version in versions.items()])])
    return line + "\n\n" + tables.Table("", ["environment", "versions"], rows).markdown()


def times(spread: Spread | None) -> str:
    """Return how many times one is the other."""
    return "-" if spread is None else f"{tables.short(spread.median)}"


def headlines(sheet: Sheet) -> str:
    """Return the page's first figures as a list."""
    found = []
    counts = [n for n in sheet.counts("W1", "step") if sheet.median(Key("W1", "step", "stepengine", n)) is not None]
    mine = Key("W1", "step", "stepengine", 0)
    if len(counts) > 1:
        values = [sheet.median(mine._replace(count=n)) or 0.0 for n in counts]
        found.append(
            f"A step of stepengine costs {tables.short(min(values))} to {tables.short(max(values))} microseconds"
            f" in runs of {counts[0]:,} to {counts[-1]:,} steps."
        )
    others = []
    for engine in AGENTS:
        had = [n for n in counts if sheet.median(mine._replace(engine=engine, count=n)) is not None]
        if had:
            ratio = sheet.ratio(mine._replace(engine=engine, count=had[-1]), mine._replace(count=had[-1]))
            others.append(f"{label(engine)} {times(ratio)} times at N={had[-1]:,}")
    if others:
        found.append("A step of a peer costs, beside it: " + ", ".join(others) + ".")
    for protocol in ("openai_chat", "openai"):
        ratio = sheet.ratio(
            Key("W3", "steps", f"bare, {protocol}", 100), Key("W3", "steps", f"stepengine, {protocol}", 100)
        )
        if ratio:
            name = {"openai_chat": "Chat Completions", "openai": "Responses"}[protocol]
            found.append(
                f"Over HTTP at N=100 a bare loop over the SDK spends {times(ratio)} times as much on a step of {name}."
            )
    last = max(sheet.counts("W4", "cassette, playing"), default=0)
    ratio = sheet.ratio(
        Key("W4", "cassette, playing", "vcrpy", last), Key("W4", "cassette, playing", "stepengine", last)
    )
    if ratio:
        found.append(
            f"A cassette of {last} growing requests, bodies matched: vcrpy takes {times(ratio)} times as long."
        )
    return "\n".join([f"- {line}" for line in found])


def text(sheet: Sheet, file: str) -> str:
    """Return the page."""
    peers = ", ".join([label(name) for name in AGENTS])
    parts = [OPENING.format(peers=peers, file=file, machine=machine(sheet)), headlines(sheet), READING]
    parts += [PROMISES, tables.promises(sheet).markdown(), FIGURES, tables.other_figures(sheet).markdown()]
    drawn = plots.plots(sheet)
    for work, of in tables.works(sheet).items():
        title, about = WORDS[work]
        parts.append(f"\n## {work}: {title}\n\n{about}")
        name, alt = PICTURES.get(work, ("", ""))
        if name in drawn:
            parts.append(f"\n![{alt}](pictures/{name})")
        parts += [f"\n{table.title.partition(': ')[2]}:\n\n{table.markdown()}" for table in of]
    if sheet.gaps:
        parts.append(f"\n## Not measured\n\n{tables.gaps(sheet).markdown()}")
    parts.append(AGAIN.format(minutes=sheet.about.get("minutes", "some")))
    return "\n".join(parts)


def write(sheet: Sheet) -> list[Path]:
    """Write the page and its pictures, keep the figures beside the code, and return what was written."""
    written = {MEASURED: sheet.to_json(), PAGE: text(sheet, MEASURED.name)}
    written |= {PLOTS / name: picture for name, picture in plots.plots(sheet).items()}
    PLOTS.mkdir(exist_ok=True)
    for path, content in written.items():
        path.write_text(content, encoding="utf-8")
    return list(written)
