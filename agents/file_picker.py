"""
``file-picker``: finds the files that matter for a prompt, reads them, and reports what is in them.

``file-lister`` chooses from the tree without having read anything; this agent reads what it chose and says what is really
there, so its caller can read only what it needs.

``stepengine run file-picker "Where are prices computed?"``
"""

from __future__ import annotations

import re
from posixpath import normpath
from typing import Any

from stepengine import AgentCall, AgentDefinition, StepContext, Steps, StepText, StepWith, ToolCall

from .file_lister import Where
from .file_lister import agent as file_lister

MOST = 20
BULLET = re.compile(r"(?:[-*+]|\d+[.)])\s+")

INSTRUCTIONS = """\
Say which of the files that were read matter for the prompt, with one line per file: its path, and what in it matters. Name
what the prompt asks for and the files do not show. Do not answer the request itself, and quote no code."""
NOTHING = "No file of the project matters for this."


def handle_steps(ctx: StepContext[Where]) -> Steps:
    """Let another agent list files, read them, and let the model report on them."""
    listing = yield from AgentCall(file_lister, ctx.prompt, ctx.params)
    paths = parse_listed_paths(listing)
    read: Any = ()
    if paths:
        read = (yield ToolCall("read_files", {"paths": paths})).tool_results[0].data or ()
    if any("content" in file for file in read):
        yield StepWith(tool_choice="none")
    else:
        yield StepText(NOTHING)


def parse_listed_paths(listing: str) -> list[str]:
    """Return the paths in a listing, each once, without bullets and quotes."""
    lines = [line.strip() for line in listing.splitlines()]
    # A bullet is looked for at the beginning only: anywhere else, digits without end would be read again and again.
    bare = [line[found.end() if (found := BULLET.match(line)) else 0 :].strip("`'\" ") for line in lines]
    return list(dict.fromkeys([normpath(line) for line in bare if line]))[:MOST]


agent = AgentDefinition(
    "file-picker",
    description="Finds and reads the files that matter for a question and says what is in them. Give it one question.",
    tools=["read_files"],
    spawnable_agents=[file_lister],
    instructions_prompt=INSTRUCTIONS,
    input_schema=Where,
    handle_steps=handle_steps,
)
