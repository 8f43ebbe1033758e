"""
The reference servers of the protocol's own project, as processes and behind HTTP. They come from npm; without them these tests
are skipped.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from stepengine import Engine, RunStatus
from stepengine.adapters.mcp import mcp_tools
from stepengine.journal import MemoryJournal
from stepengine.permissions import Policy, Rule
from stepengine.testing import ScriptedModel, tool_call
from tests.phrases import OUTCOME_UNKNOWN

from .peers import command, needs_npm

COUNTERPARTS = (
    ("npm:@modelcontextprotocol/server-everything", "2026.8.31", "works", "results, progress, sampling, server exit during a call"),
    ("npm:@modelcontextprotocol/server-filesystem", "2026.8.31", "works", "reads, writes, images, permission policies"),
)  # fmt: skip
"""Counterpart, version, how it goes, and what was seen."""
pytestmark = [pytest.mark.deep, needs_npm]


def everything(**options: Any) -> Any:
    return mcp_tools([command("mcp-server-everything"), "stdio"], name="ev", **{"start_timeout": 60, **options})


@pytest.mark.spec("reliability:MC10")
async def test_everything_gives_texts_values_images_links_and_progress(agent: Any) -> None:
    shown: list[Any] = []
    calls = [
        tool_call("ev__echo", {"message": "hi"}),
        tool_call("ev__get-structured-content", {"location": "New York"}),
        tool_call("ev__get-tiny-image", {}),
        tool_call("ev__get-resource-links", {"count": 2}),
        tool_call("ev__trigger-long-running-operation", {"duration": 1, "steps": 2}),
        tool_call("mcp_prompt_ev", {"name": "simple-prompt"}),
        tool_call("mcp_resources_ev", {}),
        "ok",
    ]
    source = everything(resources=True, prompts=True)

    async with Engine([agent(source)], models=ScriptedModel(calls), observers=[shown.append]) as engine:
        result = await engine.run("worker", "Go.")

    echo, value, image, links, _, prompt, listed = [one.result for one in result.tool_calls]
    assert "Echo: hi" == echo.text
    assert {"temperature", "conditions", "humidity"} == set(value.data)
    assert ["image/png"] == [part.mime_type for part in image.media]
    assert 2 == links.text.count("[a link, which was not followed: demo://")
    assert [50.0, 100.0] == [event.percent for event in shown if type(event).__name__ == "ToolProgress"]
    assert "This is a simple prompt without arguments." in prompt.text
    assert any(one.get("uri", "").startswith("demo://") for one in listed.data)


@pytest.mark.spec("reliability:MC05")
async def test_killed_everything_server_loses_one_call_and_the_run_replays(agent: Any) -> None:
    journal = MemoryJournal()
    source = everything()

    class Killer:
        def on_event(self, event: Any) -> None:
            if type(event).__name__ == "ToolProgress" and not killed:
                live = next(iter(source._connections.values()))._live
                killed.append(live.pipe._process.pid)
                os.killpg(killed[0], signal.SIGKILL)

    killed: list[int] = []
    long = tool_call("ev__trigger-long-running-operation", {"duration": 60, "steps": 300})
    model = ScriptedModel([long, tool_call("ev__echo", {"message": "again"}), "ok"])
    async with Engine([agent(source)], models=model, observers=[Killer()]) as engine:
        lived = await engine.run("worker", "Go.", journal=journal)
    gone = mcp_tools(["no-such-program"], name="ev")
    async with Engine([agent(gone)], models=ScriptedModel([])) as engine:
        again = await engine.replay(journal)

    lost, echo = [one.result for one in lived.tool_calls]
    assert f"the connection to the MCP server 'ev' was lost; the {OUTCOME_UNKNOWN}" == lost.text
    assert "Echo: again" == echo.text
    assert RunStatus.COMPLETED is again.status
    assert [one.result for one in lived.tool_calls] == [one.result for one in again.tool_calls]


@pytest.mark.spec("reliability:MC12")
async def test_everything_samples_only_when_allowed(agent: Any) -> None:
    asks = tool_call("ev__trigger-sampling-request", {"prompt": "Hello", "maxTokens": 10})
    model = ScriptedModel([asks, "sampled", "ok"])

    async with Engine([agent(everything(sampling=True))], models=model) as engine:
        result = await engine.run("worker", "Go.")
    async with Engine([agent(everything())], models=ScriptedModel(["ok"])) as engine:
        without = await engine.run("worker", "Go.")

    assert "sampled" in result.tool_calls[0].result.text
    assert "ev__trigger-sampling-request" not in without.state.tool_definitions


@pytest.mark.spec("reliability:MC04")
async def test_filesystem_server_obeys_the_policy(agent: Any, tmp_path: Path) -> None:
    root = tmp_path
    (root / "a.txt").write_text("one")
    source = mcp_tools([command("mcp-server-filesystem"), str(root)], name="fs", start_timeout=60)
    model = ScriptedModel(
        [
            tool_call("fs__read_text_file", {"path": str(root / "a.txt")}),
            tool_call("fs__write_file", {"path": str(root / "b.txt"), "content": "two"}),
            tool_call("fs__read_text_file", {"path": "/etc/passwd"}),
            "ok",
        ]
    )
    policy = Policy([Rule.allow_tool("fs__read_text_file")], mode="dont_ask")

    async with Engine([agent(source)], models=model, permissions=policy) as engine:
        result = await engine.run("worker", "Go.")

    read, written, outside = [one.result for one in result.tool_calls]
    assert "one" in read.text
    assert "denied" == written.status
    assert not (root / "b.txt").exists()
    assert "error" == outside.status


async def test_filesystem_shows_a_file_and_a_picture_once(agent: Any, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text('print("a")\n' * 700)
    (tmp_path / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"0" * 600)
    source = mcp_tools([command("mcp-server-filesystem"), str(tmp_path)], name="fs", start_timeout=60)
    calls = [tool_call(f"fs__read_{what}", {"path": str(tmp_path / name)}) for what, name in READS]

    async with Engine([agent(source)], models=ScriptedModel([*calls, "ok"])) as engine:
        text, picture = [one.result for one in (await engine.run("worker", "Go.")).tool_calls]

    assert 'print("a")\n' * 700 == text.text
    assert ["image/png"] == [part.mime_type for part in picture.content]


READS = (("text_file", "a.py"), ("media_file", "a.png"))
