"""
What pages that speak AG-UI send beside words and answers: their tools, their context, the state that they share; and coming back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs
import pytest

pytest.importorskip("ag_ui", reason="needs the extra 'ag-ui'")
import json

from ag_ui.core import RunAgentInput
from ag_ui.encoder import EventEncoder

from stepengine import AgentDefinition, Engine, RunHandle, ToolResult, tool
from stepengine.adapters.ag_ui import PageRequest, ag_ui, page_hooks, parse_page_request, run_turns, stream_reconnection
from stepengine.data.hooks import Change, Hooks
from stepengine.errors import InputError
from stepengine.journal import MemoryJournal
from stepengine.permissions import Policy, Rule
from stepengine.sessions import MemorySessions, Session, SessionInfo
from stepengine.testing import ScriptedModel, tool_call, tool_calls

SHARES = ("a/b", "c~d", "both")
WHERE = {"name": "where", "description": "Say where.", "parameters": {"properties": {"x": {"type": "integer"}}}}
NEW = Session(info=SessionInfo(session_id="t"))


@tool(in_thread=False)
def change(values: dict[str, Any]) -> ToolResult:
    """
    Change the context.
    """
    return ToolResult.text("changed", change=Change(context=values))


@tool(in_thread=False)
def paint(what: str) -> str:
    """
    Paint something.
    """
    return f"{what} is red"


@tool(in_thread=False, parallel_safe=True)
def look(at: str) -> str:
    """
    Look at something.
    """
    return f"{at} is there"


POLICY = Policy(
    [Rule.ask_for_tool("paint"), Rule.ask_for_tool("look"), Rule.allow_tool("change"), Rule.allow_tool("spawn_agents")]
)


def given(*said: Any, **fields: Any) -> RunAgentInput:
    messages = [
        {"id": f"m{n}", "role": "user", "content": one} if isinstance(one, str) else one for n, one in enumerate(said)
    ]
    return RunAgentInput(**{"thread_id": "t", "run_id": "r", "messages": messages, "tools": [WHERE]} | fields)


def result(call: str, content: str, **more: Any) -> dict[str, Any]:
    return {"id": f"of {call}", "role": "tool", "toolCallId": call, "content": content, **more}


class App:
    """
    What an application does for a page, without HTTP.
    """

    def __init__(
        self, *replies: Any, hooks: Hooks | None = None, agent: Callable[..., AgentDefinition] = AgentDefinition
    ) -> None:
        self.sessions = MemorySessions()
        self.model = ScriptedModel(replies)
        bot = agent("bot", model="m/m", tools=[change, paint, look])
        options: Any = {"models": self.model, "permissions": POLICY, "sessions": self.sessions}
        self.engine = Engine([bot], hooks=page_hooks() if hooks is None else hooks, **options)
        self.handles: list[RunHandle] = []

    def start(self, asked: PageRequest) -> Callable[[str, Mapping[str, Any]], RunHandle]:
        def start(prompt: str, answers: Mapping[str, Any]) -> RunHandle:
            self.handles.append(
                self.engine.start("bot", prompt, session_id="t", answers=answers or None, metadata=asked.metadata)
            )
            return self.handles[-1]

        return start

    async def __call__(self, asks: RunAgentInput) -> list[dict[str, Any]]:
        asked = parse_page_request(asks, self.sessions.load("t"), shares=SHARES)
        return await shown(ag_ui(run_turns(asked, self.start(asked)), thread_id="t", run_id="r", asked=asked))

    async def again(self, handle: RunHandle | None = None) -> list[dict[str, Any]]:
        return await shown(stream_reconnection(given(), self.sessions.load("t"), handle, shares=SHARES))


async def shown(events: Any) -> list[dict[str, Any]]:
    encoder = EventEncoder()
    return [json.loads(encoder.encode(event).removeprefix("data: ")) async for event in events]


def of(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [event for event in events if event["type"] == kind]


def state_after(events: list[dict[str, Any]]) -> Any:
    """
    Return what a page holds after *events*; patches change whole members.
    """
    state: Any = None
    for event in events:
        if event["type"] == "STATE_SNAPSHOT":
            state = dict(event["snapshot"])
        for patch in event.get("delta", ()) if event["type"] == "STATE_DELTA" else ():
            name = patch["path"].removeprefix("/").replace("~1", "/").replace("~0", "~")
            if patch["op"] == "remove":
                del state[name]
            else:
                state[name] = patch["value"]
    return state


@pytest.mark.spec("interfaces:IF111")
async def test_page_always_has_exactly_the_shared_state() -> None:
    steps: list[dict[str, Any]] = [
        {"a/b": [1], "own": "secret"}, {"c~d": {"x": 1}}, {"both": None}, {"a/b": None, "c~d": "text"}, {"other": 2},
    ]  # fmt: skip
    held: dict[str, Any] = {"both": "page"}
    app = App(*[tool_call("change", {"values": step}) for step in steps], "Done.")

    events = await app(given("Go.", state={"both": "page"}))

    known = [state_after(events[: n + 1]) for n, event in enumerate(events) if event["type"] == "TOOL_CALL_RESULT"]
    expected = []
    for step in steps:
        held = {name: value for name, value in {**held, **step}.items() if value is not None and name in SHARES}
        expected.append(held)
    assert expected == [state_after(_upto(events, n)) for n in range(len(steps))]
    assert len(steps) == len(known)
    assert 1 == len(of(events, "STATE_SNAPSHOT"))
    assert "secret" not in str(of(events, "STATE_DELTA") + of(events, "STATE_SNAPSHOT"))


def _upto(events: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    places = [n for n, event in enumerate(events) if event["type"] == "TOOL_CALL_RESULT"]
    return events[: places[count] + 1]


@pytest.mark.spec("interfaces:IF111")
async def test_state_changed_by_hooks_is_sent_at_run_end() -> None:
    def later(ctx: Any) -> Change | None:
        return None if ctx.step_index else Change(context={"both": len(ctx.messages), "own": 1})

    app = App("Done.", "Done.", hooks=Hooks(pre_run=list(page_hooks().pre_run), pre_step=[later]))
    events = await app(given("Go."))
    after = await app(given("On."))

    assert [{}, {"both": 1}] == [event["snapshot"] for event in of(events, "STATE_SNAPSHOT")]
    assert {"both": 1} == of(after, "STATE_SNAPSHOT")[0]["snapshot"]


@pytest.mark.spec("interfaces:IF112")
@pytest.mark.parametrize("at_once", [True, False])
async def test_page_tool_calls_suspend_and_each_gets_its_own_result(at_once: bool) -> None:
    calls = tool_calls(tool_call("where", {"x": 1}), tool_call("change", {"values": {}}), tool_call("where", {"x": 1}))
    app = App(calls, "Done.")
    before = await app(given("Go."))
    answers = [result("c1", "Rome"), result("c3", "Oslo")]
    if not at_once:
        between = await app(given("Go.", answers[0]))
        assert ["c3"] == between[-1]["outcome"]["pendingToolCallIds"]
        before += between
    events = [*before, *await app(given("Go.", *answers))]

    assert ["c1", "c3"] == of(before, "RUN_FINISHED")[0]["outcome"]["pendingToolCallIds"]
    assert {"type": "success"} == events[-1]["outcome"]
    assert ["c1", "c2", "c3"] == [event["toolCallId"] for event in of(events, "TOOL_CALL_START")]
    assert ["c2"] == [event["toolCallId"] for event in of(events, "TOOL_CALL_RESULT")]
    told = {m.tool_call_id: m.text for m in app.model.calls[-1].messages if m.role == "tool"}
    assert {"c1": "Rome", "c2": "changed", "c3": "Oslo"} == told


@pytest.mark.spec("interfaces:IF112")
async def test_run_with_page_tools_replays_without_the_page() -> None:
    app = App(tool_call("where", {"x": 1}))
    journal = MemoryJournal()
    asked = parse_page_request(given("Go."), NEW, shares=SHARES)
    recorded = await app.engine.run("bot", asked.prompt, metadata=asked.metadata, journal=journal)

    assert "suspended" == recorded.status
    assert attrs.evolve(recorded, session_saved=None) == await App().engine.replay(journal)


@pytest.mark.spec("interfaces:IF112")
async def test_page_tools_are_offered_to_the_root_only() -> None:
    def with_kid(*args: Any, **fields: Any) -> AgentDefinition:
        kid = AgentDefinition("kid", model="m/m")
        return AgentDefinition(
            *args, **{**fields, "tools": [*fields["tools"], "spawn_agents"], "spawnable_agents": [kid]}
        )

    spawn = tool_call("spawn_agents", {"agents": [{"agent_type": "kid", "prompt": "Go."}]})
    app = App(spawn, "Done.", "Done.", agent=with_kid)
    await app(given("Go."))

    offered = [{spec.name for spec in call.tools} for call in app.model.calls]
    assert [True, False, True] == ["where" in names for names in offered]


@pytest.mark.spec("interfaces:IF113")
async def test_ignored_page_input_is_reported_to_the_page() -> None:
    app = App("Done.", hooks=Hooks())
    events = await app(given("Go.", forwarded_props={"x": 1}, parent_run_id="p"))

    told = [event["value"]["message"] for event in of(events, "CUSTOM")]
    assert ["forwardedProps", "parentRunId", "the page's tools where were not offered"] == [
        next(
            word
            for word in ("forwardedProps", "parentRunId", "the page's tools where were not offered")
            if word in each
        )
        for each in told
    ]


NESTED: Any = {"properties": {}}
for _ in range(300):
    NESTED = {"properties": {"x": NESTED}}


@pytest.mark.spec("interfaces:IF113")
@pytest.mark.parametrize(
    ("fields", "issue"),
    [
        ({"state": {"own": 1}}, "state"), ({"state": [1]}, "state"), ({"state": "x"}, "state"),
        ({"tools": [{**WHERE, "name": "end_turn"}]}, "tools"), ({"tools": [WHERE, WHERE]}, "tools"), ({"tools": [{**WHERE, "name": "a b"}]}, "tools"),
        ({"tools": [{**WHERE, "parameters": 5}]}, "tools"), ({"tools": [{**WHERE, "parameters": {"type": "string"}}]}, "tools"),
        ({"tools": [{**WHERE, "parameters": {"properties": 5}}]}, "tools"), ({"tools": [{**WHERE, "name": f"w{n}"} for n in range(101)]}, "tools"),
        ({"tools": [{**WHERE, "parameters": NESTED}]}, "tools"), ({"context": [{"description": "d", "value": "x" * 1_048_576}]}, "tools, context"),
        ({"messages": [result("c1", "x" * 1_048_577)]}, "messages"), ({"messages": [result("c1", "x")]}, "messages"),
    ],
)  # fmt: skip
def test_invalid_page_input_raises(fields: Any, issue: str) -> None:
    with pytest.raises(InputError) as refused:
        parse_page_request(given("Go.", **fields), NEW, shares=SHARES)

    assert refused.value.issues[0].startswith(issue)


@pytest.mark.spec("interfaces:IF112")
async def test_page_tool_cannot_replace_an_agent_tool() -> None:
    app = App("Done.")
    events = await app(given("Go.", tools=[{**WHERE, "name": "paint"}]))

    assert ("RUN_ERROR", "input_error", []) == (events[-1]["type"], events[-1]["code"], app.model.calls)


@pytest.mark.spec("interfaces:IF114")
async def test_reconnecting_page_sees_conversation_state_and_open_question() -> None:
    app = App("Hello.", tool_call("paint", {"what": "it"}, text="I will."), "Ended.")
    assert ["RUN_STARTED", "MESSAGES_SNAPSHOT", "STATE_SNAPSHOT", "RUN_FINISHED"] == [
        e["type"] for e in await app.again()
    ]
    await app(given("Hi.", state={"both": 1}))
    first = await app(given("Paint."))
    events = await app.again()

    (snapshot,) = of(events, "MESSAGES_SNAPSHOT")
    spoken = [(m["role"], m.get("content"), [c["id"] for c in m.get("toolCalls", ())]) for m in snapshot["messages"]]
    assert [
        ("user", "Hi.", []),
        ("assistant", "Hello.", []),
        ("user", "Paint.", []),
        ("assistant", "I will.", ["c1"]),
    ] == spoken
    assert {"both": 1} == of(events, "STATE_SNAPSHOT")[0]["snapshot"]
    assert first[-1]["outcome"] == events[-1]["outcome"]


@pytest.mark.spec("interfaces:IF114")
async def test_reconnecting_page_sees_each_question_with_its_call() -> None:
    app = App(tool_calls(*[tool_call("look", {"at": what}) for what in ("it", "that", "this")]))
    first = await app(given("Paint."))
    events = await app.again()

    asked = first[-1]["outcome"]["interrupts"]
    assert ["c1", "c2", "c3"] == [one["toolCallId"] for one in asked]
    assert asked == events[-1]["outcome"]["interrupts"]


@pytest.mark.spec("interfaces:IF114")
async def test_page_reconnecting_during_a_run_sees_it_from_its_start() -> None:
    app = App("Hello.", "Fine.")
    await app(given("Hi."))
    asked = parse_page_request(given("How are you?"), app.sessions.load("t"), shares=SHARES)
    handle = app.start(asked)(asked.prompt, {})
    await handle.result()
    session = app.sessions.load("t")
    before = list(session.messages)[:2]
    events = await shown(
        stream_reconnection(given(), Session(info=session.info, messages=before), handle, shares=SHARES)
    )

    (snapshot,) = of(events, "MESSAGES_SNAPSHOT")
    assert ["Hi.", "Hello.", "How are you?"] == [m["content"] for m in snapshot["messages"]]
    assert "Fine." == "".join([event["delta"] for event in of(events, "TEXT_MESSAGE_CONTENT")])


@pytest.mark.spec("interfaces:IF113")
async def test_unreadable_tool_result_raises_and_the_call_keeps_waiting() -> None:
    app = App(tool_call("where", {"x": 1}), "Done.")
    await app(given("Go."))
    image = [{"type": "image", "source": {"type": "url", "value": "https://example.org/a.png"}}]
    for wrong in ("x" * 1_048_577, image):
        with pytest.raises(InputError, match="result of the call 'c1'"):
            await app(given("Go.", result("c1", wrong)))
    events = await app(given("Go.", result("c1", "Rome"), result("c0", image)))

    assert {"type": "success"} == events[-1]["outcome"]


@pytest.mark.spec("interfaces:IF112")
async def test_user_text_instead_of_a_page_result_reaches_the_model() -> None:
    app = App(tool_call("where", {"x": 1}), "Done.")
    await app(given("Go."))
    await app(given("Go.", "Never mind."))

    assert "The page gave no result; its user said: Never mind." == app.model.calls[-1].messages[-1].text


@pytest.mark.spec("interfaces:IF42", "interfaces:IF112")
async def test_text_after_a_tool_result_reaches_the_model() -> None:
    app = App(tool_call("where", {"x": 1}), "Done.")
    await app(given("Go."))
    events = await app(given("Go.", result("c1", "Rome"), "And be quick."))

    assert {"type": "success"} == events[-1]["outcome"]
    assert [("tool", "Rome"), ("user", "And be quick.")] == [(m.role, m.text) for m in app.model.calls[-1].messages][
        -2:
    ]


@pytest.mark.spec("interfaces:IF112")
async def test_result_counts_after_the_page_withdrew_its_tool() -> None:
    app = App(tool_call("where", {"x": 1}), "Done.", "Bye.")
    await app(given("Go."))
    events = await app(given("Go.", result("c1", "Rome"), tools=[]))
    await app(given("On.", tools=[]))

    assert {"type": "success"} == events[-1]["outcome"]
    assert "Rome" == app.model.calls[1].messages[-1].text
    assert [True, True, False] == ["where" in {spec.name for spec in call.tools} for call in app.model.calls]


@pytest.mark.spec("interfaces:IF113")
async def test_page_context_reaches_the_model_but_not_the_history() -> None:
    app = App("One.", "Two.")
    await app(given("Go.", context=[{"description": "the open file", "value": "a.txt"}]))
    await app(given("On."))

    first, second = [" ".join([m.text for m in request.tail]) for request in app.model.calls]
    assert "the open file: a.txt" in first
    assert "a.txt" not in second
