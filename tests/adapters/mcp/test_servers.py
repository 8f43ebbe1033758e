"""
Tools of real servers, as processes: listed when a run begins, called like any tool, closed with the engine.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import pytest
from mcp import MCPError

from stepengine import AgentDefinition, Engine, RunStatus, call
from stepengine.adapters.mcp import connection, mcp_tools
from stepengine.errors import DefinitionError, ToolError
from stepengine.events import ToolProgress
from stepengine.journal import MemoryJournal
from stepengine.testing import ScriptedModel, check_tool_source, tool_call
from tests.loop_clock import put_clock_ahead
from tests.phrases import OUTCOME_UNKNOWN

from .foreign import Foreign, described

COUNTERPARTS = (("pypi:mcp", "2.3.0", "works", "servers: tools, resources, prompts, elicitation, sampling, progress"),)


def results(result: Any) -> list[tuple[str, str]]:
    return [(one.result.status, one.result.text) for one in result.tool_calls]


async def test_handler_calls_a_server_tool_by_name(near: Any, agent: Any) -> None:
    def handle(ctx: Any) -> Any:
        value = yield from call("small__add", int, a=2, b=5)
        return value

    async with Engine([agent(near(), handle_steps=handle)], models=ScriptedModel([])) as engine:
        result = await engine.run("worker")

    assert 7 == result.unwrap()


@pytest.mark.spec("ecosystem:EC232")
@pytest.mark.parametrize("kind", ["near", pytest.param("small", marks=pytest.mark.deep)])
def test_mcp_tools_keep_the_promises_of_a_tool_source(kind: str, request: pytest.FixtureRequest) -> None:
    make = request.getfixturevalue(kind)

    def make_source(reachable: bool) -> Any:
        return make() if reachable else mcp_tools(["a-program-that-does-not-exist"], name="small")

    check_tool_source(make_source, "small__add", {"a": 2, "b": 5})


@pytest.mark.spec("interfaces:IF62", "interfaces:IF61")
async def test_server_refusals_are_error_results(near: Any, agent: Any) -> None:
    model = ScriptedModel([tool_call("small__fail", {}), tool_call("small__add", {"a": "x", "b": 1}), "ok"])

    async with Engine([agent(near())], models=model) as engine:
        failed, misfit = results(await engine.run("worker", "Go."))

    assert "error" == failed[0]
    assert ("error", "Invalid parameters for small__add") == (misfit[0], misfit[1][:33])


@pytest.mark.spec("reliability:MC05", "interfaces:IF57")
@pytest.mark.deep
async def test_server_crash_loses_one_call_and_restarts(
    small: Any, agent: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stepengine.adapters.mcp.connection.RESTART_WAITS", (0.0, 0.0))
    source, adds = small(), tool_call("small__add", {"a": 1, "b": 2})

    async with Engine(
        [agent(source)], models=ScriptedModel([tool_call("small__crash", {}), adds, adds, adds, "ok"])
    ) as engine:
        result = await engine.run("worker", "Go.")
        restarts = list(next(iter(source._connections.values()))._restarts.values())

    lost = f"the connection to the MCP server 'small' was lost; the {OUTCOME_UNKNOWN}"
    assert RunStatus.COMPLETED is result.status
    assert [("error", lost), *[("ok", "3")] * 3] == results(result)
    assert [1] == restarts


@pytest.mark.deep
@pytest.mark.spec("reliability:MC05", "interfaces:IF57")
async def test_third_crash_in_a_run_removes_the_server(small: Any, agent: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (0.5, 2.0) == connection.RESTART_WAITS
    monkeypatch.setattr("stepengine.adapters.mcp.connection.RESTART_WAITS", (0.0, 0.0))
    calls = [*[tool_call("small__crash", {}) for _ in range(6)], "ok"]

    async with Engine([agent(small())], models=ScriptedModel(calls)) as engine:
        found = results(await engine.run("worker", "Go."))

    assert [True] * 3 == [text.endswith(f"the {OUTCOME_UNKNOWN}") for _, text in found[:3]]
    gone = "the MCP server 'small' is gone: it was started again 2 times in this run"
    assert [True] * 3 == [gone in text for _, text in found[3:]]


@pytest.mark.spec("reliability:MC05")
async def test_server_error_of_any_code_loses_no_connection(agent: Any) -> None:
    asked: list[str] = []

    class Refusing(Foreign):
        async def _call(self, ctx: Any, params: Any) -> Any:
            asked.append(params.name)
            raise MCPError(code=-32000, message="quota exceeded")

    source = mcp_tools(Refusing(described("order")).server, name="srv")
    model = ScriptedModel([*[tool_call("srv__order", {}) for _ in range(4)], "ok"])
    async with Engine([agent(source)], models=model) as engine:
        found = results(await engine.run("worker", "Go."))

    assert [("error", "the MCP server 'srv' answered with an error: quota exceeded")] * 4 == found
    assert 4 == len(asked)


@pytest.mark.deep
@pytest.mark.spec("reliability:MC05")
@pytest.mark.parametrize(("trusted", "expected"), [(True, "ok"), (False, "error")])
async def test_lost_call_is_repeated_only_with_a_trusted_hint(
    small: Any, agent: Any, tmp_path: Path, trusted: bool, expected: str
) -> None:
    model = ScriptedModel([tool_call("small__once", {"marker": str(tmp_path / "marker")}), "ok"])

    async with Engine([agent(small("idempotent", trust_hints=trusted))], models=model) as engine:
        result = await engine.run("worker", "Go.")

    assert [expected] == [status for status, _ in results(result)]


@pytest.mark.spec("reliability:MC01", "interfaces:IF60")
async def test_journal_replays_without_server_and_package(odd: Any, agent: Any, tmp_path: Path) -> None:
    journal, dies = MemoryJournal(), tmp_path / "dies"

    def end_the_server(_: Any) -> Any:
        dies.touch()
        return tool_call("odd__look", {})

    calls = [tool_call("odd__look", {}), end_the_server, "ok"]
    async with Engine([agent(odd("dies", str(dies)))], models=ScriptedModel(calls)) as engine:
        lived = await engine.run("worker", "Go.", journal=journal)
    gone = mcp_tools(["no-such-program"], name="odd")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stepengine.adapters.mcp.connection.find_spec", lambda name: None)
        async with Engine([agent(gone)], models=ScriptedModel([])) as engine:
            again = await engine.replay(journal)

    assert RunStatus.COMPLETED is again.status
    assert ["ok", "error"] == [status for status, _ in results(lived)]
    assert results(lived) == results(again)


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("interfaces:IF55")
async def test_runs_at_once_share_one_server(near: Any, agent: Any) -> None:
    source = near()
    model = ScriptedModel([_adding] * 10)

    async with Engine([agent(source)], models=model) as engine:
        ended = await asyncio.gather(*[engine.run("worker", str(n)) for n in range(5)])
        started = len(source._connections)

    assert [RunStatus.COMPLETED] * 5 == [result.status for result in ended]
    assert 1 == started


def _adding(request: Any) -> Any:
    return "ok" if any(m.role == "tool" for m in request.messages) else tool_call("small__add", {"a": 1, "b": 1})


@pytest.mark.spec("interfaces:IF57")
async def test_timed_out_call_is_cancelled_at_the_surviving_server(
    odd: Any, agent: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker = tmp_path / "marker"
    model = ScriptedModel([tool_call("odd__look", {}), tool_call("odd__look", {}), "ok"])

    async with Engine([agent(odd("slow", str(marker), timeout=3_000))], models=model) as engine:
        running = asyncio.create_task(engine.run("worker", "Go."))
        while not marker.exists():  # noqa: ASYNC110 - a file has no event
            await asyncio.sleep(0.01)
        put_clock_ahead(monkeypatch, 6_000)
        timed_out, seen = results(await running)

    assert "error" == timed_out[0]
    assert ("ok", "seen") == seen
    assert "cancelled" == marker.read_text()


@pytest.mark.spec("interfaces:IF65")
async def test_server_progress_is_shown_as_tool_progress(near: Any, agent: Any) -> None:
    shown = []
    model = ScriptedModel([tool_call("small__steps", {"count": 4}), "ok"])

    async with Engine([agent(near())], models=model, observers=[shown.append]) as engine:
        await engine.run("worker", "Go.")

    progress = [event for event in shown if isinstance(event, ToolProgress)]
    assert [("step 1", 25.0), ("step 2", 50.0), ("step 3", 75.0), ("step 4", 100.0)] == [
        (event.message, event.percent) for event in progress
    ]
    assert {"small__steps"} == {event.tool_name for event in progress}


@pytest.mark.deep
@pytest.mark.spec("reliability:MC06", "interfaces:IF55")
async def test_closing_the_engine_ends_all_server_processes(small: Any, agent: Any) -> None:
    model = ScriptedModel([tool_call("small__spawn", {"seconds": 600}), "ok"])

    async with Engine([agent(small("stubborn"))], models=model) as engine:
        result = await engine.run("worker", "Go.")
        child = result.tool_calls[0].result.data
        os.kill(child, 0)

    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


def open_descriptors() -> int:
    return len([*Path("/proc/self/fd").iterdir()])


@pytest.mark.skipif(sys.platform != "linux", reason="descriptors are counted in /proc")
@pytest.mark.spec("reliability:MC06")
async def test_escaped_process_keeps_no_pipe_open(odd: Any, agent: Any) -> None:
    model = ScriptedModel([tool_call("odd__look", {}), "ok"])
    before = open_descriptors()

    async with Engine([agent(odd("escapes"))], models=model) as engine:
        ((_, pid),) = results(await engine.run("worker", "Go."))
    after = open_descriptors()
    os.kill(int(pid), signal.SIGKILL)

    assert before == after


@pytest.mark.spec("interfaces:IF55")
def test_a_synchronous_engine_starts_and_closes_a_server_too(odd: Any, agent: Any) -> None:
    model = ScriptedModel([tool_call("odd__look", {}), "ok"])

    with Engine([agent(odd())], models=model) as engine:
        result = engine.run_sync("worker", "Go.")

    assert [("ok", "seen")] == results(result)


def test_unclosed_engine_leaves_no_server_after_its_loop(odd: Any, agent: Any) -> None:
    model = ScriptedModel([tool_call("odd__look", {}), "ok"])

    result = asyncio.run(Engine([agent(odd())], models=model).run("worker", "Go."))

    assert [("ok", "seen")] == results(result)


@pytest.mark.spec("reliability:MC08")
async def test_server_sees_only_allowed_environment_variables(
    odd: Any, agent: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_PASSWORD", "hidden")
    model = ScriptedModel([tool_call("odd__look", {}), "ok"])

    async with Engine([agent(odd("environment", env={"NAMED": "1"}))], models=model) as engine:
        ((_, text),) = results(await engine.run("worker", "Go."))

    seen = set(text.split())
    allowed = {
        "PATH",
        "HOME",
        "LANG",
        "LC_ALL",
        "TZ",
        "TMPDIR",
        "USER",
        "LOGNAME",
        "TERM",
        "NO_COLOR",
        "NAMED",
        "LC_CTYPE",
    }
    assert seen <= allowed
    assert {"PATH", "NAMED"} <= seen


@pytest.mark.spec("reliability:MC05", "interfaces:IF57")
async def test_invalid_lines_are_skipped_and_stderr_is_limited(
    odd: Any, agent: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    model, source = ScriptedModel([tool_call("odd__look", {}), "ok"]), odd("junk")

    async with Engine([agent(source)], models=model) as engine:
        result = await engine.run("worker", "Go.")
        pipe = next(iter(source._connections.values()))._live.pipe

    assert [("ok", "seen")] == results(result)
    assert (30, 64 * 1024) == (pipe.junk_count, len(pipe._errors))
    assert ("", "") == tuple(capfd.readouterr())


@pytest.mark.spec("reliability:MC05")
@pytest.mark.parametrize("mode", ["latin", "cut", "list", "null", "deep"])
async def test_unreadable_reply_is_an_immediate_error(mode: str, odd: Any, agent: Any) -> None:
    model = ScriptedModel([tool_call("odd__look", {}), "ok"])

    async with Engine([agent(odd(mode, timeout=600))], models=model) as engine, asyncio.timeout(30):
        result = await engine.run("worker", "Go.")

    ((status, said),) = results(result)
    assert "error" == status
    assert "its reply is not a message of the protocol" in said


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("reliability:MC05", "interfaces:IF57")
@pytest.mark.parametrize(
    ("mode", "said"),
    [
        ("dead", "its stderr ends with: no licence"),
        ("mute", "it did not answer within 0.1 s; give it more time with start_timeout=60"),
        ("noise", "it wrote more than 100 lines that are not messages, the first: this is not a message"),
    ],
)
async def test_server_failing_to_start_fails_the_run_with_reason(
    odd: Any, agent: Any, monkeypatch: pytest.MonkeyPatch, mode: str, said: str
) -> None:
    monkeypatch.setattr("stepengine.adapters.mcp.connection.RESTART_WAITS", (0.0, 0.0))
    monkeypatch.setattr("stepengine.adapters.mcp.stdio.CLOSE_SECONDS", 0.05)
    source = odd(mode, start_timeout=0.1 if mode == "mute" else 30)

    async with Engine([agent(source)], models=ScriptedModel([])) as engine:
        result = await engine.run("worker", "Go.")

    assert RunStatus.FAILED is result.status
    assert isinstance(result.error, ToolError)
    assert said in str(result.error)


@pytest.mark.spec("interfaces:IF57")
async def test_missing_program_is_reported_at_once(agent: Any) -> None:
    source = mcp_tools(["no-such-program-here"], name="small")

    async with Engine([agent(source)], models=ScriptedModel([])) as engine:
        result = await engine.run("worker", "Go.")

    assert "the MCP server 'small' did not start: FileNotFoundError" in str(result.error)


@pytest.mark.spec("interfaces:IF55", "interfaces:IF61")
async def test_engine_tool_source_is_listed_by_agents_by_name(near: Any) -> None:
    model = ScriptedModel([tool_call("small__add", {"a": 1, "b": 2}), "ok"])
    worker = AgentDefinition("worker", model="test/model", tools=["small"])

    async with Engine([worker], tools=[near()], models=model) as engine:
        result = await engine.run("worker", "Go.")

    assert [("ok", "3")] == results(result)


async def test_a_single_step_has_the_tools_of_a_server_too(near: Any, agent: Any) -> None:
    from stepengine import AgentState, UserMessage

    model = ScriptedModel([tool_call("small__add", {"a": 1, "b": 2})])
    state = AgentState.from_messages([UserMessage("Go.")], agent_id="worker")

    async with Engine([agent(near())], models=model) as engine:
        step = await engine.step(state)

    assert "3" == step.agent_state.message_history[-1].text


@pytest.mark.spec("interfaces:IF55")
def test_a_server_is_named_in_code_and_never_by_text() -> None:
    with pytest.raises(DefinitionError, match="not the text 'rm -rf /'"):
        mcp_tools("rm -rf /", name="small")
    with pytest.raises(DefinitionError, match="is not a valid server name"):
        mcp_tools(["x"], name="a__b")


def test_local_folder_named_mcp_is_not_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    Such a folder is found as a package without a file.
    """
    (tmp_path / "mcp").mkdir()
    folder = PathFinder.find_spec("mcp", [str(tmp_path)])
    assert folder is not None
    monkeypatch.setattr(connection, "find_spec", lambda name: folder)

    with pytest.raises(DefinitionError, match=r"pip install 'stepengine\[mcp\]'"):
        connection.require_mcp_package()


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("interfaces:IF57")
async def test_slow_npx_start_explains_the_download_and_timeout(
    agent: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("stepengine.adapters.mcp.connection.RESTART_WAITS", (0.0, 0.0))
    monkeypatch.setattr("stepengine.adapters.mcp.stdio.CLOSE_SECONDS", 0.05)
    npx = tmp_path / "npx"
    npx.write_text("#!/bin/sh\nexec sleep 60\n")
    npx.chmod(0o755)
    source = mcp_tools([str(npx), "-y", "some-server"], name="small", start_timeout=0.1)

    async with Engine([agent(source)], models=ScriptedModel([])) as engine:
        result = await engine.run("worker", "Go.")

    said = (
        "it did not answer within 0.1 s; npx may still be downloading packages; give it more time with start_timeout=60"
    )
    assert result.error.message.endswith(said)
