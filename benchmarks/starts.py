"""
What it costs until something happens: CPU of whole processes, each beside its floor in the same round, and what an installation weighs.

A floor is the least code that does the same with the same packages. Processes read compiled modules, as those of an installation do.
"""

from __future__ import annotations

import csv
import os
import re
import resource
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory

from packaging.requirements import Requirement

PARTS = "pydantic and attrs"
SCREEN = "typer and rich"
LIST = "typer's list of commands"
CODES = {
    PARTS: "from pydantic import BaseModel, TypeAdapter; import attrs",
    "usable import": "from stepengine import Engine, AgentDefinition, tool",
    SCREEN: "import typer, rich",
}
LISTING = """
import typer
app = typer.Typer(add_completion=False, rich_markup_mode="rich")
for number in range(48):
    app.command(f"command-{number}", short_help="Do what this command is for.", rich_help_panel=f"Group {number // 8}")(lambda: None)
app()
"""
AGENT = """
import sys, time
from stepengine import AgentDefinition, Perform

def spent():
    print(time.process_time(), file=sys.stderr)

def handle_steps(ctx):
    yield from Perform(spent)

agent = AgentDefinition("starting", handle_steps=handle_steps)
"""
SDKS = ("anthropic", "google-genai", "openai")


@contextmanager
def installed(folder: Path) -> Iterator[dict[str, str]]:
    """Give the variables of a process that reads modules compiled, writes below *folder* and knows no key."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "STEPENGINE_")) and "KEY" not in name
    }
    yield {
        **kept,
        # This checkout, also where another one is what the environment has installed.
        "PYTHONPATH": str(Path(__file__).resolve().parent.parent),
        "PYTHONPYCACHEPREFIX": str(folder / "compiled"),
        "HOME": str(folder),
        "STEPENGINE_STATE_DIR": str(folder / "state"),
    }


def cpu(command: list[str], variables: Mapping[str, str]) -> float:
    """Return the CPU seconds of a whole process."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, env=dict(variables), capture_output=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def starts(rounds: int) -> Iterator[dict[str, float]]:
    """Give for each round the CPU seconds of every start; each process ran once before, so that its modules are compiled."""
    with TemporaryDirectory() as name, installed(Path(name)) as variables:
        listing, agent = Path(name) / "listing.py", Path(name) / "starting.py"
        listing.write_text(LISTING)
        agent.write_text(AGENT)
        commands = {what: [sys.executable, "-c", code] for what, code in CODES.items()}
        commands[LIST] = [sys.executable, str(listing), "--help"]
        commands["stepengine --help"] = [sys.executable, "-m", "stepengine", "--help"]
        run = [sys.executable, "-m", "stepengine", "run", str(agent), "--quiet"]
        for turn in range(rounds + 1):
            found = {what: cpu(command, variables) for what, command in commands.items()}
            done = subprocess.run(run, env=variables, capture_output=True, text=True, check=True, cwd=name)
            found["first effect"] = float(done.stderr.strip().splitlines()[0])
            if turn:
                yield found


def weights() -> dict[str, float]:
    """Return the megabytes of what an installation without extras brings, by distribution, compiled modules left out."""
    found: dict[str, float] = {}
    _weigh("stepengine", found, {})
    own = Path(__file__).resolve().parent.parent
    found["stepengine"] = (
        sum(
            file.stat().st_size
            for folder in ("stepengine", "agents")
            for file in (own / folder).rglob("*")
            if file.is_file() and file.suffix != ".pyc"
        )
        / 1e6
    )
    return found


def beside_the_sdks(found: Mapping[str, float]) -> float:
    """Return the megabytes of what the official SDKs do not bring themselves, as far as it is in *found*."""
    return sum(found.values()) - sum([found[name] for name in of_the_sdks(found)])


def of_the_sdks(found: Mapping[str, float]) -> set[str]:
    """Return the names in *found* of the official SDKs, and of what they alone bring."""
    brought: dict[str, float] = {}
    for name in SDKS:
        _weigh(name, brought, {})
    shared: dict[str, float] = {}
    for name in ("stepengine",):
        _weigh(name, shared, {}, without=SDKS)
    return {name for name in found if name in brought and name not in shared}


def _needed() -> list[str]:
    """Return what this checkout requires, also where another one is what the environment has installed."""
    project = tomllib.loads((Path(__file__).resolve().parents[1] / "pyproject.toml").read_text(encoding="utf-8"))
    needed: list[str] = project["project"]["dependencies"]
    return needed


def _weigh(name: str, found: dict[str, float], extras: dict[str, set[str]], without: tuple[str, ...] = ()) -> None:
    key = re.sub(r"[-_.]+", "-", name).lower()
    if key in found or key in without:
        return
    try:
        of = metadata.distribution(name)
    except metadata.PackageNotFoundError:  # for another Python or system
        return
    record = csv.reader((of.read_text("RECORD") or "").splitlines())
    found[key] = sum(int(size or 0) for file, _, size in record if not file.endswith(".pyc")) / 1e6
    for line in _needed() if key == "stepengine" else of.requires or ():
        needed = Requirement(line)
        if needed.marker is None or any(
            needed.marker.evaluate({"extra": extra}) for extra in ("", *extras.get(key, ()))
        ):
            extras.setdefault(re.sub(r"[-_.]+", "-", needed.name).lower(), set()).update(needed.extras)
            _weigh(needed.name, found, extras, without)
