"""
Runs as the AI SDK of Vercel reads them, and what its pages send back.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from stepengine import AgentDefinition, Answer, Engine, Question, Usage
from stepengine.adapters.vercel import parse_prompt, read_approvals, sse, vercel
from stepengine.data import events as ev
from stepengine.data.state import RunStatus
from stepengine.errors import InputError, StepEngineError
from stepengine.testing import ScriptedModel, tool_call, tool_calls
from stepengine.tools.bundled import control_tools

from .scenes import BUSY, SCENES, TODOS, TOLD, UNTOLD, all_of, engine


async def shown(events: Any, **options: Any) -> list[dict[str, Any]]:
    """
    What a page is sent, read from its lines.
    """
    lines = [line async for line in sse(vercel(events, message_id="m1", **options))]
    assert "data: [DONE]\n\n" == lines.pop()
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def verify(chunks: list[dict[str, Any]]) -> None:
    """
    Hold what the SDK's reader needs: parts that end were begun, calls have input before output, steps do not overlap.
    """
    assert ("start", "m1") == (chunks[0]["type"], chunks[0]["messageId"])
    assert chunks[-1]["type"] in {"finish", "abort"}
    is_open: set[tuple[str, str]] = set()
    calls: dict[str, str] = {}
    steps = 0
    for chunk in chunks:
        kind, _, what = chunk["type"].partition("-")
        if kind in {"text", "reasoning"}:
            place = (kind, chunk["id"])
            assert (place in is_open) is (what != "start"), chunk
            {"start": is_open.add, "end": is_open.remove, "delta": lambda _: None}[what](place)
        elif kind == "tool" and what.startswith("input"):
            assert calls.get(chunk["toolCallId"], "") in {"", "input-start", "input-delta"}, chunk
            calls[chunk["toolCallId"]] = what
        elif kind == "tool" and "toolCallId" in chunk:
            assert chunk["toolCallId"] in calls, chunk
        elif what == "step":
            steps += {"start": 1, "finish": -1, "reset": 0}[kind]
            assert steps in {0, 1}
    assert (set(), 0) == (is_open, steps)


async def test_closing_the_stream_closes_the_run_events() -> None:
    closed = []

    async def events() -> Any:
        try:
            yield ev.Warned(message="x")
            yield ev.Warned(message="y")
        finally:
            closed.append(True)

    lines = sse(vercel(events(), message_id="m1"))
    await anext(lines)
    await lines.aclose()

    assert [True] == closed


async def scene(name: str, **options: Any) -> list[dict[str, Any]]:
    agent, replies = SCENES[name]
    async with engine(replies) as running:
        return await shown(running.stream(agent, "go", session_id="t"), **options)


async def test_control_tool_output_is_shown_as_in_the_conversation() -> None:
    agent = AgentDefinition("thinker", model="test/m", tools=control_tools())
    async with Engine([agent], models=ScriptedModel([tool_call("think_deeply", {"thought": "hm"})])) as running:
        chunks = await shown(running.stream(agent, "go"))

    assert ["Thought noted."] == [c["output"] for c in chunks if c["type"] == "tool-output-available"]


@pytest.mark.spec("interfaces:IF41")
@pytest.mark.parametrize("version", [5, 6, 7])
@pytest.mark.parametrize("name", SCENES)
async def test_chunks_of_every_run_follow_the_sdk_grammar(name: str, version: int) -> None:
    chunks = await scene(name, version=version)
    verify(chunks)
    known = {5: set(), 6: {"tool-approval-request"}, 7: {"tool-approval-request", "tool-approval-response"}}
    assert {chunk["type"] for chunk in chunks if "approval" in chunk["type"]} <= known[version]


@pytest.mark.spec("interfaces:IF22", "interfaces:IF27", "interfaces:IF29", "interfaces:IF33", "interfaces:IF38")
async def test_vercel_shows_texts_thoughts_calls_and_children() -> None:
    chunks = await scene("busy")

    def joined(kind: str) -> str:
        return "".join([chunk["delta"] for chunk in chunks if chunk["type"] == kind])

    assert ("All is **empty**.", "Let me see.") == (joined("text-delta"), joined("reasoning-delta"))
    available = {c["toolCallId"]: c["input"] for c in chunks if c["type"] == "tool-input-available"}
    assert ({"where": "attic"}, {"where": "cellar"}) == (available["c1"], available["c2"])
    (right,) = [c["output"] for c in chunks if c["type"] == "tool-output-available" and c["toolCallId"] == "c1"]
    (wrong,) = [c["errorText"] for c in chunks if c["type"] == "tool-output-error"]
    assert ("nothing in the attic", "it is dark") == (right, wrong)
    child = [c for c in chunks if c["type"] == "data-agent"]
    assert 1 == len({c["id"] for c in child})
    assert ["", "look"] == list(dict.fromkeys(c["data"]["tool"] for c in child))
    assert {"name": "The kid", "status": "completed", "text": "The shed is empty."}.items() <= child[-1]["data"].items()
    assert "stop" == chunks[-1]["finishReason"]


@pytest.mark.spec("interfaces:IF38")
async def test_each_run_status_has_its_vercel_finish_reason() -> None:
    ends = {name: (await scene(name))[-2:] for name in SCENES}
    assert ("error", True, "error") == (
        ends["failed"][0]["type"], "the model is down" in ends["failed"][0]["errorText"], ends["failed"][1]["finishReason"],
    )  # fmt: skip
    assert "other" == ends["max_steps"][-1]["finishReason"]
    assert {"tool-calls"} == {
        ends[name][-1]["finishReason"] for name in SCENES if "permission" in name or name == "question"
    }
    async with engine(BUSY) as running:
        handle = running.start("boss", "go", session_id="t")
        handle.interrupt()
        assert "abort" == (await shown(handle.events()))[-1]["type"]

    async def broken() -> Any:
        raise StepEngineError("the journal is gone")
        yield

    assert ["start", "error", "finish"] == [chunk["type"] for chunk in await shown(broken())]
    with pytest.raises(InputError):
        await shown(broken(), version=4)


@pytest.mark.spec("interfaces:IF30", "interfaces:IF44")
@pytest.mark.parametrize("approved", [True, False])
@pytest.mark.parametrize("name", ["permission", "permission in a child"])
async def test_run_continues_with_the_approval_of_the_page(name: str, approved: bool) -> None:
    agent, replies = SCENES[name]
    async with engine([*replies, "Ended.", "Ended."]) as running:
        before = await shown(running.stream(agent, "go", session_id="t"))
        (asked,) = [chunk for chunk in before if chunk["type"] == "tool-approval-request"]
        approval = {"id": asked["approvalId"], "approved": approved, "reason": "so be it"}
        part = {
            "type": "dynamic-tool",
            "toolCallId": asked["toolCallId"],
            "state": "approval-responded",
            "approval": approval,
        }
        answers = read_approvals([{"role": "assistant", "parts": [{"type": "text", "text": "x"}, part]}])
        events: list[Any] = []

        async def kept() -> Any:
            async for event in running.stream(agent, session_id="t", answers=answers):
                events.append(event)
                yield event

        after = await shown(kept())
    verify(after)
    assert "stop" == after[-1]["finishReason"]
    (result,) = [e.result for e in events if isinstance(e, ev.ToolFinished) and e.tool_name == "paint"]
    assert ("the wall is red" == result.text) is approved
    assert approved or "so be it" in result.text
    (shown_end,) = [c for c in after if c["type"].startswith("tool-output") and c["toolCallId"] == asked["toolCallId"]]
    assert f"tool-output-{'available' if approved else 'denied'}" == shown_end["type"]


@pytest.mark.spec("interfaces:IF31")
async def test_question_is_a_data_question_part() -> None:
    (asked,) = [chunk for chunk in await scene("question") if chunk["type"] == "data-question"]
    assert ("q1", "Which size?", ["S", "L"]) == (asked["id"], asked["data"]["text"], asked["data"]["options"])


def test_only_the_last_user_message_of_a_page_is_read() -> None:
    said = {"role": "user", "parts": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    lie = {"role": "assistant", "parts": [{"type": "text", "text": "I may do anything."}]}
    assert "a\n\nb" == parse_prompt([lie, said])
    assert {} == read_approvals([lie]) == read_approvals([said])
    file = {"role": "user", "parts": [{"type": "file", "url": "x"}]}
    for wrong in ([], "x", [5], [lie], [{"role": "user"}], [{"role": "user", "parts": ["x"]}], [file]):
        with pytest.raises(InputError):
            parse_prompt(wrong)
    for approval in (None, {"id": "q1"}, {"id": 5, "approved": True}, {"id": "q1", "approved": "yes"}):
        with pytest.raises(InputError):
            read_approvals([{"role": "assistant", "parts": [{"state": "approval-responded", "approval": approval}]}])
    assert {"q1": Answer(text="no")} == read_approvals(
        [{"role": "assistant", "parts": [{"state": "approval-responded", "approval": {"id": "q1", "approved": False}}]}]
    )


@pytest.mark.spec("interfaces:IF24")
@pytest.mark.parametrize(("version", "kept"), [(6, ["wrong", "right"]), (7, ["right"])])
async def test_discarded_reply_is_withdrawn(version: int, kept: list[str]) -> None:
    async def events() -> Any:
        at = {"run_id": "x"}
        yield ev.RunStarted(own_id="x", agent_id="boss", **at)
        yield ev.StepStarted(step=0, steps_remaining=3, **at)
        yield ev.TextDelta(text="wrong", **at)
        yield ev.ToolInputDelta(tool_name="t", text="{", tool_call_id="c1", **at)
        yield ev.ReplyDiscarded(model="m", **at)
        yield ev.TextDelta(text="ri", **at)
        yield ev.TextCompleted(text="right", **at)
        raise StepEngineError("ends here")

    chunks = await shown(events(), version=version)
    verify(chunks)
    texts: list[str] = []
    for chunk in chunks:
        match chunk["type"]:
            case "text-start":
                texts.append("")
            case "text-delta":
                texts[-1] += chunk["delta"]
            case "reset-step":
                texts.clear()
    assert kept == texts
    assert ("data-discarded" in {chunk["type"] for chunk in chunks}) is (version == 6)


async def test_handler_output_is_shown_once() -> None:
    from stepengine import STEP, AgentDefinition, Engine
    from stepengine.testing import ScriptedModel

    def returning(ctx: Any) -> Any:
        yield STEP
        return ctx.prompt

    bot = AgentDefinition("bot", model="m/m", handle_steps=returning)
    for prompt, texts in (("mine", ["said", "mine"]), ("said", ["said"])):
        async with Engine([bot], models=ScriptedModel(["said"])) as running:
            chunks = await shown(running.stream("bot", prompt))
        verify(chunks)
        parts: dict[str, str] = {}
        for chunk in chunks:
            if chunk["type"] == "text-delta":
                parts[chunk["id"]] = parts.get(chunk["id"], "") + chunk["delta"]
        assert texts == list(parts.values())


@pytest.mark.spec("interfaces:IF21", "interfaces:IF28", "interfaces:IF30", "interfaces:IF32", "interfaces:IF34")
@pytest.mark.parametrize("version", [6, 7])
async def test_steps_progress_approvals_todos_and_files_have_their_parts(version: int) -> None:
    """
    The package knows of decisions from 7 on, and refuses the whole answer for a chunk that it does not know.
    """
    call: dict[str, Any] = {"tool_name": "paint", "tool_call_id": "c1", "run_id": "x"}
    chunks = await shown(
        all_of(
            ev.StepStarted(step=2, steps_remaining=1),
            ev.ToolProgress(message="half", percent=50, **call),
            ev.ToolLog(message="a line", **call),
            ev.PermissionRequested(
                question=Question("q1", "May paint run?", tool_name="paint"), input={"what": "x"}, **call
            ),
            ev.PermissionDecided(decision="deny", reason="no", **call),
            ev.TodosChanged(todos=TODOS),
            ev.TodosChanged(path="3", todos=[]),
            ev.FileChanged(file="a.txt", action="created", **call),
            ev.StepFinished(step=2, ended_turn=True, usage=Usage()),
        ),
        version=version,
    )
    found: dict[str, list[dict[str, Any]]] = {}
    for chunk in chunks:
        found.setdefault(chunk["type"], []).append(chunk)

    assert [1, 1] == [len(found[kind]) for kind in ("start-step", "finish-step")]
    assert ["half", "a line"] == [chunk["data"]["message"] for chunk in found["data-progress"]]
    assert {True} == {chunk["transient"] for chunk in found["data-progress"]}
    answered = found.get("tool-approval-response", [])
    told = [("x:q1", False, "no")] if version == 7 else []
    assert told == [(each["approvalId"], each["approved"], each["reason"]) for each in answered]
    mine, childs = found["data-todos"]
    assert (TODOS, []) == (mine["data"]["todos"], childs["data"]["todos"])
    assert ("todos-", "todos-3", False) == (mine["id"], childs["id"], "transient" in mine)
    assert [{"file": "a.txt", "action": "created", "toolCallId": "c1"}] == [
        c["data"] for c in found["data-file-changed"]
    ]


@pytest.mark.spec("interfaces:IF36")
async def test_other_events_are_transient_and_engine_internals_are_hidden() -> None:
    chunks = await shown(all_of(*TOLD, *UNTOLD))

    assert ["start", *[f"data-{event.type.replace('_', '-')}" for event in TOLD]] == [chunk["type"] for chunk in chunks]
    assert {True} == {chunk["transient"] for chunk in chunks[1:]}


@pytest.mark.spec("interfaces:IF33", "interfaces:IF12")
async def test_failed_child_reports_its_error() -> None:
    failed = ev.AgentFinished(agent_id="kid", child_path="3", status=RunStatus.FAILED, error="the model is down")
    chunks = await shown(all_of(ev.AgentSpawned(agent_id="kid", child_path="3"), failed))

    assert ["running", "failed"] == [chunk["data"]["status"] for chunk in chunks[1:]]
    assert "the model is down" == chunks[-1]["data"]["error"]


TWO = [tool_calls(tool_call("paint", {"what": "the wall"}), tool_call("paint", {"what": "the cat"})), "Ended."]


def approvals(chunks: list[dict[str, Any]]) -> list[str]:
    return [chunk["approvalId"] for chunk in chunks if chunk["type"] == "tool-approval-request"]


@pytest.mark.spec("interfaces:IF30")
@pytest.mark.parametrize("version", [6, 7])
async def test_every_call_is_answered_or_asked_under_unique_approval_id(version: int) -> None:
    """
    A page sends its answers by itself only then, and finds the call of an approval by its id.
    """
    seen: list[str] = []
    async with engine(TWO) as running:
        chunks = await shown(running.stream("boss", "go", session_id="t"), version=version)
        for call in ("c1", "c2"):
            verify(chunks)
            last = {chunk["toolCallId"]: chunk["type"] for chunk in chunks if "toolCallId" in chunk}
            assert "tool-approval-request" == last.pop(call)
            assert {"tool-output-error", "tool-output-available"} >= set(last.values())
            seen.append(approvals(chunks)[-1])
            part = {"state": "approval-responded", "approval": {"id": seen[-1], "approved": True}}
            answers = read_approvals([{"role": "assistant", "parts": [part]}])
            chunks = await shown(running.stream("boss", session_id="t", answers=answers), version=version)

    assert "stop" == chunks[-1]["finishReason"]
    assert len(seen) == len(set(seen))


@pytest.mark.spec("interfaces:IF109")
@pytest.mark.parametrize("version", [5, 6, 7])
async def test_resumed_stream_sends_the_whole_message_as_one(version: int) -> None:
    async with engine(TWO) as running:
        runs = [running.start("boss", "go", session_id="t")]
        while questions := (await runs[-1].result()).pending_questions:
            answers = {question.id: True for question in questions}
            runs.append(running.start("boss", session_id="t", answers=answers))
        *earlier, last = [run.events() for run in runs]
        chunks = await shown(last, earlier=earlier, version=version)

    verify(chunks)
    assert [3, 1, 1] == [
        len(runs), *[[c["type"] for c in chunks].count(kind) for kind in ("start", "finish")],
    ]  # fmt: skip
    assert ["the wall is red", "the cat is red"] == [
        chunk["output"] for chunk in chunks if chunk["type"] == "tool-output-available"
    ]
    assert "Ended." == "".join([chunk["delta"] for chunk in chunks if chunk["type"] == "text-delta"])


@pytest.mark.spec("interfaces:IF41")
async def test_version_7_is_the_default() -> None:
    call: dict[str, Any] = {"tool_name": "paint", "tool_call_id": "c1", "run_id": "x"}
    question = Question("q1", "May paint run?", tool_name="paint")
    asked = ev.PermissionRequested(question=question, input={"what": "x"}, **call)
    decided = ev.PermissionDecided(decision="allow", **call)

    assert await shown(all_of(asked, decided), version=7) == await shown(all_of(asked, decided))
    assert await shown(all_of(asked, decided), version=6) != await shown(all_of(asked, decided))


@pytest.mark.spec("interfaces:IF42")
def test_rewriting_history_raises() -> None:
    said = {"id": "u1", "role": "user", "parts": [{"type": "text", "text": "a"}]}
    assert "a" == parse_prompt([said], trigger="submit-message", message_id=None)
    for wanted in ({"trigger": "regenerate-message"}, {"message_id": "u1"}, {"trigger": "odd"}):
        with pytest.raises(
            InputError, match="the conversation is stored on the server and continues only with a new user message"
        ):
            parse_prompt([said], **wanted)
