"""Children that the calls of one reply start: they run at once, and everything else follows the order of the calls."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from stepengine import (
    AgentDefinition,
    Ask,
    Decision,
    Engine,
    Hooks,
    Perform,
    RunStatus,
)
from stepengine.events import AgentSpawned, ToolFinished, ToolStarted
from stepengine.journal import MemoryJournal
from stepengine.testing import ScriptedModel, simulate, text, tool_call, tool_calls
from stepengine.tools.bundled import agent_tool, task_tool


class Meeting:
    """Children that end only when *count* of them are at work, in the reverse order of their prompts."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.running = self.most = 0
        self.log: list[str] = []
        self.full = asyncio.Event()

    async def work(self, prompt: str) -> str:
        self.log.append(f"begin {prompt}")
        self.running += 1
        self.most = max(self.most, self.running)
        if self.running >= self.count:
            self.full.set()
        await asyncio.wait_for(self.full.wait(), 50)
        for _ in range(20 - int(prompt)):
            await asyncio.sleep(0)
        self.running -= 1
        self.log.append(f"end {prompt}")
        return f"did {prompt}"

    @property
    def kid(self) -> AgentDefinition:
        def handle_steps(ctx):
            return (yield from Perform(self.work, ctx.prompt))

        return AgentDefinition("kid", description="Works.", handle_steps=handle_steps)


def boss_of(way: str, kid: AgentDefinition, **options: Any) -> AgentDefinition:
    tools = {"task": [task_tool([kid])], "agent_tool": [agent_tool(kid, name="helper")]}.get(way, ["spawn_agents"])
    own = [] if way in ("task", "agent_tool") else [kid]
    return AgentDefinition(
        "boss", model="t/m", tools=[*tools, *options.pop("more", [])], spawnable_agents=own, **options
    )


def asking(way: str, *prompts: str) -> list[Any]:
    made = {
        "task": lambda p: tool_call("task", {"agent": "kid", "prompt": p}),
        "agent_tool": lambda p: tool_call("helper", {"prompt": p}),
        "direct": lambda p: tool_call("kid", {"prompt": p}),
        "spawn_agents": lambda p: tool_call("spawn_agents", {"agents": [{"agent_type": "kid", "prompt": p}]}),
    }
    return [made[way](prompt) for prompt in prompts]


def results(result: Any) -> list[str]:
    return [m.text for m in result.state.message_history if m.role == "tool"]


WAYS = ["task", "agent_tool", "direct", "spawn_agents"]


@pytest.mark.spec("requirements:X9", "reliability:SP02")
@pytest.mark.parametrize("way", WAYS)
async def test_children_of_one_reply_run_concurrently_with_ordered_results(way):
    meeting, events, journal = Meeting(3), [], MemoryJournal()
    boss = boss_of(way, meeting.kid)
    reply = tool_calls(*asking(way, "1", "2", "3"))
    engine = Engine([boss], models=ScriptedModel([reply, text("done")]), observers=[events.append])
    result = await engine.run(boss, "go", journal=journal)

    assert (RunStatus.COMPLETED, 3) == (result.status, meeting.most)
    assert ["end 3", "end 2", "end 1"] == meeting.log[3:]
    assert all(f"did {n}" in told for n, told in zip("123", results(result), strict=True))
    assert ["c1", "c2", "c3"] == [e.tool_call_id for e in events if type(e) is ToolStarted and not e.path]
    assert ["c1", "c2", "c3"] == [e.tool_call_id for e in events if type(e) is ToolFinished and not e.path]
    spawned = [e for e in events if type(e) is AgentSpawned]
    assert [("1", False, 3), ("2", False, 3), ("3", False, 3)] == [(e.child_path, e.only_child, e.of) for e in spawned]
    assert [c.tool_call_id for c in result.tool_calls] == ["c1", "c2", "c3"]
    assert (await engine.replay(journal)).output == "done"
    assert 6 == len(meeting.log)


@pytest.mark.spec("reliability:SP02")
async def test_concurrency_window_of_eight_spans_the_whole_reply():
    meeting = Meeting(8)
    boss = boss_of("task", meeting.kid)
    reply = tool_calls(*asking("task", *map(str, range(12))))
    result = await Engine([boss], models=ScriptedModel([reply, text("done")])).run(boss, "go")

    assert (12, 8) == (len(results(result)), meeting.most)


@pytest.mark.spec("requirements:X9")
async def test_every_call_is_judged_before_the_first_child_begins():
    meeting = Meeting(1)

    def judge(ctx, call):
        meeting.log.append(f"judge {call.input['prompt']}")
        return Decision.deny("Not this one.") if call.input["prompt"] == "2" else None

    boss = boss_of("agent_tool", meeting.kid, hooks=Hooks(pre_tool=[judge]))
    reply = tool_calls(*asking("agent_tool", "1", "2", "3"))
    result = await Engine([boss], models=ScriptedModel([reply, text("done")])).run(boss, "go")

    assert ["judge 1", "judge 2", "judge 3"] == meeting.log[:3]
    assert ["did 1", "Not this one.", "did 3"] == results(result)


@pytest.mark.spec("requirements:X9")
async def test_all_asking_children_ask_before_the_run_is_suspended():
    def handle_steps(ctx):
        return (yield from Ask(f"May I {ctx.prompt}?", key=ctx.prompt))

    kid = AgentDefinition("kid", description="Asks.", handle_steps=handle_steps)
    boss, journal = boss_of("task", kid), MemoryJournal()
    reply = tool_calls(*asking("task", "1", "2"))
    engine = Engine([boss], models=ScriptedModel([reply, text("done")]))
    waiting = await engine.run(boss, "go", journal=journal)
    assert ["May I 1?", "May I 2?"] == [q.text for q in waiting.pending_questions]

    first, second = waiting.pending_questions
    still = await engine.resume(journal, answers={second.id: "yes"})
    assert ["May I 1?"] == [q.text for q in still.pending_questions]
    result = await engine.resume(journal, answers={first.id: "no"})
    assert (["no", "yes"], "done") == (results(result), result.output)


@pytest.mark.spec("requirements:X9", "replay:D15")
@pytest.mark.parametrize(
    ("way", "seeds"),
    # Past the name of the call, all ways start their children alike: everything that can happen is tried with one of them.
    [
        pytest.param("task", None, marks=pytest.mark.deep),
        ("task", range(20)),
        *[(way, range(5)) for way in WAYS[1:]],
    ],
)
def test_reply_that_starts_several_children_survives_every_crash(way, seeds):
    def handle_steps(ctx):
        one = yield from Perform(work, ctx.prompt)
        return f"{one}!"

    def work(prompt):
        return f"did {prompt}"

    kid = AgentDefinition("kid", description="Works.", handle_steps=handle_steps)
    boss = boss_of(way, kid)
    replies = [tool_calls(*asking(way, "1", "2")), text("done")]
    seen = simulate(boss, seeds, replies=replies, results={"work": lambda prompt: f"did {prompt}"}, agents=[kid])
    assert seen.runs > 100 if seeds is None else seen.runs == len(seeds)


@pytest.mark.spec("generator-contract:L3", "requirements:X9")
async def test_call_without_an_admissible_child_gets_its_own_error():
    meeting = Meeting(1)
    boss = boss_of("spawn_agents", meeting.kid)
    (fine,) = asking("spawn_agents", "1")
    wrong = tool_call("spawn_agents", {"agents": [{"agent_type": "nobody"}]})
    result = await Engine([boss], models=ScriptedModel([tool_calls(wrong, fine), text("done")])).run(boss, "go")

    refused, told = results(result)
    assert ("may not spawn 'nobody'" in refused, "did 1" in told) == (True, True)
