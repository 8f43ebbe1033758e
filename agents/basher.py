"""
``basher``: runs one command and reports what came out; a model is asked only when there is much to sum up.

It needs ``run_terminal_command``, so the engine's workspace needs ``shell=True``.

``stepengine run basher --params '{"command": "git status --short"}' --shell``
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from stepengine import AgentDefinition, StepContext, Steps, StepWith, ToolCall, ToolResult

SHORT = 2_000

INSTRUCTIONS = """\
The command has run; its output stands below. Report what the parameter what_to_summarize asks for and nothing else. Say
whether the command succeeded, and quote errors word for word. Do not guess at what was not printed."""


class Command(BaseModel):
    """What to run."""

    model_config = ConfigDict(extra="forbid")

    command: str | list[str] = Field(
        min_length=1, description="The command: a program with its arguments, as one line or as a list."
    )
    what_to_summarize: str | None = Field(
        default=None, description="What to report of a long output; without it the output is returned as it is."
    )
    timeout_seconds: int = Field(default=30, ge=-1, description="When to stop it; -1 for as late as is allowed.")


def handle_steps(ctx: StepContext[Command]) -> Steps[Any]:
    """Run the command, and return its result; a long output is summarized if that was requested."""
    asked = ctx.params
    turn = yield ToolCall("run_terminal_command", {"command": asked.command, "timeout_seconds": asked.timeout_seconds})
    ran = turn.tool_results[0]
    if not asked.what_to_summarize or count_printed_chars(ran) <= SHORT:
        return {"error": ran.text} if ran.data is None else ran.data
    yield StepWith(tool_choice="none")
    return None


def count_printed_chars(ran: ToolResult) -> int:
    """Return how many characters a command printed."""
    data: Any = ran.data or {}
    return sum(len(data.get(name) or "") for name in ("stdout", "stderr", "message"))


agent = AgentDefinition(
    "basher",
    description="Runs one command, given as params, and reports its output; can sum up a long one.",
    tools=["run_terminal_command"],
    instructions_prompt=INSTRUCTIONS,
    input_schema=Command,
    handle_steps=handle_steps,
)
