"""
What ``--code-mode`` changes for bundled agents: the same work by calls and by programs, with scripted models and real files.

``python -m benchmarks.programs.bundled`` prints it. Only what a model reads is counted: the tools that it is shown, and the messages.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.programs.market import CHARACTERS
from stepengine import AgentDefinition, Engine, tool
from stepengine.cli.toolset import convert_to_code_mode
from stepengine.engine import load_agent
from stepengine.permissions import Policy
from stepengine.testing import ScriptedModel, text, tool_call, tool_calls
from stepengine.tools.bundled import file_tools, search_tools, shell_tools

MODULES, RENAMED = 30, 10
OLD, NEW = "def total(", "def subtotal("
EDIT = [{"old_string": OLD, "new_string": NEW}]
RENAMING = f"""\
import re

found = str(await code_search("def total"))
paths = sorted(set(re.findall(r"m\\d+\\.py", found)))
for path in paths:
    await str_replace(path, {EDIT!r})
print(len(paths), "files")
"""
PAGE = "A paragraph about the caching of HTTP, and what a newer version of its standard has changed. " * 100
READING = """\
import asyncio

for page in await asyncio.gather(*[read_url(f"https://pages.example/{n}") for n in range(3)]):
    print(page)
"""


class Needed(NamedTuple):
    """
    What some work needed.

    Attributes:
        requests: To the model.
        read: The tokens that it read in all of them.
    """

    requests: int
    read: int


@tool
def web_search(query: str) -> list[dict[str, str]]:
    """Search the web."""
    about = f"{query}: what has changed in the caching of HTTP, told by somebody who was there."
    return [{"title": f"Page {n}", "url": f"https://pages.example/{n}", "snippet": about} for n in range(10)]


@tool
def read_url(url: str) -> str:
    """Read a page."""
    return f"{url}\n{PAGE}"


def run_code(code: str) -> Any:
    """Return a reply that asks for a program."""
    return tool_call("run_code", {"code": code})


def project(folder: Path) -> None:
    """Write a project of modules, of which some have a function that is renamed."""
    for number in range(MODULES):
        body = [f"def function_{n}(x):\n    return x + {n}\n" for n in range(20)]
        renamed = [f"{OLD}items):\n    return sum(items)\n"] if number % 3 == 0 else []
        (folder / f"m{number}.py").write_text("\n".join([*body, *renamed]))


def needed(agent: AgentDefinition[Any], replies: Sequence[Any], folder: Path, more: Sequence[Any] = ()) -> Needed:
    """Run an agent by a script and return what it needed; no call may fail."""
    model = ScriptedModel([*replies, text("Done.")])
    tools = more or [*file_tools(folder, write=True), *search_tools(folder), *shell_tools(folder)]
    with Engine([agent], tools, model, permissions=Policy(mode="bypass"), default_model="scripted/m") as engine:
        result = engine.run_sync(agent, "Do it.")
    result.unwrap()
    failed = [call.result.text for call in result.tool_calls if call.result.is_error]
    if failed:
        raise SystemExit(failed[0])
    return Needed(len(model.calls), sum([read(request) for request in model.calls]) // CHARACTERS)


def read(request: Any) -> int:
    """Return the characters of a request that the model reads."""
    shown = [[spec.name, spec.description, spec.input_schema] for spec in request.tools]
    calls = [call.input for message in request.messages for call in getattr(message, "tool_calls", ())]
    return len(json.dumps([shown, calls], default=dict)) + sum([len(message.text) for message in request.messages])


def renaming() -> dict[str, Needed]:
    """Return what ``coder`` needs to rename a function in ten of thirty modules."""
    coder, paths = load_agent("coder"), [f"m{number}.py" for number in range(0, MODULES, 3)]
    search = tool_call("code_search", {"pattern": "def total"})
    edits = tool_calls(*[tool_call("str_replace", {"path": path, "replacements": EDIT}) for path in paths])
    found = {}
    for way, agent, replies in (
        ("calls", coder, [search, edits]),
        ("program", convert_to_code_mode(coder), [run_code(RENAMING)]),
    ):
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            project(folder)
            found[way] = needed(agent, replies, folder)
            done = [path for path in sorted(folder.iterdir()) if re.search(re.escape(NEW), path.read_text())]
            if len(done) != RENAMED:
                msg = f"{way}: {len(done)} files were changed"
                raise SystemExit(msg)
    return found


def researching() -> dict[str, Needed]:
    """Return what ``researcher-web`` needs to search and to read the three pages that it chooses."""
    import attrs

    tools = [web_search, read_url]
    agent = attrs.evolve(load_agent("researcher-web"), tools=tools)
    search = tool_call("web_search", {"query": "caching"})
    pages = tool_calls(*[tool_call("read_url", {"url": f"https://pages.example/{n}"}) for n in range(3)])
    programs = [run_code('await web_search("caching")'), run_code(READING)]
    return {
        "calls": needed(agent, [search, pages], Path(), tools),
        "program": needed(convert_to_code_mode(agent), programs, Path(), tools),
    }


def main() -> None:
    """Print all of it."""
    for name, found in (("coder, renaming", renaming()), ("researcher-web", researching())):
        for way, one in found.items():
            print(f"{name}, by {way}: {one.requests} requests, {one.read:,} tokens read")


if __name__ == "__main__":
    main()
