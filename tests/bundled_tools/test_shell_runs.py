"""Agents that run programs: in a run, with children, cancelled, killed, resumed."""

from __future__ import annotations

import asyncio
import os
import sys
import textwrap
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from stepengine import AgentCall, AgentDefinition, Engine, Limits, RunStatus, ToolCall, ToolContext, tool
from stepengine.errors import UnknownOutcome
from stepengine.events import ToolProgress
from stepengine.journal import FileJournal, MemoryJournal
from stepengine.testing import ScriptedModel, text, tool_call, tool_calls
from stepengine.tools.bundled import shell_tools
from tests.forked_processes import Process
from tests.waits import until_async as until

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
RUN = "run_terminal_command"
pytestmark = pytest.mark.usefixtures("soon")


def basher(*tools: Any, **options: Any) -> AgentDefinition[Any]:
    return AgentDefinition(id="basher", tools=list(tools), **options)


@pytest.mark.spec("reliability:SH02", "generator-contract:T0", "requirements:E10")
async def test_a_model_runs_programs_and_reads_their_output(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("print('tests', 'passed')")
    model = ScriptedModel(
        [
            tool_call(RUN, {"command": [sys.executable, "test_it.py"]}),
            tool_calls(tool_call(RUN, {"command": "ls; rm x"}), tool_call(RUN, {"command": "false"})),
            text("done"),
        ]
    )
    shown: list[str] = []
    engine = Engine(
        models=model, observers=[lambda e: shown.append(e.message) if isinstance(e, ToolProgress) else None]
    )
    async with engine:
        result = await engine.run(basher(*shell_tools(tmp_path), model="m"), "Run the tests.")

    first, second, third = [log.result for log in result.tool_calls]
    assert result.unwrap() == "done"
    assert (first.data["exit_code"], first.data["stdout"]) == (0, "tests passed\n")
    assert "needs a shell" in second.text
    assert third.data["exit_code"] == 1
    assert shown == ["tests passed\n"]


def slow(ctx: Any) -> Any:
    yield ToolCall(RUN, {"command": "trap '' TERM; sleep 100 & echo $! > new; mv new pid; wait"})


@pytest.mark.deep
@pytest.mark.smoke
@LINUX
@pytest.mark.spec("reliability:SH04")
@pytest.mark.parametrize("way", ["interrupt", "closed", "cancelled", "limit"])
async def test_however_a_run_ends_its_command_ends_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, elsewhere: Any
) -> None:
    engine = Engine()
    agent = basher(*shell_tools(tmp_path, shell="bash"), handle_steps=slow)
    handle = engine.start(agent, limits=Limits(max_seconds=60 if way == "limit" else None))
    pid = int(await until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text()))
    assert elsewhere.running([pid])
    if way == "interrupt":
        handle.interrupt()
    elif way == "cancelled":
        handle._turns.task.cancel()
    elif way == "limit":
        loop = asyncio.get_running_loop()
        before = loop.time
        monkeypatch.setattr(loop, "time", lambda: before() + 60)
    waiting = asyncio.create_task(handle.result())
    await asyncio.sleep(0)
    if way == "closed":
        await engine.aclose()
    await asyncio.wait((waiting,), timeout=50)
    await engine.aclose()

    assert waiting.done()
    assert waiting.cancelled() is (way == "cancelled")
    assert waiting.cancelled() or waiting.result().status is not RunStatus.COMPLETED
    assert not elsewhere.running([pid])


def child_with_job(ctx: Any) -> Any:
    started = yield ToolCall(RUN, {"command": ["sleep", "100"], "process_type": "BACKGROUND"})
    seen = yield ToolCall("check_job", {"job_id": started.tool_result.data["job_id"]})
    return {"pid": started.tool_result.data["pid"], "status": seen.tool_result.data["status"]}


@LINUX
@pytest.mark.spec("reliability:SH14")
async def test_a_job_ends_with_its_run_and_a_warning(tmp_path: Path, elsewhere: Any) -> None:
    tools = shell_tools(tmp_path)
    children: list[Any] = []

    def parent(ctx: Any) -> Any:
        mine = (yield ToolCall(RUN, {"command": ["sleep", "100"], "process_type": "BACKGROUND"})).tool_result.data
        child = yield from AgentCall("helper")
        children.append((child["status"], elsewhere.running([child["pid"], mine["pid"]]) == [mine["pid"]]))
        return {"mine": mine["pid"]}

    helper = AgentDefinition(id="helper", tools=tools, handle_steps=child_with_job, output_mode="structured_output")
    agent = basher(*tools, handle_steps=parent, spawnable_agents=[helper], output_mode="structured_output")
    journal = MemoryJournal()
    async with Engine([helper, agent]) as engine:
        result = await engine.run(agent, journal=journal)
        replayed = await engine.replay(journal)

    assert children[0] == ("running", True)
    assert not elsewhere.running([result.output["mine"]])
    assert len([w for w in result.warnings if "(sleep 100) was ended with its run" in w]) == 2
    assert [e.kind for log in result.tool_calls for e in log.result.side_effects] == ["job_started"]
    assert replayed == result


CRASH = """
    import asyncio, sys
    from stepengine import AgentDefinition, Engine, ToolCall
    from stepengine import ToolContext, tool
    from stepengine.tools.bundled import shell_tools

    def handler(ctx):
        yield ToolCall("run_terminal_command", {"command": "echo once >> ran; touch begun; exec sleep 100"})

    agent = AgentDefinition(id="basher", tools=shell_tools(sys.argv[1], shell="bash"), handle_steps=handler)
    asyncio.run(Engine([agent]).run("basher", journal=sys.argv[2]))
    """


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.usefixtures("forks")
@LINUX
@pytest.mark.spec("reliability:R3", "reliability:SH04")
async def test_a_command_in_doubt_is_not_run_again(tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl"
    root = tmp_path / "root"
    root.mkdir()
    arguments = [sys.executable, "-c", textwrap.dedent(CRASH), str(root), str(file)]
    with Process(arguments, env={**os.environ, "TMPDIR": str(tmp_path)}) as crashing:
        try:
            await until((root / "begun").exists)
        finally:
            crashing.kill()
    caught: list[UnknownOutcome] = []

    def handler(ctx: Any) -> Any:
        try:
            yield ToolCall(RUN, {"command": "echo once >> ran; touch begun; exec sleep 100"})
        except UnknownOutcome as error:
            caught.append(error)

    agent = basher(*shell_tools(root, shell="bash"), handle_steps=handler)
    async with Engine([agent]) as engine:
        result = await engine.resume(FileJournal(file))

    assert result.status is RunStatus.COMPLETED
    assert (root / "ran").read_text() == "once\n"
    assert "run_terminal_command" in str(caught[0])
    assert "echo once >> ran" in str(caught[0])


@pytest.mark.deep
@pytest.mark.smoke
@LINUX
@pytest.mark.spec("reliability:SH14", "reliability:SH04")
async def test_a_job_ends_with_a_run_that_is_cancelled_repeatedly(tmp_path: Path, elsewhere: Any) -> None:
    pids: list[int] = []

    def handler(ctx: Any) -> Any:
        job = yield ToolCall(
            RUN, {"command": "trap '' TERM; while :; do sleep 0.1; done", "process_type": "BACKGROUND"}
        )
        pids.append(job.tool_result.data["pid"])
        yield ToolCall("check_job", {"job_id": job.tool_result.data["job_id"], "timeout_seconds": 100})

    agent = basher(*shell_tools(tmp_path, shell="bash"), handle_steps=handler)
    async with Engine() as engine:
        task = asyncio.create_task(engine.run(agent))
        await until(lambda: pids)
        while not task.done():
            task.cancel()
            await asyncio.sleep(0.02)
        assert task.cancelled()

    assert not elsewhere.running(pids)


class Broken:
    """
    Something of a run whose end fails.
    """

    async def aclose(self) -> list[str]:
        raise RuntimeError("no end")


async def test_bodies_in_threads_share_one_object_of_their_run() -> None:
    meeting = threading.Barrier(2)
    made: list[Any] = []

    class Database:
        is_open = True

        def __init__(self) -> None:
            made.append(self)
            with suppress(threading.BrokenBarrierError):
                meeting.wait(0.2)  # only two makers at once get past it earlier

        async def aclose(self) -> list[str]:
            self.is_open = False
            return []

    @tool(parallel_safe=True)
    def query(ctx: ToolContext) -> str:
        """Query the database."""
        return str(ctx.get_or_create_run_object("db", Database).is_open)

    model = ScriptedModel([tool_calls(tool_call("query", {}), tool_call("query", {})), text("done")])
    async with Engine(models=model) as engine:
        result = await engine.run(basher(query, model="m"), "Query.")

    assert ["True", "True"] == [log.result.text for log in result.tool_calls]
    assert [False] == [one.is_open for one in made]


async def test_run_resources_close_in_reverse_order_despite_failures() -> None:
    ended: list[str] = []

    class Kept:
        def __init__(self, name: str) -> None:
            self.name = name

        async def aclose(self) -> list[str]:
            ended.append(self.name)
            return [f"{self.name} was open"]

    @tool
    async def keep(ctx: ToolContext, name: str) -> str:
        """Keep something."""
        kept: Any = ctx.get_or_create_run_object(name, Broken if name == "broken" else lambda: Kept(name))
        assert kept is ctx.get_or_create_run_object(name, Broken)
        return name

    def handler(ctx: Any) -> Any:
        for name in ("a", "broken", "b"):
            yield ToolCall("keep", {"name": name})

    async with Engine() as engine:
        result = await engine.run(basher(keep, handle_steps=handler))

    assert result.status is RunStatus.COMPLETED
    assert ended == ["b", "a"]
    expected = ["b was open", "Broken could not be ended: RuntimeError: no end", "a was open"]
    assert [w for w in result.warnings if w in expected] == expected
