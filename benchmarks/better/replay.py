"""
A peer's side of "replay": a hook with an effect in a durable run of pydantic-ai on DBOS, which is killed and recovered.

The run makes four model calls; its process dies in the third one. What the hook wrote into a file before each model call is counted, once
for a plain hook, and once for one that hands what it does to a durable operation of its capability.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from dbos import DBOS, SetWorkflowID
from pydantic_ai import Agent, RunContext
from pydantic_ai.capabilities import AbstractCapability, Hooks, durable_operation
from pydantic_ai.durable_exec.dbos import DBOSDurability
from pydantic_ai.messages import ModelResponse, TextPart, ToolCallPart
from pydantic_ai.models.function import FunctionModel

from benchmarks.better import GONE

TOOLS = 3


DIES_IN = 2
"""How many replies the process has seen when it dies."""


class Bill(AbstractCapability[None]):
    """Hands what a hook does to a durable operation."""

    id = "bill"

    def __init__(self, notes: Path) -> None:
        self.notes = notes

    @durable_operation(name="bill")
    async def bill(self, ctx: RunContext[None]) -> None:
        """Bill a model call."""
        noted(self.notes)

    async def before_model_request(self, ctx: RunContext[None], request_context: Any) -> Any:
        """Bill, then go on."""
        await self.bill(ctx)
        return request_context


def noted(file: Path) -> None:
    """Write down that something happened."""
    with file.open("a") as notes:
        notes.write("1\n")


def agent_for(folder: Path, kind: str, *, dies: bool) -> Agent[None, str]:
    """Return the agent, with a hook of one kind."""

    def reply(messages: list[Any], _: Any) -> ModelResponse:
        done = sum(isinstance(message, ModelResponse) for message in messages)
        if dies and done == DIES_IN:
            os._exit(9)
        noted(folder / "model")
        return ModelResponse(parts=[TextPart("done") if done == TOOLS else ToolCallPart("look", {"n": done})])

    async def bill(_: Any, request: Any) -> Any:
        noted(folder / "hook")
        return request

    billing: Any = Hooks(before_model_request=bill) if kind == "plain" else Bill(folder / "hook")
    agent = Agent(FunctionModel(reply), name="looker", capabilities=[billing, DBOSDurability()])

    @agent.tool_plain
    def look(n: int) -> str:
        """Look something up."""
        return f"result {n}"

    return agent


def work(folder: Path, kind: str, *, dies: bool) -> None:
    """Run the workflow, or recover it."""
    agent = agent_for(folder, kind, dies=dies)
    url = f"sqlite:///{folder}/dbos.sqlite"
    DBOS(config={"name": "replay", "system_database_url": url, "log_level": "CRITICAL"})

    @DBOS.workflow(name="looking")
    async def looking() -> str:
        return (await agent.run("look")).output

    async def main() -> None:
        DBOS.launch()
        if dies:
            with SetWorkflowID("w"):
                await DBOS.start_workflow_async(looking)
        end = time.monotonic() + 60
        while time.monotonic() < end:
            status = await DBOS.get_workflow_status_async("w")
            if status is not None and status.status == "SUCCESS":
                return
            await asyncio.sleep(0.1)
        raise TimeoutError

    asyncio.run(main())
    DBOS.destroy()


def counted(kind: str) -> dict[str, int]:
    """Kill one process, recover in another, and count."""
    with tempfile.TemporaryDirectory() as name:
        for side in ("dies", "recovers"):
            done = subprocess.run(
                [sys.executable, "-m", "benchmarks.better.replay", side, name, kind],
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode != (9 if side == "dies" else 0):
                raise SystemExit(done.stderr[-2_000:])
        return {what: len((Path(name) / what).read_text().splitlines()) for what in ("model", "hook")}


def main() -> None:
    """Count both kinds of hooks."""
    plain, marked = counted("plain"), counted("marked")
    if plain["hook"] <= TOOLS + 1:
        raise SystemExit(GONE)
    print(
        f"{plain['model']} model calls; a hook before them took effect {plain['hook']} times, "
        f"one that hands it to a durable operation {marked['hook']} times"
    )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        work(Path(sys.argv[2]), sys.argv[3], dies=sys.argv[1] == "dies")
    else:
        main()
