"""
The warnings of a child in the result of its parent: at every depth, however the child is started, and in replays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import pytest

from stepengine import (
    AgentCall,
    AgentDefinition,
    Ask,
    Engine,
    Hooks,
    Limits,
    Parallel,
    Perform,
    Race,
    Receive,
    RunResult,
    Send,
    Sleep,
    Start,
    TextPart,
    ToolCall,
    ToolContext,
    Wait,
    call,
    tool,
)
from stepengine.data.models import ModelReply
from stepengine.data.state import MAX_WARNING_CHARS, MAX_WARNINGS
from stepengine.journal import MemoryJournal
from stepengine.machine import hooks as machine_hooks
from stepengine.testing import Clock, ScriptedModel, text, tool_call
from stepengine.tools.bundled import child_tools


@tool
def deploy() -> str:
    """Deploy."""
    return "deployed"


@attrs.frozen
class Kind:
    """
    One kind of warning.

    Attributes:
        words: Words of its text.
        fields: The definition of an agent that gets it.
        replies: What its model says.
    """

    words: str
    fields: dict[str, Any]
    replies: Sequence[Any] = ()


def sets_output(ctx: Any) -> Any:
    yield ToolCall("set_output", {"found": 1})


def ends_in_an_error(ctx: Any) -> Any:
    yield from Perform(nothing)
    raise ValueError("boom")


def fails(*_: Any) -> None:
    raise ValueError("no disk")


def never_ends(ctx: Any, reply: Any) -> Any:
    try:
        while True:
            yield Perform(nothing)
    finally:
        yield Perform(nothing)


async def nothing() -> None:
    return None


UNREAD = ModelReply((TextPart("Hi."),), provider_data={"provider": "test", "unread": ["choices[1]"]})
DROPPED = ModelReply((TextPart("Hi."),), provider_data={"provider": "test", "dropped": ["'top_k'"]})
KINDS = {
    "set_output": Kind("calls set_output", {"tools": ["set_output"], "handle_steps": sets_output}),
    "a written call": Kind(
        "looks like a tool call",
        {"tools": [deploy]},
        [text('<tool_call>{"name": "deploy", "input": {}}</tool_call>')],
    ),
    "a placeholder that nobody knows": Kind("CODEBUFF_NOPE", {"system_prompt": "You are {CODEBUFF_NOPE}."}, ["Hi."]),
    "a failing hook": Kind("no disk", {"hooks": Hooks(post_step=[fails])}, ["Hi."]),
    "an unread part of a reply": Kind("'choices[1]'", {}, [UNREAD]),
    "a dropped setting": Kind("does not support 'top_k'", {}, [DROPPED]),
    "a hook that works while it is closed": Kind(
        "while it was closed", {"hooks": Hooks(post_step=[never_ends])}, ["Hi."]
    ),
    "a wait for children that was too long": Kind(
        "it waited 60 s for background children",
        {"tools": child_tools(), "spawnable_agents": ["sleeper"], "limits": Limits(max_wait_seconds=60)},
        [tool_call("start_agents", {"agents": [{"agent_type": "sleeper"}]}), text("I wait.")],
    ),
}
HELPERS = [
    AgentDefinition("helper", handle_steps=lambda ctx: (yield from Perform(nothing))),
    AgentDefinition("broken", handle_steps=ends_in_an_error),
    AgentDefinition("sleeper", handle_steps=lambda ctx: (yield from Sleep(86_400))),
]


def kid_of(kind: Kind) -> AgentDefinition:
    return AgentDefinition("kid", model="kid/m", **kind.fields)


def calling(agent: AgentDefinition, name: str) -> AgentDefinition:
    def handle_steps(ctx: Any) -> Any:
        given = yield AgentCall(agent.id, "Go.")
        return given.value.status.value

    return AgentDefinition(name, spawnable_agents=[agent], handle_steps=handle_steps)


def asking(agent: AgentDefinition) -> AgentDefinition:
    """Return an agent that runs *agent* and then asks a person, so that its run is suspended with an ended child."""

    def handle_steps(ctx: Any) -> Any:
        given = yield AgentCall(agent.id, "Go.")
        yield from Ask("Is that all?", key="all")
        return given.value.status.value

    return AgentDefinition("root", spawnable_agents=[agent], handle_steps=handle_steps)


async def ran(agent: AgentDefinition, replies: Sequence[Any] = (), **options: Any) -> RunResult:
    async with engine_of(replies) as engine:
        return await engine.run(agent, "Go.", **options)


def engine_of(replies: Sequence[Any]) -> Engine:
    return Engine(HELPERS, models={"kid": ScriptedModel([*replies])}, clock=Clock(), headless=True)


async def in_every_run(agent: AgentDefinition, replies: Sequence[Any] = ()) -> list[tuple[str, ...]]:
    """Return the warnings of a suspended run of *agent*, of its resume in another engine, and of both replays."""
    root, journal = asking(agent), MemoryJournal()
    waiting = await ran(root, replies, journal=journal)
    async with engine_of(replies) as engine:
        early = await engine.replay(journal, agent=root)
        ended = await engine.resume(journal, agent=root, answers={"all": "yes"})
        late = await engine.replay(journal, agent=root)
    assert ("suspended", "completed", "completed") == (waiting.status, ended.status, late.status)
    return [one.warnings for one in (waiting, early, ended, late)]


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("generator-contract:L42")
@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
async def test_a_childs_warnings_reach_the_result(kind: str, depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_hooks, "MAX_YIELDS", 3)
    one = KINDS[kind]
    agent = kid_of(one)
    own = (await ran(agent, one.replies)).warnings
    for level in range(1, depth):
        agent = calling(agent, f"level-{level}")
    path = ".".join(["0"] * depth)

    assert [text for text in own if one.words in text] != []
    assert [tuple(f"run {path} (kid): {text}" for text in own)] * 4 == await in_every_run(agent, one.replies)


SETS = ToolCall("set_output", {"found": 1})
NOISY = AgentDefinition("kid", tools=["set_output"], handle_steps=sets_output)


@tool
def asks_kid() -> Any:
    """Ask the kid."""
    return (yield from AgentCall(NOISY, "Go."))


@tool(uses=["asks_kid"])
def asks_below() -> Any:
    """Ask the kid by another tool."""
    return (yield from call(asks_kid)).text


def by_background(**options: Any) -> Callable[[Any], Any]:
    def handle_steps(ctx: Any) -> Any:
        ref = yield from Start(AgentCall("kid", "Go."), **options)
        if not options:
            yield from Wait(ref)

    return handle_steps


def hands_over(ctx: Any) -> Any:
    yield ToolCall("hand_off", {"agent": "kid"}, include_tool_call=False)


WAYS: dict[str, Callable[[Any], Any]] = {
    "AgentCall": lambda ctx: (yield from AgentCall("kid", "Go.")),
    "Parallel": lambda ctx: [one.status.value for one in (yield from Parallel(AgentCall("kid"), AgentCall("helper")))],
    "Race": lambda ctx: (yield from Race(AgentCall("kid"), Sleep(60)))[0],
    "spawn_agents": lambda ctx: (yield ToolCall("spawn_agents", {"agents": [{"agent_type": "kid"}]})).text,
    "spawn_agent_inline": lambda ctx: (yield ToolCall("spawn_agent_inline", {"agent_type": "kid"})).text,
    "Start and Wait": by_background(),
    "Start": by_background(on_return="wait"),
    "hand_off": hands_over,
    "a tool that yields": lambda ctx: (yield from call(asks_kid)).text,
    "a tool that calls one": lambda ctx: (yield from call(asks_below)).text,
}


@pytest.mark.spec("generator-contract:L42")
@pytest.mark.parametrize("way", WAYS)
async def test_a_childs_warnings_reach_the_result_however_it_is_started(way: str) -> None:
    boss = AgentDefinition(
        "boss", tools=[asks_kid, asks_below], spawnable_agents=[NOISY, "helper"], handle_steps=WAYS[way]
    )
    (own,) = (await ran(NOISY)).warnings

    for warnings in await in_every_run(boss):
        (warning,) = warnings
        where, _, said = warning.partition(" (kid): ")
        assert ("run 0.", own) == (where[:6], said)


@tool
def careless() -> Any:
    """Lose a failure."""
    yield AgentCall(AgentDefinition("broken", handle_steps=ends_in_an_error))
    return "done"


@tool
def careless_below() -> Any:
    """Lose a failure, in the body of another tool."""
    return (yield from call(careless)).text


@pytest.mark.spec("generator-contract:L42")
@pytest.mark.parametrize(("asked", "path"), [(careless, "0.0"), (careless_below, "0.0.0")], ids=["one", "two"])
async def test_the_warnings_of_a_tool_that_yields_reach_the_result(asked: Any, path: str) -> None:
    boss = AgentDefinition(
        "boss", tools=[careless, careless_below], handle_steps=lambda ctx: (yield from call(asked)).text
    )

    for warnings in await in_every_run(boss):
        (warning,) = warnings
        assert warning.startswith(f"run {path} (boss): the tool 'careless' ")
        assert "ignores a failed child: 'broken' failed" in warning


@pytest.mark.spec("generator-contract:L42")
async def test_a_child_in_a_race_or_cancelled_keeps_its_warnings() -> None:
    def handle_steps(ctx: Any) -> Any:
        yield SETS
        yield from Sleep(86_400)

    slow = AgentDefinition("kid", tools=["set_output"], handle_steps=handle_steps)

    def boss_steps(ctx: Any) -> Any:
        yield from Race(AgentCall(slow), Sleep(60))

    result = await ran(AgentDefinition("boss", spawnable_agents=[slow], handle_steps=boss_steps))

    (warning,) = result.warnings
    assert warning.startswith("run 0 (kid): ")
    assert (warning,) == result.children[0].warnings


@pytest.mark.spec("generator-contract:L42")
async def test_warnings_of_a_childs_tools_and_messages_name_the_child() -> None:
    class Held:
        async def aclose(self) -> list[str]:
            return ["a job was ended with its run"]

    @tool
    async def hold(ctx: ToolContext) -> str:
        """Hold something."""
        ctx.get_or_create_run_object("held", Held)
        return "held"

    def kid_steps(ctx: Any) -> Any:
        yield from call(hold)
        return (yield from Receive("number", schema={"type": "integer"}))

    kid = AgentDefinition("kid", tools=[hold], handle_steps=kid_steps)

    def boss_steps(ctx: Any) -> Any:
        ref = yield from Start(AgentCall(kid))
        yield from Send(ref, "six", topic="number")
        yield from Send(ref, 6, topic="number")
        yield from Wait(ref)

    result = await ran(AgentDefinition("boss", spawnable_agents=[kid], handle_steps=boss_steps))

    left_out, ended = result.warnings
    assert left_out.startswith("run 0 (kid): a message on 'number'")
    assert "run 0 (kid): a job was ended with its run" == ended


@pytest.mark.spec("generator-contract:L42", "replay:J23")
@pytest.mark.parametrize("stable", [True, False])
async def test_stable_recording_has_no_warnings_and_its_replay_does(stable: bool) -> None:
    agent, journal = calling(NOISY, "boss"), MemoryJournal(stable=stable)
    result = await ran(agent, journal=journal)
    async with engine_of(()) as engine:
        replayed = await engine.replay(journal, agent=agent)

    assert stable is not any(b"calls set_output" in line for line in journal.lines())
    assert len(result.warnings) == 1
    assert result.warnings == replayed.warnings


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("generator-contract:L42")
async def test_long_and_many_warnings_are_shortened() -> None:
    def talks(ctx: Any, reply: Any) -> None:
        raise ValueError("x" * 1_000_000)

    def boss_steps(ctx: Any) -> Any:
        yield from Parallel(*[AgentCall(NOISY)] * (MAX_WARNINGS + 7))
        yield from AgentCall(loud)

    loud = AgentDefinition("loud", model="kid/m", hooks=Hooks(post_step=[talks]))
    boss = AgentDefinition("boss", spawnable_agents=[NOISY, loud], handle_steps=boss_steps)
    alone, many = await ran(loud, ["Hi."]), await ran(boss, ["Hi."])

    assert [MAX_WARNING_CHARS] == [len(text) for text in alone.warnings]
    assert MAX_WARNINGS == len(many.warnings)
    assert f"there are more than {MAX_WARNINGS} warnings; the others are left out" == many.warnings[-1]


def discards_all(ctx: Any) -> Any:
    yield from Parallel(AgentCall("helper"), AgentCall("broken"))


def discards_all_below(ctx: Any) -> Any:
    yield from discards_all(ctx)


def keeps_all(ctx: Any) -> Any:
    children = yield from Parallel(AgentCall("helper"), AgentCall("broken"))
    return [one.status.value for one in children]


def unpacks_all(ctx: Any) -> Any:
    _, broken = yield from Parallel(AgentCall("helper"), AgentCall("broken"))
    return broken.status.value


@pytest.mark.spec("generator-contract:L23")
@pytest.mark.parametrize(
    ("handler", "warns"), [(discards_all, True), (discards_all_below, True), (keeps_all, False), (unpacks_all, False)]
)
async def test_failure_discarded_by_yield_from_parallel_is_a_warning(
    handler: Callable[..., Any], *, warns: bool
) -> None:
    """
    `yield from` raises the failure of an `AgentCall`, and returns those of a `Parallel`.
    """
    result = await ran(AgentDefinition("boss", spawnable_agents=["helper", "broken"], handle_steps=handler))

    found = [warning for warning in result.warnings if "ignores a failed child: 'broken' failed" in warning]
    assert ("completed", int(warns)) == (result.status, len(found))
