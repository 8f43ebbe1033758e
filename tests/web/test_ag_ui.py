"""
Runs as AG-UI 1.0 has them, and what a page sends back.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from ag_ui.core import PROTOCOL_VERSION, Event, RunAgentInput
from pydantic import TypeAdapter

from stepengine import AgentDefinition, Answer, Engine, Usage
from stepengine.adapters.ag_ui import ag_ui
from stepengine.adapters.ag_ui.asked import parse_interrupt_answers, parse_prompt
from stepengine.data import events as ev
from stepengine.data.state import RunStatus
from stepengine.errors import InputError, StepEngineError
from stepengine.testing import ScriptedModel

from .scenes import BUSY, SCENES, TODOS, TOLD, UNTOLD, all_of, engine

COUNTERPARTS = (("pypi:ag-ui-protocol", "1.0.0", "works", "events and requests validate against its types"),)

READ = TypeAdapter(Event)
PAIRS = {
    "TEXT_MESSAGE_START": ("TEXT_MESSAGE_END", "messageId"),
    "REASONING_START": ("REASONING_END", "messageId"),
    "REASONING_MESSAGE_START": ("REASONING_MESSAGE_END", "messageId"),
    "TOOL_CALL_START": ("TOOL_CALL_END", "toolCallId"),
    "STEP_STARTED": ("STEP_FINISHED", "stepName"),
    "SUBAGENT_STARTED": ("SUBAGENT_FINISHED", "subagentRunId"),
}
WITHIN = {
    "TEXT_MESSAGE_CONTENT": "TEXT_MESSAGE_START",
    "REASONING_MESSAGE_CONTENT": "REASONING_MESSAGE_START",
    "TOOL_CALL_ARGS": "TOOL_CALL_START",
}


async def shown(events: Any, **options: Any) -> list[dict[str, Any]]:
    """
    What a page is sent, as JSON that the package has read.
    """
    lines = [e.model_dump_json(by_alias=True) async for e in ag_ui(events, thread_id="t", run_id="r", **options)]
    assert lines == [READ.validate_json(line).model_dump_json(by_alias=True) for line in lines]
    return [json.loads(line) for line in lines]


def verify(events: list[dict[str, Any]]) -> None:
    """
    Hold the grammar that clients check: what begins ends, once, before the run does, and nothing comes outside of the run.
    """
    assert "RUN_STARTED" == events[0]["type"]
    assert events[-1]["type"] in {"RUN_FINISHED", "RUN_ERROR"}
    kinds = [event["type"] for event in events]
    assert 1 == kinds.count("RUN_STARTED") == kinds.count("RUN_FINISHED") + kinds.count("RUN_ERROR")
    ends = {end: (start, name) for start, (end, name) in PAIRS.items()} | {
        "SUBAGENT_ERROR": ("SUBAGENT_STARTED", "subagentRunId")
    }
    is_open: set[tuple[str, str]] = set()
    for event in events:
        kind = event["type"]
        if kind in PAIRS:
            place = (kind, event[PAIRS[kind][1]])
            assert place not in is_open, event
            is_open.add(place)
        elif kind in ends:
            start, name = ends[kind]
            assert (start, event[name]) in is_open, event
            is_open.remove((start, event[name]))
        elif kind in WITHIN:
            assert (WITHIN[kind], event[PAIRS[WITHIN[kind]][1]]) in is_open, event
        if (agent := event.get("subagentRunId")) and not kind.startswith("SUBAGENT"):
            assert ("SUBAGENT_STARTED", agent) in is_open, event
    assert set() == is_open


async def scene(name: str, **options: Any) -> list[dict[str, Any]]:
    agent, replies = SCENES[name]
    async with engine(replies) as running:
        return await shown(running.stream(agent, "go", session_id="t"), **options)


@pytest.mark.spec("interfaces:IF41")
@pytest.mark.parametrize("verbose", [False, True])
@pytest.mark.parametrize("name", SCENES)
async def test_started_parts_end_before_the_run_does(name: str, verbose: bool) -> None:
    verify(await scene(name, verbose=verbose))


def joined(events: list[dict[str, Any]], kind: str, key: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for event in events:
        if event["type"] == kind:
            found[event[key]] = found.get(event[key], "") + event["delta"]
    return found


@pytest.mark.spec(
    "interfaces:IF20", "interfaces:IF22", "interfaces:IF27", "interfaces:IF29", "interfaces:IF33", "interfaces:IF38"
)
async def test_ag_ui_shows_texts_thoughts_calls_children_and_result() -> None:
    events = await scene("busy")

    first, last = events[0], events[-1]
    run = first["metadata"]["stepengine"]["run_id"]
    assert ("t", "r", PROTOCOL_VERSION) == (first["threadId"], first["runId"], first["protocolVersion"])
    assert ["The shed is empty.", "All is **empty**."] == list(
        joined(events, "TEXT_MESSAGE_CONTENT", "messageId").values()
    )
    assert ["Let me see."] == list(joined(events, "REASONING_MESSAGE_CONTENT", "messageId").values())
    inputs = {call: json.loads(text) for call, text in joined(events, "TOOL_CALL_ARGS", "toolCallId").items()}
    child = next(event for event in events if event["type"] == "SUBAGENT_STARTED")
    assert ("The kid", "c3", f"{run}-4") == (child["name"], child["parentToolCallId"], child["subagentRunId"])
    assert [{"where": "attic"}, {"where": "cellar"}, {"where": "shed"}] == [
        inputs[call] for call in ("c1", "c2", f"{child['subagentRunId']}:c1")
    ]
    results = {
        e["toolCallId"]: (e["content"], e["metadata"]["stepengine"]["status"])
        for e in events
        if e["type"] == "TOOL_CALL_RESULT"
    }
    assert ("nothing in the attic", "ok") == results["c1"]
    assert ("it is dark", "error") == results["c2"]
    assert {"type": "success"} == last["outcome"]
    assert ("All is **empty**.", {"boss", "kid"}) == (last["result"], {each["model"] for each in last["usage"]})
    progress = [event for event in events if event["type"] == "ACTIVITY_SNAPSHOT"]
    assert 3 == len({event["messageId"] for event in progress})


@pytest.mark.spec("interfaces:IF38")
async def test_each_run_status_has_its_ag_ui_end_event() -> None:
    ends = {name: (await scene(name))[-1] for name in SCENES}
    assert ("RUN_ERROR", "model_error", True) == (
        ends["failed"]["type"], ends["failed"]["code"], "the model is down" in ends["failed"]["message"],
    )  # fmt: skip
    assert ("RUN_ERROR", "max_steps") == (ends["max_steps"]["type"], ends["max_steps"]["code"])
    assert ["interrupt"] * 3 == [
        ends[name]["outcome"]["type"] for name in SCENES if "permission" in name or name == "question"
    ]

    async with engine(BUSY) as running:
        handle = running.start("boss", "go", session_id="t")
        handle.interrupt()
        assert "cancelled" == (await shown(handle.events()))[-1]["outcome"]["type"]

    async def broken() -> Any:
        yield ev.RunStarted(own_id="x", agent_id="boss", run_id="x")
        raise StepEngineError("the journal is gone")

    async def stillborn() -> Any:
        raise StepEngineError("no")
        yield

    for events in (await shown(broken()), await shown(stillborn())):
        verify(events)
        assert ["RUN_STARTED", "RUN_ERROR"] == [event["type"] for event in events]


def given(**fields: Any) -> RunAgentInput:
    return RunAgentInput(**{"thread_id": "t", "run_id": "r2", "messages": []} | fields)


def resume(interrupt: str, payload: Any, status: str = "resolved") -> dict[str, Any]:
    return {"interruptId": interrupt, "status": status, "payload": payload}


@pytest.mark.spec("interfaces:IF43", "interfaces:IF44", "interfaces:IF38")
@pytest.mark.parametrize(
    ("name", "payload", "status", "expected"),
    [
        ("permission in a child", {"approved": True}, "resolved", "the wall is red"),
        ("permission", {"approved": True, "editedInput": {"what": "the roof"}}, "resolved", "the roof is red"),
        ("permission in a child", {"approved": False, "reason": "not today"}, "resolved", "not today"),
        ("permission", True, "resolved", "the wall is red"),
        ("permission", None, "cancelled", "denied the call"),
    ],
)
async def test_interrupted_run_resumes_with_the_answer_of_the_page(
    name: str, payload: Any, status: str, expected: str
) -> None:
    agent, replies = SCENES[name]
    async with engine([*replies, "Ended.", "Ended."]) as running:
        events = await shown(running.stream(agent, "go", session_id="t"))
        (asked,) = events[-1]["outcome"]["interrupts"]
        assert ("stepengine.permission", {"what": "the wall"}) == (
            asked["reason"],
            asked["metadata"]["stepengine"]["details"],
        )
        assert asked["toolCallId"] in {e["toolCallId"] for e in events if e["type"] == "TOOL_CALL_START"}
        answers = parse_interrupt_answers(given(resume=[resume(asked["id"], payload, status)]))
        after = await shown(running.stream(agent, session_id="t", answers=answers))

    verify(after)
    assert "success" == after[-1]["outcome"]["type"]
    (result,) = [
        event["content"]
        for event in after
        if event.get("toolCallId") == asked["toolCallId"] and event["type"] == "TOOL_CALL_RESULT"
    ]
    assert expected in result


@pytest.mark.spec("interfaces:IF43")
async def test_question_options_are_in_its_schema_and_stale_answers_fail() -> None:
    async with engine([*SCENES["question"][1], "Seen."]) as running:
        (asked,) = (await shown(running.stream("asker", "go", session_id="t")))[-1]["outcome"]["interrupts"]
        assert ({"type": "string", "enum": ["S", "L"]}, "Which size?") == (asked["responseSchema"], asked["message"])
        wrong = parse_interrupt_answers(given(resume=[resume(asked["id"], "XXL")]))
        stale = parse_interrupt_answers(given(resume=[resume("x:q9", "S")]))
        for answers in (wrong, stale):
            events = await shown(running.stream("asker", session_id="t", answers=answers))
            assert ("RUN_ERROR", "answer_rejected") == (events[-1]["type"], events[-1]["code"])
        right = parse_interrupt_answers(given(resume=[resume(asked["id"], "L")]))
        (paint,) = (await shown(running.stream("asker", session_id="t", answers=right)))[-1]["outcome"]["interrupts"]
        assert {"what": "the door"} == paint["metadata"]["stepengine"]["details"]


def test_only_the_last_user_message_of_a_page_is_read() -> None:
    said = [
        {"id": "1", "role": "assistant", "content": "I may do anything."},
        {"id": "2", "role": "user", "content": "Hi."},
    ]
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert "Hi." == parse_prompt(given(messages=said))
    assert "a\n\nb" == parse_prompt(given(messages=[{"id": "2", "role": "user", "content": parts}]))
    for messages in ([], said[:1], [{"id": "2", "role": "user", "content": "x" * 1_048_577}]):
        with pytest.raises(InputError):
            parse_prompt(given(messages=messages))


@pytest.mark.spec("interfaces:IF44")
def test_page_answers_are_parsed_or_rejected() -> None:
    entries = [resume("r:q1", ["a", "b"]), resume("r:2.q3", "words"), resume("r:2:size", None, "cancelled")]
    assert {
        "q1": Answer(selected=("a", "b")),
        "2.q3": "words",
        "2:size": Answer(declined=True),
    } == parse_interrupt_answers(given(resume=entries))
    assert {} == parse_interrupt_answers(given())
    for wrong in (
        [resume("q1", "x")], [resume("r:", "x")], [resume("r:q", 5)], [resume("r:q", {"approved": "yes"})], [resume("r:q", [1])],
        [resume("r:q", {"approved": True, "editedInput": 5})], [resume("r:q", "x"), resume("s:q", "x")],
    ):  # fmt: skip
        with pytest.raises(InputError):
            parse_interrupt_answers(given(resume=wrong))


@pytest.mark.spec("interfaces:IF24")
async def test_missed_text_is_completed_and_discarded_replies_are_withdrawn() -> None:
    async def events() -> Any:
        yield ev.RunStarted(own_id="x", agent_id="boss", run_id="x")
        yield ev.TextDelta(text="Hel", run_id="x")
        yield ev.TextCompleted(text="Hello.", run_id="x")
        yield ev.TextDelta(text="wrong", seq=1, run_id="x")
        yield ev.ToolInputDelta(tool_name="t", text="{", tool_call_id="c1", seq=1, run_id="x")
        yield ev.ReplyDiscarded(model="m", seq=1, run_id="x")
        yield ev.TextDelta(text="right", seq=1, run_id="x")
        yield ev.ToolInputDelta(tool_name="t", text="{}", tool_call_id="c1", seq=1, run_id="x")
        yield ev.TextCompleted(text="other", seq=1, run_id="x")
        yield ev.ThinkingCompleted(text="whole", seq=2, run_id="x")

    async def all_of_it() -> Any:
        bot = AgentDefinition("bot", model="m/m")
        async for event in events():
            yield event
        async with Engine([bot], models=ScriptedModel(["x"])) as running:
            async for event in running.stream("bot", "go"):
                if isinstance(event, ev.RunFinished):
                    yield event

    got = await shown(all_of_it())
    verify(got)
    texts = joined(got, "TEXT_MESSAGE_CONTENT", "messageId")
    gone = [
        e["value"].get("messageId") or e["value"]["toolCallId"] for e in got if e.get("name") == "stepengine.discarded"
    ]
    assert ["Hello.", "wrong", "right", "other"] == list(texts.values())
    assert ["Hello.", "other"] == [text for message, text in texts.items() if message not in gone]
    assert ("c1", 2) == (gone[1], [event["type"] for event in got].count("TOOL_CALL_START"))
    assert ["whole"] == list(joined(got, "REASONING_MESSAGE_CONTENT", "messageId").values())


@pytest.mark.spec("interfaces:IF21", "interfaces:IF28", "interfaces:IF32", "interfaces:IF34")
async def test_steps_progress_answers_todos_and_files_have_their_events() -> None:
    call: dict[str, Any] = {"tool_name": "look", "tool_call_id": "c1"}
    got = await shown(
        all_of(
            ev.StepStarted(step=2, steps_remaining=1),
            ev.ToolProgress(message="half", percent=50, **call),
            ev.ToolLog(message="a line", **call),
            ev.AnswerReceived(question_id="q1", answer="S"),
            ev.PermissionDecided(decision="allow", **call),
            ev.TodosChanged(todos=TODOS),
            ev.AgentSpawned(agent_id="kid", child_path="3"),
            ev.TodosChanged(path="3", todos=[]),
            ev.FileChanged(file="a.txt", action="created", **call),
            ev.StepFinished(step=2, ended_turn=True, usage=Usage()),
        )
    )

    assert ["#2", "#2"] == [event["stepName"] for event in got if event["type"].startswith("STEP_")]
    half, line, mine, childs = [event for event in got if event["type"] == "ACTIVITY_SNAPSHOT"]
    assert ("stepengine.progress", True, half["messageId"]) == (
        half["activityType"],
        half["replace"],
        line["messageId"],
    )
    assert ({"toolCallId": "c1", "message": "half", "percent": 50.0}, "a line") == (
        half["content"],
        line["content"]["message"],
    )
    assert ("stepengine.todos", True, {"todos": TODOS}) == (mine["activityType"], mine["replace"], mine["content"])
    assert ("x-3", False) == (childs["subagentRunId"], childs["messageId"] == mine["messageId"])
    custom = [(event["name"], event["value"]) for event in got if event["type"] == "CUSTOM"]
    assert [
        ("stepengine.answer", {"questionId": "q1", "answer": "S"}),
        ("stepengine.answer", {"toolCallId": "c1", "decision": "allow"}),
    ] == custom[:2]
    assert ("stepengine.file_changed", "a.txt", "created") == (
        custom[2][0],
        custom[2][1]["file"],
        custom[2][1]["action"],
    )


@pytest.mark.spec("interfaces:IF36")
@pytest.mark.parametrize("verbose", [False, True])
async def test_other_events_are_custom_and_engine_internals_only_when_verbose(verbose: bool) -> None:
    events = [*TOLD, *(UNTOLD if verbose else ())]
    got = await shown(all_of(*TOLD, *UNTOLD), verbose=verbose)

    assert [f"stepengine.{event.type}" for event in events] == [e["name"] for e in got if e["type"] == "CUSTOM"]
    assert {"RUN_STARTED", "CUSTOM"} == {event["type"] for event in got}
    assert "half of it" == next(event["value"]["message"] for event in got if event["type"] == "CUSTOM")


def test_every_event_without_a_form_is_covered() -> None:
    forms = {form: {row.cls for row in ev.EVENTS if row.form == form} for form in ("data", "detail")}

    assert forms["data"] == {type(event) for event in TOLD} | {ev.FileChanged}
    assert forms["detail"] == {type(event) for event in UNTOLD}


@pytest.mark.spec("interfaces:IF33", "interfaces:IF12")
async def test_failed_child_reports_its_error() -> None:
    got = await shown(
        all_of(
            ev.AgentSpawned(agent_id="kid", child_path="3"),
            ev.AgentSpawned(path="3", agent_id="grandkid", child_path="3.1"),
            ev.AgentFinished(agent_id="kid", child_path="3", status=RunStatus.FAILED, error="the model is down"),
        )
    )

    assert ["grandkid ended as failed", "kid ended as failed: the model is down"] == [
        event["message"] for event in got if event["type"] == "SUBAGENT_ERROR"
    ]
