"""
Pages that speak AG-UI: the real client of ``@ag-ui/client`` against ``serving.app``, and PyPI's own types.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from stepengine.testing import tool_call, tool_calls

from .npm import Script, running
from .painter import Painter
from .served import served

COUNTERPARTS = (
    ("npm:@ag-ui/client", "1.0.0", "works", "text, tools, interrupts, shared state, the page's own tools, message snapshots, reconnect"),
    ("pypi:ag-ui-protocol", "1.0.0", "works", "the package's encoder"),
)  # fmt: skip
"""Whose program is used here: package, version that was seen, what came of it, what is covered."""
pytestmark = pytest.mark.deep
WHERE = {"name": "where", "description": "Say where the user is.", "parameters": {"type": "object", "properties": {"exact": {"type": "boolean"}}}}  # fmt: skip
PICK = {"name": "pick", "description": "Let the user pick."}


@asynccontextmanager
async def talking(painter: Painter, packages: Path, folder: Path, **more: Any) -> AsyncIterator[Script]:
    async with (
        served(folder, painter.engine, shares=["colours"]) as (url, headers),
        running(
            "ag_ui_client.mjs", packages, url=f"{url}/ag-ui/painter", thread="t 1", headers=headers, **more
        ) as page,
    ):
        yield page


def said(told: Any) -> list[tuple[str, str]]:
    return [(m["role"], m.get("content") or "") for m in told["messages"] if m["role"] in ("user", "assistant", "tool")]


def calls(told: Any) -> list[tuple[str, str]]:
    return [(call["id"], call["function"]["name"]) for m in told["messages"] for call in m.get("toolCalls") or ()]


def results(told: Any) -> list[tuple[str, str]]:
    return [(m["toolCallId"], m["content"]) for m in told["messages"] if m["role"] == "tool"]


@pytest.mark.spec("interfaces:IF22", "interfaces:IF27", "interfaces:IF29")
async def test_client_shows_texts_and_tools_of_a_continued_conversation(packages: Path, tmp_path: Path) -> None:
    painter = Painter(tool_call("dry", {"what": "door"}, text="Let me see."), "It is dry.", "You are welcome.")
    painter.gate.set()
    async with talking(painter, packages, tmp_path) as page:
        first = await page("run", text="Is it dry?")
        told = await page("run", text="Thank you.")

    assert ([], []) == (first["problems"], told["problems"])
    assert {"is": "success", "pending": [], "interrupts": None, "result": "You are welcome."} == told["outcome"]
    assert [("user", "Thank you."), ("assistant", "You are welcome.")] == said(told)[-2:]
    assert ([("c1", "dry")], [("c1", "The door is dry.")]) == (calls(told), results(told))


@pytest.mark.spec("interfaces:IF43", "interfaces:IF44", "interfaces:IF114")
@pytest.mark.parametrize(
    ("payload", "expected"),
    [({"approved": True}, "The door is red now."), ({"approved": False, "reason": "not today"}, "not today"), ("later", "later")],
)  # fmt: skip
async def test_permission_is_a_resolvable_interrupt_and_calls_appear_once(
    payload: Any, expected: str, packages: Path, tmp_path: Path
) -> None:
    painter = Painter(tool_call("paint", {"what": "door"}, text="I will."), "Ended.")
    async with talking(painter, packages, tmp_path) as page:
        asked = await page("run", text="Paint the door.")
        (interrupt,) = asked["outcome"]["interrupts"]
        entry = {"interruptId": interrupt["id"], "status": "resolved", "payload": payload}
        told = await page("run", resume=[entry])

    assert ("interrupt", "c1", []) == (asked["outcome"]["is"], interrupt["toolCallId"], asked["problems"])
    assert ("success", []) == (told["outcome"]["is"], told["problems"])
    assert [("c1", "paint")] == calls(told)
    ((call, result),) = results(told)
    assert ("c1", True) == (call, expected in result)
    assert ("assistant", "Ended.") == said(told)[-1]


@pytest.mark.spec("interfaces:IF111", "interfaces:IF113")
async def test_shared_state_syncs_both_ways_and_other_state_is_hidden(packages: Path, tmp_path: Path) -> None:
    mixing = [tool_call("mix", {"colour": "red"}), tool_call("mix", {"colour": "blue"}), "Mixed."]
    painter = Painter(*mixing, tool_call("mix", {"colour": "green"}), "Mixed.")
    async with talking(painter, packages, tmp_path, state={"colours": {"all": ["white"]}}) as page:
        first = await page("run", text="Mix.")
        await page("state", state={"colours": {"all": ["black"]}})
        second = await page("run", text="Mix.")
        await page("state", state={"secret": "mine"})
        refused = await page("run", text="Mix.")

    white, red, blue = [{"colours": {"all": ["white", "red", "blue"][: n + 1]}} for n in range(3)]
    assert ([white, red, blue], []) == (first["states"], first["problems"])
    assert ["STATE_SNAPSHOT", "STATE_DELTA", "STATE_DELTA"] == [e for e in first["events"] if e.startswith("STATE")]
    assert {"colours": {"all": ["black", "green"]}} == second["state"]
    assert [{"all": ["white"]}, {"all": ["white", "red"]}, {"all": ["black"]}] == painter.seen
    assert "which is not shared" in str(refused["problems"])


@pytest.mark.spec("interfaces:IF112")
async def test_page_runs_its_own_tools_and_the_run_continues(packages: Path, tmp_path: Path) -> None:
    painter = Painter(
        tool_calls(
            tool_call("where", {"exact": True}), tool_call("dry", {"what": "door"}), tool_call("where", {"exact": True}),
            tool_call("pick", {}),
        ),
        "Ended.",
    )  # fmt: skip
    painter.gate.set()
    async with talking(painter, packages, tmp_path) as page:
        asked = await page("run", text="Go.", tools=[WHERE, PICK])
        await page("give", call="c1", content="Rome")
        await page("give", call="c3", content="Oslo")
        await page("give", call="c4", content="", error="nobody picked")
        told = await page("run", tools=[WHERE, PICK])

    assert (["c1", "c3", "c4"], []) == (asked["outcome"]["pending"], asked["problems"])
    assert ("success", [], "Ended.") == (told["outcome"]["is"], told["problems"], told["outcome"]["result"])
    assert [("c1", "where"), ("c2", "dry"), ("c3", "where"), ("c4", "pick")] == calls(told)
    assert {"c1": "Rome", "c2": "The door is dry.", "c3": "Oslo", "c4": ""} == dict(results(told))
    assert 4 == len(results(told))
    heard = {m.tool_call_id: m.text for m in painter.model.calls[-1].messages if m.role == "tool"}
    assert {"c1": "Rome", "c2": "The door is dry.", "c3": "Oslo", "c4": "nobody picked"} == heard


@pytest.mark.spec("interfaces:IF114")
async def test_reconnecting_page_sees_the_conversation_and_the_active_run(packages: Path, tmp_path: Path) -> None:
    painter = Painter("Hello.", tool_call("dry", {"what": "door"}, text="Let me see."), "It is dry.")
    async with talking(painter, packages, tmp_path) as page:
        await page("run", text="Hi.")
        await page("post", text="Is it dry?")
        await page("until", event="TOOL_CALL_END")
        await page("abort")
        await page("begin")
        await page("come")
        await page("until", event="TOOL_CALL_END")
        painter.gate.set()
        await page("finish")
        told = await page("connect")

    spoken = [("user", "Hi."), ("assistant", "Hello."), ("user", "Is it dry?"), ("assistant", "Let me see."), ("tool", "The door is dry."), ("assistant", "It is dry.")]  # fmt: skip
    assert ([], spoken) == (told["problems"], [each for each in said(told) if each[1]])
    assert [("c1", "dry")] == calls(told)
    assert "success" == told["outcome"]["is"]
