# ruff: noqa: INP001, D103
"""Write the costs of runs under every context policy: ``python docs/make_context_costs.py``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from stepengine import AgentDefinition, Engine, Hooks, Limits, RunResult, Tool, tool
from stepengine.context import (
    mask_tool_results,
    output_cache,
    prune_to_summary,
    raise_on_overflow,
    summarize,
    truncate,
)
from stepengine.data.estimate import estimate_tokens, message_tokens, tool_tokens
from stepengine.data.json import find_first_difference
from stepengine.data.messages import Message
from stepengine.data.models import ModelReply, ModelRequest
from stepengine.data.usage import Usage
from stepengine.testing import ScriptedModel, text, tool_call

TARGET = Path(__file__).parent / "reference" / "context-costs.md"
STEPS = 400
WINDOW = 30_000
CACHED, WRITTEN = 0.1, 1.25
"""The costs of a cached prompt token and of one that is written to the cache, relative to an uncached one."""
SUMMARY = "The user wants every module read and every failing test repaired. " * 40

COSTS = f"""\
# Costs of context policies

The table compares the [context policies](../context-policies.md) for a run of {STEPS} steps with at most {WINDOW:,} tokens per prompt.
`output_cache` is limited to 60,000 characters of results. Each rewrite of earlier messages invalidates the prompt cache. Costs are relative to a run
without a policy; a cached token counts {CACHED}, any other {WRITTEN}. The largest prompt of `summarize` is the request for a summary.

"""


class Row(NamedTuple):
    """A policy as the table names it, and how an agent uses it."""

    name: str
    hooks: Sequence[Callable[..., Any]] = ()
    ephemeral: int | None = None


ROWS = (
    Row("none"),
    Row("`truncate()`", [truncate(WINDOW)]),
    Row("`truncate(free_ratio=0)`", [truncate(WINDOW, free_ratio=0)]),
    Row("`mask_tool_results()`", [mask_tool_results(WINDOW)]),
    Row("`mask_tool_results()`, `truncate()`", [mask_tool_results(WINDOW), truncate(WINDOW)]),
    Row("`output_cache()`, `truncate()`", [output_cache(60_000), truncate(WINDOW)]),
    Row("`@tool(ephemeral=3)`, `truncate()`", [truncate(WINDOW)], ephemeral=3),
    Row("`prune_to_summary()`", [prune_to_summary(WINDOW)]),
    Row("`summarize()`", [summarize(WINDOW)]),
    Row("`raise_on_overflow()`", [raise_on_overflow(WINDOW)]),
)


def tools(ephemeral: int | None) -> list[Tool[..., Any]]:
    @tool(in_thread=False, ephemeral=ephemeral)
    def read_files(path: str) -> str:
        """Read a file."""
        return f"{path}\n" + "value = compute(left, right)\n" * 70

    @tool(in_thread=False)
    def run_terminal_command(command: str) -> str:
        """Run a command."""
        return f"{command}\n" + "test_something PASSED\n" * 60

    @tool(in_thread=False)
    def str_replace(path: str, old_string: str, new_string: str) -> str:
        """Edit a file."""
        return f"Edited {path}: {old_string} is now {new_string}."

    return [read_files, run_terminal_command, str_replace]


def step(number: int) -> ModelReply:
    name = f"module_{number:03}.py"
    match number % 3:
        case 0:
            return tool_call("read_files", {"path": name}, text=f"Next I look at {name}, which the last failure names.")
        case 1:
            return tool_call("run_terminal_command", {"command": f"pytest {name}"})
        case _:
            return tool_call("str_replace", {"path": name, "old_string": "left, right", "new_string": "right, left"})


def is_summary_request(messages: Sequence[Message]) -> bool:
    return bool(messages) and "SUMMARY_REQUEST" in getattr(messages[-1], "tags", ())


def model() -> ScriptedModel:
    numbers = iter(range(STEPS))

    def play(request: ModelRequest) -> ModelReply:
        if is_summary_request(request.all_messages):
            return text(SUMMARY, usage=Usage())
        number = next(numbers, None)
        return text("All repaired.") if number is None else step(number)

    return ScriptedModel([play] * (STEPS * 2))


def run(row: Row) -> tuple[RunResult[Any], list[ModelRequest]]:
    provider = model()
    agent = AgentDefinition(
        "repairer",
        model="test/model",
        tools=tools(row.ephemeral),
        hooks=Hooks(pre_step=row.hooks),
        limits=Limits(max_steps=STEPS + 1),
        system_prompt="You repair Python projects, carefully and one module at a time. " * 20,
        instructions_prompt="Read a module before you edit it, and run its tests afterwards.",
    )

    async def whole() -> RunResult[Any]:
        async with Engine(models=provider) as engine:
            return await engine.run(agent, "Read every module and repair every failing test.")

    return asyncio.run(whole()), provider.calls


class PromptTotals(NamedTuple):
    """The prompt tokens of a run, and the number of prompts that rewrite earlier messages."""

    sizes: list[int]
    cached: int
    rewrites: int

    @property
    def cost(self) -> float:
        """The cost of the prompts, in uncached tokens."""
        return self.cached * CACHED + (sum(self.sizes) - self.cached) * WRITTEN


def add_up_prompts(requests: Sequence[ModelRequest]) -> PromptTotals:
    sizes, cached, rewrites = [], 0, 0
    sent: tuple[Message, ...] = ()
    for request in requests:
        fixed = estimate_tokens(request.system_prompt) + tool_tokens(request.tools)
        messages = request.all_messages
        common = find_first_difference(sent, messages)
        tokens = [*request.messages.memo("message_tokens", message_tokens), *map(message_tokens, request.tail)]
        sizes.append(fixed + sum(tokens))
        cached += sum(tokens[:common]) + (fixed if sent else 0)
        # The next prompt does not contain the request for a summary.
        rewrites += common < len(sent) - is_summary_request(sent)
        sent = messages
    return PromptTotals(sizes, cached, rewrites)


def table() -> str:
    head = ("policy", "steps", "rewrites", "largest", "cost")
    lines = [f"| {' | '.join(head)} |", f"|{'|'.join(['---', *['---:'] * (len(head) - 1)])}|"]
    whole = 0.0
    for row in ROWS:
        result, requests = run(row)
        found = add_up_prompts(requests)
        whole = whole or found.cost
        extra = sum(is_summary_request(request.all_messages) for request in requests)
        failed = f" ({result.status.value})" if result.error else ""
        cells = (
            row.name,
            f"{len(requests) - extra - 1}{failed}",
            f"{found.rewrites}",
            f"{max(found.sizes):,}",
            "-" if result.error else f"{found.cost / whole:.0%}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def page() -> str:
    """Return the text of the page."""
    return f"{COSTS}{table()}\n"


if __name__ == "__main__":
    TARGET.write_text(page(), encoding="utf-8")
