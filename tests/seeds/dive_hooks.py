"""
Seed 002, "Common Patterns as Hooks": sessions, permissions, context, compaction, usage; and how hooks share values and fail.

Nothing of it is installed by an engine; each is a hook that the agent is given.
"""

import logging
from typing import Any

from stepengine import AgentDefinition, Change, Engine, Hooks, tool
from stepengine.context import inject_context, summarize, usage_logger
from stepengine.permissions import Policy, Rule
from stepengine.sessions import MemorySessions, session_hooks
from stepengine.testing import ScriptedModel, text, tool_call

DONE: list[str] = []
RECORDS: list[str] = []


class Handler(logging.Handler):
    """Keeps what is logged."""

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one line."""
        RECORDS.append(record.getMessage())


@tool(category="read")
def read(path: str) -> str:
    """Read a file."""
    DONE.append(f"read {path}")
    return "long " * 400


@tool(category="write")
def write(path: str) -> str:
    """Write a file."""
    DONE.append(f"write {path}")
    return "written"


def begin(ctx: Any) -> Change:
    return Change(values={"said": "by the first hook"})


def end(ctx: Any, _: object) -> None:
    DONE.append(ctx.values["said"])
    msg = "the last hook fails, and that changes nothing"
    raise RuntimeError(msg)


def agent(store: MemorySessions, *, pre_run: Any = ()) -> AgentDefinition:
    log = logging.getLogger("seed.dive")
    sessions = session_hooks(store)
    plan = Policy([Rule.allow_tool("read"), Rule.deny_tool("write", "Not today.")], mode="plan")
    hooks = sessions + Hooks(
        pre_run=[begin, *pre_run],
        pre_step=[
            inject_context("This is the project's own file of instructions."),
            summarize(300, summarizer=lambda old: f"{len(old)} messages were here."),
        ],
        pre_tool=[plan.hook()],
        post_run=[usage_logger(log), end],
    )
    return AgentDefinition("coder", model="anthropic/claude-sonnet-4-5", tools=[read, write], hooks=hooks)


def refuse(ctx: Any) -> None:
    msg = "not before noon"
    raise RuntimeError(msg)


def main() -> None:
    log = logging.getLogger("seed.dive")
    log.setLevel(logging.INFO)
    log.addHandler(Handler())
    store, model = (
        MemorySessions(),
        ScriptedModel(
            [tool_call("read", {"path": "a"}), tool_call("write", {"path": "a"}), text("Read it."), text("You asked.")]
        ),
    )
    coder = agent(store)
    with Engine([coder], models=model) as engine:
        first = engine.run_sync(coder, "Look at a.", session_id="s")
        second = engine.run_sync(coder, "What did I ask?", session_id="s")
        before = len(model.calls)
        refused = engine.run_sync(agent(store, pre_run=[refuse]), "Again.", session_id="s")
    print(first.output, second.output, refused.error)

    assert ("Read it.", "You asked.") == (first.output, second.output)
    assert [True] == [c.is_error for c in first.tool_calls if c.tool_name == "write"]
    assert "Not today." in first.tool_calls[1].result.text
    assert DONE == ["read a", *["by the first hook"] * 3]
    for request in model.calls:
        assert any("instructions" in m.text for m in request.all_messages)
    assert not any("instructions" in m.text for m in store.load("s").messages), "injected text was stored"
    assert any("messages were here" in m.text for m in model.calls[-1].messages), "nothing was compacted"
    assert "Look at a." in [m.text for m in store.load("s").messages]
    assert RECORDS == ["session s: 0 input tokens, 0 output tokens"] * 3
    assert refused.status == "failed"
    assert len(model.calls) == before, "a model was asked after a hook had refused the run"
    assert store.load("s").turns == 2


if __name__ == "__main__":
    main()
