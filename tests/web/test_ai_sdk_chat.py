"""
Pages made with the AI SDK: the real ``Chat`` of ``@ai-sdk/react``, in three versions, against ``serving.app``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from stepengine.testing import tool_call

from .npm import Script, running
from .painter import Painter
from .served import served

COUNTERPARTS = (
    ("npm:ai", "5.0.277", "partly", "text, tools, typed answers, reconnect with a new Chat; no approvals"),
    ("npm:ai", "6.0.326", "works", "text, tools, approve, deny, typing instead, reconnect"),
    ("npm:ai", "7.0.173", "works", "text, tools, approve, deny, typing instead, reconnect"),
    ("npm:@ai-sdk/react", "2.0.280", "works", "Chat with ai 5, 6 and 7"),
    ("npm:@ai-sdk/react", "3.0.326", "works", "Chat with ai 5, 6 and 7"),
    ("npm:@ai-sdk/react", "4.0.177", "works", "Chat with ai 5, 6 and 7"),
)
"""Whose program is used here: package, version that was seen, what came of it, what is covered."""
VERSIONS = (5, 6, 7)
WITH_APPROVALS = (6, 7)
pytestmark = pytest.mark.deep


@asynccontextmanager
async def chatting(painter: Painter, version: int, packages: Path, folder: Path) -> AsyncIterator[Script]:
    async with (
        served(folder, painter.engine) as (url, headers),
        running(
            "ai_sdk_chat.mjs", packages, version=version, api=f"{url}/vercel/painter", id="c 1",
            headers={**headers, "ai-sdk-version": str(version)},
        ) as page,
    ):  # fmt: skip
        yield page


def parts(told: Any, kind: str = "") -> list[Any]:
    return [part for message in told["messages"] for part in message["parts"] if part["type"].startswith(kind)]


def texts(told: Any) -> list[str]:
    return [part["text"] for part in parts(told, "text")]


def tools(told: Any) -> list[tuple[str, str]]:
    return [(part["toolName"], part["state"]) for part in parts(told, "dynamic-tool")]


def open_of(told: Any) -> list[Any]:
    return [part for part in parts(told) if part.get("state") == "approval-requested"]


@pytest.mark.spec("interfaces:IF22", "interfaces:IF27", "interfaces:IF29")
@pytest.mark.parametrize("version", VERSIONS)
async def test_chat_shows_texts_and_tools_of_a_continued_conversation(
    version: int, packages: Path, tmp_path: Path
) -> None:
    painter = Painter(tool_call("dry", {"what": "door"}, text="Let me see."), "It is dry.", "You are welcome.")
    painter.gate.set()
    async with chatting(painter, version, packages, tmp_path) as page:
        await page("send", text="Is the door dry?")
        told = await page("send", text="Thank you.")

    assert ("ready", []) == (told["status"], told["problems"])
    assert ["user", "assistant", "user", "assistant"] == [message["role"] for message in told["messages"]]
    assert ["Is the door dry?", "Let me see.", "It is dry.", "Thank you.", "You are welcome."] == texts(told)
    (call,) = parts(told, "dynamic-tool")
    assert ({"what": "door"}, "The door is dry.", "output-available") == (call["input"], call["output"], call["state"])


@pytest.mark.spec("interfaces:IF30", "interfaces:IF44")
@pytest.mark.parametrize("version", WITH_APPROVALS)
@pytest.mark.parametrize("approved", [True, False])
async def test_permission_decision_continues_the_same_message(
    approved: bool, version: int, packages: Path, tmp_path: Path
) -> None:
    painter = Painter(tool_call("paint", {"what": "door"}, text="I will."), "Ended.")
    async with chatting(painter, version, packages, tmp_path) as page:
        asked = await page("send", text="Paint the door.")
        told = await page("decide", approved=approved, reason="so be it")

    assert ("ready", [], 1) == (asked["status"], asked["problems"], len(open_of(asked)))
    assert ("ready", []) == (told["status"], told["problems"])
    assert ["Paint the door.", "I will.", "Ended."] == texts(told)
    assert 2 == len(told["messages"])
    (call,) = parts(told, "dynamic-tool")
    assert ("output-available" if approved else "output-denied") == call["state"]
    assert (["door"] if approved else []) == painter.painted


@pytest.mark.spec("interfaces:IF30")
@pytest.mark.parametrize("version", VERSIONS)
async def test_typing_instead_of_deciding_denies_with_these_words(version: int, packages: Path, tmp_path: Path) -> None:
    painter = Painter(tool_call("paint", {"what": "door"}, text="I will."), "As you like.")
    async with chatting(painter, version, packages, tmp_path) as page:
        asked = await page("send", text="Paint the door.")
        told = await page("send", text="Not today.")

    assert ("ready", []) == (asked["status"], asked["problems"])
    assert ("ready", []) == (told["status"], told["problems"])
    assert "As you like." == texts(told)[-1]
    assert [] == painter.painted
    refused = [message.text for message in painter.model.calls[-1].messages if message.role == "tool"]
    assert "Not today." in refused[0]
    if version == 5:
        assert "paint" == parts(asked, "data-question")[0]["data"]["tool_name"]


@pytest.mark.spec("interfaces:IF109")
@pytest.mark.parametrize(
    ("how", "version"), [(how, v) for how in ("cut", "stop", "reload") for v in VERSIONS if (how, v) != ("cut", 5)]
)
async def test_disconnected_chat_ends_with_the_whole_message_once(
    how: str, version: int, packages: Path, tmp_path: Path
) -> None:
    """
    Version 5 adds what it is sent again to what it has when a network broke off; its page has to make its Chat anew.
    """
    painter = Painter(tool_call("dry", {"what": "door"}, text="Let me see."), "It is dry.")
    async with chatting(painter, version, packages, tmp_path) as page:
        await page("post", text="Is it dry?")
        await page("until", state="input-available")
        await page(how)
        await page("come")
        painter.gate.set()
        told = await page("finish")

    assert "ready" == told["status"]
    assert ["Is it dry?", "Let me see.", "It is dry."] == texts(told)
    assert [("dry", "output-available")] == tools(told)


@pytest.mark.spec("interfaces:IF109")
@pytest.mark.parametrize("version", WITH_APPROVALS)
async def test_chat_resumed_after_an_approval_shows_the_whole_message(
    version: int, packages: Path, tmp_path: Path
) -> None:
    painter = Painter(
        tool_call("paint", {"what": "door"}, text="I will."), tool_call("dry", {"what": "door"}), "Ended."
    )
    async with chatting(painter, version, packages, tmp_path) as page:
        await page("send", text="Paint the door.")
        again = await page("resume")
        assert 1 == len(open_of(again))
        decided = asyncio.create_task(page("decide", approved=True))
        await painter.has_painted.wait()
        painter.gate.set()
        await decided
        told = await page("resume")

    assert ("ready", []) == (told["status"], told["problems"])
    assert ["Paint the door.", "I will.", "Ended."] == texts(told)
    assert [("paint", "output-available"), ("dry", "output-available")] == tools(told)
