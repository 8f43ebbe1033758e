"""
What is said in a session whose last run waits for something that is not a person.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stepengine import STEP, AgentDefinition, Engine, Receive, Sleep, StepContext
from stepengine.data.state import RunStatus
from stepengine.errors import SessionError
from stepengine.journal import FileJournal
from stepengine.sessions import FileSessions
from stepengine.testing import Clock, ScriptedModel


def handle_steps(ctx: StepContext) -> Iterator[Any]:
    """
    Sleep an hour, and let the model speak.
    """
    yield Sleep(seconds=3600)
    yield STEP
    return "woken"


def receive_steps(ctx: StepContext) -> Iterator[Any]:
    """
    Wait for a message.
    """
    said = yield Receive("go")
    return f"got {said.value}"


SLEEPER = AgentDefinition(id="sleeper", handle_steps=handle_steps)
LISTENER = AgentDefinition(id="listener", handle_steps=receive_steps)
OTHER = AgentDefinition(id="other")


def engine(folder: Path, clock: Clock) -> Engine:
    """
    Return an engine with sessions in a folder.
    """
    model = ScriptedModel(["hello", "again"])
    return Engine([SLEEPER, LISTENER, OTHER], models=model, sessions=FileSessions(folder), clock=clock)


def kept_in(folder: Path) -> Path:
    """
    Return the journal of the only run in a session.
    """
    (found,) = folder.rglob("000001-*.jsonl")
    return found


@pytest.mark.spec("waiting:WT20")
async def test_input_to_a_sleeping_session_raises_until_its_wake_time(tmp_path: Path) -> None:
    clock = Clock()
    async with engine(tmp_path, clock) as e:
        first = await e.run(SLEEPER, "wake me later", session_id="s")
        assert (RunStatus.SUSPENDED, ()) == (first.status, first.pending_questions)
        for agent in (SLEEPER, OTHER):
            with pytest.raises(SessionError, match=r"sleeps until .*now=True"):
                await e.run(agent, "are you there?", session_id="s")
        again = await e.run(SLEEPER, session_id="s")
        assert (RunStatus.SUSPENDED, first.wakes_at) == (again.status, again.wakes_at), "asked with nothing, it says so"
        clock.advance(hours=2)
        last = await e.run(SLEEPER, "are you there?", session_id="s")
        assert ("woken", first.state.run_id, ()) == (last.output, last.state.run_id, last.warnings)
        said = [m.text for m in last.state.message_history if m.role == "user"]
        assert "are you there?" in " ".join(said)
        new = await e.run(OTHER, "and now?", session_id="s")
        assert RunStatus.COMPLETED is new.status


@pytest.mark.spec("waiting:WT20")
async def test_session_waiting_for_a_message_resumes_after_it_was_sent(tmp_path: Path) -> None:
    async with engine(tmp_path, Clock()) as e:
        await e.run(LISTENER, "hi", session_id="s")
        kept = kept_in(tmp_path)
        with pytest.raises(SessionError, match="waits for a message on 'go'"):
            await e.run(LISTENER, "more", session_id="s")
        await e.send_message(FileJournal(kept), "go", 3)
        last = await e.run(LISTENER, "more", session_id="s")
        assert "got 3" == last.output
        assert ["hi", "more"] == [m.text for m in last.state.message_history], (
            "the next run reads what this one did not"
        )


@pytest.mark.spec("waiting:WT20")
async def test_run_resumed_elsewhere_is_finished_in_its_session(tmp_path: Path) -> None:
    async with engine(tmp_path, Clock()) as e:
        await e.run(SLEEPER, "hi", session_id="s")
        kept = kept_in(tmp_path)
        assert "woken" == (await e.resume(FileJournal(kept), now=True)).output
        last = await e.run(OTHER, "and now?", session_id="s")
        assert RunStatus.COMPLETED is last.status
        assert "hello" in " ".join(m.text for m in last.state.message_history)
