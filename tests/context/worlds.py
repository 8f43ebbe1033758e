"""
What the tests of context policies share: hook contexts without an engine, and models that work for a long time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

from stepengine import AgentDefinition, AgentState, Engine, HookContext, Tool
from stepengine.data.messages import Message, UserMessage
from stepengine.data.models import ModelReply, ModelRequest
from stepengine.data.transcript import Transcript
from stepengine.data.usage import Usage
from stepengine.models import ModelInfo, Models, Provider
from stepengine.runtime.sizes import estimate_request_tokens
from stepengine.testing import text, tool_call
from tests.context.conversations import Lines

NOW = datetime(2026, 3, 4, 5, 6, tzinfo=UTC)
MODEL = "test/m"


def context(*messages: Message, state: AgentState | None = None, **fields: Any) -> HookContext:
    """
    Return what a hook is given.
    """
    agent = fields.pop("agent", AgentDefinition("worker", model=MODEL))
    state = AgentState(message_history=Transcript(messages)) if state is None else state
    return HookContext(state=state, agent=agent, now=NOW, **{"logger": Lines(), **fields})


class Worker(Provider):
    """
    A model that calls a tool so many times and then says that it is done; asked for a summary, it writes one.

    It reports prompts as large as the estimate says, and keeps every request.
    """

    name = "test"

    def __init__(self, calls: int, *, report: Callable[[ModelRequest], int] | None = estimate_request_tokens) -> None:
        self.todo = calls
        self.report = report
        self.requests: list[ModelRequest] = []
        self.summaries: list[ModelRequest] = []

    async def complete(self, request: ModelRequest) -> ModelReply:
        self.requests.append(request)
        usage = None if self.report is None else Usage(self.report(request), 7)
        last = request.all_messages[-1]
        if isinstance(last, UserMessage) and "SUMMARY_REQUEST" in last.tags:
            self.summaries.append(request)
            return text(f"summary number {len(self.summaries)}", usage=usage)
        if not self.todo:
            return text("done", usage=usage)
        self.todo -= 1
        return tool_call("dig", {"depth": self.todo}, usage=usage)


def digging(size: Callable[[int], int] = lambda depth: 100 + depth * 37 % 900) -> Tool[..., Any]:
    """
    Return the tool that a ``Worker`` calls; *size* says how many characters come back.
    """
    schema = {"type": "object", "properties": {"depth": {"type": "integer"}}, "required": ["depth"]}

    def run(value: dict[str, Any]) -> str:
        return f"{value['depth']} " + "x" * size(value["depth"])

    return Tool("dig", "Digs a hole.", schema, run, in_thread=False)


def engine(provider: Provider, window: int | None = None, **options: Any) -> Engine:
    """
    Return an engine whose one model has a context of *window* tokens.
    """
    return Engine(models=Models({"test": provider}, info={MODEL: ModelInfo(context_window=window)}), **options)


def assert_paired(requests: Sequence[ModelRequest]) -> None:
    """
    Check that every call in every request has its one result right behind it.
    """
    for request in requests:
        Transcript(list(request.all_messages))
