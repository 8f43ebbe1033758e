"""Who may run what: decisions of hooks, answers of a person."""

from __future__ import annotations

import pytest

from stepengine.data import yields as y
from stepengine.data.effects import AskPerson, Gather
from stepengine.data.events import PermissionDecided
from stepengine.data.hooks import Hooks
from stepengine.data.questions import Answer, Decision
from stepengine.data.state import RunStatus
from stepengine.errors import LimitExceeded, StepEngineError
from tests.machine.batches import ANY, NAMES, run, single, statuses
from tests.machine.world import World, call, reply


def deciding(*decisions):
    return Hooks(pre_tool=[lambda ctx, asked, said=said: said for said in decisions])


ALLOW, ASK, DENY = Decision.allow(rule_id="r"), Decision.ask("May it?"), Decision.deny("Never.", rule_id="no")
MERGED = {
    "no policy": ([], "ok", []),
    "nobody cares": ([None], "ok", []),
    "allow": ([None, ALLOW], "ok", [("allow", "r")]),
    "deny": ([ALLOW, DENY, ASK], "denied", [("deny", "no")]),
    "deny first": ([DENY, ALLOW], "denied", [("deny", "no")]),
    "ask": ([ALLOW, ASK, ALLOW], "ok", [("allow", None)]),
    "silent deny": ([Decision.deny()], "denied", [("deny", None)]),
}


@pytest.mark.spec("requirements:X3", "requirements:H16", "requirements:M18")
@pytest.mark.parametrize(("decisions", "status", "decided"), MERGED.values(), ids=MERGED)
@pytest.mark.parametrize("name", ["add", "safe"])
def test_decisions_are_merged_deny_over_ask_over_allow(decisions, status, decided, name):
    world = World(
        replies=[reply(call(name), call(name)), reply("done")], tools=ANY, answers={f"q{k}": "yes" for k in range(9)}
    )
    played = run(world=world, hooks=deciding(*decisions))
    assert statuses(played) == [status] * 2
    assert [(e.decision, e.rule_id) for e in played.seen(PermissionDecided)] == decided * 2
    assert (len(played.calls), played.output) == (2 * (status == "ok"), "done")
    if status == "denied":
        assert {m.text for m in played.history if m.role == "tool"} <= {"Never.", f"The call of {name} was denied."}


ANSWERS = {
    "yes": ("yes", "ok", None),
    "true": (True, "ok", None),
    "no": ("no", "denied", "A person denied the call of add."),
    "declined": (Answer(declined=True), "denied", "A person denied the call of add."),
    "reason": (Answer(text="use git"), "denied", "A person denied the call of add: use git"),
    "n": (Answer(text="N"), "denied", "A person denied the call of add."),
}


@pytest.mark.spec("requirements:M15", "requirements:X54", "reliability:R8")
@pytest.mark.parametrize(("answer", "status", "text"), ANSWERS.values(), ids=ANSWERS)
def test_permission_answer_applies_to_exactly_this_call(answer, status, text):
    world = World(replies=[reply(call("add", a=4)), reply("done")], tools=ANY, answers={"q1": answer})
    played = run(world=world, hooks=deciding(ASK))
    ask = next(e for e in played.leaves if type(e) is AskPerson)
    [question] = ask.questions
    assert (ask.purpose, ask.tool_call_id, question.text) == ("permission", "c1", "May it?")
    assert (question.tool_name, question.details, question.options) == ("add", {"a": 4}, ("yes", "no"))
    assert statuses(played) == [status]
    assert text in (None, played.history[2].text)


@pytest.mark.spec("requirements:E18")
def test_tool_without_permission_need_ignores_ask_but_not_deny():
    played = run(
        reply(call("open"), call("think_deeply", thought="x")),
        reply("x"),
        hooks=deciding(ASK),
        tools=[*NAMES, "think_deeply"],
    )
    assert statuses(played) == ["ok", "ok"]
    assert [e.decision for e in played.seen(PermissionDecided)] == ["allow", "allow"]
    assert statuses(run(reply(call("open")), reply("x"), hooks=deciding(DENY))) == ["denied"]


@pytest.mark.spec("requirements:M17")
@pytest.mark.parametrize(
    "error", [StepEngineError("nobody is here"), LimitExceeded("too late", kind="tokens")], ids=["error", "limit"]
)
@pytest.mark.parametrize("name", ["add", "safe"])
def test_call_is_denied_if_no_person_can_be_asked(error, name):
    world = World(replies=[reply(call(name), call(name))], tools=ANY, at={1: error, 2: error})
    played = run(world=world, hooks=deciding(ASK), handler=single)
    assert statuses(played) == ["denied", "denied"]
    assert played.history[2].text == f"Nobody could be asked: {error.message}"
    assert played.status is (RunStatus.FAILED if type(error) is LimitExceeded else RunStatus.COMPLETED)


@pytest.mark.spec("requirements:K6", "requirements:K3", "requirements:D9")
def test_batch_with_two_questions_suspends_once_and_keeps_denials():
    def judge(ctx, asked):
        return Decision.deny() if asked.input["a"] == 2 else Decision.ask(f"May {asked.input['a']}?")

    replies = [reply(*[call("safe", a=k) for k in (1, 2, 3, 4)])]
    played = run(world=World(replies=replies, tools=ANY, answers={"q2": "no"}), hooks=Hooks(pre_tool=[judge]))
    [gather] = [e for e in played.emitted if type(e) is Gather]
    assert [e.questions[0].text for e in gather.effects] == ["May 1?", "May 3?", "May 4?"]
    assert (played.status, played.text, [q.id for q in played.pending]) == (RunStatus.SUSPENDED, "", ["q1", "q3"])
    assert played.state.pending == played.pending
    assert statuses(played) == ["pending", "denied", "denied", "pending"]
    assert [m.text[-3:] for m in played.history if m.role == "tool"][::3] == ["q1.", "q3."]


@pytest.mark.spec("requirements:K6")
def test_in_a_sequence_the_calls_after_the_question_wait_too():
    def judge(ctx, asked):
        return Decision.ask() if asked.input["a"] == 2 else None

    played = run(reply("t", *[call("add", a=k) for k in (1, 2, 3)]), hooks=Hooks(pre_tool=[judge]))
    assert statuses(played) == ["ok", "pending", "pending"]
    assert len(played.calls) == 1
    assert played.history[1].text == "t"


@pytest.mark.spec("generator-contract:G32", "generator-contract:G31")
def test_a_call_of_the_handler_is_judged_too():
    def handler(ctx):
        result = yield y.ToolCall("add", include_tool_call=False)
        assert result.tool_result.status == "denied"
        results = yield from y.StepText('<tool_call>{"name": "add"}</tool_call>')
        assert results[0].status == "denied"
        values = yield from y.Parallel(y.ToolCall("add"), y.ToolCall("set_output", {"x": 1}))
        assert [v.status for v in values] == ["denied", "denied"]

    played = run(handler=handler, hooks=deciding(DENY))
    assert (played.status, played.calls, played.state.output) == (RunStatus.COMPLETED, [], None)
