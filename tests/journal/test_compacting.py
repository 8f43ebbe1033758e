"""
Compactions that are found in a journal: each shows what it left out, whole, and what took its place.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepengine import (
    STEP,
    STEP_ALL,
    AgentCall,
    AgentDefinition,
    Change,
    Engine,
    HookContext,
    Hooks,
    StepContext,
    Steps,
    ToolCall,
    ToolResult,
    load_agent,
    tool,
)
from stepengine.context import compact, mask_tool_results, output_cache, prune_to_summary, summarize, truncate
from stepengine.data.messages import Message
from stepengine.data.state import AgentState
from stepengine.journal import MemoryJournal
from stepengine.journal.compactions import Compaction, find_compactions
from stepengine.testing import ScriptedModel, text, tool_call


@tool(in_thread=False)
def dig(depth: int, size: int) -> str:
    """
    Dig.
    """
    return f"layer {depth} " + "x" * size


def seen_by(policy: Any, seen: list[tuple[tuple[Message, ...], ...]]) -> Any:
    """
    Return a hook that notes what stood in the view and does not any more after *policy*, and what stands there instead.
    """

    def noting(ctx: HookContext) -> Any:
        change = policy(ctx)
        if hasattr(change, "send"):
            change = yield from change
        if change is not None:
            after = change.messages if change.view is None else change.view
            if left := ctx.state.view.find_missing_messages(after):
                seen.append((left, after.find_missing_messages(ctx.state.view)))
        return change

    return noting


def policy_of(which: int, limit: int, *, record: bool) -> Any:
    return (
        truncate(limit, replace_record=record),
        mask_tool_results(limit, replace_record=record),
        prune_to_summary(limit, replace_record=record),
        summarize(limit, replace_record=record),
        output_cache(limit * 2),
    )[which]


def recorded(*replies: Any, previous: AgentState | None = None, **fields: Any) -> list[Compaction]:
    """
    Return what a recorded run of an agent shows to have been left out.
    """
    agent = AgentDefinition("digger", model="t/m", **fields)
    journal = MemoryJournal()
    result = Engine([agent], models={"t": ScriptedModel(replies)}).run_sync(
        "digger", "Dig for gems.", journal=journal, previous=previous
    )
    assert result.status == "completed", result.error
    read = MemoryJournal(journal.lines())
    return list(find_compactions(read.history()))


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("requirements:DM21a")
@settings(max_examples=15)
@given(
    st.integers(0, 4),
    st.booleans(),
    st.integers(150, 900),
    st.lists(st.integers(0, 700), min_size=1, max_size=9),
    st.booleans(),
)
def test_compaction_shows_exactly_the_omitted_messages(
    which: int, record: bool, limit: int, sizes: list[int], went_on: bool
) -> None:
    seen: list[tuple[tuple[Message, ...], ...]] = []
    policy = seen_by(policy_of(which, limit, record=record), seen)
    digs = iter(tool_call("dig", {"depth": n, "size": size}, text=f"Word {n}") for n, size in enumerate(sizes))

    def reply(request: Any) -> Any:
        if "SUMMARY_REQUEST" in getattr(request.all_messages[-1], "tags", ()):
            return text("What mattered.")
        return next(digs, text("done"))

    agent = AgentDefinition("digger", model="t/m", tools=[dig], hooks=Hooks(pre_step=[policy]))
    journal = MemoryJournal()
    engine = Engine([agent], models={"t": ScriptedModel(reply)})
    previous = engine.run_sync("digger", "Dig before.").state if went_on else None
    seen.clear()
    result = engine.run_sync("digger", "Dig for gems.", journal=journal, previous=previous)
    assert result.status == "completed", result.error
    found = list(find_compactions(MemoryJournal(journal.lines()).history()))

    assert seen == [(one.left_out, one.instead) for one in found]
    assert not any(one.unrecorded for one in found)


DIGS = [tool_call("dig", {"depth": n, "size": 900}, text=f"Word {n}") for n in range(6)]


@pytest.mark.spec("requirements:DM21a")
def test_run_without_omissions_shows_no_compaction() -> None:
    """
    Not what was said for a time, not what a hook made of a result, not a reply that came in two parts, no cut one.
    """
    cut = text("It is a long", stop_reason="max_tokens")

    def handle_steps(ctx: StepContext) -> Steps:
        yield ToolCall("dig", {"depth": 9, "size": 3}, include_tool_call=False)
        yield ToolCall("add_message", {"role": "user", "content": "For now.", "ttl": "agent_step"})
        yield STEP
        yield STEP_ALL

    hooks = Hooks(post_tool=[lambda ctx, call, result: Change(result=ToolResult.text("dug"))])

    assert [] == recorded(*DIGS, cut, text(" story."), tools=[dig], hooks=hooks, handle_steps=handle_steps)
    assert [] == recorded(*DIGS, "done", tools=[dig], step_prompt="Go on.", instructions_prompt="Dig well.")


@pytest.mark.spec("requirements:DM21a")
def test_compaction_by_handler_or_inline_child_is_shown() -> None:
    pruner = load_agent("context-pruner")
    prune = {"agent_type": "context-pruner", "params": {"max_context_length": 1}}

    def compacting(ctx: StepContext) -> Steps:
        state = (yield STEP).agent_state
        yield STEP
        yield from compact(state, summarize(summarizer=lambda _: "What mattered."))
        yield STEP_ALL

    def pruning(ctx: StepContext) -> Steps:
        yield STEP
        yield ToolCall("spawn_agent_inline", prune, include_tool_call=False)
        yield STEP_ALL

    (compacted,) = recorded(*DIGS, "done", tools=[dig], handle_steps=compacting)
    (pruned, *_) = recorded(*DIGS, "done", tools=[dig], handle_steps=pruning, spawnable_agents=[pruner])

    assert ["user", "assistant", "tool", "assistant", "tool"] == [m.role for m in compacted.left_out]
    assert ["SUMMARY"] == [tag for m in compacted.instead for tag in getattr(m, "tags", ())]
    assert ["user", "assistant", "tool"] == [m.role for m in pruned.left_out]
    assert "CONVERSATION_SUMMARY" in getattr(pruned.instead[0], "tags", ())
    assert (2, 4) == (pruned.step, compacted.step + 1)


@pytest.mark.spec("requirements:DM21a")
def test_unrecorded_results_are_counted() -> None:
    def forgetting(ctx: HookContext) -> Change | None:
        return Change(view=ctx.state.view[:1]) if len(ctx.state.view) > 1 else None

    todos = tool_call("write_todos", {"todos": [{"task": "Dig", "completed": False}]})
    (found,) = recorded(todos, "done", tools=[dig, "write_todos"], hooks=Hooks(pre_step=[forgetting]))

    assert ["assistant"] == [m.role for m in found.left_out]
    assert 1 == found.unrecorded


@pytest.mark.spec("requirements:DM21a")
def test_a_childs_compactions_are_shown_with_its_path() -> None:
    helper = AgentDefinition("helper", model="t/m", tools=[dig], hooks=Hooks(pre_step=[truncate(400)]))

    def handle_steps(ctx: StepContext) -> Steps:
        yield AgentCall("helper", "Dig there.")

    found = recorded(*DIGS, "done", handle_steps=handle_steps, spawnable_agents=[helper])

    assert {"0"} == {one.address[0] for one in found}
    assert all(one.left_out for one in found)
