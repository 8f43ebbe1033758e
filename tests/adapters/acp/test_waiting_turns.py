"""
A turn whose run waits for something that is not a person.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import acp
import pytest

from stepengine import STEP, AgentDefinition, Engine, Sleep, StepContext, Usage
from stepengine.adapters.acp import EditorAgent
from stepengine.testing import ScriptedModel, text

from .test_editors import Editor, said_to


def handle_steps(ctx: StepContext) -> Iterator[Any]:
    """
    Sleep an hour, and let the model speak.
    """
    yield Sleep(seconds=3600)
    yield STEP


def make(cwd: Path, *, observers: Any = (), **_: Any) -> Engine:
    sleeper = AgentDefinition(id="sleeper", handle_steps=handle_steps)
    return Engine([sleeper], models=ScriptedModel(["I woke up."]), observers=observers)


@pytest.mark.spec("waiting:WT20")
async def test_sleeping_turn_ends_with_a_notice_and_starts_no_run(tmp_path: Path) -> None:
    editor = Editor()
    agent: Any = EditorAgent(make, "sleeper", tmp_path / "sessions")
    agent.on_connect(editor)
    await agent.initialize(acp.PROTOCOL_VERSION)
    session = (await agent.new_session(cwd=str(tmp_path), mcp_servers=[])).session_id
    assert "end_turn" == (await said_to(agent, session, "wake me")).stop_reason
    assert editor.said().startswith("The run sleeps until 20")
    editor.updates.clear()
    await said_to(agent, session, "are you there?")
    assert editor.said().startswith("The run sleeps until 20")
    await agent.aclose()

    again: Any = EditorAgent(make, "sleeper", tmp_path / "sessions")
    again.on_connect(editor)
    await again.initialize(acp.PROTOCOL_VERSION)
    await again.load_session(cwd=str(tmp_path), session_id=session, mcp_servers=[])
    editor.updates.clear()
    await said_to(again, session, "and now?")
    assert editor.said().startswith("The run sleeps until 20"), "also after the session was loaded"
    editor.updates.clear()
    assert "end_turn" == (await said_to(again, session, "/resume up, please")).stop_reason
    assert "I woke up." == editor.said()
    assert 1 == len(list((tmp_path / "sessions" / session).glob("*.jsonl")))
    await again.aclose()


@pytest.mark.spec("waiting:WT20")
@pytest.mark.parametrize("said", ["are you there?", "/resume up"])
async def test_prompt_after_an_external_wake_starts_the_next_turn(tmp_path: Path, said: str) -> None:
    editor = Editor()
    agent: Any = EditorAgent(make, "sleeper", tmp_path / "sessions")
    agent.on_connect(editor)
    await agent.initialize(acp.PROTOCOL_VERSION)
    session = (await agent.new_session(cwd=str(tmp_path), mcp_servers=[])).session_id
    await said_to(agent, session, "wake me")
    (journal,) = (tmp_path / "sessions" / session).glob("*.jsonl")
    async with make(tmp_path) as other:
        assert "I woke up." == (await other.resume(journal, now=True)).text
    editor.updates.clear()
    assert "end_turn" == (await said_to(agent, session, said)).stop_reason
    assert "Another process resumed the run. Its output follows." in editor.said()
    assert "I woke up." in editor.said()
    turns = [file.name for file in (tmp_path / "sessions" / session).glob("*.jsonl")]
    assert (1 if said.startswith("/resume") else 2) == len(turns)
    await agent.aclose()


@pytest.mark.spec("interfaces:IF21", "waiting:WT20")
async def test_resumed_turn_counts_its_earlier_cost_once(tmp_path: Path) -> None:
    def steps(ctx: StepContext) -> Iterator[Any]:
        yield STEP
        yield Sleep(seconds=3600)
        yield STEP

    def make_priced(cwd: Path, *, observers: Any = ()) -> Engine:
        reply = text("Hi.", usage=Usage(input_tokens=90, output_tokens=10))
        sleeper = AgentDefinition(id="sleeper", model="anthropic/claude-sonnet-4-5", handle_steps=steps)
        return Engine([sleeper], models=ScriptedModel([reply] * 2), observers=observers)

    editor = Editor()
    agent: Any = EditorAgent(make_priced, "sleeper", tmp_path / "sessions")
    agent.on_connect(editor)
    session = (await agent.new_session(cwd=str(tmp_path), mcp_servers=[])).session_id
    await said_to(agent, session, "wake me")
    await said_to(agent, session, "/resume")
    await agent.aclose()
    first, second = [one.cost.amount for one in editor.updates if one.session_update == "usage_update"]
    assert pytest.approx(2 * first) == second
