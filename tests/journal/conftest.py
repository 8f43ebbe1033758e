"""
Engines whose runs have journals, and small agents to record.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from stepengine import (
    STEP,
    AgentCall,
    AgentDefinition,
    Engine,
    Hooks,
    Parallel,
    Perform,
    RunResult,
    Tool,
    ToolCall,
    Usage,
    retry,
)
from stepengine.data.tools import ToolAnnotations
from stepengine.engine.run import EngineRun
from stepengine.engine.run_plans import RunRequest, pop_run_info
from stepengine.journal import FileJournal, Journal, MemoryJournal, SqliteJournal
from stepengine.journal.journaled_run import JournaledRun
from stepengine.journal.recorded_part import AllowedDifferences
from stepengine.testing import ScriptedModel, text, tool_call, tool_calls
from stepengine.workspace import write_ahead
from stepengine.workspace.guarded_database import GuardedConnection


class Rig:
    """
    An engine whose runs have journals.
    """

    JournaledRun = JournaledRun

    def __init__(self, agent: Any, replies: Iterable[Any] = (), **options: Any) -> None:
        self.agent = agent
        self.model = ScriptedModel(list(replies))
        options.setdefault("pricing", None)
        self.engine = Engine(models=self.model, **options)

    def begin(self, session: JournaledRun, prompt: str = "", **options: Any) -> EngineRun:
        opening = session.opening
        if opening is not None:
            prompt = opening.prompt
            given = {"params": opening.params, "previous": opening.previous, "limits": opening.limits}
            options = {**given, "info": opening.info, **options}
        options.setdefault("info", pop_run_info(options))
        launcher = self.engine._launcher
        agent = launcher.catalog.get_agent(self.agent)
        return launcher.make_journaled_run(
            session, RunRequest(agent=agent, prompt=prompt, answers=session.answers.by_question, **options)
        )

    async def launch(self, session: JournaledRun, prompt: str = "", **options: Any) -> RunResult[Any]:
        return await self.begin(session, prompt, **options).run()

    async def arun(self, *sessions: Callable[[], JournaledRun], **options: Any) -> list[RunResult[Any]]:
        try:
            return [await self.launch(make(), **options) for make in sessions]
        finally:
            await self.engine.aclose()

    def run(self, make: Callable[[], JournaledRun], prompt: str = "", **options: Any) -> RunResult[Any]:
        """
        Run once in an event loop of its own.
        """
        return asyncio.run(self.arun(make, prompt=prompt, **options))[0]

    def record(self, journal: Any, prompt: str = "go", answers: Any = None, **options: Any) -> RunResult[Any]:
        return self.run(lambda: JournaledRun.record(journal, answers), prompt, **options)

    def resume(self, journal: Any, answers: Any = None, **options: Any) -> RunResult[Any]:
        return self.run(lambda: JournaledRun.resume(journal, answers, **options))

    def replay(self, journal: Any) -> RunResult[Any]:
        return self.run(lambda: JournaledRun.replay(journal))

    def extend(self, journal: Any, *, allow_repeat: bool = False) -> RunResult[Any]:
        return self.run(
            lambda: JournaledRun.replay_then_continue(journal, leeway=AllowedDifferences(may_repeat=allow_repeat))
        )


@pytest.fixture
def rig() -> type[Rig]:
    """
    Makes engines whose runs have journals.
    """
    return Rig


@pytest.fixture
def synced_database() -> None:
    """
    Lets SQLite ask the disk to sync in a test, as in all that are not fast.
    """


@pytest.fixture(autouse=True)
def unsynced_database(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    Lets no other test wait for the disk, which each run in a database would do dozens of times: nobody pulls the plug.
    """
    is_slow = any(map(request.node.get_closest_marker, ("deep", "speed", "memory")))
    if is_slow or "synced_database" in request.fixturenames:
        return
    enable, execute = write_ahead.enable_write_ahead, GuardedConnection.execute

    def enabled(database: GuardedConnection, seconds: float) -> None:
        execute(database, "PRAGMA synchronous=OFF")
        enable(database, seconds)

    def executed(self: GuardedConnection, sql: str, *parameters: Any) -> Any:
        return execute(self, sql.replace("synchronous=FULL", "synchronous=OFF"), *parameters)

    monkeypatch.setattr(write_ahead, "enable_write_ahead", enabled)
    monkeypatch.setattr(GuardedConnection, "execute", executed)


@pytest.fixture(params=["memory", "file", "sqlite"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., Journal]:
    """
    Makes the same journal again and again, as every process has its own object for it; in memory it is one object.
    """
    kept: dict[str, Journal] = {}

    def made(**options: Any) -> Journal:
        if request.param == "file":
            return FileJournal(tmp_path / "run.jsonl", **options)
        if request.param == "sqlite":
            return SqliteJournal(tmp_path / "runs.db", "run", **options)
        return kept.setdefault("it", MemoryJournal(**options))

    return made


class World:
    """
    The outside of a run: what was done to it, by whom, how often.
    """

    def __init__(self) -> None:
        self.done: list[str] = []

    def sample(self) -> AgentDefinition[Any]:
        """
        An agent that does a bit of everything: own I/O, tools of both kinds, steps, children, a hook with I/O, chance and time.
        """
        done = self.done

        def send(arguments: Any) -> Any:
            done.append(f"send {arguments['n']}")
            return arguments["n"] + 1

        def look(arguments: Any) -> Any:
            done.append(f"look {arguments['n']}")
            return f"saw {arguments['n']}"

        def fetch(name: str) -> dict[str, Any]:
            done.append(f"fetch {name}")
            return {"name": name, "ok": True}

        def note(ctx: Any, reply: Any) -> Any:
            yield from Perform(fetch, f"note {ctx.step_index}")

        schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
        tool_send = Tool(name="send", description="Send.", input_schema=schema, run=send, in_thread=False)
        safe = ToolAnnotations(read_only=True)
        tool_look = Tool(
            name="look",
            description="Look.",
            input_schema=schema,
            run=look,
            annotations=safe,
            parallel_safe=True,
            in_thread=False,
        )
        child = AgentDefinition("child", model="test/small", system_prompt="You look.", tools=[tool_look])

        def handle_steps(ctx: Any) -> Any:
            data = yield from Perform(fetch, "config")
            sent = yield from retry(lambda: ToolCall("send", {"n": 1}), times=1)
            while True:
                turn = yield STEP
                if turn.steps_complete:
                    break
            children = yield from Parallel(
                AgentCall(child, "left"), AgentCall(child, "right"), Perform(fetch, "beside")
            )
            last = yield from ToolCall("send", {"n": 5}, include_tool_call=False)
            values = [c.output for c in children[:2]]
            return {"data": data, "sent": sent.data, "children": values, "last": last.data, "dice": ctx.random.random()}

        return AgentDefinition(
            "parent",
            model="test/big",
            system_prompt="You decide.",
            tools=[tool_send, tool_look],
            spawnable_agents=[child],
            handle_steps=handle_steps,
            hooks=Hooks(post_step=[note]),
        )

    @staticmethod
    def reply(request: Any) -> Any:
        """
        What the model of the sample says; it depends on the request alone, so a run may ask twice.
        """
        last = request.all_messages[-1]
        if request.system_prompt == "You look.":
            return text(f"child: {last.text}") if last.role == "tool" else tool_call("look", {"n": len(last.text)})
        if any(m.role == "tool" and m.tool_name == "look" for m in request.all_messages):
            return text("done", usage=Usage(7, 3))
        return tool_calls(tool_call("look", {"n": 1}), tool_call("look", {"n": 2}), usage=Usage(5, 2))

    def rig(self, **options: Any) -> Rig:
        """
        Return a rig of the sample agent with as many replies as anybody may want.
        """
        return Rig(self.sample(), [self.reply] * 60, **options)


@pytest.fixture
def world() -> World:
    """
    The outside of a run, and the sample agent in it.
    """
    return World()


@pytest.fixture
def fresh_world() -> type[World]:
    """
    Makes worlds.
    """
    return World
