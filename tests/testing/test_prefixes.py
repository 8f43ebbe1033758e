"""
Requests of one run may only grow: whatever else they do loses the provider's prompt cache.
"""

from __future__ import annotations

import pytest

from stepengine import STEP, STEP_ALL, AgentDefinition, Engine, RunStatus, ToolCall, tool
from stepengine.errors import DataError
from stepengine.journal import FileJournal, MemoryJournal
from stepengine.testing import ScriptedModel, assert_prefix_stable, text, tool_call


@tool
def look(path: str) -> str:
    """
    Look.
    """
    return f"seen {path}"


def run(handler, replies, journal=None, **options):
    agent = AgentDefinition("w", model="test/m", tools=[look], system_prompt="Watch.", handle_steps=handler, **options)
    with Engine(models={"test": ScriptedModel(replies)}) as engine:
        return engine.run_sync(agent, "go", journal=journal or MemoryJournal())


@pytest.mark.spec("replay:Y15")
def test_a_growing_run_is_stable_in_memory_file_and_result(tmp_path):
    def handler(ctx):
        yield ToolCall("look", {"path": "a"})
        yield STEP_ALL

    file = FileJournal(tmp_path / "run.jsonl")
    result = run(handler, [tool_call("look", {"path": "b"}), text("fine")], file)
    assert_prefix_stable(result)
    assert_prefix_stable(file)
    assert_prefix_stable(tmp_path / "run.jsonl")


@pytest.mark.spec("replay:Y15")
def test_a_rewritten_history_is_reported_with_the_first_different_byte():
    def handler(ctx):
        yield STEP
        yield ToolCall("set_messages", {"messages": [{"role": "user", "content": "gone"}]}, include_tool_call=False)
        yield STEP

    result = run(handler, [text("fine"), text("fine")])
    assert RunStatus.COMPLETED is result.status, result.error
    with pytest.raises(AssertionError) as caught:
        assert_prefix_stable(result)
    said = str(caught.value)
    assert "the request of effect #1 in the journal in memory does not start with the request of #0" in said
    lines = said.splitlines()
    assert lines[1].startswith("  first difference in /messages/0, character ")
    assert ('go"' in lines[2], 'gone"' in lines[3], "#0" in lines[2], "#1" in lines[3]) == (True,) * 4
    assert_prefix_stable(result, cut_at=("#1",))


@pytest.mark.spec("replay:Y15")
def test_a_result_without_a_journal_is_refused():
    with Engine(models={"test": ScriptedModel([text("fine")])}) as engine:
        result = engine.run_sync(AgentDefinition("w", model="test/m"), "go")
    with pytest.raises(DataError, match="has no journal"):
        assert_prefix_stable(result)
