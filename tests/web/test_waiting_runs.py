"""
What a page is shown of a run that waits for something that is no person.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from stepengine import AgentDefinition, Engine, Sleep, StepContext
from stepengine.adapters.vercel import vercel
from stepengine.journal import MemoryJournal
from stepengine.testing import ScriptedModel

from .test_ag_ui import shown, verify


def handle_steps(ctx: StepContext) -> Iterator[Any]:
    """
    Sleep an hour.
    """
    yield Sleep(seconds=3600)
    return "woken"


SLEEPER = AgentDefinition(id="sleeper", handle_steps=handle_steps)


@pytest.mark.spec("waiting:WT20")
async def test_ag_ui_page_shows_why_a_run_waits() -> None:
    async with Engine([SLEEPER], models=ScriptedModel([])) as engine:
        events = await shown(engine.stream(SLEEPER, "hi", journal=MemoryJournal()))
    verify(events)
    text = "".join(e["delta"] for e in events if e["type"] == "TEXT_MESSAGE_CONTENT")
    assert text.startswith("The run sleeps until 20")
    waits = next(e["value"]["waits"] for e in events if e.get("name") == "stepengine.waits")
    assert ["time"] == [one["kind"] for one in waits]
    activities = [e["content"]["isOver"] for e in events if e.get("activityType") == "stepengine.wait"]
    assert activities
    assert not any(activities)
    assert ("RUN_FINISHED", "success") == (events[-1]["type"], events[-1]["outcome"]["type"]), (
        "nothing is to be answered"
    )


@pytest.mark.spec("waiting:WT20")
async def test_vercel_page_shows_why_a_run_waits() -> None:
    async with Engine([SLEEPER], models=ScriptedModel([])) as engine:
        chunks = [c async for c in vercel(engine.stream(SLEEPER, "hi", journal=MemoryJournal()), message_id="m")]
    json.dumps(chunks)
    assert "".join(c["delta"] for c in chunks if c["type"] == "text-delta").startswith("The run sleeps until 20")
    waits = [c["data"] for c in chunks if c["type"] == "data-wait"]
    assert waits
    assert ("time", False) == (waits[-1]["kind"], waits[-1]["isOver"])
    assert {"type": "finish", "finishReason": "other"} == chunks[-1]
