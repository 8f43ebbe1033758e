"""
A peer's side of "growth": what a durable run of openai-agents hands to Temporal, call by call.

The plug-in's own model stub builds the input of each model call's activity, and its own converter turns it into the payload that
the server writes into the history. Only the server is missing: where the stub schedules the activity, the payloads are counted and the
reply is there. The server ends a run whose history exceeds 50 MiB.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from openai.types.responses import ResponseFunctionToolCall
from temporalio import workflow
from temporalio.openai_agents import ModelActivityParameters, OpenAIPayloadConverter
from temporalio.openai_agents._temporal_model_stub import _TemporalModelStub

from agents import Agent, ModelResponse, Runner, Usage, function_tool, set_tracing_disabled  # noqa: TID251 - the peer
from benchmarks.better import GONE

CALLS = 100
CONVERSATION = "word and word " * 60_000
OUTPUT = "x y z w " * 640
LIMIT = 50 * 2**20
CONVERTER = OpenAIPayloadConverter()


class TooLarge(Exception):
    """The history is larger than the server allows."""


class History:
    """Counts what the activities of a run put into its history."""

    def __init__(self) -> None:
        self.calls = 0
        self.size = 0

    async def execute(self, _: Any, activity_input: Any, **__: Any) -> ModelResponse:
        """Stand where the server schedules an activity, and answer."""
        name = f"call_{self.calls}"
        call = ResponseFunctionToolCall(
            type="function_call", call_id=name, name="look", arguments=json.dumps({"n": self.calls})
        )
        reply = ModelResponse(output=[call], usage=Usage(), response_id=None)
        for payload in CONVERTER.to_payloads([activity_input, reply]):
            self.size += payload.ByteSize()
        self.calls += 1
        if self.size > LIMIT:
            raise TooLarge
        return reply


@function_tool
async def look(n: int) -> str:
    """Look something up."""
    return f"{n} {OUTPUT}"


async def main() -> None:
    """Run until the server would end it."""
    set_tracing_disabled(disabled=True)
    history = History()
    workflow.execute_activity_method = history.execute  # type: ignore[assignment]
    agent: Agent[None] = Agent(name="looker", tools=[look])
    agent.model = _TemporalModelStub("m", model_params=ModelActivityParameters(), agent=agent)
    try:
        await Runner.run(agent, CONVERSATION, max_turns=CALLS + 1)
    except TooLarge:
        print(
            f"the history has {history.size / 2**20:.1f} MiB after model call {history.calls} of {CALLS}: the server ends the run"
        )
    else:
        raise SystemExit(GONE)


if __name__ == "__main__":
    asyncio.run(main())
