"""Tools that become other effects: children and questions."""

from __future__ import annotations

import pytest
from pydantic import BaseModel

from stepengine.data import yields as y
from stepengine.data.effects import AskPerson, Gather, Spawn
from stepengine.data.hooks import Change, Hooks
from stepengine.data.json import compact
from stepengine.data.messages import ThinkingPart, UserMessage
from stepengine.data.outcomes import Stop
from stepengine.data.questions import Answer, Question
from stepengine.data.state import RunStatus
from stepengine.errors import LimitExceeded, StepEngineError
from tests.machine.batches import ANY, NAMES, run, statuses
from tests.machine.world import World, agent, call, child, play, reply, thought


@pytest.mark.spec(
    "generator-contract:T2",
    "generator-contract:L6",
    "generator-contract:L3",
)
def test_spawn_agents_runs_children_at_once_and_answers_in_order():
    entries = [{"agent_type": n, "prompt": f"p{n}", "params": {"k": 1}} for n in "abcd"]
    world = World(
        replies=[reply(call("spawn_agents", agents=entries)), reply("done")],
        children={
            "a": child({"x": 1}, agent_id="a", run_id="ra"),
            "b": child(None, agent_id="b", run_id="rb", status="failed", error=StepEngineError("broke")),
            "c": LimitExceeded("too many", kind="children"),
            "d": child(agent_id="d", run_id="rd", status="max_steps"),
        },
    )
    played = run(world=world, tools=["spawn_agents"])
    [gather] = [e for e in played.emitted if type(e) is Gather]
    assert [(type(e), e.agent_id, e.prompt, e.params, e.tool_call_id) for e in gather.effects][1] == (
        Spawn,
        "b",
        "pb",
        {"k": 1},
        "c1",
    )
    assert (gather.concurrency, gather.effects[0].parent().message_history[-1].role) == (None, "assistant")
    assert played.tool_calls[0].result.data == [
        {"agent_type": "a", "run_id": "ra", "status": "completed", "output": {"x": 1}},
        {"agent_type": "b", "run_id": "rb", "status": "failed", "error": "broke"},
        {"agent_type": "c", "status": "failed", "error": "too many"},
        {"agent_type": "d", "run_id": "rd", "status": "max_steps", "error": "it ended as max_steps", "output": "done"},
    ]
    assert (played.status, [c.agent_id for c in played.children]) == (RunStatus.COMPLETED, [*"abcd"])


@pytest.mark.spec("generator-contract:L15")
def test_child_inherits_reply_text_before_its_call():
    seen = []

    def spawned(effect):
        state = effect.parent()
        seen.append(([m.text for m in state.message_history], [m.text for m in state.view]))
        return child()

    entry = {"agents": [{"agent_type": "a"}]}
    parts = ["first", thought("hm"), " ", call("spawn_agents", entry), "second", call("spawn_agents", entry)]
    world = World(replies=[reply(*parts), reply(call("spawn_agents", entry)), reply("x")], children={"a": spawned})
    played = run(world=world, tools=["spawn_agents"])
    result = played.history[2].text
    assert seen == [
        (texts, texts) for texts in (["go", "first"], ["go", "firstsecond"], ["go", "first second", result, result])
    ]
    assert [m.text for m in played.history if m.role != "tool"] == ["go", "first second", "", "x"]

    shortened = Hooks(pre_run=[lambda ctx: Change(view=[UserMessage("short")])])
    world = World(replies=[reply(*parts), reply("x")], children={"a": spawned})
    run(world=world, tools=["spawn_agents"], hooks=shortened)
    assert seen[3] == (["go", "first"], ["short", "first"])


@pytest.mark.spec("generator-contract:L15")
def test_child_inherits_thoughts_before_its_call_only():
    seen = []

    def spawned(effect):
        *_, last = effect.parent().message_history
        seen.append([(type(p).__name__, p.text) for p in last.content] if last.role == "assistant" else last.text)
        return child()

    entry = {"agents": [{"agent_type": "a"}]}
    signed = ThinkingPart("", provider_data={"provider": "p", "signature": "s"})
    parts = [thought("hm"), thought(" "), call("spawn_agents", entry), signed, "said", thought("late")]
    world = World(
        replies=[reply(*parts, call("spawn_agents", entry), thought("over")), reply("x")], children={"a": spawned}
    )
    run(world=world, tools=["spawn_agents"])
    before = [("ThinkingPart", "hm")]
    assert seen == [before, [*before, ("ThinkingPart", ""), ("TextPart", "said"), ("ThinkingPart", "late")]]

    world = World(replies=[reply(call("spawn_agents", entry)), reply("x")], children={"a": spawned})
    run(world=world, tools=["spawn_agents"])
    assert seen[2] == "go"


def test_spawn_agents_fails_only_if_every_child_failed():
    class Model(BaseModel):
        mode: str = "json"

    def handler(ctx):
        one = yield from y.ToolCall("spawn_agents", {"agents": [{"agent_type": "a"}]})
        two = yield y.ToolCall("spawn_agents", {"agents": [{"agent_type": "b"}]})
        return [one.data[0]["output"], two.tool_result.is_error]

    world = World(children={"a": child(Model()), "b": child(agent_id="b", status="failed")})
    assert run(world=world, handler=handler).output == [{"mode": "json"}, True]


@pytest.mark.spec("reliability:SP10")
def test_a_suspended_child_suspends_its_parent():
    inner = Stop("suspended", questions=(Question("2.q0", "?"),), child=child(agent_id="b", status="suspended"))
    entries = [{"agent_type": n} for n in "abc"]
    world = World(
        replies=[reply(call("add"), call("spawn_agents", agents=entries), call("add"))],
        tools=ANY,
        children={"a": child(agent_id="a"), "b": inner, "c": child(agent_id="c")},
    )
    played = run(world=world, tools=[*NAMES, "spawn_agents"])
    assert (played.status, [q.id for q in played.pending]) == (RunStatus.SUSPENDED, ["2.q0"])
    assert statuses(played) == ["ok", "pending", "pending"]
    assert played.history[3].text.endswith("question 2.q0.")
    assert [c.agent_id for c in played.children] == ["a", "b", "c"]


@pytest.mark.spec("requirements:K2", "generator-contract:T20")
def test_ask_user_asks_all_its_questions_as_one():
    asked = [
        {"question": "Which?", "options": ["a", {"label": "b", "description": "the b"}], "multi_select": True},
        {"question": "Why?", "header": "Reason"},
    ]
    both = {"q1.0": Answer(("a", "b")), "q1.1": Answer(text="so")}
    world = World(replies=[reply(call("ask_user", questions=asked)), reply("x")], answers=both)
    played = run(world=world, tools=["ask_user"])
    ask = next(e for e in played.leaves if type(e) is AskPerson)
    assert (ask.purpose, ask.tool_call_id, [q.options for q in ask.questions]) == ("question", "c1", [("a", "b"), ()])
    assert played.tool_calls[0].result.data == {
        "answers": [{"question_index": 0, "selected": ["a", "b"]}, {"question_index": 1, "text": "so"}]
    }
    more = {"q1.0": Answer("a", "but later"), "q1.1": Answer(text="so")}
    world = World(replies=[reply(call("ask_user", questions=asked)), reply("x")], answers=more)
    assert run(world=world, tools=["ask_user"]).tool_calls[0].result.data == {
        "answers": [
            {"question_index": 0, "selected": ["a"], "text": "but later"},
            {"question_index": 1, "text": "so"},
        ]
    }

    one = [{"question": "Go?"}]
    world = World(replies=[reply(call("ask_user", questions=one)), reply("x")], answers={"q1": Answer(declined=True)})
    assert run(world=world, tools=["ask_user"]).tool_calls[0].result.data == {"skipped": True}

    half = {"q1.0": Answer("a", "a, I think", declined=True), "q1.1": Answer(text="so")}
    world = World(replies=[reply(call("ask_user", questions=asked)), reply("x")], answers=half)
    assert run(world=world, tools=["ask_user"]).tool_calls[0].result.data == {
        "answers": [{"question_index": 0, "text": ""}, {"question_index": 1, "text": "so"}]
    }

    waiting = run(reply(call("ask_user", questions=asked)), tools=["ask_user"])
    assert (waiting.status, [q.id for q in waiting.pending]) == (RunStatus.SUSPENDED, ["q1.0", "q1.1"])

    world = World(replies=[reply(call("ask_user", questions=one)), reply("x")], at={1: StepEngineError("nobody")})
    assert run(world=world, tools=["ask_user"]).history[2].text == "nobody"


WRONG = {
    "one option": (
        {"questions": [{"question": "?", "options": ["a"]}]},
        "questions.0.options: none or at least two, not one",
    ),
    "no label": (
        {"questions": [{"question": "?", "options": ["a", {"text": "b"}]}]},
        (
            "questions.0.options.1: fits none of the 2 allowed forms; the nearest one says: questions.0.options.1.text: is not a "
            "parameter; the parameters are: description, label; questions.0.options.1.label: is required"
        ),
    ),
    "none": ({"questions": []}, "questions: should have at least 1 items"),
    "no list": ({"questions": "why"}, "questions: should be array, not string"),
    "no object": ({"questions": ["why"]}, "questions.0: should be object, not string"),
    "no text": ({"questions": [{"question": 1}]}, "questions.0.question: should be string, not integer"),
}


@pytest.mark.spec("generator-contract:G32", "reliability:TL14")
@pytest.mark.parametrize(("value", "issues"), WRONG.values(), ids=WRONG)
def test_wrong_input_of_ask_user_is_refused(value, issues):
    played = run(reply(call("ask_user", value)), reply("x"), tools=["ask_user"])
    assert played.history[2].text == f"Invalid parameters for ask_user: {issues}\nThe input was: {compact(value)}"


@pytest.mark.spec("generator-contract:T0")
def test_lookup_without_known_agents_reports_not_found():
    played = run(reply(call("lookup_agent_info", agent_id="a")), reply("x"), tools=["lookup_agent_info"])

    assert played.tool_calls[0].result.data == {"found": False, "error": "no other agents are known here"}


@pytest.mark.spec("generator-contract:L25")
def test_inline_child_without_own_messages_keeps_the_history():
    def spawned(effect):
        played = play(agent(None), World(replies=[reply("inside")]), state=effect.parent(), prompt="")
        return played.finished.to_child_result(is_inline=True)

    world = World(
        replies=[reply("a", call("spawn_agent_inline", agent_type="a")), reply("end")], children={"a": spawned}
    )
    played = run(world=world, tools=["spawn_agent_inline"])

    assert [m.text for m in played.history if m.role != "tool"] == ["go", "inside", "a", "end"]
    assert played.children[0].left is None
