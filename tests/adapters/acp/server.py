"""
What the tests start in place of an editor's command: a small agent over stdin and stdout.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs

from stepengine import STEP_ALL, AgentDefinition, Ask, Engine, ImagePart, ToolCall, Usage
from stepengine.adapters.acp import redirect_stdout, serve
from stepengine.permissions import Policy, Rule, read_only_commands
from stepengine.testing import ScriptedModel, text, tool_call
from stepengine.tools.bundled import file_tools, shell_tools

ROOT = Path(__file__).resolve().parents[3]
POLICY = Policy([Rule.allow_category("read"), *read_only_commands()])


def edit(path: str, old: str, new: str) -> Any:
    return tool_call("str_replace", {"path": path, "replacements": [{"old_string": old, "new_string": new}]})


def reply(request: Any) -> Any:
    """
    Do what the user said last, in one call, and then say how often that was.
    """
    last = request.messages[-1]
    said = [message.text for message in request.messages if message.role == "user"]
    if last.role == "tool":
        return f"Done, after {len(said)} prompts: {last.text[:60]}"
    if last.text.startswith("# Skill"):
        return text(f"By the skill: {last.text.splitlines()[-1]}", usage=Usage(input_tokens=900, output_tokens=100))
    match last.text.split():
        case ["edit", path, old, new]:
            return edit(path, old, new)
        case ["write", path, content]:
            return tool_call("write_file", {"path": path, "content": content})
        case ["read", path]:
            return tool_call("read_files", {"paths": [path]})
        case ["delete", path]:
            return tool_call("delete_file", {"path": path})
        case ["run", *words]:
            return tool_call("run_terminal_command", {"command": words})
        case ["run-for", seconds, *words]:
            return tool_call("run_terminal_command", {"command": words, "timeout_seconds": float(seconds)})
        case ["call", name, *numbers]:
            return tool_call(name, dict(zip("ab", map(int, numbers), strict=False)))
        case ["which", "model"]:
            return f"I am {request.model}."
        case ["see"]:
            seen = [
                part
                for message in request.messages
                for part in getattr(message, "content", ())
                if isinstance(part, ImagePart)
            ]
            return f"I see {len(seen)} images of {sum(len(part.data) for part in seen)} bytes."
        case _:
            return f"You said: {last.text}"


def asking(ctx: Any) -> Any:
    if "ask" in ctx.prompt:
        size = yield from Ask("Which size?", options=["S", "L"])
        name = yield from Ask("Which name?")
        return f"{name} in {size}"
    if ctx.prompt == "by hand":
        yield ToolCall("read_files", {"paths": ["shop.py"]})
        yield ToolCall(
            "str_replace", {"path": "shop.py", "replacements": [{"old_string": "rate", "new_string": "tax"}]}
        )
        yield ToolCall("write_file", {"path": "new.py", "content": "more = 3\n"})
        return "Done."
    yield STEP_ALL
    return None


TOOLS = ["str_replace", "write_file", "read_files", "delete_file", "run_terminal_command"]


def small(version: int) -> tuple[AgentDefinition, Callable[..., Engine]]:
    bot = AgentDefinition(
        "bot", model="m/m", tools=TOOLS, handle_steps=asking, system_prompt="" if version == 1 else "Another version.",
    )  # fmt: skip

    def make(
        cwd: Path,
        /,
        *,
        observers: Any = (),
        mode: str = "",
        model: str = "",
        buffers: Any = None,
        terminals: Any = None,
    ) -> Engine:
        # A replay asks no model: it would be told so.
        models = ScriptedModel([reply] * 100 if not observers else [])
        policy = attrs.evolve(POLICY, mode=mode or "default")
        tools = [*file_tools(cwd, write=True, delete=True, buffers=buffers), *shell_tools(cwd, terminals=terminals)]
        return Engine(
            [bot], tools, models, permissions=policy, observers=observers, agent_models={"": model} if model else None
        )

    return bot, make


if __name__ == "__main__":
    kind, folder = sys.argv[1:]
    out = redirect_stdout()
    print("what an agent's file prints")
    agent, make = small(int(kind.removeprefix("full")))
    choices: dict[str, Any] = {}
    if kind.startswith("full"):
        from stepengine.adapters.mcp import mcp_tools

        choices = {
            "mcp": mcp_tools,
            "modes": ["default", "accept_edits", "plan"],
            "models": ["", "anthropic/claude-sonnet-4-5"],
        }
    asyncio.run(serve(make, agent.id, Path(folder), out=out, **choices))
